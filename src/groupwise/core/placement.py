"""Which member of which group runs on which rank, in which pass: a pure function, the same on every rank.

A *position* is an index into the rank-major gather: position = rank x rollouts_per_rank + pass x rows_per_pass + slot,
where only the last pass of a rank may have fewer than rows_per_pass slots. A placement gives every rollout (numbered
group by group) a position; all else follows from that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from groupwise.core.balance import ConditionCosts, order_by_cost
from groupwise.core.epochs import draw_conditions
from groupwise.core.errors import UserError
from groupwise.core.io.imports import import_function
from groupwise.core.randomness import normal, random_bits, uniform
from groupwise.core.shape import PLACEMENTS, StepShape

_PLACEMENT_SALT = 0x73656174

Positions = Int64[Tensor, " rollouts"]
PlacementFunction = Callable[[StepShape, int, int], Positions]


def whole(shape: StepShape, seed: int, step: int) -> Positions:
    """Each group on one rank, as group-wise rewards and shared prefixes need it."""
    return torch.arange(shape.rollouts_per_step)


def spread(shape: StepShape, seed: int, step: int) -> Positions:
    """The members of a group on different ranks, round-robin."""
    rollout = torch.arange(shape.rollouts_per_step)
    return rollout % shape.ranks * shape.rollouts_per_rank + rollout // shape.ranks


def shuffled(shape: StepShape, seed: int, step: int) -> Positions:
    """All rollouts in random order over ranks and passes, as a k-repeat sampler does it."""
    return random_bits(_PLACEMENT_SALT, seed, step, torch.arange(shape.rollouts_per_step)).argsort()


@dataclass(frozen=True)
class RolloutRows:
    """Rollouts to run, each with the key of its random numbers."""

    seed: int
    step: int
    rows_per_pass: int
    group: Int64[Tensor, " rows"]
    """Number of the group, counted over the whole run."""
    member: Int64[Tensor, " rows"]
    condition: Int64[Tensor, " rows"]
    """Index into the dataset."""

    def __len__(self) -> int:
        return len(self.group)

    def uniform(self, decision: int, elements: int = 1) -> Float[Tensor, "rows elements"]:
        """Numbers in [0, 1) for one decision of these rollouts, wherever they run."""
        return uniform(*self._keys, decision, torch.arange(elements))

    def normal(self, decision: int, elements: int = 1) -> Float[Tensor, "rows elements"]:
        """Standard normal numbers for one decision of these rollouts, wherever they run."""
        return normal(*self._keys, decision, torch.arange(elements))

    @property
    def _keys(self) -> tuple[int, int, Tensor, Tensor]:
        return self.seed, self.step, self.group[:, None], self.member[:, None]

    def passes(self) -> Iterator[RolloutRows]:
        """These rows in passes of at most `rows_per_pass`; the last may be smaller."""
        for start in range(0, len(self), self.rows_per_pass):
            part = slice(start, start + self.rows_per_pass)
            yield RolloutRows(
                self.seed, self.step, self.rows_per_pass, self.group[part], self.member[part], self.condition[part]
            )


@dataclass(frozen=True)
class Placement:
    """One step's rollouts in position order, which is the order of a rank-major gather."""

    shape: StepShape
    seed: int
    step: int
    group: Int64[Tensor, " rollouts"]
    member: Int64[Tensor, " rollouts"]
    condition: Int64[Tensor, " rollouts"]

    @property
    def rounds(self) -> int:
        """More than one where a step's rounds were joined."""
        return len(self.group) // self.shape.rollouts_per_step

    @property
    def position(self) -> Positions:
        return torch.arange(self.shape.rollouts_per_step)

    @property
    def rank(self) -> Int64[Tensor, " rollouts"]:
        return self.position // self.shape.rollouts_per_rank

    @property
    def pass_index(self) -> Int64[Tensor, " rollouts"]:
        return self.position % self.shape.rollouts_per_rank // self.shape.rows_per_pass

    @property
    def slot(self) -> Int64[Tensor, " rollouts"]:
        return self.position % self.shape.rollouts_per_rank % self.shape.rows_per_pass

    def rows_of(self, rank: int) -> RolloutRows:
        """The rollouts of one rank, in order."""
        share = slice(rank * self.shape.rollouts_per_rank, (rank + 1) * self.shape.rollouts_per_rank)
        return RolloutRows(
            self.seed,
            self.step,
            self.shape.rows_per_pass,
            self.group[share],
            self.member[share],
            self.condition[share],
        )

    def ranks_touched(self) -> Int64[Tensor, " groups"]:
        """On how many ranks each of the step's groups has members."""
        pairs = torch.unique((self.group - self.group.min()) * self.shape.ranks + self.rank)
        return torch.bincount(pairs // self.shape.ranks)


def place(
    shape: StepShape,
    *,
    seed: int,
    step: int,
    round_index: int = 0,
    rounds: int = 1,
    costs: ConditionCosts | None = None,
) -> Placement:
    """The placement of any step, computed directly. A step may have several rounds, each with other conditions: the
    rounds of a step together draw no condition twice.

    With `costs` groups change places, so that ranks have equally much to do. What is rolled out stays the same.
    """
    per_round = shape.conditions_per_step
    drawn = draw_conditions(seed, step, conditions=shape.conditions, per_step=rounds * per_round)
    conditions = drawn[round_index * per_round :][:per_round]
    round_of_run = step * rounds + round_index
    positions = _positions(shape, seed, round_of_run)
    _check_is_permutation(positions, shape)
    expected = None if costs is None else costs(conditions)
    if expected is not None:
        of_groups = positions.view(per_round, shape.group_size)
        positions = torch.empty_like(of_groups)
        positions[order_by_cost(shape, expected)] = of_groups
        positions = positions.flatten()
    rollout = torch.empty_like(positions)
    rollout[positions] = torch.arange(shape.rollouts_per_step)
    group_of_round, member = rollout // shape.group_size, rollout % shape.group_size
    group = round_of_run * per_round + group_of_round
    return Placement(shape, seed, step, group, member, conditions[group_of_round])


def _positions(shape: StepShape, seed: int, step: int) -> Positions:
    function = _placement_function(shape.placement)
    if shape.placement in PLACEMENTS:
        return function(shape, seed, step)
    try:
        return torch.as_tensor(function(shape, seed, step))
    except Exception as error:
        raise UserError(
            f"placement '{shape.placement}' raised {type(error).__name__}: {error}. It is called with (shape, seed,"
            " step) and returns a position for every rollout."
        ) from error


def _placement_function(name: str) -> PlacementFunction:
    """A built-in one, or a user's own: (shape, seed, step) -> a position for every rollout."""
    if name in PLACEMENTS:
        return {"whole": whole, "spread": spread, "shuffled": shuffled}[name]
    function: PlacementFunction = import_function(name, "placement", known=PLACEMENTS)
    return function


def _check_is_permutation(positions: Tensor, shape: StepShape) -> None:
    """Built-in placements are permutations by construction; a user's own must be checked."""
    rollouts = shape.rollouts_per_step
    in_range = positions.shape == (rollouts,) and bool(((positions >= 0) & (positions < rollouts)).all())
    if not in_range or len(torch.unique(positions)) < rollouts:
        raise UserError(
            f"placement '{shape.placement}' does not give each of the {rollouts} rollouts a position of its own: it"
            f" must return every number from 0 to {rollouts - 1} exactly once."
        )
