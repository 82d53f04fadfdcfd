"""Config, OptimizerConfig and RunConfig; to and from JSON; what may differ on resume. No torch."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from groupwise.core.config import AdvantageConfig, LossConfig, RewardConfig
from groupwise.core.errors import UserError, require, require_types
from groupwise.core.io.json_types import has_type
from groupwise.core.shape import MAX_ROLLOUTS_PER_STEP, UNKNOWN_DATASET_SIZE, StepShape
from groupwise.memory.sharding import RolloutMode
from groupwise.memory.stages import StepSpec
from groupwise.workloads.base import WorkloadConfig

MAX_THREADS = 1024
"""More cores than a machine has for one rank. Tens of thousands of threads end in a segmentation fault."""
_MOST = 10**9
"""Steps, and what is counted in steps."""


@dataclass(frozen=True)
class OptimizerConfig:
    learning_rate: float = 1e-3
    """Highest learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or falling to 0 at the end of the run."""
    warmup_updates: int = 0
    """Updates over which the learning rate rises from 0."""
    weight_decay: float = 0.0
    """Decoupled weight decay of AdamW."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of AdamW's first and second moment."""
    max_grad_norm: float | None = 1.0
    """Gradients are scaled down to this norm; None for no limit."""
    updates_per_step: int = 1
    """Updates on each step's rollouts. From the second on the ratio differs from 1, and clipping takes effect."""
    ema_decay: float | None = None
    """Decay of an exponential moving average of the weights, which evaluation then uses. None for no average."""
    offload: bool = False
    """Keep AdamW's two moments in host memory; those of one weight at a time are copied to the device for its update.
    Less memory on the device, slower updates, the same result."""

    def __post_init__(self) -> None:
        require_types(self, "optimizer.")
        rules = {
            "learning_rate": (0 < self.learning_rate < 1000, "above 0 and below 1000 (1e-6 to 1e-2 are common)"),
            "warmup_updates": (0 <= self.warmup_updates <= _MOST, f"from 0 to {_MOST:,}"),
            "weight_decay": (0 <= self.weight_decay < math.inf, "0 or more"),
            "betas": (all(0 <= beta < 1 for beta in self.betas), "two numbers from 0 to below 1"),
            "max_grad_norm": (self.max_grad_norm is None or self.max_grad_norm > 0, "above 0, or None"),
            "updates_per_step": (1 <= self.updates_per_step <= 10**6, "from 1 to 1,000,000"),
            "ema_decay": (self.ema_decay is None or 0 <= self.ema_decay < 1, "from 0 to below 1, or None"),
        }
        for name, (holds, rule) in rules.items():
            require(holds, f"optimizer.{name}", getattr(self, name), rule)


