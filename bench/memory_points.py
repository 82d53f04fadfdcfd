"""The points of bench/memory.py: models given by their sizes, and the settings they are trained with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast

import torch

from groupwise.core.placement import RolloutRows
from groupwise.core.shape import StepShape
from groupwise.memory.architecture import architecture
from groupwise.memory.plan import MemoryModel
from groupwise.memory.stages import StepSpec
from groupwise.memory.trace import TracedStep
from groupwise.workloads.chat.memory import ChatMemory
from groupwise.workloads.controller.memory import ControllerMemory, vision_tower
from groupwise.workloads.flow.memory import FlowMemory, wan_architecture

Stage = Literal["rollout", "update"]

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
MOSAIC = TINY | EXPERTS | {"num_hidden_layers": 8, "num_experts_per_tok": 4}
SIGLIP = {"hidden_size": 96, "intermediate_size": 288, "num_hidden_layers": 3, "num_attention_heads": 4}
SIGLIP |= {"num_channels": 3, "image_size": 16, "patch_size": 4, "vision_use_head": False}
SO400M = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
SO400M |= {"num_channels": 3, "image_size": 336, "patch_size": 14, "vision_use_head": False}
NO_TOKENS = {"max_position_embeddings": 16384, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}


class Point(Protocol):
    stage: Stage
    true: bool

    def spec(self) -> StepSpec: ...
    def memory_model(self) -> MemoryModel: ...
    def step(self, fake: bool) -> TracedStep: ...
    def real_rollout(self, step: TracedStep) -> object: ...
    def parameters(self, step: TracedStep) -> int: ...


def two_groups(rows: int) -> StepSpec:
    """Two groups in all, and one group or less in a pass."""
    return StepSpec(StepShape(10**6, 2, max(2, rows), 1, rows, "whole"), fused_optimizer=True)


class _PointDefaults:
    """The rollout that is traced is also the one that is measured; all parameters are the policy's."""

    def real_rollout(self, step: TracedStep) -> object:
        assert step.rollout is not None
        return step.rollout()

    def parameters(self, step: TracedStep) -> int:
        return sum(weight.numel() for weight in step.policy.parameters())


@dataclass(frozen=True)
class Chat(_PointDefaults):
    """Prompts of P tokens, completions of C, a pass of one group."""

    model_type: str
    sizes: dict[str, Any]
    policy: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, int] = (64, 64)
    rows: int = 8
    true: bool = True
    stage: Stage = "update"

    def spec(self) -> StepSpec:
        return two_groups(self.rows)

    def memory_model(self) -> ChatMemory:
        fields = {"lora_rank": self.policy.get("lora_rank"), "dtype": self.policy.get("dtype", "float32")}
        fields |= {"checkpointing": self.policy.get("gradient_checkpointing", False)}
        fields |= {"reference_copies": int(self.policy.get("reference") == "copy")}
        return ChatMemory(architecture({"model_type": self.model_type, **self.sizes}), *self.lengths, **fields)

    def step(self, fake: bool) -> TracedStep:
        import transformers

        from groupwise.workloads.chat.config import PolicyConfig
        from groupwise.workloads.chat.trace import chat_step, fake_policy

        config = transformers.AutoConfig.for_model(self.model_type, **self.sizes, **NO_TOKENS)
        policy = fake_policy(config, PolicyConfig(model="-", **self.policy), fake=fake)
        return chat_step(policy, self.memory_model(), self.spec())

    def real_rollout(self, step: TracedStep) -> object:
        """All rows go on to their last token: no token stops them."""
        from groupwise.workloads.chat.config import SamplingParams
        from groupwise.workloads.chat.engine.generate import generate

        (prompt_tokens, completion_tokens), rows = self.lengths, 2 * self.rows
        group, member = torch.arange(rows) // self.rows, torch.arange(rows) % self.rows
        prompts = [[1 + index % 100 for index in range(prompt_tokens)]] * 2
        placed = RolloutRows(0, 0, rows, group, member, group)
        sampling = SamplingParams(max_new_tokens=completion_tokens)
        return generate(cast(Any, step.policy), prompts, group.tolist(), placed, sampling)


@dataclass(frozen=True)
class Flow(_PointDefaults):
    """Clips of the given latent size; LoRA of rank 4, or all weights."""

    sizes: dict[str, Any]
    part: str
    latent: tuple[int, ...] = (4, 4, 16, 16)
    steps: int = 1
    rows: int = 2
    true: bool = True
    stage: Stage = "update"

    def spec(self) -> StepSpec:
        return two_groups(self.rows)

    def memory_model(self) -> FlowMemory:
        return FlowMemory(wan_architecture(self.sizes), self.latent, self.steps, self.part, text_tokens=8, lora_rank=4)

    def step(self, fake: bool) -> TracedStep:
        from groupwise.workloads.flow.config import TrainedPartsConfig
        from groupwise.workloads.flow.trace import fake_transformer, flow_step

        train = TrainedPartsConfig(part=self.part, lora_rank=4)  # type: ignore[arg-type]
        transformer = fake_transformer(self.sizes, train, fake=fake)
        return flow_step(transformer, self.memory_model(), self.spec(), fake=fake)


