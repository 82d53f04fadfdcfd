"""All settings of the chat workload and its engine, and the engine's chunk sizes. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from groupwise.core.errors import UserError, require, require_types
from groupwise.core.io.imports import resolve_folder
from groupwise.data.rows import OnBadRow
from groupwise.memory.architecture import read_architecture
from groupwise.rewards.config import RewardFunctionsConfig
from groupwise.workloads.base import MAX_LORA_RANK, WorkloadConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from groupwise.memory.stages import StepSpec
    from groupwise.workloads.chat.memory import ChatMemory
    from groupwise.workloads.chat.workload import ChatWorkload

PREFILL_TOKENS = 8192
"""Prompt tokens that are prefilled in one forward pass."""
SAMPLING_LOGITS = 1 << 24
"""Logits that are held at a time while tokens are sampled."""
STOP_CHECK_STEPS = 8
"""Tokens that rows generate between two looks at which of them have ended, where each look waits for the device."""
LOGITS_PER_CHUNK, MIN_CHUNK_TOKENS = 1 << 21, 64
"""Logits that are held at a time while tokens are scored, for at least so many tokens: smaller products are slow."""


@dataclass(frozen=True)
class PolicyConfig:
    """Which language model is trained, and how."""

    model: str = ""
    """Folder of a transformers causal language model, its name on the hub, or package:folder for one that is shipped in
    a Python package."""
    lora_rank: int | None = None
    """Rank of a LoRA adapter (PEFT). Only the adapter is trained; None trains all weights."""
    lora_alpha: float = 32.0
    """The adapter's output is scaled by lora_alpha / lora_rank."""
    lora_targets: tuple[str, ...] = ()
    """Names of the linear layers that get an adapter; empty for all but the head."""
    lora_seed: int = 0
    """Seed of the adapter's initial weights."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Dtype of the computation. With bfloat16, trained weights stay in float32 and are cast once per pass or rollout;
    frozen weights are stored in bfloat16."""
    gradient_checkpointing: bool = False
    """Keep only the layers' inputs for the backward pass and recompute the rest: less memory, the same result."""
    reference: Literal["none", "adapter", "copy"] = "none"
    """The reference of the KL term: none; the model with its adapter disabled; or a frozen copy."""
    forward: Literal["auto", "shared_prefix", "plain"] = "auto"
    """shared_prefix: a prompt is computed once for its whole group. plain: transformers' own forward, for model
    families that do not support this. auto: shared_prefix where it is supported, else plain, showing the reason."""

    def __post_init__(self) -> None:
        require_types(self, "policy.")
        rule = f"from 1 to {MAX_LORA_RANK:,}, or None"
        require(
            self.lora_rank is None or 1 <= self.lora_rank <= MAX_LORA_RANK, "policy.lora_rank", self.lora_rank, rule
        )
        require(0 < self.lora_alpha < math.inf, "policy.lora_alpha", self.lora_alpha, "above 0")
        can_disable = self.reference != "adapter" or self.lora_rank is not None
        require(can_disable, "policy.reference", self.reference, "'copy' or 'none' where policy.lora_rank is None")

    @property
    def folder_or_name(self) -> str:
        """Where model and tokenizer are loaded from."""
        return resolve_folder(self.model, "policy.model")


