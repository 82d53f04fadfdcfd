"""Self-check: the executor's answers against transformers' own forward, before a model is used.

The executor calls a model's blocks itself. What a text model computes outside of them, or inside of them for a single
sequence only, would be lost without an error, so each model is compared once with what transformers makes of the same
prompts: batched, decoded, with all blocks and experts and with the fewest.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from groupwise.core.errors import UserError
from groupwise.core.groups import content_hash
from groupwise.core.io.files import cache_folder, write_atomic
from groupwise.workloads.controller.model.adapters import ModelAdapter, Sample
from groupwise.workloads.controller.model.adapters.experts import expert_module, router_of
from groupwise.workloads.controller.model.executor import Answer, AnswerRequest, Executor
from groupwise.workloads.controller.model.inputs import noise_images
from groupwise.workloads.controller.model.knobs import KnobOptions

if TYPE_CHECKING:
    from groupwise.workloads.controller.model.load import LoadedModel

_QUESTIONS = ("What is in this image?", "How many things are there, and what color is the largest one?")
"""Two, so that rows of different length are packed into one batch."""
_QUESTION_TOKENS = (4, 9)
"""The same for a model without a tokenizer or an image processor."""
NEW_TOKENS = 4
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 2e-3}
_LOW_PRECISION_TOLERANCE = 0.25
"""Error of the logits, as root mean square, over the spread of the logits. Low precision rounds each block's output, so
that some tokens go to other experts."""


@dataclass(frozen=True)
class Difference:
    """How one answer of the executor differs from transformers' own."""

    logits_error: float
    """Root mean square over the vocabulary, in units of the logits' standard deviation."""
    token: int | None
    """Index of the first answer token that transformers would not choose; None if there is none."""


def check_model(loaded: LoadedModel) -> None:
    """Refuse a model that the executor does not answer as transformers does. Passing costs once for each model."""
    passed = _record_file(loaded)
    if passed.is_file():
        return
    errors = compare(loaded)
    passed.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(passed, (json.dumps({"model": loaded.name, "logits_errors": errors}) + "\n").encode())


def _record_file(loaded: LoadedModel) -> Path:
    """Named by all that the result depends on: the model, its dtype and device, the libraries and the executor."""
    code = [file.read_text() for file in sorted(Path(__file__).parent.rglob("*.py"))]
    device = loaded.model.device.type
    known_by = (loaded.fingerprint, str(loaded.model.dtype), device, transformers.__version__, torch.__version__, code)
    return cache_folder() / "self-checks" / f"{content_hash(repr(known_by))}.json"


def compare(loaded: LoadedModel) -> dict[str, float]:
    """The logits' error with full and with the cheapest knobs; a model that differs or cannot run is refused."""
    tolerance = _TOLERANCES.get(loaded.model.dtype, _LOW_PRECISION_TOLERANCE)
    differences = _differences(loaded, tolerance)
    for knobs, by_sample in differences.items():
        if any(each.token is not None or not each.logits_error <= tolerance for each in by_sample):
            raise UserError(_difference_message(loaded, knobs, by_sample, tolerance))
    return {knobs: max(each.logits_error for each in by_sample) for knobs, by_sample in differences.items()}


def _differences(loaded: LoadedModel, tolerance: float) -> dict[str, list[Difference]]:
    """By knobs, one for each sample, all answered in one batch at the coarsest tier."""
    options, adapter = loaded.options, loaded.adapter
    cheapest = options.cheapest
    full = replace(options.full, tier=cheapest.tier)
    all_knobs = {"all blocks and experts": full, "the fewest blocks and experts": cheapest}
    samples = _samples(loaded)
    requests = [AnswerRequest(sample, knobs) for knobs in all_knobs.values() for sample in samples]
    with _readable_errors(loaded, "the executor"):
        executor = Executor(adapter, options)
        answers, _ = executor.answer(requests, max_new_tokens=NEW_TOKENS)
    with _readable_errors(loaded, "transformers"):
        by_sample = [
            _difference(adapter, request, answer, options.block_path(request.knobs), tolerance)
            for request, answer in zip(requests, answers, strict=True)
        ]
    return {name: by_sample[index * len(samples) :][: len(samples)] for index, name in enumerate(all_knobs)}


