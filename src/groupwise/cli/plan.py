"""`groupwise plan RECIPE`: how much memory a run will take, before it is started."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from groupwise.cli.arguments import parse, print_json, quiet_stdout
from groupwise.core.errors import UserError, require
from groupwise.core.shape import UNKNOWN_DATASET_SIZE, StepShape
from groupwise.core.units import format_bytes, parse_bytes
from groupwise.memory.architecture import read_architecture
from groupwise.memory.plan import MemoryModel, MemoryPlan, describe_fewest_ranks, make_plan, needs_sharding
from groupwise.memory.sharding import RolloutMode, Sharding, ranks_per_copy
from groupwise.memory.stages import StepSpec
from groupwise.recipes import RECIPE_NAMING_HELP, RECIPES, load_recipe
from groupwise.training.config import Config
from groupwise.workloads.base import WorkloadConfig
from groupwise.workloads.chat.memory import ChatMemory

DESCRIPTION = (
    "Bytes by part for rollout and update, three settings side by side, and what to reduce first. This is arithmetic:"
    " no model is loaded unless --trace or --probe is given. In place of a recipe, a language model's config.json will"
    " do: `groupwise plan config.json --help`."
)


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    device_memory: str | None = None
    """Memory of one device, such as 32GiB or 80GB. None takes this machine's GPU, or its RAM where there is none."""
    ranks: int = 1
    """Processes, usually one per GPU or NPU."""
    ranks_per_node: int = 8
    """Ranks of a node, for --shard-over node."""
    trace: bool = False
    """Trace a rollout and an update with fake tensors, too."""
    probe: bool = False
    """Run a rollout and an update on this device, too."""
    picture: Path | None = None
    """Draw the three settings into this PNG file."""

    def __post_init__(self) -> None:
        require(self.ranks >= 1, "--ranks", self.ranks, "at least 1")
        require(self.ranks_per_node >= 2, "--ranks-per-node", self.ranks_per_node, "at least 2")

    @property
    def device_bytes(self) -> int:
        return _this_device() if self.device_memory is None else parse_bytes(self.device_memory, "--device-memory")


@dataclass(frozen=True, kw_only=True)
class RecipeArguments(PlanOptions):
    config: Annotated[Config, tyro.conf.arg(name="")]


@dataclass(frozen=True, kw_only=True)
class ModelArguments(PlanOptions):
    """Plan the training of a language model from its config.json alone."""

    model: tyro.conf.Positional[Path]
    """A config.json, or the folder that holds it."""
    prompt_tokens: int = 512
    """Longest prompt."""
    completion_tokens: int = 512
    """Longest completion."""
    conditions_per_step: int = 32
    """Prompts of a step."""
    group_size: int = 8
    """Completions of each prompt."""
    rows_per_pass: int = 8
    """Most rows that go through the model together in training."""
    placement: str = "whole"
    """Where members run: whole (a group on one rank), spread (over ranks), or shuffled."""
    decode_rows: int = 256
    """Most rows that are decoded together."""
    lora_rank: int | None = None
    """Rank of a LoRA adapter. Only the adapter is trained; None trains all weights."""
    dtype: Literal["float32", "bfloat16", "float64"] = "bfloat16"
    """Dtype of the computation, and of frozen weights; trained weights have at least float32."""
    checkpointing: bool = False
    """Keep only the layers' inputs for the backward pass."""
    kl: bool = False
    """With a reference: a frozen copy, or the adapter disabled."""
    shard: Literal["none", "full", "auto"] = "none"
    """full: weights, gradients and moments are cut over the ranks. auto: only where a whole copy does not fit."""
    shard_over: Literal["all", "node"] = "all"
    """Ranks that hold a whole copy together: all, or those of each node (then a copy on each node)."""
    shard_rollout: RolloutMode = "auto"
    """Weights in rollouts. whole: all are gathered first. blocks: each while it runs. auto: whole where that fits."""
    shard_exchange: Literal["pass", "update"] = "pass"
    """When gradients are summed over the ranks: after each pass, or once per update, which holds all of them until
    then."""


def run(arguments: list[str], as_json: bool) -> int:
    options = _parse(arguments)
    config = options.config if isinstance(options, RecipeArguments) else None
    model, spec = _of_recipe(options) if isinstance(options, RecipeArguments) else _of_model(options)
    plan = make_plan(model, _shard_as_asked(options, model, spec), options.device_bytes)
    measured = _trace_and_probe(config, spec, options, as_json)
    if options.picture is not None:
        from groupwise.cli.plan_view import draw

        draw(plan, options.picture)
    if as_json:
        print_json({**plan.to_dict(), **measured})
    else:
        from groupwise.cli.plan_view import show

        show(plan, measured, options.picture)
    if not plan.fits:
        print(f"groupwise: {_shortage(plan)}", file=sys.stderr)
    return 0 if plan.fits else 2


