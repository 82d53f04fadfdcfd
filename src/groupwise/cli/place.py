"""`groupwise place`: the placement of a step as a map, with a proof that every group is complete."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from groupwise.cli.arguments import parse, print_json
from groupwise.core.errors import require
from groupwise.core.shape import UNKNOWN_DATASET_SIZE, StepShape

if TYPE_CHECKING:
    from rich.console import RenderableType

    from groupwise.core.placement import Placement

_COLORS = ("cyan", "magenta", "yellow", "green", "blue", "red", "bright_cyan", "bright_magenta", "bright_yellow")
_MAX_LINES = 24
_MAX_PASSES = 8
_MAX_MEMBERS = 16


@dataclass(frozen=True)
class PlaceArguments:
    """Show which member of which group runs on which rank, in which pass, and prove that every group is complete.

    A cell such as B2 is member 2 of group B. 'Gathered at' is a member's index after the ranks' rows are gathered rank
    by rank: members of a group are not neighbors there, which is why they are found by id.
    """

    conditions: int = 8
    """Conditions of one step: each becomes one group. (--conditions-per-step means the same.)"""
    group_size: int = 4
    """Members of a group: rollouts of each condition."""
    ranks: int = 8
    """Processes, usually one per GPU or NPU."""
    rows_per_pass: int = 2
    """Most rows that one rank runs together; the last pass may be smaller."""
    placement: str = "shuffled"
    """whole (a group on one rank), spread (over ranks), shuffled, or your own module:function."""
    dataset: int | None = None
    """Conditions in the dataset; None for as many as a step has."""
    seed: int = 0
    """Seed of the run."""
    step: int = 0
    """Which step to show. Any step can be computed directly."""
    condition_spread: float = 0.3
    """How much conditions differ in cost, for the expected idle share: standard deviation of its logarithm."""
    member_spread: float = 0.5
    """How much rollouts of one condition differ in cost."""


def run(arguments: list[str], as_json: bool) -> int:
    renamed = [argument.replace("--conditions-per-step", "--conditions") for argument in arguments]
    options = parse(PlaceArguments, renamed, prog="groupwise place")
    require(0 <= options.step <= 10**9, "step", options.step, "from 0 to 1,000,000,000")
    shape = StepShape(
        conditions=UNKNOWN_DATASET_SIZE if options.dataset is None else options.dataset,
        conditions_per_step=options.conditions,
        group_size=options.group_size,
        ranks=options.ranks,
        rows_per_pass=options.rows_per_pass,
        placement=options.placement,
    )
    if options.dataset is None:
        shape = replace(shape, conditions=options.conditions)
    from groupwise.core.placement import place

    placed = place(shape, seed=options.seed, step=options.step)
    idle = _expected_idle(options, shape)
    if as_json:
        print_json({**to_dict(placed), "expected_idle_share": idle})
    else:
        show(placed)
        print(_describe_idle(options, idle))
    return 0


def _expected_idle(options: PlaceArguments, shape: StepShape) -> dict[str, float]:
    """As placed, and with groups dealt by what is known of their cost."""
    from groupwise.core.expected_idle import CostSpread, expected_idle_share

    spread = CostSpread(options.condition_spread, options.member_spread)
    return {
        name: expected_idle_share(shape, spread, ordered=ordered, seed=options.seed)
        for name, ordered in (("as_placed", False), ("ordered_by_cost", True))
    }


def _describe_idle(options: PlaceArguments, idle: dict[str, float]) -> str:
    return (
        f"Expected idle share   {idle['as_placed']:.1%} of a step; {idle['ordered_by_cost']:.1%} with groups ordered by"
        f" expected cost\n{'':22}(simulated: log-normal costs, spread {options.condition_spread:g} between conditions"
        f" and {options.member_spread:g} between members)"
    )


def to_dict(placed: Placement) -> dict[str, Any]:
    """The whole placement as JSON values."""
    columns = {
        "rank": placed.rank,
        "pass": placed.pass_index,
        "slot": placed.slot,
        "group": placed.group,
        "member": placed.member,
        "condition": placed.condition,
        "gathered_at": placed.position,
    }
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    rollouts = [dict(zip(columns, row, strict=True)) for row in rows]
    return {"rollouts": rollouts, "totals": totals(placed)}


def totals(placed: Placement) -> dict[str, Any]:
    shape, touched = placed.shape, placed.ranks_touched()
    return {
        "rollouts_per_step": shape.rollouts_per_step,
        "conditions_per_step": shape.conditions_per_step,
        "conditions_per_epoch": shape.conditions,
        "steps_per_epoch": shape.steps_per_epoch,
        "copies_per_condition": shape.group_size,
        "ranks": shape.ranks,
        "passes_per_step": shape.passes,
        "rows_per_pass": shape.rows_per_pass,
        "ranks_per_group": {
            "min": int(touched.min()),
            "mean": float(touched.double().mean()),
            "max": int(touched.max()),
        },
        "every_condition_has_group_size_members": groups_are_complete(placed),
    }


def groups_are_complete(placed: Placement) -> bool:
    """Counted from the rollouts themselves: each condition has each member exactly once."""
    import torch

    size = placed.shape.group_size
    pairs, counts = torch.unique(torch.stack([placed.condition, placed.member]), dim=1, return_counts=True)
    expected = torch.arange(size).repeat(len(torch.unique(placed.condition)))
    return bool((counts == 1).all()) and torch.equal(pairs[1], expected)


def show(placed: Placement) -> None:
    from rich.console import Console

    console, shape = Console(), placed.shape
    console.print(
        f"{shape.summary()}   ({shape.placement}, seed {placed.seed}, step {placed.step})\n",
        highlight=False,
    )
    console.print(_map(placed))
    console.print(_group_table(placed))
    console.print(_total_lines(placed), highlight=False)


def _map(placed: Placement) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    shape = placed.shape
    table = Table(title="Map", title_justify="left", caption_justify="left")
    table.add_column("rank", justify="right")
    for index in range(min(shape.passes, _MAX_PASSES)):
        table.add_column(f"pass {index}")
    first = int(placed.group.min())
    for rank in range(min(shape.ranks, _MAX_LINES)):
        cells = []
        for part in islice(placed.rows_of(rank).passes(), _MAX_PASSES):
            cell = Text()
            members = zip((part.group - first).tolist(), part.member.tolist(), strict=True)
            for group, member in islice(members, _MAX_MEMBERS):
                cell.append(f"{group_label(group)}{member}", style=f"black on {_COLORS[group % len(_COLORS)]}").append(
                    " "
                )
            cells.append(cell)
        table.add_row(str(rank), *cells)
    more = {"ranks": shape.ranks - _MAX_LINES, "passes": shape.passes - _MAX_PASSES}
    more["rows in each pass"] = shape.largest_pass - _MAX_MEMBERS
    left_out = [f"{count} more {name}" for name, count in more.items() if count > 0]
    if left_out:
        table.caption = f"... and {', '.join(left_out)} (all of them with --json)"
    return table


def _group_table(placed: Placement) -> RenderableType:
    from rich.table import Table

    table = Table(title="Groups", title_justify="left", caption_justify="left")
    for heading in ("group", "condition", "ranks", "members at rank.pass.slot", "gathered at"):
        table.add_column(heading, justify="left" if "." in heading or "at" in heading[-2:] else "right")
    first, touched = int(placed.group.min()), placed.ranks_touched().tolist()
    for index in range(min(len(touched), _MAX_LINES)):
        positions = (placed.group == first + index).nonzero().flatten()
        positions = positions[placed.member[positions].argsort()]
        where = zip(
            placed.rank[positions].tolist(),
            placed.pass_index[positions].tolist(),
            placed.slot[positions].tolist(),
            strict=True,
        )
        table.add_row(
            group_label(index),
            str(int(placed.condition[positions[0]])),
            str(touched[index]),
            " ".join(f"{rank}.{pass_index}.{slot}" for rank, pass_index, slot in islice(where, _MAX_MEMBERS)),
            " ".join(map(str, positions[:_MAX_MEMBERS].tolist())) + (" ..." if len(positions) > _MAX_MEMBERS else ""),
        )
    if len(touched) > _MAX_LINES:
        table.caption = f"... and {len(touched) - _MAX_LINES} more groups (all of them with --json)"
    return table


def _total_lines(placed: Placement) -> str:
    shape, touched = placed.shape, placed.ranks_touched()
    spread = f"{int(touched.min())} to {int(touched.max())}, {float(touched.double().mean()):.2f} on average"
    verdict = (
        f"[green]Proved:[/] every condition of this step has exactly {shape.group_size} members, each once."
        if groups_are_complete(placed)
        else "[red]Broken:[/] some condition does not have each of its members once."
    )
    return (
        f"Rollouts per step     {shape.rollouts_per_step}\n"
        f"Conditions per step   {shape.conditions_per_step}\n"
        f"Conditions per epoch  {shape.conditions}   ({shape.steps_per_epoch:g} of these steps)\n"
        f"Copies per condition  {shape.group_size}\n"
        f"Ranks a group touches {spread}\n"
        f"{verdict}"
    )


def group_label(index: int) -> str:
    """A, B, ... Z, AA, AB, ... for the groups of a step."""
    letters = ""
    while index >= 0:
        letters = chr(ord("A") + index % 26) + letters
        index = index // 26 - 1
    return letters
