"""Write and restore checkpoints. A crash cannot damage the last one: files are written aside, synced, then renamed."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import shutil
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from groupwise.core.errors import UserError
from groupwise.core.files import sync_folder, write_atomic, write_synced
from groupwise.training.config import differing_fields
from groupwise.training.state import State, trainable_weights
from groupwise.workloads.checkpoint_files import (
    EMA_WEIGHTS,
    METADATA_FILE,
    WEIGHTS,
    checkpoint_errors,
    metadata_hash,
    newest_first,
    newest_valid_checkpoint,
    read_metadata,
    step_of,
)

__all__ = [
    "check_same_config",
    "check_same_files",
    "newest_valid_checkpoint",
    "read_metadata",
    "restore",
    "write_checkpoint",
]

_OPTIMIZER = "optimizer.pt"


def write_checkpoint(
    folder: Path,
    state: State,
    *,
    config: Mapping[str, Any],
    ranks: int,
    keep: int,
    files: Mapping[str, bytes] | None = None,
) -> Path:
    """Save the state, and the workload's own files, as `step-NNNNNN`; keep the newest `keep` checkpoints."""
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{state.step:06d}"
    if final.exists():
        if next(checkpoint_errors(final), None) is None:
            return _update_row_limits(final, state)
        _remove(final)
    for leftover in (*folder.glob(".writing-*"), *folder.glob(".removing-*")):
        shutil.rmtree(leftover)
    contents = {**(files or {}), **_state_files(state)}
    metadata = _metadata(state, config, ranks, contents)
    temporary = folder / f".writing-{final.name}"
    temporary.mkdir()
    for name, content in {**contents, METADATA_FILE: _to_bytes(metadata)}.items():
        write_synced(temporary / name, content)
    sync_folder(temporary)
    temporary.rename(final)
    sync_folder(folder)
    for old in [path for path in newest_first(folder) if step_of(path) <= state.step][keep:]:
        _remove(old)
    return final


def _metadata(state: State, config: Mapping[str, Any], ranks: int, contents: Mapping[str, bytes]) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "step": state.step,
        "updates": state.updates,
        "ranks": ranks,
        "row_limits": dict(state.row_limits),
        "config": config,
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("groupwise", "torch", "accelerate")},
        },
        "sha256": {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()},
    }
    metadata["sha256"][METADATA_FILE] = metadata_hash(metadata)
    return metadata


def _update_row_limits(path: Path, state: State) -> Path:
    """Give a checkpoint that was already written the limits that were halved since."""
    metadata = read_metadata(path)
    if metadata.get("row_limits") != state.row_limits:
        metadata["row_limits"] = dict(state.row_limits)
        metadata["sha256"][METADATA_FILE] = metadata_hash(metadata)
        write_atomic(path / METADATA_FILE, _to_bytes(metadata))
    return path


def check_same_config(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse to continue a run under settings that would make it another run."""
    differences = differing_fields(config, read_metadata(path)["config"])
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
    """Set the state to what the checkpoint holds, bit-identical."""
    _load_tensors(_policy_tensors(state), load((path / WEIGHTS).read_bytes()), path)
    optimizer = torch.load(io.BytesIO((path / _OPTIMIZER).read_bytes()), weights_only=True)
    for group in optimizer["param_groups"]:
        group["fused"] = state.optimizer.defaults["fused"]  # as this device has it, not the one it was written on
    state.optimizer.load_state_dict(optimizer)
    if state.ema:
        _load_tensors(state.ema.weights, load((path / EMA_WEIGHTS).read_bytes()), path)
    metadata = read_metadata(path)
    state.step, state.updates = metadata["step"], metadata["updates"]


def _state_files(state: State) -> dict[str, bytes]:
    optimizer = io.BytesIO()
    torch.save(state.optimizer.state_dict(), optimizer)
    files = {WEIGHTS: _save_tensors(_policy_tensors(state)), _OPTIMIZER: optimizer.getvalue()}
    if state.ema:
        files[EMA_WEIGHTS] = _save_tensors(state.ema.weights)
    return files


def _policy_tensors(state: State) -> dict[str, Tensor]:
    """What training changes: trainable weights and buffers. Frozen weights are loaded from their own source."""
    return {**trainable_weights(state.policy), **dict(state.policy.named_buffers())}


def _save_tensors(tensors: Mapping[str, Tensor]) -> bytes:
    return save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()})


def _load_tensors(target: Mapping[str, Tensor], saved: Mapping[str, Tensor], path: Path) -> None:
    unexpected = sorted(set(target) ^ set(saved))
    reshaped = [name for name in target if name in saved and target[name].shape != saved[name].shape]
    if unexpected or reshaped:
        raise UserError(
            f"The checkpoint {path} does not belong to this policy: '{(unexpected + reshaped)[0]}' is missing on one"
            " side or has another shape. Use the recipe that the run was started with."
        )
    for name, tensor in target.items():
        tensor.detach().copy_(saved[name])


def _remove(path: Path) -> None:
    """Rename first, so that a crash never leaves half a checkpoint under a valid name."""
    trash = path.with_name(f".removing-{path.name}")
    shutil.rmtree(trash, ignore_errors=True)
    path.rename(trash)
    shutil.rmtree(trash)


def _to_bytes(metadata: Mapping[str, Any]) -> bytes:
    return json.dumps(metadata, indent=1).encode()
