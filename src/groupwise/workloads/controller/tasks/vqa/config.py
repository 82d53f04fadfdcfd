"""Settings of a controller for your own model and a dataset on disk. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from groupwise.core.errors import UserError, require
from groupwise.data.rows import OnBadRow
from groupwise.workloads.controller.config import ControllerConfig, kept_estimator
from groupwise.workloads.controller.memory import ControllerMemory, MolmoeVision, read_controlled_model
from groupwise.workloads.controller.model.knobs import check_tiers

if TYPE_CHECKING:
    import torch

    from groupwise.memory.stages import StepSpec
    from groupwise.workloads.controller.task import Task


@dataclass(frozen=True)
class VqaConfig(ControllerConfig):
    model: str = ""
    """A folder that save_pretrained() has written, or a name on the hub."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of the frozen model; `auto` keeps the one it was saved in, as `groupwise profile` does."""
    published_crop_rule: bool = False
    """MolmoE only: zero the features of a crop that has any pixel of exactly -1 after normalization, as the published
    code does. Without it only crops of nothing else are zeroed, as in training."""
    questions: Path | None = None
    """VQA's questions file (.json); or rows {"image": ..., "question": ..., "answers": [...]}, which may have a
    "question_type" too, in a .jsonl or .parquet file, a folder that holds one such file beside its images, a folder
    that `datasets` saved, or from module:function."""
    annotations: Path | None = None
    """VQA's annotations file, which holds the answers; only with VQA's questions file."""
    images: Path | None = None
    """Folder of the images; None for the folder in which the questions are."""
    exif_orientation: bool = True
    """Rotate images as their EXIF data says; False takes the pixels as they are stored."""
    image_name: str = "COCO_{subtype}_{image_id:012d}.jpg"
    """File name of an image by VQA's image_id; {subtype} is the questions file's data_subtype."""
    on_bad_row: OnBadRow = "refuse"
    """A broken line, or a question whose image or answers are missing: refuse to start, or skip such questions and
    report how many."""
    train_questions: int = 4096
    """Questions to train on, at most; split_seed decides which."""
    held_out_questions: int = 512
    """Questions of the selection split for metrics during training, at most."""
    selection_questions: int = 512
    """Questions of the selection split on which `groupwise eval` chooses its baselines, at most."""
    test_questions: int = 512
    """Questions of the test split on which `groupwise eval` compares the controller with them, at most."""
    selection_share: float = 0.1
    """Share of the images in the selection split, which the controller is not trained on."""
    test_share: float = 0.1
    """Share of the images in the test split, used by the final evaluation alone; 0 leaves that evaluation out."""
    split_seed: int = 0
    """Decides which image is in which split."""
    prompt: str = "{question}\nAnswer the question using a single word or phrase."
    """What goes through the chat template. Without a template, the whole prompt with the image token in it."""
    crops: Mapping[str, int] = field(default_factory=dict)
    """Crops of every tier besides the overview, coarse to fine, such as low 3 high 12; the model's default if empty."""
    max_new_tokens: int = 8
    """Longest answer."""
    estimator: str = ""
    """JSON file of a latency estimator fitted to this model on this machine; `auto` to profile it once and cache the
    result as long as it holds; or `proportional` to counted work."""
    allow_estimator_mismatch: bool = False
    """Take an estimator that was fitted elsewhere as it is."""
    answers: Path | None = None
    """File of cached answers that later runs and other ranks share; None keeps them within a run only."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (
            "train_questions",
            "held_out_questions",
            "selection_questions",
            "test_questions",
            "max_new_tokens",
        ):
            require(getattr(self, name) >= 1, f"workload.{name}", getattr(self, name), "at least 1")
        selection, test = self.selection_share, self.test_share
        require(selection > 0, "workload.selection_share", selection, "above 0")
        require(test >= 0, "workload.test_share", test, "0 or more")
        require(
            selection + test < 1,
            "workload.selection_share + workload.test_share",
            selection + test,
            "below 1, so that images are left to train on",
        )
        check_tiers(self.crops, "workload.crops")
        require("{question}" in self.prompt, "workload.prompt", repr(self.prompt), "a text with {question} in it")

    def for_resume(self, saved: Path) -> Self:
        return replace(self, estimator=kept_estimator(self.estimator, saved))

    def memory_model(self) -> ControllerMemory:
        """By the model's config.json, with the default insertion positions and prompts of up to 64 tokens. With dtype
        `auto` MolmoE is counted in float32, as it is published, any other model in two bytes."""
        text, vision = read_controlled_model(Path(self.model))
        saved_bytes = 4 if isinstance(vision, MolmoeVision) else 2
        crops = {tier: 1 + count for tier, count in (self.crops or {"low": 3, "medium": 6, "high": 12}).items()}
        return ControllerMemory(
            text,
            vision,
            crops,
            positions=5,
            question_tokens=64,
            sees_overview=self.stage1.sees_overview,
            dtype_bytes={"auto": saved_bytes, "float32": 4}.get(self.dtype, 2),
            new_tokens=self.max_new_tokens,
        )

    def trace_memory(self, spec: StepSpec) -> Mapping[str, int]:
        from groupwise.workloads.controller.model.load import read_config
        from groupwise.workloads.controller.trace import trace_controller

        return trace_controller(read_config(self.model), self.memory_model(), spec)

    def task(self, device: torch.device) -> Task:
        for name in ("model", "questions"):
            if not getattr(self, name):
                raise UserError(
                    f"workload.{name} is not given. This recipe needs --workload.model FOLDER_OR_NAME,"
                    " --workload.questions FILE_OR_FOLDER, for images elsewhere --workload.images FOLDER and, for VQA's"
                    " own format, --workload.annotations FILE."
                )
        from groupwise.workloads.controller.tasks.vqa.task import vqa_task

        return vqa_task(self, device)