@dataclass(frozen=True)
class SamplingParams:
    """The distribution that tokens are sampled from. Training scores tokens in the same distribution."""

    temperature: float = 1.0
    """Logits are divided by it; 0 is greedy decoding (for evaluation only)."""
    top_k: int | None = None
    """Only the k likeliest tokens; None for all."""
    top_p: float | None = None
    """Of those, only the likeliest tokens whose probabilities add up to this; None for all."""
    max_new_tokens: int = 64
    """Longest completion. One that reaches it without a stop token counts as truncated."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion. They are part of it, and are trained."""

    def __post_init__(self) -> None:
        require_types(self, "sampling.")
        rules = {
            "temperature": (0 <= self.temperature < math.inf, "0 or more"),
            "top_k": (self.top_k is None or self.top_k >= 1, "1 or more, or None"),
            "top_p": (self.top_p is None or 0 < self.top_p <= 1, "above 0 and at most 1, or None"),
            "max_new_tokens": (self.max_new_tokens >= 1, "1 or more"),
        }
        for name, (holds, rule) in rules.items():
            require(holds, f"sampling.{name}", getattr(self, name), rule)

    @property
    def filters_tokens(self) -> bool:
        """Whether top_k or top_p gives some tokens probability 0."""
        return self.top_k is not None or (self.top_p is not None and self.top_p < 1)


PLANNED_PROMPT = 512
"""Tokens of the longest prompt that a memory plan assumes where data.max_prompt_tokens is not set."""


@dataclass(frozen=True)
class DataConfig:
    """Where the prompts come from, and what happens to rows that cannot be used."""

    train: str = ""
    """Prompts to train on: a .jsonl or .parquet file, a folder that `datasets` saved, or module:function, which returns
    the rows."""
    held_out: str = ""
    """Prompts to evaluate on, in the same forms; empty for none."""
    prompt_column: str = "prompt"
    """Column with the prompt: a text, a list of messages, or a list of token ids, which are used as they are."""
    system: str = ""
    """System message put before every prompt that is text or messages; empty for none."""
    template: Literal["chat", "none"] = "chat"
    """chat: the tokenizer's chat template (a text is what the user says). none: a text is encoded as it stands."""
    max_prompt_tokens: int | None = None
    """Most tokens of a prompt; None for what the model allows besides sampling.max_new_tokens."""
    on_bad_row: OnBadRow = "refuse"
    """A broken line, a missing column, an empty or overlong prompt: refuse the dataset, naming the first one, or skip
    such rows, counted and shown before training. Prompts are never truncated."""

    def __post_init__(self) -> None:
        require_types(self, "data.")
        tokens = self.max_prompt_tokens
        require(tokens is None or tokens >= 1, "data.max_prompt_tokens", tokens, "1 or more, or None")


