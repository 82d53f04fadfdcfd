"""`groupwise plan RECIPE`: how much memory a run will take, before it takes any."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from groupwise.cli.arguments import parse, print_json, quiet_stdout, read_config
from groupwise.core.errors import UserError, require
from groupwise.core.shape import UNKNOWN_DATASET_SIZE, StepShape
from groupwise.core.units import format_bytes, parse_bytes
from groupwise.memory.architecture import read_architecture
from groupwise.memory.plan import MemoryModel, make_plan
from groupwise.memory.stages import StepSpec
from groupwise.workloads.chat.memory import ChatMemory

if TYPE_CHECKING:
    from groupwise.training.config import Config

DESCRIPTION = (
    "Bytes by part for rollout and update, three settings side by side, and what to lower first. Integers only: nothing"
    " is loaded. Besides the fields of the recipe: --device-memory 32GiB, --ranks 8, --sharded (FSDP, by arithmetic"
    " alone), --trace (follow a rollout and an update with fake tensors), --probe (run them on this device), --picture"
    " FILE.png. In place of a recipe, a model's config.json will do: `groupwise plan config.json --help`."
)


@dataclass(frozen=True)
class Options:
    """What `plan` asks besides the recipe's own fields."""

    device: int
    ranks: int = 1
    sharded: bool = False
    trace: bool = False
    probe: bool = False
    picture: Path | None = None


@dataclass(frozen=True)
class ModelArguments:
    """Plan the training of a language model that is known only by its config.json."""

    model: tyro.conf.Positional[Path]
    """A config.json, or the folder that holds it."""
    prompt_tokens: int = 512
    """Longest prompt."""
    completion_tokens: int = 512
    """Longest completion."""
    conditions_per_step: int = 32
    group_size: int = 8
    rows_per_pass: int = 8
    placement: str = "whole"
    decode_rows: int = 256
    """Most rows that are decoded at once."""
    lora_rank: int | None = None
    """Rank of an adapter that alone is trained; None trains all weights."""
    dtype: Literal["float32", "bfloat16", "float64"] = "bfloat16"
    checkpointing: bool = False
    """Keep only the layers' inputs for the backward pass."""
    kl: bool = False
    """With a reference: a frozen copy, or the adapter switched off."""


def run(words: list[str], as_json: bool) -> int:
    options, words = _options(words)
    config: Config | None = None
    if words and _is_model(words[0]):
        model, job = _of_model(parse(ModelArguments, words, prog="groupwise plan"), options)
    else:
        config = read_config("plan", words, DESCRIPTION)
        model, job = _of_recipe(config, options)
    plan = make_plan(model, job, options.device)
    checked = _followed(config, job, options, as_json)
    if options.picture is not None:
        from groupwise.cli.plan_view import draw

        draw(plan, options.picture)
    if as_json:
        print_json({**plan.plain(), **checked})
    else:
        from groupwise.cli.plan_view import show

        show(plan, checked, options.picture)
    if not plan.fits:
        missing = plan.current.stages.peak - plan.device
        print(
            f"groupwise: the plan does not fit: {format_bytes(plan.current.stages.peak)} are needed on each rank and"
            f" the device has {format_bytes(plan.device)}, so {format_bytes(missing)} are missing. The list says"
            " what to lower.",
            file=sys.stderr,
        )
    return 0 if plan.fits else 2


def _is_model(word: str) -> bool:
    return word.endswith(".json") or (Path(word) / "config.json").is_file()


def _of_model(asked: ModelArguments, options: Options) -> tuple[MemoryModel, StepSpec]:
    model = ChatMemory(
        read_architecture(asked.model),
        asked.prompt_tokens,
        asked.completion_tokens,
        decode_rows=asked.decode_rows,
        lora_rank=asked.lora_rank,
        dtype=asked.dtype,
        checkpointing=asked.checkpointing,
        reference_copies=int(asked.kl and asked.lora_rank is None),
    )
    shape = StepShape(
        UNKNOWN_DATASET_SIZE,
        asked.conditions_per_step,
        asked.group_size,
        options.ranks,
        asked.rows_per_pass,
        asked.placement,
    )
    return model, StepSpec(shape, kl=asked.kl, sharded=options.sharded)


def _of_recipe(config: Config, options: Options) -> tuple[MemoryModel, StepSpec]:
    model = config.workload.memory_model()
    if model is None:
        raise UserError(
            f"{type(config.workload).__name__} says nothing about its memory (its method memory() returns None), so"
            " there is no arithmetic to do. `groupwise train` measures it step by step; docs/memory.md says how to give"
            " a workload of your own a plan."
        )
    return model, config.job(ranks=options.ranks, sharded=options.sharded)


def _followed(config: Config | None, job: StepSpec, options: Options, as_json: bool) -> dict[str, Any]:
    """What a trace and a probe found, where they were asked for."""
    if config is None and (options.trace or options.probe):
        raise UserError("--trace and --probe follow a recipe's own code: name a recipe, not a config.json.")
    found: dict[str, Any] = {}
    if config is not None and options.trace:
        with quiet_stdout(as_json):
            found["trace"] = config.workload.trace_memory(job)
    if config is not None and options.probe:
        from groupwise.training.probe import probe

        with quiet_stdout(as_json):
            found["probe"] = probe(config)
    return found


def _options(words: list[str]) -> tuple[Options, list[str]]:
    """Our own words, taken out of those for the recipe."""
    rest, given = list(words), dict[str, str]()
    for name in ("--device-memory", "--ranks", "--picture"):
        for nth, word in enumerate(rest):
            flag, equals, value = word.partition("=")
            if flag == name:
                value = value if equals else "".join(rest[nth + 1 : nth + 2])
                given[name] = value
                del rest[nth : nth + (1 if equals else 2)]
                break
    switches = {name: name in rest for name in ("--sharded", "--trace", "--probe")}
    rest = [word for word in rest if word not in switches]
    ranks = given.get("--ranks", "1")
    require(ranks.isdigit() and int(ranks) >= 1, "--ranks", repr(ranks), "a whole number, at least 1")
    device = given.get("--device-memory")
    return (
        Options(
            device=_this_device() if device is None else parse_bytes(device, "--device-memory"),
            ranks=int(ranks),
            sharded=switches["--sharded"],
            trace=switches["--trace"],
            probe=switches["--probe"],
            picture=Path(given["--picture"]) if "--picture" in given else None,
        ),
        rest,
    )


def _this_device() -> int:
    """Memory of the first GPU where NVML tells it, else this machine's RAM."""
    try:
        import pynvml
    except ImportError:
        import psutil

        return int(psutil.virtual_memory().total)
    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).total)
