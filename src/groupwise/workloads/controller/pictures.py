"""Latency tokens of many questions about one picture: the picture goes through the first blocks once.

The questions follow it side by side in one row, a tree: each sees the picture and itself, and none of the others.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn.functional import pad

from groupwise.workloads.controller.adapter import Prompt, Sample
from groupwise.workloads.controller.executor import Executor, Head, with_latency_token
from groupwise.workloads.controller.packed import Tally


def picture_of(sample: Sample) -> Hashable:
    """Samples with the same crops (the same object, not equal ones) and the same words before them share a picture."""
    return id(sample.crops), sample.before


@torch.inference_mode()
def latency_tokens_by_picture(
    executor: Executor, samples: Sequence[Sample], latency_token: Float[Tensor, " width"] | None = None
) -> dict[Head, Float[Tensor, "positions width"]]:
    """For samples that share a picture, at every tier, what `Executor.prefix` would find for each alone."""
    assert len({picture_of(sample) for sample in samples}) == 1, "one picture at a time"
    tiers, offered = list(executor.options.crops), executor.options.insertion_positions
    prompts = executor.adapter.encode([(sample, tier) for tier in tiers for sample in samples]).prompts
    by_tier = [prompts[start : start + len(samples)] for start in range(0, len(prompts), len(samples))]
    questions = [len(sample.question) for sample in samples]
    shared = [len(each[0].states) - questions[0] for each in by_tier]
    states = [_states(each, start, latency_token) for each, start in zip(by_tier, shared, strict=True)]
    places = [_places(each, start) for each, start in zip(by_tier, shared, strict=True)]
    visible = [_visible(start, questions).to(states[0].device) for start in shared]
    top_k, seen = [executor.options.full_top_k or 1] * len(tiers), list[list[Tensor]]()
    with executor.blocks.installed():
        for block in range(max(offered)):
            states, _ = executor.blocks.run(block, states, places, top_k, Tally(), visible=visible)
            states = [each[0].after_block(block, state) for each, state in zip(by_tier, states, strict=True)]
            seen.append(states)
    ends = torch.tensor([length + 1 for length in questions]).cumsum(0) - 1
    return {
        (sample.name, tier): torch.stack([seen[position - 1][nth][start + ends[number]] for position in offered])
        for nth, (tier, start) in enumerate(zip(tiers, shared, strict=True))
        for number, sample in enumerate(samples)
    }


def _states(prompts: Sequence[Prompt], start: int, latency_token: Tensor | None) -> Float[Tensor, "tokens width"]:
    """The picture, then every question with a latency token behind it."""
    questions = [prompt.states[start:] for prompt in prompts]
    behind = [with_latency_token(question, len(question), latency_token=latency_token) for question in questions]
    return torch.cat([prompts[0].states[:start], *behind])


def _places(prompts: Sequence[Prompt], start: int) -> Int64[Tensor, "axes tokens"]:
    questions = [pad(prompt.places[:, start:], (0, 1), value=prompt.next_place) for prompt in prompts]
    return torch.cat([prompts[0].places[:, :start], *questions], dim=1)


def _visible(start: int, questions: Sequence[int]) -> Bool[Tensor, "tokens tokens"]:
    """Who sees whom: what came before, of the picture and of one's own question."""
    branch = torch.tensor([0] * start + [nth for nth, length in enumerate(questions, 1) for _ in range(length + 1)])
    return ((branch == 0) | (branch == branch[:, None])).tril()
