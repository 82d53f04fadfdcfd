"""Settings of a controller for the embedded mosaic model. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from groupwise.core.errors import require
from groupwise.workloads.controller.config import ControllerConfig, kept_estimator
from groupwise.workloads.controller.memory import ControllerMemory, read_llava

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from groupwise.memory.stages import StepSpec
    from groupwise.workloads.controller.task import Task


@dataclass(frozen=True)
class MosaicConfig(ControllerConfig):
    mosaics: int = 384
    """Mosaics to train on, each with one question of every type."""
    held_out_mosaics: int = 16
    """Mosaics of the selection split, in other handwriting, for metrics during training."""
    selection_mosaics: int = 128
    """Mosaics of the selection split on which `groupwise eval` chooses its baselines; the held-out ones are among
    them."""
    test_mosaics: int = 192
    """Mosaics of the test split on which `groupwise eval` compares the controller with them."""
    question_seed: int = 0
    """Seed of the mosaics and questions."""
    estimator: str = "auto"
    """The latency estimator: `auto` profiles this machine once, in under a minute, and caches the result as long as it
    holds; or a JSON file of `groupwise profile`, for ranks on several machines; or `proportional` to counted work."""
    allow_estimator_mismatch: bool = False
    """Accept a file that was fitted on another machine."""
    answers: Path | None = None
    """File of cached answers that later runs and other ranks share; None keeps them within a run only."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("mosaics", "held_out_mosaics", "selection_mosaics", "test_mosaics"):
            require(getattr(self, name) >= 1, f"workload.{name}", getattr(self, name), "at least 1")

    def for_resume(self, saved: Path) -> Self:
        return replace(self, estimator=kept_estimator(self.estimator, saved))

    def memory_model(self) -> ControllerMemory:
        """The embedded model in float32, its three tiers, and questions of at most three tokens."""
        text, vision = read_llava(Path(__file__).parent / "asset")
        return ControllerMemory(
            text,
            vision,
            crops={"low": 4, "medium": 7, "high": 13},
            positions=5,
            question_tokens=3,
            sees_overview=self.stage1.sees_overview,
        )

    def trace_memory(self, spec: StepSpec) -> Mapping[str, int]:
        import transformers

        from groupwise.workloads.controller.tasks.mosaic.model import mosaic_options
        from groupwise.workloads.controller.trace import trace_controller

        config = transformers.AutoConfig.from_pretrained(Path(__file__).parent / "asset")
        return trace_controller(config, self.memory_model(), spec, mosaic_options())

    def task(self, device: torch.device) -> Task:
        from groupwise.workloads.controller.tasks.mosaic.task import mosaic_task

        return mosaic_task(self, device)
