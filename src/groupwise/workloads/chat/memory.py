"""Memory of training a language model, by arithmetic on its architecture: peaks of rollout and update. No torch.

Counted for transformers' Llama-like layers. In the packed pass a prompt stands once for all its members; every token
keeps, per layer, the inputs of its products and norms until the backward pass has used them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from groupwise.core.errors import require
from groupwise.memory.architecture import Architecture
from groupwise.memory.plan import Reduction
from groupwise.memory.sharding import ShardUnits, UnitParams
from groupwise.memory.stages import PassPeaks, StageBytes, StepSpec, WeightBytes
from groupwise.workloads.chat.config import LOGITS_PER_CHUNK, MIN_CHUNK_TOKENS, PREFILL_TOKENS, SAMPLING_LOGITS

SAMPLED_TOKEN_BYTES = 32
"""Of one sampled token: its id, position, log-prob, entropy, and the random number it was sampled with."""
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}


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
    """1 where a frozen copy is held for the KL term; an adapter that is disabled takes no memory."""
    shared: bool = True
    """A prompt is computed once for its group, and its keys and values are kept once."""
    tokens_per_pass: int | None = None

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "completion_tokens", "decode_rows"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")

    def predict(self, spec: StepSpec) -> StageBytes:
        weights = self._weights()
        persistent = weights.by_part(spec, reference_copies=self.reference_copies)
        return weights.stage_bytes(spec, persistent, self._rollout_peaks(spec), self._update_peaks(spec))

    # Weights

    def _weights(self) -> WeightBytes:
        parameters, wide = self.model.parameters, self._float32_or_wider
        if self.lora_rank is None:
            return WeightBytes(0, parameters, trained_dtype_bytes=wide, units=self._units(0))
        adapter = self.model.lora_params(self.lora_rank)
        return WeightBytes(parameters, adapter, self._dtype_bytes, wide, units=self._units(adapter))

    def _units(self, adapter: int) -> ShardUnits:
        """Each layer is a block; embeddings, the last norm and the head are the root."""
        model, in_layers = self.model, self.model.layers * self.model.layer_params
        if self.lora_rank is None:
            block, root = UnitParams(0, model.layer_params), UnitParams(0, model.parameters - in_layers)
        else:
            block = UnitParams(model.layer_params, adapter // model.layers)
            root = UnitParams(model.parameters - in_layers)
        trained = adapter if self.lora_rank else model.parameters
        return ShardUnits(block, root, model.parameters + adapter, trained, self._dtype_bytes, self._float32_or_wider)

    def _weight_copies(self, spec: StepSpec) -> int:
        """Trained in float32, computed in bfloat16: each weight is cast once per pass and kept for its backward.

        Sharded weights are gathered in bfloat16 at once.
        """
        casts = self.dtype == "bfloat16" and self.lora_rank is None and spec.sharding is None
        return self.model.parameters * 2 if casts else 0

    @property
    def _dtype_bytes(self) -> int:
        return _DTYPE_BYTES[self.dtype]

    @property
    def _float32_or_wider(self) -> int:
        """Bytes of a number that is never stored in bfloat16."""
        return max(4, self._dtype_bytes)

    # Rollout

    def _rollout_peaks(self, spec: StepSpec) -> list[dict[str, int]]:
        """While all rows decode, or while prompts are prefilled. Where rows wait for a slot, both come together."""
        rows = min(self.decode_rows, spec.shape.rollouts_per_rank)
        prompts = spec.conditions_in(rows) if self.shared else rows
        model, wide = self.model, self._float32_or_wider
        prefilled = min(prompts * self.prompt_tokens, max(PREFILL_TOKENS, self.prompt_tokens))
        prompt_cache = model.kv_bytes(prompts * self.prompt_tokens, self._dtype_bytes)
        row_cache = model.kv_bytes(rows * self.completion_tokens, self._dtype_bytes)
        sampled_together = min(rows, max(1, SAMPLING_LOGITS // model.vocabulary))
        always = {
            "logits": 4 * sampled_together * model.vocabulary * wide,  # and probabilities, their sums and products
            "sampled tokens": spec.shape.rollouts_per_rank * self.completion_tokens * SAMPLED_TOKEN_BYTES,
            "bf16 weight copies": self._weight_copies(spec),
        }
        prefill = max(prefilled * self._layer_width * wide, prompt_cache)  # then keys and values move into the cache
        rows_wait = rows < spec.shape.rollouts_per_rank
        return [
            {"KV cache": prompt_cache + row_cache, "activations": rows * self._layer_width * wide, **always},
            {"KV cache": prompt_cache + (row_cache if rows_wait else 0), "activations": prefill, **always, "logits": 0},
        ]

    @property
    def _layer_width(self) -> int:
        """Numbers per token at the peak of a layer."""
        return 4 * self.model.width + self._ffn_peak

    @property
    def _ffn_peak(self) -> int:
        """Numbers per token at the peak of the feed-forward part."""
        model = self.model
        return 3 * model.top_k * (model.ffn_dim + model.width) if model.experts else 3 * model.ffn_dim

    # Update

    def tokens_in_pass(self, spec: StepSpec) -> int:
        """Tokens that go through the model together; the last one of a completion predicts nothing."""
        rows = spec.shape.largest_pass
        prompts = spec.conditions_in(rows) if self.shared else rows
        tokens = prompts * self.prompt_tokens + rows * (self.completion_tokens - 1)
        longest_row = self.prompt_tokens + self.completion_tokens - 1
        return min(tokens, max(self.tokens_per_pass, longest_row)) if self.tokens_per_pass else tokens

    def _update_peaks(self, spec: StepSpec) -> PassPeaks:
        """At the head in the forward pass, at the head in the backward pass, inside a layer in the backward pass."""
        tokens, model = self.tokens_in_pass(spec), self.model
        layer, wide = self._saved_per_layer(), self._float32_or_wider
        saved = model.layers * model.width * wide if self.checkpointing else model.layers * layer
        rotary_tables = 2 * model.head_dim * wide
        in_layer = (layer if self.checkpointing else 0) + self._backward_of_layer()
        predicted = spec.shape.largest_pass * self.completion_tokens
        final = tokens * (3 if self._norm_results_saved else 2) * model.width * wide + predicted * model.width * wide
        chunk_tokens = min(predicted, max(MIN_CHUNK_TOKENS, LOGITS_PER_CHUNK // model.vocabulary))
        chunk = chunk_tokens * model.vocabulary * 3 * wide
        # a head that is gathered in the dtype of the computation has a gradient of that dtype
        head_gradient = 0 if self.lora_rank else model.head_params * (self._dtype_bytes if spec.sharding else wide)
        always = {"bf16 weight copies": self._weight_copies(spec)}
        in_layers = tokens * (saved + rotary_tables)
        # where weights are gathered, the head keeps its gradient until the backward pass has come to the embeddings
        uncut_head = {"output-head gradient": head_gradient} if spec.sharding else {}
        at_root = [
            {"logits (chunk)": chunk, "activations": in_layers + final, **always},
            {
                "logits (chunk)": chunk // 3,
                "activations": in_layers + final + 2 * predicted * model.width * wide,
                "output-head gradient": head_gradient,
                **always,
            },
        ]
        in_blocks = [{"activations": in_layers + tokens * in_layer, **uncut_head, **always}]
        freed = tokens * saved // model.layers
        return PassPeaks(in_blocks, at_root, one_backward=spec.shape.passes == 1, freed_per_block=freed)

    @property
    def _norm_results_saved(self) -> bool:
        """To train a norm's weights, transformers saves its result too; the engine's Llama forward recomputes it.

        That forward supports norms of each head, or none, but not one norm over all heads.
        """
        uses_llama_forward = self.shared and self.model.qk_norm != "all_heads"
        return self.lora_rank is None and not uses_llama_forward

    def _saved_per_layer(self) -> int:
        """Bytes per token that a layer saves for backward: attention, two norms, feed-forward part or experts."""
        model, rank, number, wide = self.model, self.lora_rank or 0, self._dtype_bytes, self._float32_or_wider
        norm_inputs = 2 * model.width * wide
        norm_results = 2 * model.width * wide if self._norm_results_saved else 0
        linear_inputs = 2 * model.width * number
        # rotary tables are float32, and so are queries, keys and the attention's result where the residual stream is
        rotated = number if self.lora_rank else wide
        attention = (2 * model.query_width + model.kv_width) * rotated + model.kv_width * number + 4 * model.heads
        if model.qk_norm is not None:
            attention += (2 if self._norm_results_saved else 1) * (model.query_width + model.kv_width) * rotated
        feed_forward = 4 * model.ffn_dim * number
        if model.experts:
            feed_forward = model.top_k * (4 * model.ffn_dim + 2 * model.width) * number
        return norm_inputs + norm_results + linear_inputs + attention + feed_forward + 7 * rank * wide

    def _backward_of_layer(self) -> int:
        """Bytes per token that a layer's backward adds to what it saved: gradients inside the feed-forward part."""
        if self.model.experts:
            return 2 * self.model.top_k * (self.model.ffn_dim + self.model.width) * self._dtype_bytes
        return 2 * self.model.ffn_dim * self._dtype_bytes

    # Reductions, cheapest first

    def reductions(self) -> list[Reduction]:
        reductions: list[Reduction] = []
        memory, rows = self, self.decode_rows
        while rows > 16:
            memory = replace(memory, decode_rows=rows // 2)
            reductions.append(Reduction("decode_rows", rows // 2, memory, previous=rows))
            rows //= 2
        if not memory.checkpointing:
            memory = replace(memory, checkpointing=True)
            effect = "a third more time in training"
            reductions.append(Reduction("gradient_checkpointing", "on", memory, effect=effect))
        if memory.dtype == "float32":
            memory = replace(memory, dtype="bfloat16")
            reductions.append(Reduction("dtype", "bfloat16", memory, effect="other rounding", changes_result=True))
        if memory.lora_rank is None:
            memory = replace(memory, lora_rank=32, reference_copies=0)
            effect = "only an adapter is trained"
            reductions.append(Reduction("lora_rank", 32, memory, effect=effect, changes_result=True))
        tokens = memory.completion_tokens
        if tokens >= 32:
            memory, effect = replace(memory, completion_tokens=tokens // 2), "shorter completions"
            reductions.append(
                Reduction("max_new_tokens", tokens // 2, memory, previous=tokens, effect=effect, changes_result=True)
            )
        return reductions
