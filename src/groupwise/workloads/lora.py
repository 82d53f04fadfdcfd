"""LoRA (PEFT) for transformers and diffusers models alike: added in place, switched off for the reference, merged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from groupwise.core.errors import UserError
from groupwise.dist.deferred_weights import stand_ins_for_deferred

_LOW_PRECISION = (torch.bfloat16, torch.float16)


def add_lora(model: Any, *, rank: int, alpha: float, targets: Sequence[str], seed: int, setting: str) -> None:
    """Freeze the model and add an adapter that is trained alone; a fresh one does not change the output.

    `targets` are the ends of the names of linear layers, those that the model lacks are ignored; empty for all but the
    output layer. `setting` is where the user gave them. Initial weights depend on the seed alone, the same on every
    rank, and stay in float32 at least: small updates would be lost in bfloat16.
    """
    from peft import LoraConfig

    model.requires_grad_(False)
    config: Any = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets) or "all-linear", lora_dropout=0.0)
    with torch.random.fork_rng(devices=[]):  # PEFT draws on the CPU
        torch.default_generator.manual_seed(seed)
        try:
            with stand_ins_for_deferred(model):  # or PEFT would give its new weights no memory either
                model.add_adapter(config)
        except ValueError as error:
            raise UserError(
                f"{setting} is {tuple(targets)}: no layer of {type(model).__name__} can get an adapter by these names."
                f" PEFT says: {' '.join(str(error).split())[:300]} Name linear layers of the model."
            ) from error
    for weight in model.parameters():
        if weight.requires_grad and weight.dtype in _LOW_PRECISION:
            weight.data = weight.data.float()


@contextmanager
def without_lora(model: Any) -> Iterator[None]:
    """The model as it was before training."""
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()


@torch.no_grad()
def merge_lora(model: Any) -> None:
    """Add the adapter to the weights and remove it: a plain model again."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    for _, layer in layers:
        layer.merge()
    for name, layer in layers:
        if not any(name.startswith(f"{other}.") for other, _ in layers):  # the outermost, where experts have two
            model.set_submodule(name, layer.get_base_layer())
    model._hf_peft_config_loaded = False  # or transformers would save the adapter alone
    del model.peft_config
