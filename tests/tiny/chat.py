"""A chat task small enough to learn in seconds: twelve prompts, a tiny random Llama, a reward function."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import groupwise as gw
from groupwise.workloads.chat.config import (
    ChatConfig,
    ChatEvalConfig,
    DataConfig,
    JudgeConfig,
    PolicyConfig,
    SamplingParams,
)
from tiny.llama import save_model


def write_lines(path: Path, rows: list[object]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


QUESTIONS = [{"prompt": f"say {number}", "answer": f"#### {number}"} for number in range(12)]


def early_letters(prompts, completions, **columns) -> list[float]:
    """A reward function with TRL's signature that a random model can learn in a few steps."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(letter < "m" for letter in text) / max(1, len(text)) for text in texts]


def chat_config(folder: Path, **changes: object) -> ChatConfig:
    """Twelve prompts for a tiny model. Files in the folder are reused."""
    if not (folder / "model").exists():
        folder.mkdir(parents=True, exist_ok=True)
        save_model(folder / "model")
        write_lines(folder / "train.jsonl", QUESTIONS)
    data = str(folder / "train.jsonl")
    base = ChatConfig(
        policy=PolicyConfig(model=str(folder / "model")),
        data=DataConfig(train=data, held_out=data),
        sampling=SamplingParams(max_new_tokens=6),
        judge=JudgeConfig(functions=("tiny.chat:early_letters",)),
        eval=ChatEvalConfig(num_prompts=6, samples_per_prompt=2, report_samples_per_prompt=4, pass_threshold=0.5),
    )
    return replace(base, **changes)


def recipe(folder: Path, **changes: object) -> gw.Config:
    return gw.Config(
        chat_config(folder, **changes),
        steps=3,
        conditions_per_step=4,
        group_size=8,
        rows_per_pass=8,
        optimizer=gw.OptimizerConfig(learning_rate=3e-2),
    )