def _samples(loaded: LoadedModel) -> list[Sample]:
    """Noise as an image, and the questions as the model's own front end prepares them."""
    if loaded.tokenizer is None or loaded.normalization is None:
        image = loaded.model.config.image_token_id
        probes = loaded.front_end.probe_samples(_QUESTION_TOKENS)
        return [replace(probe, question_ids=tuple(t for t in probe.question_ids if t != image)) for probe in probes]
    front_end = replace(loaded, options=_coarsest(loaded.options)).front_end
    (noise,), prompt = noise_images(loaded), "{question}"
    if loaded.tokenizer.chat_template is None:
        prompt = f"{loaded.tokenizer.convert_ids_to_tokens(loaded.model.config.image_token_id)} {prompt}"
    return [front_end.sample(noise, prompt.replace("{question}", question)) for question in _QUESTIONS]


def _coarsest(options: KnobOptions) -> KnobOptions:
    """With one tier: finer ones may be longer than the model's context, and are then left to the settings of a run."""
    tier = options.cheapest.tier
    pixels = {tier: options.pixels[tier]} if options.pixels else {}
    return replace(options, crops_by_tier={tier: options.crops_by_tier[tier]}, pixels=pixels)


@torch.inference_mode()
def _difference(
    adapter: ModelAdapter, request: AnswerRequest, answer: Answer, path: Sequence[int], tolerance: float
) -> Difference:
    """The answer's tokens are given to transformers, which says after each what it would have said: one pass."""
    image = adapter.model.config.image_token_id
    tokens = answer.tokens[: answer.tokens.index(image)] if image in answer.tokens else answer.tokens
    with _stock_knobs(adapter, path):
        stock = adapter.stock_logits(request.sample, request.knobs.tier, tokens[:-1])
    first = answer.first_logits.float()
    spread = stock[0].std().clamp(min=1e-30)
    error = float((first - stock[0]).square().mean().sqrt() / spread)
    wrong = [
        index
        for index, (token, logits) in enumerate(zip(tokens, stock, strict=False))
        if logits.max() - logits[token] > 4 * tolerance * spread
    ]
    return Difference(error, wrong[0] if wrong else None)


@contextmanager
def _stock_knobs(adapter: ModelAdapter, path: Sequence[int]) -> Iterator[None]:
    """Transformers' own blocks with a top-k of each, 0 for a block that returns what it was given."""
    with ExitStack() as stack:
        for block, top_k in zip(adapter.blocks, path, strict=True):
            if not top_k:
                stack.enter_context(_removed(block.register_forward_hook(_return_input, with_kwargs=True)))
            elif (module := expert_module(block)) is not None and router_of(module).top_k != top_k:
                stack.enter_context(_top_k(router_of(module), top_k))
        yield


@contextmanager
def _removed(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _top_k(router: Any, top_k: int) -> Iterator[None]:
    full = router.top_k
    router.top_k = top_k
    try:
        yield
    finally:
        router.top_k = full


def _return_input(_: Any, positional: tuple[Any, ...], named: dict[str, Any], output: Any) -> Any:
    states = positional[0] if positional else named["hidden_states"]
    return (states, *output[1:]) if isinstance(output, tuple) else states


@contextmanager
def _readable_errors(loaded: LoadedModel, who: str) -> Iterator[None]:
    """An error in the code of a model that was never tried is a reason to refuse the model."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{_describe(loaded)} cannot be controlled: {error}") from error
    except torch.OutOfMemoryError:
        raise
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"{_describe(loaded)} cannot be controlled: {who} cannot run its blocks ({type(error).__name__}: {reason})."
            " Take a model that docs/model-families.md lists as equal."
        ) from error


def _describe(loaded: LoadedModel) -> str:
    text = loaded.adapter.text_config.model_type
    return f"The model {loaded.name!r} ({type(loaded.model).__name__} with the text model {text!r})"


def _difference_message(loaded: LoadedModel, knobs: str, by_sample: Sequence[Difference], tolerance: float) -> str:
    error = max(each.logits_error for each in by_sample)
    wrong = [each.token for each in by_sample if each.token is not None]
    tokens = f", and {len(wrong)} of {len(by_sample)} answers have other tokens" if wrong else ""
    return (
        f"{_describe(loaded)} cannot be controlled: with {knobs} the executor's logits differ from those of"
        f" transformers by {error:.3g} of their standard deviation{tokens}; at most {tolerance:g} is rounding. Its text"
        " model computes something that the executor does not. Take a model that docs/model-families.md lists as equal."
    )