@dataclass(frozen=True)
class RunConfig:
    run_dir: Path | None = None
    """Folder of this run: config, metrics, samples, checkpoints. A recipe has runs/ and its name."""
    resume: bool = False
    """Continue from the newest valid checkpoint in run_dir; start at step 0 where there is none yet."""
    checkpoint_every: int = 50
    """Steps between checkpoints; the last step always writes one."""
    keep_checkpoints: int = 3
    """Number of newest checkpoints that are kept."""
    eval_every: int = 0
    """Steps between evaluations; 0 evaluates before the first and after the last step only."""
    samples_per_step: int = 4
    """Rollouts of each step that are written to samples.jsonl."""
    samples_mib: int = 32
    """Size at which samples.jsonl becomes samples.1.jsonl, in place of the one before it."""
    show_samples_every: int = 0
    """Steps between tables of those rollouts on the screen; 0 shows none."""
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Where to send metrics besides metrics.jsonl."""
    device: str | None = None
    """Device of the ranks, such as cuda, npu or cpu. By default the accelerator that torch reports, else the CPU."""
    threads: int = 1
    """CPU threads of each rank. More than cores / ranks can be several times slower than one."""
    rank_timeout_s: float = 1800.0
    """Longest that a rank waits for another one, or makes no progress in one call, before the run ends. Rank 0 draws
    images and writes checkpoints alone meanwhile, so it must be longer than that takes."""
    preflight: bool = True
    """Check rollouts, rewards, ratios and gradients on one pass before training."""
    on_warning: Literal["print", "stop"] = "print"
    """What a warning about a step does, such as nearly all completions truncated: print it, or stop the run."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What a log-probability, loss or gradient that is not finite does, or too many missing rewards: stop the run, or
    skip the update and go on. Either way nothing of it reaches the weights, and nonfinite.jsonl has the rollouts."""
    max_skipped: int = 10
    """With on_nonfinite skip: most steps in a row that may be skipped; one more stops the run."""

    def __post_init__(self) -> None:
        require_types(self)
        least = {"checkpoint_every": 1, "keep_checkpoints": 1, "threads": 1, "samples_mib": 1, "max_skipped": 1}
        least |= {"eval_every": 0, "samples_per_step": 0, "show_samples_every": 0}
        most = {"threads": MAX_THREADS, "samples_per_step": MAX_ROLLOUTS_PER_STEP, "samples_mib": 2**20}
        for name, number in least.items():
            limit = most.get(name, _MOST)
            holds = number <= getattr(self, name) <= limit
            require(holds, name, getattr(self, name), f"from {number} to {limit:,}")
        require(
            1 <= self.rank_timeout_s <= _MOST, "rank_timeout_s", self.rank_timeout_s, f"from 1 to {_MOST:,} seconds"
        )


@dataclass(frozen=True)
class Config:
    """A full experiment. A recipe returns one; the command line changes its fields."""

    workload: WorkloadConfig
    steps: int = 100
    """Steps to train. Each makes conditions_per_step x group_size rollouts and updates the policy."""
    seed: int = 0
    """Key of every random number, including the order of conditions. Same seed, same run."""
    conditions_per_step: int = 8
    """Conditions (prompts, tasks) drawn for a step, without replacement."""
    group_size: int = 8
    """Rollouts of each condition; they are compared only with each other."""
    rows_per_pass: int | Literal["auto"] = 8
    """Most rows that go through the model together; the last pass may be smaller. Affects memory and speed, never the
    result. auto starts at all rows of a rank and halves until the memory plan and a trial step on the device fit."""
    refill: int = 0
    """Further rounds of conditions that a step may roll out while fewer than conditions_per_step groups have spread
    (dynamic sampling). Dropped groups are counted. 0 trains on the first round alone."""
    placement: str = "whole"
    """Where members run: whole (a group on one rank), spread (over ranks), shuffled, or your own module:function."""
    shard: Literal["none", "full", "auto"] = "none"
    """full: each rank holds a part of weights, gradients and moments, and gathers the weights of a block while it runs.
    none: each rank holds all. auto: full where the memory plan says that all do not fit."""
    shard_over: Literal["all", "node"] = "all"
    """Ranks that hold a whole copy together: all, or those of each node (then a copy on each node)."""
    shard_rollout: RolloutMode = "auto"
    """Weights of sharded rollouts. whole: all are gathered first, and ranks decode without waiting for each other.
    blocks: a block while it runs, for a policy whose weights exceed a device. auto: as the memory plan fits."""
    shard_exchange: Literal["pass", "update"] = "pass"
    """When sharded gradients are summed over the ranks: after each pass, or once per update, which holds the whole
    gradient on each rank until then."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    run: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)
    recipe: tyro.conf.Suppress[str] = ""

    def __post_init__(self) -> None:
        require_types(self)
        require(1 <= self.steps <= _MOST, "steps", self.steps, f"from 1 to {_MOST:,}")
        whole = isinstance(self.rows_per_pass, int) and not isinstance(self.rows_per_pass, bool)
        require(whole or self.rows_per_pass == "auto", "rows_per_pass", self.rows_per_pass, "a whole number, or auto")
        require(0 <= self.refill <= 1000, "refill", self.refill, "from 0 to 1,000")
        if self.group_size < 2 or self.conditions_per_step * self.group_size > MAX_ROLLOUTS_PER_STEP:
            self.shape(conditions=UNKNOWN_DATASET_SIZE)

    def shape(self, *, conditions: int, ranks: int = 1) -> StepShape:
        """The arithmetic of a step; refuses what does not fit."""
        reserved = (1 + self.refill) * self.conditions_per_step
        if self.refill and conditions < 2 * reserved - 1 and conditions % reserved:
            most = (conditions + 1) // 2 // self.conditions_per_step - 1
            raise UserError(
                f"refill is {self.refill}, so a step reserves {1 + self.refill} x conditions_per_step"
                f" {self.conditions_per_step} = {reserved} conditions, all different, and the dataset holds"
                f" {conditions}: it must hold a multiple of them, or at least {2 * reserved - 1}. Take refill"
                f" {max(0, most)} or less."
            )
        rows = 1 if self.rows_per_pass == "auto" else self.rows_per_pass
        return StepShape(conditions, self.conditions_per_step, self.group_size, ranks, rows, self.placement)

    def step_spec(self, *, ranks: int = 1, fused_optimizer: bool = False) -> StepSpec:
        """The numbers that decide the memory of a run, whatever the dataset's size."""
        shape = self.shape(conditions=UNKNOWN_DATASET_SIZE, ranks=ranks)
        return StepSpec(
            shape,
            has_ema=self.optimizer.ema_decay is not None,
            fused_optimizer=fused_optimizer,
            offloads_optimizer=self.optimizer.offload,
        )

    @property
    def updates(self) -> int:
        return self.steps * self.optimizer.updates_per_step


