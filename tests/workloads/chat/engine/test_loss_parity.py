"""The loss of a batch of completions against the definitions that TRL documents, written out token by token.

bench/chat_parity.py compares with TRL itself.
"""

from __future__ import annotations

import math

import pytest
import torch
from tiny.llama import llama, ragged_prompts, rows_for

import groupwise as gw
from groupwise.training.update import StepTotals, loss_of_pass
from groupwise.workloads.chat.config import PolicyConfig, SamplingParams
from groupwise.workloads.chat.engine.generate import generate
from groupwise.workloads.chat.engine.plain import score_plain
from groupwise.workloads.chat.engine.policy import make_policy
from groupwise.workloads.chat.engine.sampler import completion_mask, pad_rows
from groupwise.workloads.chat.engine.score import score

SAMPLING = SamplingParams(max_new_tokens=12, stop_token_ids=tuple(range(5, 25)))
PROMPTS, ROWS = ragged_prompts(2), rows_for(2, 3)
OF = ROWS.condition.tolist()
ADVANTAGES = [1.3, -0.4, -0.9, 0.2, 1.1, -1.3]
BETA, LOW, HIGH = 0.04, 0.2, 0.28
CONFIGS = {
    "grpo": gw.LossConfig(denominator="rollouts", kl=BETA, clip_high=HIGH),
    "dr_grpo": gw.LossConfig(denominator="constant", constant=6.0 * 12, kl=BETA, clip_high=HIGH),
    "dapo": gw.LossConfig(kl=BETA, clip_high=HIGH),
    "sequence": gw.LossConfig(ratio="rollout", denominator="rollouts", kl=BETA, clip_high=HIGH),
}


def documented(kind: str, new: list[list[float]], old: list[list[float]], reference: list[list[float]]) -> float:
    """-min(r A, clip(r) A) + beta k3: summed over a row's tokens, then divided as the setting says."""
    rows, tokens = [], sum(map(len, new))
    for advantage, now, then, fixed in zip(ADVANTAGES, new, old, reference, strict=True):
        whole = math.exp(sum(a - b for a, b in zip(now, then, strict=True)) / len(now))
        total = 0.0
        for a, b, c in zip(now, then, fixed, strict=True):
            ratio = whole if kind == "sequence" else math.exp(a - b)
            surrogate = min(ratio * advantage, min(max(ratio, 1 - LOW), 1 + HIGH) * advantage)
            total += -surrogate + BETA * (math.exp(c - a) - (c - a) - 1)
        rows.append(total)
    if kind in ("grpo", "sequence"):
        return sum(total / len(now) for total, now in zip(rows, new, strict=True)) / len(rows)
    return sum(rows) / (len(rows) * 12 if kind == "dr_grpo" else tokens)


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_loss_is_the_documented_one(kind):
    policy = make_policy(llama(), PolicyConfig(forward="shared_prefix"))
    plain = make_policy(llama(), PolicyConfig(forward="plain"))
    completions = generate(policy, PROMPTS, OF, ROWS, SAMPLING)
    lengths = [len(completion) for completion in completions]
    assert len(set(lengths)) > 2
    with torch.no_grad():
        now, _ = score_plain(plain, [PROMPTS[prompt] for prompt in OF], completions, SAMPLING)
    noise = torch.randn(2, 6, max(lengths), generator=torch.Generator().manual_seed(0)) * 0.3
    old = [logp + noise[0, row, : len(logp)] for row, logp in enumerate(now)]
    reference = [logp + noise[1, row, : len(logp)] for row, logp in enumerate(now)]
    scored = score(policy, PROMPTS, OF, completions, SAMPLING)
    scored = gw.Scores(scored.logp, reference_logp=pad_rows(reference))
    rollouts = gw.Rollouts(torch.tensor(OF), pad_rows(old), completion_mask(completions))
    loss, _ = loss_of_pass(scored, rollouts, torch.tensor(ADVANTAGES), StepTotals(sum(lengths), 6), CONFIGS[kind])
    columns = ([row.tolist() for row in rows] for rows in (now, old, reference))
    assert loss.item() == pytest.approx(documented(kind, *columns), abs=1e-5)
