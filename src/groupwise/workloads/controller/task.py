"""What a task gives to the controller workload: a frozen model, questions by split, and a latency estimator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from groupwise.core.errors import UserError
from groupwise.workloads.controller.latency.estimates import KnobLatencyModel
from groupwise.workloads.controller.model.adapters import Sample
from groupwise.workloads.controller.model.answer_cache import AnswerCache, answer_with_cache
from groupwise.workloads.controller.model.executor import AnswerRequest, Executor, PrefixStates


class Split(StrEnum):
    """What a question is used for. No image is in two splits."""

    TRAIN = "train"
    SELECT = "select"
    """Held-out metrics during training, and choosing the baselines of the final evaluation."""
    TEST = "test"
    """The final evaluation alone."""


@dataclass(frozen=True)
class Question:
    """One question about one image."""

    sample: Sample
    text: str
    answers: tuple[str, ...]
    """Right answers: one, or one from each annotator."""
    prompt_tokens: Mapping[str, int]
    """Length of the prompt at every tier, image tokens included."""
    image: str = ""
    """A name for people."""
    question_type: str = ""
    """Known from the question alone, such as "how many"; the controller does not see it."""


@dataclass(frozen=True)
class ModelSource:
    """Where a task's model comes from and how it is prompted: enough to use a trained controller without the task."""

    model: str
    """As `load_model` takes it."""
    identity: str
    """Of its weights: a controller is of no use for others."""
    dtype: str = "float32"
    prompt: str = "{question}"
    """What goes to the model for a question."""
    published_crop_rule: bool = False
    """As `load_model` takes it."""
    exif_orientation: bool = True
    """Images are rotated as their EXIF data says."""


class PartialAnswers(Protocol):
    """Precomputed answers to some samples, perhaps in some configurations only."""

    def get_all(self, sample: str) -> Sequence[tuple[int, ...] | None] | None:
        """The answers in the order of `KnobOptions.configurations()`, None where one is not known; None if the sample
        is not in the table."""
        ...


@dataclass(frozen=True)
class Task:
    executor: Executor
    answers: AnswerCache
    """Answers computed so far. Its name must identify the model and the stopping rule."""
    estimator: KnobLatencyModel
    questions: Sequence[Question]
    """The training split."""
    held_out: Sequence[Question]
    """Questions of the selection split for metrics during training."""
    decode: Callable[[Sequence[int]], str]
    """Text of an answer's tokens."""
    max_new_tokens: int = 1
    stop_token: int | None = None
    source: ModelSource | None = None
    """None where the model cannot be loaded again by name: checkpoints then need the task."""
    notes: Sequence[str] = ()
    """Shown before training."""
    warnings: Sequence[str] = ()
    """The same, of what a person should change or accept."""
    selection_questions: Callable[[], Sequence[Question]] | None = None
    """Questions on which the final evaluation chooses its baselines; None uses `held_out`."""
    test_questions: Callable[[], Sequence[Question]] | None = None
    """The test split, for the final evaluation; None leaves it out."""
    other_answers: Mapping[tuple[int, ...], PartialAnswers] = field(default_factory=dict)
    """Answers with the blocks dropped in another order, by that order: what baselines may choose, too."""

    def __post_init__(self) -> None:
        for name in ("questions", "held_out"):
            if not getattr(self, name):
                raise UserError(f"The task's {name} are empty. Give it at least one question there.")
        for question in (*self.questions, *self.held_out):
            if not question.answers:
                raise UserError(
                    f"The question {question.text!r} about {question.image or question.sample.name} has no right"
                    " answer, so nothing can be learned from it. Add one, or leave the question out."
                )

    def answer(self, requests: Sequence[AnswerRequest], prefix: PrefixStates | None = None) -> list[str]:
        """The model's answer to each request, from the cache or computed in one batch."""
        tokens = answer_with_cache(
            self.executor,
            self.answers,
            requests,
            prefix=prefix,
            max_new_tokens=self.max_new_tokens,
            stop_token=self.stop_token,
        )
        return [self.decode(entry) for entry in tokens]

    def answer_all_configurations(self, question: Question, *, rows_per_pass: int) -> list[str]:
        """The model's answer to a question under every configuration, in the order of `options.configurations()`."""
        shipped = (
            self.answers.precomputed.get_all(question.sample.name) if self.answers.precomputed is not None else None
        )
        if shipped is None:
            requests = [AnswerRequest(question.sample, knobs) for knobs in self.executor.options.configurations()]
            batches = (requests[first : first + rows_per_pass] for first in range(0, len(requests), rows_per_pass))
            return [text for batch in batches for text in self.answer(batch)]
        texts = {tokens: self.decode(tokens) for tokens in set(shipped)}
        return [texts[tokens] for tokens in shipped]
