"""GSM8K with a language model of your own, for 8 accelerators.

torchrun --nproc-per-node 8 -m groupwise train chat-gsm8k --workload.policy.model FOLDER_OR_NAME \\
    --workload.data.train train.jsonl --workload.data.held-out test.jsonl
"""

from __future__ import annotations

from groupwise.core.config import AdvantageConfig, LossConfig
from groupwise.training.config import Config, OptimizerConfig, RunConfig
from groupwise.workloads.chat.config import (
    ChatConfig,
    ChatEvalConfig,
    DataConfig,
    JudgeConfig,
    PolicyConfig,
    SamplingParams,
)

SYSTEM = (
    "Solve the problem step by step. Then give the answer, a bare number, on a last line of its own that begins with"
    " four hash signs, as in '#### 42'."
)


def recipe() -> Config:
    return Config(
        ChatConfig(
            policy=PolicyConfig(model="Qwen/Qwen3-0.6B", dtype="bfloat16", gradient_checkpointing=True),
            data=DataConfig(
                train="gsm8k/train.jsonl",
                held_out="gsm8k/test.jsonl",
                prompt_column="question",
                system=SYSTEM,
            ),
            sampling=SamplingParams(max_new_tokens=512),
            judge=JudgeConfig(functions=("numeric",)),
            eval=ChatEvalConfig(num_prompts=256, samples_per_prompt=1, report_samples_per_prompt=8),
        ),
        steps=400,
        conditions_per_step=32,  # 4 questions a rank of 8
        group_size=16,
        rows_per_pass=16,  # one group: its prompt goes through the model once
        advantage=AdvantageConfig(kind="group_std"),
        loss=LossConfig(denominator="decisions", clip_high=0.28),
        optimizer=OptimizerConfig(learning_rate=1e-6, warmup_updates=10),
        run=RunConfig(eval_every=50, show_samples_every=50),
    )
