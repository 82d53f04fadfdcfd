"""Planned, traced and true memory of one update, over models and settings; and what other estimators would say.

    python bench/memory.py [NAME ...]          # all points, or those named; --json for one object a line

*plan* is the arithmetic (no torch), *trace* follows two passes and AdamW's step with fake tensors, *truth* is what the
CPU allocator handed out in the same step with real tensors (torch.profiler, profile_memory). Models that would not
fit here have no truth.

'accelerate' is what its `estimate-memory` gives for training with Adam: four times the weights. 'DeepSpeed' is its
estimator for ZeRO 2 without offload on one GPU: 4 + 16 bytes a parameter. Both take all parameters as trained and leave
activations out.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from groupwise.core.shape import Shape
from groupwise.core.units import readable
from groupwise.plan.architecture import architecture
from groupwise.plan.language import LanguageMemory
from groupwise.plan.parts import Job
from groupwise.plan.trace import traced_update
from groupwise.plan.video import VideoMemory, video_model

TINY = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4}
TINY |= {"intermediate_size": 384, "vocab_size": 512, "tie_word_embeddings": False}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64, "num_hidden_layers": 2}
ONE_BILLION = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
ONE_BILLION |= {"head_dim": 64, "intermediate_size": 8192, "vocab_size": 128256, "tie_word_embeddings": True}
OLMOE = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16}
OLMOE |= {"intermediate_size": 1024, "vocab_size": 50304, "num_experts": 64, "num_experts_per_tok": 8}
WAN = {"_class_name": "WanTransformer3DModel", "num_attention_heads": 2, "attention_head_dim": 32, "num_layers": 2}
WAN |= {"ffn_dim": 256, "in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 32, "cross_attn_norm": True}
WAN |= {"qk_norm": "rms_norm_across_heads", "patch_size": [1, 2, 2]}
WAN_1B = WAN | {"num_attention_heads": 12, "attention_head_dim": 128, "num_layers": 30, "ffn_dim": 8960}
WAN_1B |= {"in_channels": 16, "out_channels": 16, "text_dim": 4096, "freq_dim": 256}


@dataclass(frozen=True)
class Chat:
    """Prompts of P tokens, completions of C, a pass of one group."""

    kind: str
    sizes: dict[str, Any]
    policy: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, int] = (64, 64)
    rows: int = 8
    true: bool = True

    def job(self) -> Job:
        return Job(Shape(10**6, 2, self.rows, 1, self.rows, "whole"), all_at_once=False)

    def planned(self) -> LanguageMemory:
        known = {"lora_rank": self.policy.get("lora_rank"), "dtype": self.policy.get("dtype", "float32")}
        known |= {"checkpointing": self.policy.get("gradient_checkpointing", False)}
        known |= {"reference_copies": int(self.policy.get("reference") == "copy")}
        return LanguageMemory(architecture({"model_type": self.kind, **self.sizes}), *self.lengths, **known)

    def made(self, fake: bool) -> tuple[nn.Module, Callable[[], Tensor], tuple[Tensor, ...]]:
        import transformers

        from groupwise.workloads.chat.engine_config import PolicyConfig
        from groupwise.workloads.chat.trace import policy_like, scored_pass

        known = {"max_position_embeddings": 4096, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
        config = transformers.AutoConfig.for_model(self.kind, **self.sizes, **known)
        policy = policy_like(config, PolicyConfig(model="-", **self.policy), fake=fake)
        prompt, completion = self.lengths
        one = scored_pass(policy, prompts=1, rows=self.rows, prompt_tokens=prompt, completion_tokens=completion)
        copy = policy._reference[0]
        return policy, one, tuple(copy.parameters()) if copy is not None else ()


@dataclass(frozen=True)
class Flow:
    """Clips of the given latent size; LoRA of rank 4, or all weights."""

    sizes: dict[str, Any]
    part: str
    latent: tuple[int, ...] = (4, 4, 16, 16)
    steps: int = 1
    rows: int = 2
    true: bool = True

    def job(self) -> Job:
        return Job(Shape(10**6, 2, self.rows, 1, self.rows, "whole"), all_at_once=False)

    def planned(self) -> VideoMemory:
        rank = 4 if self.part == "lora" else None
        return VideoMemory(video_model(self.sizes), self.latent, self.steps, text_tokens=8, lora_rank=rank)

    def made(self, fake: bool) -> tuple[nn.Module, Callable[[], Tensor], tuple[Tensor, ...]]:
        from groupwise.workloads.flow.trace import scored_pass, transformer_like
        from groupwise.workloads.flow.training_parts import TrainConfig

        train = TrainConfig(part=self.part, lora_rank=4)  # type: ignore[arg-type]
        transformer = transformer_like(self.sizes, train, fake=fake)
        return transformer, scored_pass(transformer, self.planned(), self.rows), ()


POINTS: dict[str, Chat | Flow] = {
    "chat tiny": Chat("llama", TINY),
    "chat tiny, grouped heads": Chat("llama", TINY | {"num_key_value_heads": 1}),
    "chat tiny, checkpointing": Chat("llama", TINY, {"gradient_checkpointing": True}),
    "chat tiny, LoRA": Chat("llama", TINY, {"lora_rank": 8}),
    "chat tiny, reference copy": Chat("llama", TINY, {"reference": "copy"}),
    "chat tiny, vocabulary 8,192": Chat("llama", TINY | {"vocab_size": 8192}),
    "chat tiny Qwen3": Chat("qwen3", TINY | {"head_dim": 64, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "chat tiny experts": Chat("olmoe", TINY | EXPERTS),
    "chat tiny experts, checkpointing": Chat("olmoe", TINY | EXPERTS, {"gradient_checkpointing": True}),
    "chat tiny, prompt 256": Chat("llama", TINY, lengths=(256, 32), rows=16),
    "chat 1.2B Llama, full": Chat("llama", ONE_BILLION, lengths=(512, 512), true=False),
    "chat 1.2B Llama, checkpointing": Chat(
        "llama", ONE_BILLION, {"gradient_checkpointing": True}, (512, 512), 16, true=False
    ),
    "chat 1.2B Llama, LoRA": Chat("llama", ONE_BILLION, {"lora_rank": 32}, (512, 512), true=False),
    "chat 6.9B OLMoE, full": Chat("olmoe", OLMOE, lengths=(256, 256), true=False),
    "flow tiny, all": Flow(WAN, "all"),
    "flow tiny, LoRA": Flow(WAN, "lora"),
    "flow tiny, LoRA, window 2": Flow(WAN, "lora", steps=2),
    "flow 1.4B Wan, LoRA": Flow(WAN_1B, "lora", (16, 21, 60, 104), steps=2, rows=1, true=False),
}


def numbers_of(policy: nn.Module) -> tuple[int, int]:
    """(trained, frozen)."""
    trained = sum(weight.numel() for weight in policy.parameters() if weight.requires_grad)
    return trained, sum(weight.numel() for weight in policy.parameters()) - trained


def held_bytes(policy: nn.Module, more: tuple[Tensor, ...]) -> int:
    """Weights, buffers, and the two moments of AdamW, which are there before a step begins."""
    every = [*policy.parameters(), *policy.buffers(), *more]
    trained = [weight for weight in policy.parameters() if weight.requires_grad]
    return sum(t.nbytes for t in every) + 2 * sum(t.nbytes for t in trained)


def true_update(policy: nn.Module, passes: list[Callable[[], Tensor]], more: tuple[Tensor, ...]) -> int:
    """What the allocator handed out at most during the second of two steps, with what was held before."""
    optimiser = torch.optim.AdamW([weight for weight in policy.parameters() if weight.requires_grad])

    def step() -> None:
        for each in passes:
            each().backward()
        optimiser.step()

    step()
    optimiser.zero_grad(set_to_none=True)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        step()
    found = watched.profiler.kineto_results.events()
    events = sorted((event.start_ns(), event.nbytes()) for event in found if event.name() == "[memory]")
    now = peak = 0
    for _, size in events:
        now += size
        peak = max(peak, now)
    return held_bytes(policy, more) + peak


def figures(name: str, point: Chat | Flow) -> dict[str, Any]:
    begun = time.perf_counter()
    planned = sum(point.planned().stages(point.job()).update.values())
    milliseconds = 1000 * (time.perf_counter() - begun)
    policy, one, more = point.made(fake=True)
    trained, frozen = numbers_of(policy)
    begun = time.perf_counter()
    traced = traced_update(policy, [one, one], more=more)
    seconds = time.perf_counter() - begun
    truth = None
    if point.true:
        policy, one, more = point.made(fake=False)
        truth = true_update(policy, [one, one], more)
    return {
        "name": name,
        "plan": planned,
        "trace": traced,
        "truth": truth,
        "accelerate": 4 * 4 * (trained + frozen),
        "deepspeed": 20 * (trained + frozen),
        "plan_ms": milliseconds,
        "trace_s": seconds,
    }


def shown(found: dict[str, Any]) -> str:
    truth, trace = found["truth"], found["trace"]
    beside = f"{readable(truth)} | {trace / truth - 1:+.1%}" if truth else "- | -"
    others = " | ".join(f"{found[name] / trace - 1:+.0%}" for name in ("accelerate", "deepspeed"))
    plan = f"{readable(found['plan'])} | {found['plan'] / trace - 1:+.1%}"
    return f"| {found['name']} | {beside} | {readable(trace)} | {plan} | {others} |"


def main() -> None:
    torch.set_num_threads(1)
    words = [word for word in sys.argv[1:] if word != "--json"]
    print("| update of | truth | trace off by | trace | plan | plan off by | accelerate | DeepSpeed |", file=sys.stderr)
    for name, point in POINTS.items():
        if not words or name in words:
            found = figures(name, point)
            print(json.dumps(found) if "--json" in sys.argv else shown(found), flush=True)


if __name__ == "__main__":
    main()