def _parse(arguments: Sequence[str]) -> RecipeArguments | ModelArguments:
    """A model's config.json or a recipe comes first, then plan's own options and the recipe's fields, mixed."""
    if arguments and _is_model(arguments[0]):
        return parse(ModelArguments, list(arguments), prog="groupwise plan")
    if arguments and not arguments[0].startswith("-"):
        recipe, *fields = arguments
        default = RecipeArguments(config=load_recipe(recipe))
        prog = f"groupwise plan {recipe}"
        return parse(RecipeArguments, fields, prog=prog, description=DESCRIPTION, default=default)
    if "-h" not in arguments and "--help" not in arguments:
        raise UserError(f"`groupwise plan` needs a recipe: groupwise plan RECIPE. {RECIPE_NAMING_HELP}")
    return parse(
        RecipeArguments,
        ["--help"],
        prog="groupwise plan RECIPE",
        description=f"{DESCRIPTION}\n\n{RECIPE_NAMING_HELP}\n\nBuilt-in recipes: {', '.join(RECIPES)}.",
        default=RecipeArguments(config=Config(WorkloadConfig())),
    )


def _is_model(argument: str) -> bool:
    return argument.endswith(".json") or (Path(argument) / "config.json").is_file()


def _of_model(options: ModelArguments) -> tuple[MemoryModel, StepSpec]:
    model = ChatMemory(
        read_architecture(options.model),
        options.prompt_tokens,
        options.completion_tokens,
        decode_rows=options.decode_rows,
        lora_rank=options.lora_rank,
        dtype=options.dtype,
        checkpointing=options.checkpointing,
        reference_copies=int(options.kl and options.lora_rank is None),
    )
    shape = StepShape(
        UNKNOWN_DATASET_SIZE,
        options.conditions_per_step,
        options.group_size,
        options.ranks,
        options.rows_per_pass,
        options.placement,
    )
    return model, StepSpec(shape)


def _of_recipe(options: RecipeArguments) -> tuple[MemoryModel, StepSpec]:
    config = options.config
    model = config.workload.memory_model()
    if model is None:
        raise UserError(
            f"{type(config.workload).__name__} has no memory plan (its method memory_model() returns None). `groupwise"
            " train` measures memory step by step; docs/memory.md shows how to give a workload of your own a plan."
        )
    return model, config.step_spec(ranks=options.ranks)


def _shard_as_asked(options: RecipeArguments | ModelArguments, model: MemoryModel, spec: StepSpec) -> StepSpec:
    settings = options.config if isinstance(options, RecipeArguments) else options
    if settings.shard == "none" or (settings.shard == "auto" and not needs_sharding(model, spec, options.device_bytes)):
        return spec
    shared_by = ranks_per_copy(options.ranks, over=settings.shard_over, ranks_per_node=options.ranks_per_node)
    sharding = Sharding(shared_by, settings.shard_over, settings.shard_rollout, settings.shard_exchange)
    return replace(spec, sharding=sharding)


def _trace_and_probe(config: Config | None, spec: StepSpec, options: PlanOptions, as_json: bool) -> dict[str, Any]:
    """Peak bytes by stage of a traced and of a real step, as far as they were requested."""
    if config is None and (options.trace or options.probe):
        raise UserError("--trace and --probe run a recipe's own code: name a recipe, not a config.json.")
    measured: dict[str, Any] = {}
    if config is not None and options.trace:
        with quiet_stdout(as_json):
            measured["trace"] = config.workload.trace_memory(spec)
    if config is not None and options.probe:
        from groupwise.training.probe import probe

        with quiet_stdout(as_json):
            measured["probe"] = probe(config)
    return measured


def _shortage(plan: MemoryPlan) -> str:
    peak = plan.current.stages.peak
    return (
        f"the plan does not fit: {format_bytes(peak)} are needed on each rank and the device has"
        f" {format_bytes(plan.device_bytes)}, so {format_bytes(peak - plan.device_bytes)} are missing. The list shows"
        f" what to reduce.{_more_cards(plan)}"
    )


def _more_cards(plan: MemoryPlan) -> str:
    """The other remedy: to shard, or more cards."""
    if plan.current.spec.sharding is None:
        return " Or shard over the ranks: --shard full." if plan.current.shape.ranks > 1 else ""
    if plan.fewest_ranks is None:
        return f" More cards do not help: {describe_fewest_ranks(plan)}."
    return f" Or take more cards: {describe_fewest_ranks(plan)}."


def _this_device() -> int:
    """Memory of the first GPU that NVML reports, else this machine's RAM."""
    try:
        import pynvml
    except ImportError:
        import psutil

        return int(psutil.virtual_memory().total)
    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).total)
