"""The loss of one batch under TRL and under groupwise: the same model, tokens, advantages, masks and old policy.

pip install -e '.[chat,bench]'
python bench/chat_parity.py
"""

from __future__ import annotations

import copy

import torch
from chat_sides import Case, make_prompts, trl_trainer

import groupwise as gw
from groupwise.core.config import LossConfig
from groupwise.training.update import StepTotals, loss_of_pass
from groupwise.workloads.chat.config import PolicyConfig, SamplingParams
from groupwise.workloads.chat.engine.policy import make_policy
from groupwise.workloads.chat.engine.sampler import Completion, completion_mask
from groupwise.workloads.chat.engine.score import score

CASE = Case("parity", prompt=12, new=9, group=4)
LENGTHS = (9, 3, 1, 6, 2, 9, 5, 4)
CONSTANT = len(LENGTHS) * CASE.new
SETTINGS = {
    "grpo": ({"loss_type": "grpo"}, LossConfig(denominator="rollouts", kl=0.04)),
    "dr_grpo": ({"loss_type": "dr_grpo"}, LossConfig(denominator="constant", constant=float(CONSTANT), kl=0.04)),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, LossConfig(clip_high=0.28, kl=0.04)),
    "sequence level": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05},
        LossConfig(ratio="rollout", denominator="rollouts", clip_low=0.05, clip_high=0.05, kl=0.04),
    ),
}


def batch() -> tuple[list[list[int]], list[Completion], torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    prompts = [make_prompts(CASE, 2)[0], make_prompts(CASE, 2)[1][:7]]
    zeros = [torch.zeros(length) for length in LENGTHS]
    ids = [tuple(torch.randint(2, CASE.vocabulary, (length,)).tolist()) for length in LENGTHS]
    completions = [Completion(tokens, unknown, unknown, True) for tokens, unknown in zip(ids, zeros, strict=True)]
    shape = len(LENGTHS), CASE.new
    return prompts, completions, torch.randn(len(LENGTHS)), 0.2 * torch.randn(shape), 0.2 * torch.randn(shape)


def gradient_of(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def main() -> None:
    torch.set_num_threads(1)
    prompts, completions, advantages, drift, reference_drift = batch()
    of, mask = [0] * 4 + [1] * 4, completion_mask(completions)
    ids = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(completion.ids) for completion in completions], batch_first=True
    )
    prompt_ids = torch.tensor([[0] * (CASE.prompt - len(prompts[prompt])) + prompts[prompt] for prompt in of])
    print("loss of one batch, TRL and groupwise, their difference, and that of the gradients relative to their norm")
    for name, (trl_settings, loss_config) in SETTINGS.items():
        trainer, _ = trl_trainer(CASE, 1, 8, use_bias_correction_kl=False, **trl_settings)
        trainer.beta = 0.04  # as a setting it would load a reference model from the hub
        policy = make_policy(copy.deepcopy(trainer.model), PolicyConfig(forward="shared_prefix"))
        scored = score(policy, prompts, of, completions, SamplingParams(max_new_tokens=CASE.new))
        old, reference = scored.logp.detach() + drift, scored.logp.detach() + reference_drift
        scored = gw.Scores(scored.logp, reference_logp=reference)
        rollouts = gw.Rollouts(torch.tensor(of), old, mask)
        ours, _ = loss_of_pass(scored, rollouts, advantages, StepTotals(sum(LENGTHS), len(LENGTHS)), loss_config)
        ours.backward()
        trainer.model.eval()
        inputs = {
            "prompt_ids": prompt_ids,
            "prompt_mask": torch.tensor(
                [[0] * (CASE.prompt - len(prompts[prompt])) + [1] * len(prompts[prompt]) for prompt in of]
            ),
            "completion_ids": ids,
            "completion_mask": mask.int(),
            "advantages": advantages,
            "old_per_token_logps": old,
            "ref_per_token_logps": reference,
            "num_items_in_batch": mask.sum(),
        }
        theirs = trainer._compute_loss(trainer.model, inputs)
        theirs.backward()
        expected, gradient = gradient_of(trainer.model), gradient_of(policy.model)
        error = ((expected - gradient).norm() / expected.norm()).item()
        print(
            f"  {name:<15} {theirs.item():+.7f} {ours.item():+.7f} {abs(theirs.item() - ours.item()):.1e} {error:.1e}"
        )
        assert abs(theirs.item() - ours.item()) < 1e-5
        assert error < 1e-4


if __name__ == "__main__":
    main()