MEMORY_SETTINGS = (
    "rows_per_pass",
    "workload.decode_rows",
    "workload.tokens_per_pass",
    "workload.encode_rows",
    "workload.eval_rows",
)
"""Fields that limit how many rows or tokens are processed at once. They change no result."""
SHARD_SETTINGS = ("shard", "shard_over", "shard_rollout", "shard_exchange")
"""Fields that decide where the numbers of a policy are held. They change no result but by rounding."""
MAY_CHANGE_ON_RESUME = ("steps", "run", "recipe", "optimizer.offload", *MEMORY_SETTINGS, *SHARD_SETTINGS)
"""Fields that may differ from the checkpoint's. Of these only `steps` can change the result, where the learning rate or
the entropy bonus falls over the run."""


def memory_settings(config: Mapping[str, Any]) -> list[Any]:
    """The values of MEMORY_SETTINGS in a config of JSON values; None where its workload has no such field."""
    fields = {**config, **{f"workload.{name}": value for name, value in config["workload"].items()}}
    return [fields.get(name) for name in MEMORY_SETTINGS]


def to_dict(config: Any) -> dict[str, Any]:
    """Nested frozen configs as JSON values."""
    values: dict[str, Any] = {}
    for entry in dataclasses.fields(config):
        value = getattr(config, entry.name)
        values[entry.name] = to_dict(value) if dataclasses.is_dataclass(value) else _to_json(value)
    return values


def from_dict(config: Any, values: Mapping[str, Any], prefix: str = "") -> Any:
    """A config of the same types with the given (JSON) values: the inverse of `to_dict`. Refuses other types."""
    changed, hints = {}, _type_hints(type(config))
    for entry in dataclasses.fields(config):
        if entry.name not in values:
            continue
        current, value, name = getattr(config, entry.name), values[entry.name], f"{prefix}{entry.name}"
        if dataclasses.is_dataclass(current):
            require(isinstance(value, Mapping), name, _shorten(value), "an object of settings")
            changed[entry.name] = from_dict(current, value, f"{name}.")
        elif isinstance(current, Mapping) or isinstance(value, list) or _is_plain(current) or "Path" in str(entry.type):
            hint = hints.get(entry.name, Any)
            require(has_type(value, hint), name, _shorten(value), f"of type {entry.type}")
            changed[entry.name] = _from_json(value, entry)
    return dataclasses.replace(config, **changed)


def _from_json(value: Any, entry: dataclasses.Field[Any]) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return Path(value) if "Path" in str(entry.type) and value is not None else value


def _type_hints(kind: type) -> dict[str, Any]:
    """Of the fields; none where an annotation names what only a type checker imports."""
    try:
        return typing.get_type_hints(kind)
    except NameError:
        return {}


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def differing_fields(ours: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Phrases naming every field that two configs of JSON values set differently, but MAY_CHANGE_ON_RESUME."""
    lines = []
    for name in sorted(set(ours) | set(theirs)):
        if f"{prefix}{name}" in MAY_CHANGE_ON_RESUME:
            continue
        here, there = ours.get(name), theirs.get(name)
        if isinstance(here, Mapping) and isinstance(there, Mapping):
            lines += differing_fields(here, there, f"{prefix}{name}.")
        elif here != there:
            lines.append(f"{prefix}{name} was {there} and is now {here}")
    return lines


def _to_json(value: Any) -> Any:
    """A JSON value; functions and classes become text, and come from the recipe when the config is read."""
    if isinstance(value, Mapping):
        return {name: _to_json(entry) for name, entry in value.items()}
    if isinstance(value, tuple | list):
        return [_to_json(entry) for entry in value]
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}:{value.__qualname__}"
    return value if _is_plain(value) else str(value)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | bool)
