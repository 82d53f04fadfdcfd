"""Checkpoints that a crash cannot spoil: written beside, checked by hash, then renamed into place."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from groupwise.core.errors import UserError
from groupwise.training.config import differing_fields
from groupwise.training.state import State, trainable_weights
from groupwise.workloads.checkpoint_files import (
    AVERAGED_WEIGHTS,
    METADATA_FILE,
    WEIGHTS,
    checkpoint_errors,
    metadata_hash,
    newest_first,
    newest_valid_checkpoint,
    read_meta,
    step_of,
)

__all__ = [
    "check_same_config",
    "check_same_files",
    "newest_valid_checkpoint",
    "read_meta",
    "restore",
    "write_checkpoint",
]


def write_checkpoint(
    folder: Path,
    state: State,
    *,
    config: Mapping[str, Any],
    ranks: int,
    keep: int,
    files: Mapping[str, bytes] | None = None,
) -> Path:
    """Save the state, and the workload's own files, as `step-NNNNNN`; the newest `keep` stay."""
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{state.step:06d}"
    if final.exists():
        if next(checkpoint_errors(final), None) is None:
            return _with_cut(final, state)
        _remove(final)
    for leftover in (*folder.glob(".writing-*"), *folder.glob(".removing-*")):
        shutil.rmtree(leftover)
    draft = folder / f".writing-{final.name}"
    draft.mkdir()
    parts = {**(files or {}), **_parts(state)}
    meta: dict[str, Any] = {
        "step": state.step,
        "updates": state.updates,
        "ranks": ranks,
        "cut": asdict(state.cut),
        "config": config,
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("groupwise", "torch", "accelerate")},
        },
        "sha256": {name: hashlib.sha256(raw).hexdigest() for name, raw in parts.items()},
    }
    meta["sha256"][METADATA_FILE] = metadata_hash(meta)
    for name, raw in {**parts, METADATA_FILE: json.dumps(meta, indent=1).encode()}.items():
        _write_through(draft / name, raw)
    _sync_folder(draft)
    draft.rename(final)
    _sync_folder(folder)
    for old in [path for path in newest_first(folder) if step_of(path) <= state.step][keep:]:
        _remove(old)
    return final


def _with_cut(path: Path, state: State) -> Path:
    """A checkpoint that is there already, with the pieces that were lowered since it was written."""
    meta = read_meta(path)
    cut = json.loads(json.dumps(asdict(state.cut)))
    if meta.get("cut") != cut:
        meta["cut"] = cut
        meta["sha256"][METADATA_FILE] = metadata_hash(meta)
        draft = path / f".{METADATA_FILE}.new"
        _write_through(draft, json.dumps(meta, indent=1).encode())
        draft.rename(path / METADATA_FILE)
        _sync_folder(path)
    return path


def check_same_config(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse to continue a run under settings that would make it another run."""
    differences = differing_fields(config, read_meta(path)["config"])
    if differences:
        raise UserError(
            f"The checkpoint {path} was made with other settings: {'; '.join(differences)}. Resume with the settings it"
            " was made with, or start a new run with another --run-dir."
        )


def check_same_files(path: Path, files: Mapping[str, bytes]) -> None:
    """Refuse weights that were trained with something else than the workload has now, such as another frozen model."""
    for name, now in files.items():
        then = (path / name).read_bytes() if (path / name).is_file() else b"{}"
        if now != then:
            differences = "; ".join(differing_fields(json.loads(now), json.loads(then))) or "its bytes differ"
            raise UserError(
                f"The checkpoint {path} was made with another {name}: {differences}. Use what it was trained with, or"
                " start a new run with another --run-dir."
            )


@torch.no_grad()
def restore(path: Path, state: State) -> None:
    """Set the state to what the checkpoint holds, bit by bit."""
    saved = load((path / WEIGHTS).read_bytes())
    _load_tensors(_policy_tensors(state), saved, path)
    optimizer = torch.load(io.BytesIO((path / "optimizer.pt").read_bytes()), weights_only=True)
    for group in optimizer["param_groups"]:
        group["fused"] = state.optimizer.defaults["fused"]  # as this device has it, not the one it was written on
    state.optimizer.load_state_dict(optimizer)
    if state.ema:
        _load_tensors(state.ema.average, load((path / AVERAGED_WEIGHTS).read_bytes()), path)
    meta = read_meta(path)
    state.step, state.updates = meta["step"], meta["updates"]


def _parts(state: State) -> dict[str, bytes]:
    optimizer = io.BytesIO()
    torch.save(state.optimizer.state_dict(), optimizer)
    parts = {WEIGHTS: _tensors(_policy_tensors(state)), "optimizer.pt": optimizer.getvalue()}
    if state.ema:
        parts[AVERAGED_WEIGHTS] = _tensors(state.ema.average)
    return parts


def _policy_tensors(state: State) -> dict[str, Tensor]:
    """What training changes: trainable weights and buffers. Frozen weights are loaded from where they came from."""
    return {**trainable_weights(state.policy), **dict(state.policy.named_buffers())}


def _tensors(tensors: Mapping[str, Tensor]) -> bytes:
    return save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()})


def _load_tensors(target: Mapping[str, Tensor], saved: Mapping[str, Tensor], path: Path) -> None:
    strangers = sorted(set(target) ^ set(saved))
    wrong = [name for name in target if name in saved and target[name].shape != saved[name].shape]
    if strangers or wrong:
        raise UserError(
            f"The checkpoint {path} does not belong to this policy: '{(strangers + wrong)[0]}' is missing on one side"
            " or has another shape. Use the recipe that the run was started with."
        )
    for name, tensor in target.items():
        tensor.detach().copy_(saved[name])


def _remove(path: Path) -> None:
    """Out of sight first, so that a crash never leaves half a checkpoint under a good name."""
    doomed = path.with_name(f".removing-{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed)


def _write_through(path: Path, raw: bytes) -> None:
    with path.open("wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
