"""Settings of a controller for the embedded mosaic model. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from groupwise.core.errors import require
from groupwise.workloads.controller.config import ControllerConfig
from groupwise.workloads.controller.memory import ControllerMemory, read_llava

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from groupwise.memory.stages import StepSpec
    from groupwise.workloads.controller.task import Task


@dataclass(frozen=True)
class MosaicConfig(ControllerConfig):
    mosaics: int = 864
    """Mosaics to train on, each with one question of every kind."""
    held_out_mosaics: int = 16
    """Mosaics of other handwriting to look at while training."""
    choose_mosaics: int = 192
    """Mosaics of that handwriting on which `groupwise eval` chooses its baselines; those to look at are among them."""
    test_mosaics: int = 384
    """Mosaics of the test handwriting on which `groupwise eval` judges."""
    question_seed: int = 0
    """Decides which mosaics are drawn and what is asked."""
    estimator: str = "auto"
    """What answers are estimated to take: `auto` profiles this machine once, in under a minute, and keeps it; or a JSON
    file of `groupwise profile`, for ranks on several machines; or `proportional` to counted work."""
    allow_estimator_mismatch: bool = False
    """Take the file also if it was fitted on another machine."""
    answers: Path | None = None
    """File of remembered answers that later runs and other ranks share; None remembers within a run only."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("mosaics", "held_out_mosaics", "choose_mosaics", "test_mosaics"):
            require(getattr(self, name) >= 1, f"workload.{name}", getattr(self, name), "at least 1")

    def for_resume(self, checkpoint: Path) -> Self:
        """The estimator it was trained with, also where this machine's own has been deleted or made anew since."""
        kept = checkpoint / "estimator.json"
        return replace(self, estimator=str(kept)) if self.estimator == "auto" and kept.is_file() else self

    def memory_model(self) -> ControllerMemory:
        """The embedded model in float32, its three tiers, and questions of at most three words."""
        text, vision = read_llava(Path(__file__).parent / "asset")
        return ControllerMemory(text, vision, crops={"low": 4, "medium": 7, "high": 13}, positions=5, question_tokens=3)

    def trace_memory(self, spec: StepSpec) -> Mapping[str, int]:
        import transformers

        from groupwise.workloads.controller.tasks.mosaic.model import mosaic_options
        from groupwise.workloads.controller.trace import trace_controller

        config = transformers.AutoConfig.from_pretrained(Path(__file__).parent / "asset")
        return trace_controller(config, self.memory_model(), spec, mosaic_options())

    def task(self, device: torch.device) -> Task:
        from groupwise.workloads.controller.tasks.mosaic.task import mosaic_task

        return mosaic_task(self, device)
