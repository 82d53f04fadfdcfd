"""What a controller is trained on: a frozen model, questions about images, and what answers are estimated to take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from groupwise.core.errors import UserError
from groupwise.workloads.controller.latency.estimates import KnobLatencyModel
from groupwise.workloads.controller.model.adapters import Sample
from groupwise.workloads.controller.model.answer_cache import AnswerCache, answer_with_cache
from groupwise.workloads.controller.model.executor import AnswerRequest, Executor, PrefixStates


@dataclass(frozen=True)
class Question:
    """One thing to ask, with what is known about it."""

    sample: Sample
    text: str
    answers: tuple[str, ...]
    """Right answers: one, or one from each annotator."""
    prompt_tokens: Mapping[str, int]
    """Length of the prompt at every tier, image tokens included."""
    image: str = ""
    """A name for people."""
    kind: str = ""
    """What sort of question it is, as far as can be told from the question; the controller is not told."""


@dataclass(frozen=True)
class ModelSource:
    """What a task's model is and how it is asked: enough to use a trained controller without the task."""

    model: str
    """As `load_model` takes it."""
    identity: str
    """Of its weights: a controller is of no use for others."""
    dtype: str = "float32"
    prompt: str = "{question}"
    """What goes to the model for a question."""


@dataclass(frozen=True)
class Task:
    executor: Executor
    answers: AnswerCache
    """What is known already. Its name must tell the model and the way to stop."""
    estimator: KnobLatencyModel
    questions: Sequence[Question]
    """To train on."""
    held_out: Sequence[Question]
    """To look at while training; what decides between methods in the end must be others still."""
    spell: Callable[[Sequence[int]], str]
    """Text of an answer's tokens."""
    max_new_tokens: int = 1
    stop_token: int | None = None
    source: ModelSource | None = None
    """None where the model cannot be loaded again by its name: checkpoints are then of no use without the task."""
    notes: Sequence[str] = ()
    """What a person should know before training."""
    choose: Callable[[], Sequence[Question]] | None = None
    """Questions that baselines are chosen on in the final evaluation; None takes those held out."""
    test: Callable[[], Sequence[Question]] | None = None
    """Questions that nothing was trained or chosen on, for the final evaluation; None leaves it out."""

    def __post_init__(self) -> None:
        for name in ("questions", "held_out"):
            if not getattr(self, name):
                raise UserError(f"The task has no {name}: it needs at least one question there.")
        for question in (*self.questions, *self.held_out):
            if not question.answers:
                raise UserError(
                    f"The question {question.text!r} about {question.image or question.sample.name} has no right"
                    " answer, so nothing can be learned from it. Add one, or leave the question out."
                )

    def answer(self, requests: Sequence[AnswerRequest], prefix: PrefixStates | None = None) -> list[str]:
        """What the model says to each request, computed together or remembered."""
        tokens = answer_with_cache(
            self.executor,
            self.answers,
            requests,
            prefix=prefix,
            max_new_tokens=self.max_new_tokens,
            stop_token=self.stop_token,
        )
        return [self.spell(entry) for entry in tokens]

    def answer_all(self, question: Question) -> list[str]:
        """What the model says under every configuration, in the order of `KnobOptions.configurations()`."""
        shipped = (
            self.answers.precomputed.get_all(question.sample.name) if self.answers.precomputed is not None else None
        )
        if shipped is None:
            return self.answer(
                [AnswerRequest(question.sample, knobs) for knobs in self.executor.options.configurations()]
            )
        texts = {tokens: self.spell(tokens) for tokens in set(shipped)}
        return [texts[tokens] for tokens in shipped]
