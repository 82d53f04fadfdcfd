"""Resumable pretraining of an embedded model: its state in one file, written atomically."""

import io
from pathlib import Path

import torch
from torch import nn

from groupwise.core.errors import UserError
from groupwise.core.io.files import write_atomic

CHECKPOINT = "pretraining.pt"


def save_pretraining_state(
    folder: Path, plan: object, model: nn.Module, optimizer: torch.optim.Optimizer, steps_done: int
) -> None:
    """Write all that the next steps depend on."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        "plan": repr(plan),
        "steps_done": steps_done,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    content = io.BytesIO()
    torch.save(state, content)
    write_atomic(folder / CHECKPOINT, content.getvalue())


def restore_pretraining_state(folder: Path, plan: object, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Set model and optimizer to what is in the folder, if anything; return how many steps are done."""
    path = folder / CHECKPOINT
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    if state["plan"] != repr(plan):
        raise UserError(f"{path} was written with another plan. Take another folder, or that plan: {state['plan']}")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["steps_done"])
