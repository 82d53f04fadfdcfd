"""The pretraining run of the mosaic model: initial weights, and a loop that resumes bit-identically after a kill."""

import math
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import LlavaConfig, LlavaForConditionalGeneration

from groupwise.workloads.controller.tasks.mosaic.questions import PAD_TOKEN
from groupwise.workloads.controller.tasks.mosaic.scene import HandwritingSplit, load_handwriting
from tools.mosaic.curriculum import Phase, PretrainConfig
from tools.mosaic.dense_forward import BlockPass, block_pass
from tools.mosaic.losses import Learner, StepOutcome, cipher_step, reading_step, vision_step
from tools.pretraining import restore_pretraining_state, save_pretraining_state

_WORD_STD = 0.5
_HEAD_OF_WORD = 0.2
# Queries and keys start longer than normed, so that attention can tell one tile from twelve.
_SHARPNESS = 1.4
# Experts start with a larger output than attention, so that their contribution is not lost.
_EXPERT_GAIN = 3.0


def build(config: LlavaConfig, seed: int) -> LlavaForConditionalGeneration:
    """An untrained model, whose blocks start close to the identity."""
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(config)
    _init_words(model)
    _init_blocks(model)
    return model


@torch.no_grad()
def _init_words(model: LlavaForConditionalGeneration) -> None:
    words = model.model.language_model.embed_tokens.weight
    words.normal_(0, _WORD_STD)
    words[PAD_TOKEN] = 0
    # The output head starts as a similarity to the word embeddings.
    model.lm_head.weight.copy_(words * _HEAD_OF_WORD)


@torch.no_grad()
def _init_blocks(model: LlavaForConditionalGeneration) -> None:
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
# By phase, tier, number of mosaics and what is trained, with some to spare.
_SHAPES_OF_BATCHES = 64
_TEXT = ("model.model.language_model.", "model.lm_head.")


def pretrain(
    config: PretrainConfig,
    folder: Path,
    *,
    print_line: Callable[[str], None],
    compiled: bool = True,
    stop_after: int | None = None,
    checkpoint_every: int = 50,
) -> Learner:
    """Train, resuming from the checkpoint in `folder` if there is one of the same config.

    `stop_after` ends the call after that step, as a kill would.
    """
    handwriting = load_handwriting(HandwritingSplit.TRAIN)
    learner = Learner(build(config.size.config(), config.seed)).train()
    optimizer = _optimizer(learner)
    first = restore_pretraining_state(folder, config, learner, optimizer)
    torch._dynamo.config.recompile_limit = _SHAPES_OF_BATCHES
    run_block: BlockPass = torch.compile(block_pass, dynamic=False) if compiled else block_pass
    progress = _ProgressLog(config, first, print_line)
    for step in range(first, config.steps if stop_after is None else stop_after):
        match config.phase(step):
            case Phase.ALIGNMENT | Phase.NAMING:
                outcome = vision_step(learner, handwriting, config, step)
            case Phase.READING:
                outcome = reading_step(learner, handwriting, config, step, run_block)
            case Phase.CIPHER:
                learner.freeze_before(config.reading_blocks)
                outcome = cipher_step(learner, handwriting, config, step, run_block)
        _update(learner, optimizer, outcome, config, step)
        progress.record(step, outcome)
        if (step + 1) % checkpoint_every == 0 or step + 1 == config.steps:
            save_pretraining_state(folder, config, learner, optimizer, step + 1)
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
    learner: nn.Module, optimizer: torch.optim.Optimizer, outcome: StepOutcome, config: PretrainConfig, step: int
) -> None:
    learning_rate, vision_learning_rate = config.learning_rate_at(step), config.vision_learning_rate_at(step)
    for group in optimizer.param_groups:
        group["lr"] = vision_learning_rate if group["is_vision"] else learning_rate
    optimizer.zero_grad(set_to_none=True)
    outcome.loss.backward()
    nn.utils.clip_grad_norm_(learner.parameters(), _LARGEST_GRADIENT_NORM)
    optimizer.step()


class _ProgressLog:
    """Prints the mean loss and accuracies of the last steps."""

    def __init__(self, config: PretrainConfig, first: int, print_line: Callable[[str], None], every: int = 25) -> None:
        self.config, self.first, self.print_line, self.every = config, first, print_line, every
        self.started = time.monotonic()
        self.fractions: dict[str, list[float]] = defaultdict(list)

    def record(self, step: int, outcome: StepOutcome) -> None:
        self.fractions["loss"].append(outcome.loss.item())
        for name, value in outcome.fractions.items():
            self.fractions[name].append(value)
        if (step + 1) % self.every == 0:
            minutes = (time.monotonic() - self.started) / 60
            means = "  ".join(
                f"{name} {sum(values) / len(values):.2f}" for name, values in sorted(self.fractions.items())
            )
            self.print_line(f"step {step + 1}/{self.config.steps}  {minutes:.1f} min  {means}")
            self.fractions.clear()
