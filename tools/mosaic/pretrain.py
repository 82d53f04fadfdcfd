"""The pretraining loop: any step can be left and taken up again, and the weights come out the same.
Initial weights: sizes such that 16 blocks start close to the identity, and words that already speak of places.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import LlavaForConditionalGeneration

from groupwise.workloads.controller.tasks.mosaic.questions import PAD_TOKEN
from groupwise.workloads.controller.tasks.mosaic.scene import HandwritingSplit, load_handwriting
from tools.mosaic.curriculum import PretrainConfig
from tools.mosaic.dense_forward import BlockPass, block_pass
from tools.mosaic.losses import Learner, Outcome, alignment_step, text_step
from tools.pretraining import restore_pretraining_state, save_pretraining_state

_WORD_STD = 0.5
_HEAD_OF_WORD = 0.2
# Queries and keys start this much longer than normed, so that attention can tell one tile from twelve.
_SHARPNESS = 1.4
# Experts start this much louder than attention: what they add is then not soon overheard.
_EXPERT_GAIN = 3.0


def build(config: object, seed: int) -> LlavaForConditionalGeneration:
    """Return an untrained model with weights drawn from `seed`."""
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(config)
    _start_words(model)
    _start_blocks(model)
    return model


@torch.no_grad()
def _start_words(model: LlavaForConditionalGeneration) -> None:
    words = model.model.language_model.embed_tokens.weight
    words.normal_(0, _WORD_STD)
    words[PAD_TOKEN] = 0
    # What a position says is first read off by likeness to the word itself.
    model.lm_head.weight.copy_(words * _HEAD_OF_WORD)


@torch.no_grad()
def _start_blocks(model: LlavaForConditionalGeneration) -> None:
    text = model.config.text_config
    into = text.hidden_size**-0.5
    residual = 1 / math.sqrt(2 * text.num_hidden_layers)
    # Routing weights are about 1 / experts each, and top-k of them are added up.
    routing = text.num_experts / math.sqrt(text.num_experts_per_tok)
    for block in model.model.language_model.layers:
        attention, experts = block.self_attn, block.mlp.experts
        # Like attends to like and copies it (mimetic initialization, Trockman and Kolter, 2023).
        attention.q_proj.weight.normal_(0, into)
        attention.k_proj.weight.copy_(attention.q_proj.weight)
        attention.q_norm.weight.fill_(_SHARPNESS)
        attention.k_norm.weight.fill_(_SHARPNESS)
        attention.v_proj.weight.normal_(0, into)
        attention.o_proj.weight.copy_(attention.v_proj.weight.T * residual)
        block.mlp.gate.weight.normal_(0, 0.5 * into)
        experts.gate_up_proj.normal_(0, into)
        experts.down_proj.normal_(0, text.intermediate_size**-0.5 * residual * routing * _EXPERT_GAIN)


_BETAS = (0.9, 0.98)
_WEIGHT_DECAY = 0.03
_LARGEST_GRADIENT_NORM = 1.0
_TEXT = ("model.model.language_model.", "model.lm_head.")


def pretrain(
    plan: PretrainConfig,
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
    handwriting = load_handwriting(HandwritingSplit.TRAIN)
    learner = Learner(build(plan.size.config(), plan.seed)).train()
    optimizer = _optimizer(learner)
    first = restore_pretraining_state(folder, plan, learner, optimizer)
    run_block: BlockPass = torch.compile(block_pass, dynamic=False) if compiled else block_pass
    watch = _ProgressLog(plan, first, say)
    for step in range(first, plan.steps if stop_after is None else stop_after):
        if step < plan.alignment_steps:
            outcome = alignment_step(learner, handwriting, plan, step)
        else:
            outcome = text_step(learner, handwriting, plan, step, run_block)
        _update(learner, optimizer, outcome, plan, step)
        watch.note(step, outcome)
        if (step + 1) % checkpoint_every == 0 or step + 1 == plan.steps:
            save_pretraining_state(folder, plan, learner, optimizer, step + 1)
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


def _update(
    learner: nn.Module, optimizer: torch.optim.Optimizer, outcome: Outcome, plan: PretrainConfig, step: int
) -> None:
    learning_rate, vision_learning_rate = plan.learning_rate(step), plan.vision_learning_rate(step)
    for group in optimizer.param_groups:
        group["lr"] = vision_learning_rate if group["is_vision"] else learning_rate
    optimizer.zero_grad(set_to_none=True)
    outcome.loss.backward()
    nn.utils.clip_grad_norm_(learner.parameters(), _LARGEST_GRADIENT_NORM)
    optimizer.step()


class _ProgressLog:
    """Say now and then how far the run is and what it gets right."""

    def __init__(self, plan: PretrainConfig, first: int, say: Callable[[str], None], every: int = 25) -> None:
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
