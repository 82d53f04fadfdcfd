"""Memory of training a language model by its architecture: what a step holds at its fullest moments.

Counted for transformers' Llama-like layers. In the packed pass a prompt stands once for all its members; every token
keeps, per layer, the inputs of its products and norms until the backward pass has used them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from groupwise.core.errors import require
from groupwise.memory.architecture import Architecture
from groupwise.memory.stages import StageBytes, StepSpec, WeightBytes, drop_zero, peak_of_update
from groupwise.workloads.chat.config import LOGITS_PER_CHUNK, MIN_CHUNK_TOKENS, PREFILL_TOKENS, SAMPLING_LOGITS

DRAWN_BYTES = 32
"""Of one token that was drawn: its number, place, log-probability, entropy, and the random number it came from."""
NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}


@dataclass(frozen=True)
class ChatMemory:
    """A language model and the lengths it works with. All lengths are the longest that may occur."""

    model: Architecture
    prompt_tokens: int
    completion_tokens: int
    decode_rows: int = 256
    lora_rank: int | None = None
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    checkpointing: bool = False
    reference_copies: int = 0
    """1 where a frozen copy is held for the KL term; an adapter that is switched off costs nothing."""
    shared: bool = True
    """A prompt is computed once for its group, and its keys and values are kept once."""
    tokens_per_pass: int | None = None

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "completion_tokens", "decode_rows"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")

    def stages(self, job: StepSpec) -> StageBytes:
        held = self._trained().parts(job, reference_copies=self.reference_copies)
        rollout = {name: held[name] for name in ("weights", "optimizer", "averaged weights", "reference")}
        in_step = self._trained().in_step(job)
        update = peak_of_update(held, self._moments(job), in_step, one_pass=job.shape.passes == 1)
        return StageBytes(drop_zero({**rollout, **self._rollout(job)}), drop_zero(update))

    # Weights and what training adds to them

    def _trained(self) -> WeightBytes:
        if self.lora_rank is None:
            return WeightBytes(0, self.model.parameters, trained_bytes=max(4, self._compute_bytes))
        adapter = self.model.adapter_numbers(self.lora_rank)
        return WeightBytes(self.model.parameters, adapter, NUMBER_BYTES[self.dtype], max(4, self._compute_bytes))

    @property
    def _compute_bytes(self) -> int:
        return NUMBER_BYTES[self.dtype]

    # Rollout: the cache, one step of decoding, or the prefill

    def _rollout(self, job: StepSpec) -> dict[str, int]:
        """While prompts enter, or while all rows decode. Where not all have a seat at once, both come together."""
        rows = min(self.decode_rows, job.shape.rollouts_per_rank)
        prompts = job.prompts_in(rows) if self.shared else rows
        model, number, wide = self.model, self._compute_bytes, max(4, self._compute_bytes)
        entering = min(prompts * self.prompt_tokens, max(PREFILL_TOKENS, self.prompt_tokens))
        of_prompts = model.kv_bytes(prompts * self.prompt_tokens, number)
        own = model.kv_bytes(rows * self.completion_tokens, number)
        at_once = min(rows, max(1, SAMPLING_LOGITS // model.vocabulary))
        always = {
            "logits": 4 * at_once * model.vocabulary * wide,  # and probabilities, their sums and products
            "drawn tokens": job.shape.rollouts_per_rank * self.completion_tokens * DRAWN_BYTES,
            "cast weights": self._cast_weights(),
        }
        prefill = max(entering * self._widest * wide, of_prompts)  # then keys and values move into the cache
        waits = rows < job.shape.rollouts_per_rank
        moments = [
            {"KV cache": of_prompts + own, "activations": rows * self._widest * wide, **always},
            {"KV cache": of_prompts + (own if waits else 0), "activations": prefill, **always, "logits": 0},
        ]
        return max(moments, key=lambda parts: sum(parts.values()))

    @property
    def _widest(self) -> int:
        """Numbers of a token at the widest moment of a layer."""
        return 4 * self.model.width + self._inner_at_once

    @property
    def _inner_at_once(self) -> int:
        """Widest moment of the feed-forward part, a token."""
        model = self.model
        return 3 * model.top_k * (model.inner + model.width) if model.experts else 3 * model.inner

    # Update: one pass

    def tokens_in_pass(self, job: StepSpec) -> int:
        """Tokens that go through the network together; the last one of a completion predicts nothing."""
        rows = job.shape.rows_per_pass
        prompts = job.prompts_in(rows) if self.shared else rows
        tokens = prompts * self.prompt_tokens + rows * (self.completion_tokens - 1)
        longest_row = self.prompt_tokens + self.completion_tokens - 1
        return min(tokens, max(self.tokens_per_pass, longest_row)) if self.tokens_per_pass else tokens

    def _moments(self, job: StepSpec) -> list[dict[str, int]]:
        """At the head on the way forward, at the head on the way back, inside a layer on the way back."""
        tokens, model = self.tokens_in_pass(job), self.model
        layer, wide = self._kept_by_layer(), max(4, self._compute_bytes)
        kept = model.layers * model.width * wide if self.checkpointing else model.layers * layer
        angles = 2 * model.head_width * wide
        in_layer = (layer if self.checkpointing else 0) + self._backward_of_layer()
        predicted = job.shape.rows_per_pass * self.completion_tokens
        final = tokens * (3 if self._norms_kept_twice else 2) * model.width * wide + predicted * model.width * wide
        chunk = (
            min(predicted, max(MIN_CHUNK_TOKENS, LOGITS_PER_CHUNK // model.vocabulary)) * model.vocabulary * 3 * wide
        )
        into_head = 0 if self.lora_rank else model.head_numbers * wide
        always = {"cast weights": self._cast_weights()}
        below = tokens * (kept + angles)
        return [
            {"logits (chunk)": chunk, "activations": below + final, **always},
            {
                "logits (chunk)": chunk // 3,
                "activations": below + final + 2 * predicted * model.width * wide,
                "gradient of the head": into_head,
                **always,
            },
            {"activations": below + tokens * in_layer, **always},
        ]

    @property
    def _norms_kept_twice(self) -> bool:
        """To train a norm's weights transformers keeps its result too; the lean forward computes that again."""
        return self.lora_rank is None and not (self.model.lean and self.shared)

    def _kept_by_layer(self) -> int:
        """Bytes that a layer keeps of one token: for attention, two norms, and the feed-forward part or its experts."""
        model, rank, number = self.model, self.lora_rank or 0, self._compute_bytes
        stream = 2 * model.width * max(4, number)  # what the two norms read
        normed = 2 * model.width * max(4, number) if self._norms_kept_twice else 0
        inputs = 2 * model.width * number
        # angles are float32, and so are queries, keys and what is attended where the stream is
        turned = number if self.lora_rank else max(4, number)
        attention = (2 * model.query_width + model.kv_width) * turned + model.kv_width * number + 4 * model.heads
        if model.normed_heads:
            attention += (2 if self._norms_kept_twice else 1) * (model.query_width + model.kv_width) * turned
        inner = 4 * model.inner * number
        if model.experts:
            inner = model.top_k * (4 * model.inner + 2 * model.width) * number
        return stream + normed + inputs + attention + inner + 7 * rank * max(4, number)

    def _backward_of_layer(self) -> int:
        """What the backward pass of a layer adds to what it kept: gradients inside the feed-forward part."""
        if self.model.experts:
            return 2 * self.model.top_k * (self.model.inner + self.model.width) * self._compute_bytes
        return 2 * self.model.inner * self._compute_bytes

    def _cast_weights(self) -> int:
        """Trained in float32, computed in bfloat16: each weight is rounded once a pass, and kept for its backward."""
        return self.model.parameters * 2 if self.dtype == "bfloat16" and self.lora_rank is None else 0

    # What can be lowered, in the order of what it costs

    def smaller(self) -> list[tuple[str, ChatMemory, bool]]:
        """(what, how it would be, whether the result changes), each on top of the ones before."""
        found: list[tuple[str, ChatMemory, bool]] = []
        now = self

        def then(what: str, changes: bool, **fields: object) -> None:
            nonlocal now
            now = replace(now, **fields)  # type: ignore[arg-type]
            found.append((what, now, changes))

        while now.decode_rows > 16:
            then(f"decode_rows {now.decode_rows} -> {now.decode_rows // 2}", False, decode_rows=now.decode_rows // 2)
        if not now.checkpointing:
            then("gradient_checkpointing on (a third more time in training)", False, checkpointing=True)
        if now.dtype == "float32":
            then("dtype bfloat16 (other rounding)", True, dtype="bfloat16")
        if now.lora_rank is None:
            then("lora_rank 32: train an adapter alone", True, lora_rank=32, reference_copies=0)
        half = now.completion_tokens // 2
        if half >= 16:
            then(f"max_new_tokens {now.completion_tokens} -> {half}: shorter answers", True, completion_tokens=half)
        return found
