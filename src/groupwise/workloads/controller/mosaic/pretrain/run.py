"""The pretraining loop: any step can be left and taken up again, and the weights come out the same."""

import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from groupwise.workloads.controller.mosaic.digits import Split, load_handwriting
from groupwise.workloads.controller.mosaic.pretrain.dense import BlockPass, block_pass
from groupwise.workloads.controller.mosaic.pretrain.initial import build
from groupwise.workloads.controller.mosaic.pretrain.plan import Plan
from groupwise.workloads.controller.mosaic.pretrain.steps import Learner, Outcome, alignment_step, text_step
from groupwise.workloads.pretraining import save_progress, take_up

_BETAS = (0.9, 0.98)
_WEIGHT_DECAY = 0.03
_LARGEST_GRADIENT_NORM = 1.0
_TEXT = ("model.model.language_model.", "model.lm_head.")


def pretrain(
    plan: Plan,
    folder: Path,
    *,
    say: Callable[[str], None],
    compiled: bool = True,
    stop_after: int | None = None,
    checkpoint_every: int = 50,
) -> Learner:
    """Train as planned, going on from the checkpoint in `folder` if there is one of the same plan.

    `stop_after` ends the call early at that step, as a kill would.
    """
    handwriting = load_handwriting(Split.TRAIN)
    learner = Learner(build(plan.size.config(), plan.seed)).train()
    optimizer = _optimizer(learner)
    first = take_up(folder, plan, learner, optimizer)
    run_block: BlockPass = torch.compile(block_pass, dynamic=False) if compiled else block_pass
    watch = _Watch(plan, first, say)
    for step in range(first, plan.steps if stop_after is None else stop_after):
        if step < plan.alignment_steps:
            outcome = alignment_step(learner, handwriting, plan, step)
        else:
            outcome = text_step(learner, handwriting, plan, step, run_block)
        _update(learner, optimizer, outcome, plan, step)
        watch.note(step, outcome)
        if (step + 1) % checkpoint_every == 0 or step + 1 == plan.steps:
            save_progress(folder, plan, learner, optimizer, step + 1)
    return learner.eval()


def _optimizer(learner: nn.Module) -> torch.optim.Optimizer:
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = defaultdict(list)
    for name, weight in learner.named_parameters():
        if not weight.requires_grad:
            continue
        groups[not name.startswith(_TEXT), weight.ndim >= 2].append(weight)
    return torch.optim.AdamW(
        [
            {"params": weights, "weight_decay": _WEIGHT_DECAY if is_matrix else 0.0, "is_vision": is_vision}
            for (is_vision, is_matrix), weights in groups.items()
        ],
        betas=_BETAS,
        fused=True,
    )


def _update(learner: nn.Module, optimizer: torch.optim.Optimizer, outcome: Outcome, plan: Plan, step: int) -> None:
    learning_rate, vision_learning_rate = plan.learning_rate(step), plan.vision_learning_rate(step)
    for group in optimizer.param_groups:
        group["lr"] = vision_learning_rate if group["is_vision"] else learning_rate
    optimizer.zero_grad(set_to_none=True)
    outcome.loss.backward()
    nn.utils.clip_grad_norm_(learner.parameters(), _LARGEST_GRADIENT_NORM)
    optimizer.step()


class _Watch:
    """Say now and then how far the run is and what it gets right."""

    def __init__(self, plan: Plan, first: int, say: Callable[[str], None], every: int = 25) -> None:
        self.plan, self.first, self.say, self.every = plan, first, say, every
        self.started = time.monotonic()
        self.shares: dict[str, list[float]] = defaultdict(list)

    def note(self, step: int, outcome: Outcome) -> None:
        self.shares["loss"].append(outcome.loss.item())
        for name, share in outcome.shares.items():
            self.shares[name].append(share)
        if (step + 1) % self.every == 0:
            minutes = (time.monotonic() - self.started) / 60
            means = "  ".join(f"{name} {sum(v) / len(v):.2f}" for name, v in sorted(self.shares.items()))
            self.say(f"step {step + 1}/{self.plan.steps}  {minutes:.1f} min  {means}")
            self.shares.clear()