@dataclass(frozen=True)
class ChatRewardsConfig(RewardFunctionsConfig):
    """Reward functions of completions. Their weights are set with --reward.weights NAME WEIGHT."""

    functions: tuple[str, ...] = ("numeric",)
    """numeric (the number after #### or in a \\boxed{}), exact, regex, length; name=module:function or
    name=file.py:function with TRL's signature, sync or async; name=http(s)://host/path for a service."""
    answer_column: str = "answer"
    """Column with the right answer, for numeric and exact."""
    regex: str = ""
    """What regex searches for in a completion: 1 where it matches, 0 where not."""
    max_length: int | None = None
    """For length: 1 up to half as many tokens, falling to 0 at this many. None takes sampling.max_new_tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        length = self.max_length
        require(length is None or length >= 2, "workload.rewards.max_length", length, "2 or more, or None")


@dataclass(frozen=True)
class ChatEvalConfig:
    """Evaluation on held-out prompts. A completion passes when its first reward is at least pass_threshold."""

    num_prompts: int | None = 256
    """The first so many held-out prompts; None for all."""
    samples_per_prompt: int = 4
    """Completions of each prompt during training (before, after, --eval-every), sampled as in training."""
    report_samples_per_prompt: int = 16
    """Completions of each prompt in `groupwise eval`: pass@k is estimated for k up to this number."""
    pass_threshold: float = 1.0
    """Lowest first reward with which a completion passes."""
    seed: int = 0
    """Seed of evaluations. They use the same random numbers each time, so that runs can be compared."""
    compare_base_model: bool = True
    """Let `groupwise eval` evaluate the base model, too: the policy before training."""

    def __post_init__(self) -> None:
        require_types(self, "eval.")
        prompts = self.num_prompts
        require(prompts is None or prompts >= 1, "eval.num_prompts", prompts, "1 or more, or None")
        for name in ("samples_per_prompt", "report_samples_per_prompt"):
            require(getattr(self, name) >= 1, f"eval.{name}", getattr(self, name), "at least 1")


@dataclass(frozen=True)
class ChatConfig(WorkloadConfig):
    """GRPO for a language model: prompts, completions, rewards."""

    policy: PolicyConfig = field(default_factory=PolicyConfig)
    data: DataConfig = field(default_factory=DataConfig)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    rewards: ChatRewardsConfig = field(default_factory=ChatRewardsConfig)
    eval: ChatEvalConfig = field(default_factory=ChatEvalConfig)
    stop_tokens: tuple[str, ...] = ()
    """Tokens that end a completion besides the tokenizer's end-of-sequence token and the model's own list."""
    decode_rows: int = 256
    """Most rows that are decoded together. It limits memory and does not change the result."""
    tokens_per_pass: int | None = None
    """Most tokens in one training pass, besides at most rows_per_pass rows: limits memory where completions differ
    much in length. It does not change the result. None for no limit."""
    mask_truncated: bool = False
    """Leave truncated completions out of the loss; they still count in their group's statistics."""
    truncation_warning_at: float = 0.9
    """Fraction of truncated completions from which a step gives a warning (see run.on_warning)."""

    def __post_init__(self) -> None:
        require_types(self, "workload.")
        require(
            0 < self.truncation_warning_at <= 1,
            "truncation_warning_at",
            self.truncation_warning_at,
            "above 0 and at most 1",
        )
        require(self.decode_rows >= 1, "decode_rows", self.decode_rows, "at least 1")
        tokens = self.tokens_per_pass
        require(tokens is None or tokens >= 1, "tokens_per_pass", tokens, "1 or more, or None")
        if self.sampling.temperature == 0:
            raise UserError(
                "sampling.temperature is 0: all members of a group would be equal, so there is nothing to compare."
                " Set it above 0 (1 is usual). Evaluation reports greedy decoding beside sampling anyway."
            )

    def build(self, device: torch.device) -> ChatWorkload:
        from groupwise.workloads.chat.build import build

        return build(self, device)

    def memory_model(self) -> ChatMemory:
        """From the model's config.json, with the longest prompt and the longest completion in every row."""
        from groupwise.workloads.chat.memory import ChatMemory

        model = read_architecture(self._folder)
        room = (model.max_positions or 2048) - self.sampling.max_new_tokens
        return ChatMemory(
            model,
            prompt_tokens=self.data.max_prompt_tokens or max(1, min(room, PLANNED_PROMPT)),
            completion_tokens=self.sampling.max_new_tokens,
            decode_rows=self.decode_rows,
            lora_rank=self.policy.lora_rank,
            dtype=self.policy.dtype,
            checkpointing=self.policy.gradient_checkpointing,
            reference_copies=int(self.policy.reference == "copy"),
            shared=self.policy.forward != "plain",
            tokens_per_pass=self.tokens_per_pass,
        )

    def trace_memory(self, spec: StepSpec) -> Mapping[str, int]:
        import transformers

        from groupwise.workloads.chat.trace import trace_chat

        model_config = transformers.AutoConfig.from_pretrained(self._folder, trust_remote_code=False)
        return trace_chat(model_config, self.policy, self.memory_model(), spec)

    @property
    def _folder(self) -> Path:
        """Where the model's config.json is. A name on the hub has one only when it has been fetched."""
        folder = Path(self.policy.folder_or_name)
        if not (folder / "config.json").is_file():
            raise UserError(
                f"policy.model is {self.policy.model!r}, which is no folder with a config.json here: a plan needs the"
                " model's sizes. Fetch its config.json and name the folder with --workload.policy.model, or plan by the"
                " file alone: groupwise plan config.json."
            )
        return folder