@dataclass(frozen=True)
class Controller(_PointDefaults):
    """A frozen LLaVA model with a controller; a pass of one question, all rows at the finest tier."""

    text: dict[str, Any]
    vision: dict[str, Any]
    rows: int = 8
    crops: int = 4
    new_tokens: int = 1
    dtype_bytes: int = 4
    true: bool = True
    stage: Stage = "rollout"

    def spec(self) -> StepSpec:
        return two_groups(self.rows)

    def memory_model(self) -> ControllerMemory:
        text = architecture({"model_type": "olmoe", **self.text})
        crops = {"low": 1 + self.crops // 4, "medium": 1 + self.crops // 2, "high": 1 + self.crops}
        positions = min(5, text.layers - 1 - text.layers // 4)
        return ControllerMemory(
            text,
            vision_tower(self.vision, text.width),
            crops,
            positions,
            question_tokens=8,
            options=(3, positions, text.top_k // 2 + 1, text.layers // 4 + 1),
            dtype_bytes=self.dtype_bytes,
            new_tokens=self.new_tokens,
        )

    def step(self, fake: bool) -> TracedStep:
        import transformers

        from groupwise.workloads.controller.trace import controller_step

        config = transformers.LlavaConfig(
            vision_config=transformers.SiglipVisionConfig(**self.vision),
            text_config=transformers.OlmoeConfig(**self.text, **NO_TOKENS),
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
            tie_word_embeddings=False,
        )
        return controller_step(config, self.memory_model(), self.spec(), fake=fake)

    def parameters(self, step: TracedStep) -> int:
        memory = self.memory_model()
        return super().parameters(step) + memory.text.parameters + memory.vision.parameters


def _points() -> dict[str, Point]:
    grouped, tied = {"num_key_value_heads": 1}, {"head_dim": 64, "num_key_value_heads": 2, "tie_word_embeddings": True}
    kept, large = {"gradient_checkpointing": True}, {"lengths": (512, 512), "true": False}
    return {
        "chat tiny": Chat("llama", TINY),
        "chat tiny, grouped heads": Chat("llama", TINY | grouped),
        "chat tiny, checkpointing": Chat("llama", TINY, kept),
        "chat tiny, LoRA": Chat("llama", TINY, {"lora_rank": 8}),
        "chat tiny, LoRA, checkpointing": Chat("llama", TINY, {"lora_rank": 8, **kept}),
        "chat tiny, reference copy": Chat("llama", TINY, {"reference": "copy"}),
        "chat tiny, vocabulary 8,192": Chat("llama", TINY | {"vocab_size": 8192}),
        "chat tiny Qwen3": Chat("qwen3", TINY | tied),
        "chat tiny experts": Chat("olmoe", TINY | EXPERTS),
        "chat tiny experts, checkpointing": Chat("olmoe", TINY | EXPERTS, kept),
        "chat tiny, prompt 256": Chat("llama", TINY, lengths=(256, 32), rows=16),
        "chat tiny, grouped heads, decoding": Chat("llama", TINY | grouped, stage="rollout"),
        "chat tiny, bfloat16": Chat("llama", TINY, {"dtype": "bfloat16"}),
        "chat tiny, bfloat16, decoding": Chat("llama", TINY, {"dtype": "bfloat16"}, stage="rollout"),
        "chat tiny, decoding": Chat("llama", TINY, stage="rollout"),
        "chat tiny experts, decoding": Chat("olmoe", TINY | EXPERTS, lengths=(256, 64), stage="rollout"),
        "chat 1.2B Llama, full": Chat("llama", ONE_BILLION, **large),
        "chat 1.2B Llama, checkpointing": Chat("llama", ONE_BILLION, kept, rows=16, **large),
        "chat 1.2B Llama, LoRA, checkpointing": Chat("llama", ONE_BILLION, {"lora_rank": 32, **kept}, **large),
        "chat 1.2B Llama, decoding": Chat("llama", ONE_BILLION, rows=64, stage="rollout", **large),
        "chat 6.9B OLMoE, full": Chat("olmoe", OLMOE, lengths=(256, 256), true=False),
        "chat 6.9B OLMoE, decoding": Chat("olmoe", OLMOE, rows=16, stage="rollout", **large),
        "flow tiny, all": Flow(WAN, "all"),
        "flow tiny, LoRA": Flow(WAN, "lora"),
        "flow tiny, LoRA, window 2": Flow(WAN, "lora", steps=2),
        "flow tiny, sampling": Flow(WAN, "all", stage="rollout"),
        "flow 1.4B Wan, LoRA": Flow(WAN_1B, "lora", (16, 21, 60, 104), steps=2, rows=1, true=False),
        "flow 1.4B Wan, sampling": Flow(WAN_1B, "lora", (16, 21, 60, 104), 2, 1, true=False, stage="rollout"),
        "controller tiny": Controller(MOSAIC, SIGLIP),
        "controller tiny, policy": Controller(MOSAIC, SIGLIP, stage="update"),
        "controller tiny, answers of 8": Controller(MOSAIC, SIGLIP, new_tokens=8),
        "controller 7.3B OLMoE": Controller(OLMOE, SO400M, 16, 12, dtype_bytes=2, true=False),
    }


POINTS = _points()
