"""Write and restore checkpoints. A crash cannot damage the last one: files are written aside, synced, then renamed."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from groupwise.core.errors import UserError
from groupwise.core.io.files import parse_json, read_bytes, sync_folder, write_atomic, write_synced
from groupwise.dist.comm import Comm
from groupwise.dist.sharded_files import load_parts, save_parts, shapes_in_parts
from groupwise.dist.sharding import is_sharded, part_like
from groupwise.training.config import differing_fields
from groupwise.training.state import State, trainable_weights
from groupwise.workloads.checkpoint_files import (
    EMA_WEIGHTS,
    METADATA_FILE,
    WEIGHTS,
    checkpoint_errors,
    is_in_parts,
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

_OPTIMIZER, _MOMENTS = "optimizer.safetensors", "optimizer/"
_MAX_HEADER_BYTES = 100 << 20
"""Names, shapes and offsets of the tensors in a safetensors file: the limit of the format's own library."""


def write_checkpoint(
    folder: Path,
    state: State,
    *,
    config: Mapping[str, Any],
    ranks: int,
    keep: int,
    files: Mapping[str, bytes] | None = None,
    comm: Comm | None = None,
) -> Path:
    """Save the state, and the workload's own files, as `step-NNNNNN`; keep the newest `keep` checkpoints.

    The first rank alone calls it; when sharded all ranks, with their `comm`: each writes its part.
    """
    final = folder / f"step-{state.step:06d}"
    temporary = folder / f".writing-{final.name}"
    if comm is not None and is_sharded(state.policy):
        return _write_parts(final, temporary, state, config=config, comm=comm, keep=keep, files=files or {})
    if not _make_room(folder, final, temporary):
        return _update_row_limits(final, state)
    contents = {**(files or {}), **_state_files(state)}
    contents[METADATA_FILE] = _to_bytes(_metadata(state, config, ranks, _hashes(contents)))
    _write_files(contents, temporary, final, keep=keep)
    return final


def _write_parts(
    final: Path,
    temporary: Path,
    state: State,
    *,
    config: Mapping[str, Any],
    comm: Comm,
    keep: int,
    files: Mapping[str, bytes],
) -> Path:
    """Each rank its part, and the first one then the metadata with the hashes of all."""
    with comm.fail_together("Writing a checkpoint"):
        is_new = comm.is_main and _make_room(final.parent, final, temporary)
        if comm.is_main and not is_new:
            _update_row_limits(final, state)
    if comm.broadcast_object(is_new):
        with comm.fail_together("Writing a checkpoint"):
            parts = save_parts(_all_tensors(state), temporary)
        hashes = dict(comm.gather_objects(list(parts.items())))
        with comm.fail_together("Writing a checkpoint"):
            if comm.is_main:
                metadata = _metadata(state, config, comm.ranks, _hashes(files) | hashes)
                _write_files({**files, METADATA_FILE: _to_bytes(metadata)}, temporary, final, keep=keep)
    return final


def _hashes(contents: Mapping[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def _make_room(folder: Path, final: Path, temporary: Path) -> bool:
    """Whether there is no such checkpoint yet; then makes its folder, and removes what interrupted writes have left."""
    folder.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(final):
        if next(checkpoint_errors(final), None) is None:
            return False
        _remove(final)
    for leftover in (*folder.glob(".writing-step-*"), *folder.glob(".removing-step-*")):
        _delete(leftover)
    temporary.mkdir()
    return True


def _write_files(contents: Mapping[str, bytes], temporary: Path, final: Path, *, keep: int) -> None:
    """The last files of a checkpoint, its final name, and then no more than `keep` of them."""
    for name, content in contents.items():
        write_synced(temporary / name, content)
    sync_folder(temporary)
    temporary.rename(final)
    sync_folder(final.parent)
    for old in [path for path in newest_first(final.parent) if step_of(path) <= step_of(final)][keep:]:
        _remove(old)


def _metadata(state: State, config: Mapping[str, Any], ranks: int, hashes: Mapping[str, str]) -> dict[str, Any]:
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
        "sha256": dict(hashes),
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
        then = read_bytes(path / name) if (path / name).is_file() else b"{}"
        if now != then:
            differences = "; ".join(_json_differences(now, then)) or "its bytes differ"
            raise UserError(
                f"The checkpoint {path} was made with another {name}: {differences}. Use what it was trained with, or"
                " start a new run with another --run-dir."
            )


def _json_differences(now: bytes, then: bytes) -> list[str]:
    """Empty where either is no JSON object."""
    try:
        ours, theirs = parse_json(now), parse_json(then)
    except ValueError:
        return []
    return differing_fields(ours, theirs) if isinstance(ours, dict) and isinstance(theirs, dict) else []


@torch.no_grad()
def restore(path: Path, state: State) -> None:
    """Set the state to what the checkpoint holds, bit-identical, whether it or the state is sharded or not."""
    metadata = read_metadata(path)
    if is_in_parts(path):
        _restore_parts(path, state, metadata["updates"])
    else:
        _refuse_pickled_optimizer(path)
        policy = _policy_tensors(state)
        _load_tensors(policy, _read_tensors(path / WEIGHTS, _numel(policy)), path)
        _load_optimizer(path, state)
        if state.ema:
            _load_tensors(state.ema.weights, _read_tensors(path / EMA_WEIGHTS, _numel(policy)), path)
    state.step, state.updates = metadata["step"], metadata["updates"]


def _restore_parts(path: Path, state: State, updates: int) -> None:
    """From the parts of all ranks that wrote it. Each weight has had all updates, so that steps need no file."""
    target, weights = _all_tensors(state), trainable_weights(state.policy)
    fields = ("exp_avg", "exp_avg_sq") if updates else ()
    moments = {f"{_MOMENTS}{name}.{each}": torch.zeros_like(weights[name]) for name in weights for each in fields}
    target = {name: tensor for name, tensor in target.items() if not name.startswith(_MOMENTS)} | moments
    shapes = shapes_in_parts(path)
    wrong = sorted(set(target) ^ set(shapes)) + [name for name in target if target[name].shape != shapes.get(name)]
    if wrong:
        raise UserError(_other_policy(path, wrong[0]))
    load_parts(target, path)
    by_weight = {
        name: {
            "step": torch.tensor(float(updates)),
            **{each: moments[f"{_MOMENTS}{name}.{each}"] for each in fields},
        }
        for name in weights
    }
    _set_optimizer(state, by_weight if updates else {})


def _refuse_pickled_optimizer(path: Path) -> None:
    if not (path / _OPTIMIZER).is_file():
        raise UserError(
            f"The checkpoint {path} has no {_OPTIMIZER}: earlier versions of groupwise pickled the optimizer's state,"
            " and pickles are no longer read, because loading one can run code. Start a new run with another"
            " --run-dir, or finish this one with the version that it was started with."
        )


def _state_files(state: State) -> dict[str, bytes]:
    files = {WEIGHTS: _save_tensors(_policy_tensors(state)), _OPTIMIZER: _save_tensors(_optimizer_tensors(state))}
    if state.ema:
        files[EMA_WEIGHTS] = _save_tensors(state.ema.weights)
    return files


def _all_tensors(state: State) -> dict[str, Tensor]:
    """Policy, averaged weights and moments under one name each, for the parts of a sharded run."""
    tensors = {f"policy/{name}": tensor for name, tensor in _policy_tensors(state).items()}
    tensors |= {f"ema/{name}": tensor for name, tensor in (state.ema.weights if state.ema else {}).items()}
    moments = {name: tensor for name, tensor in _optimizer_tensors(state).items() if not name.endswith(".step")}
    return tensors | {f"{_MOMENTS}{name}": tensor for name, tensor in moments.items()}


def _policy_tensors(state: State) -> dict[str, Tensor]:
    """What training changes: trainable weights and buffers. Frozen weights are loaded from their own source."""
    return {**trainable_weights(state.policy), **dict(state.policy.named_buffers())}


def _optimizer_tensors(state: State) -> dict[str, Tensor]:
    """What AdamW keeps of each weight, as `weight.exp_avg`. Its settings are in the config, so they are not saved."""
    return {
        f"{name}.{field}": value
        for name, weight in trainable_weights(state.policy).items()
        for field, value in state.optimizer.state.get(weight, {}).items()
    }


def _load_optimizer(path: Path, state: State) -> None:
    weights = trainable_weights(state.policy)
    saved = _read_tensors(path / _OPTIMIZER, 3 * _numel(weights))
    by_weight: dict[str, dict[str, Tensor]] = {}
    for key, tensor in saved.items():
        name, _, field = key.rpartition(".")
        by_weight.setdefault(name, {})[field] = tensor
    wrong = [name for name, fields in by_weight.items() if not _is_adam_state(weights.get(name), fields)]
    if wrong:
        raise UserError(
            f"The checkpoint {path} does not belong to this policy: the optimizer's state of '{wrong[0]}' is of another"
            " weight. Use the recipe that the run was started with."
        )
    by_weight = {
        name: {each: tensor if each == "step" else part_like(tensor, weights[name]) for each, tensor in fields.items()}
        for name, fields in by_weight.items()
    }
    _set_optimizer(state, by_weight)


def _set_optimizer(state: State, by_weight: Mapping[str, Mapping[str, Tensor]]) -> None:
    # The groups are this run's: AdamW's settings are in the config, and whether it is fused depends on the device.
    groups = state.optimizer.state_dict()["param_groups"]
    names = trainable_weights(state.policy)
    by_index = {index: dict(by_weight[name]) for index, name in enumerate(names) if name in by_weight}
    state.optimizer.load_state_dict({"state": by_index, "param_groups": groups})


def _is_adam_state(weight: Tensor | None, fields: Mapping[str, Tensor]) -> bool:
    """A step, and two moments of the weight's shape."""
    shapes = {name: tensor.shape for name, tensor in fields.items()}
    return weight is not None and shapes == {
        "step": torch.Size(),
        "exp_avg": weight.shape,
        "exp_avg_sq": weight.shape,
    }


def _numel(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors.values())


def _read_tensors(path: Path, numel: int) -> dict[str, Tensor]:
    """The tensors of a file, which is refused where it has more bytes than so many numbers of any dtype."""
    try:
        return load(read_bytes(path, max_bytes=_MAX_HEADER_BYTES + 8 * numel))
    except SafetensorError as error:
        raise UserError(f"{path} holds no tensors ({error}). Restore it, or delete this checkpoint.") from error


def _save_tensors(tensors: Mapping[str, Tensor]) -> bytes:
    return save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()})


def _load_tensors(target: Mapping[str, Tensor], saved: Mapping[str, Tensor], path: Path) -> None:
    unexpected = sorted(set(target) ^ set(saved))
    reshaped = [name for name in target if name in saved and target[name].shape != saved[name].shape]
    if unexpected or reshaped:
        raise UserError(_other_policy(path, (unexpected + reshaped)[0]))
    for name, tensor in target.items():
        tensor.detach().copy_(part_like(saved[name], tensor))


def _other_policy(path: Path, name: str) -> str:
    return (
        f"The checkpoint {path} does not belong to this policy: '{name}' is missing on one side or has another shape."
        " Use the recipe that the run was started with."
    )


def _remove(path: Path) -> None:
    """Rename first, so that a crash never leaves half a checkpoint under a valid name."""
    trash = path.with_name(f".removing-{path.name}")
    _delete(trash)
    path.rename(trash)
    _delete(trash)


def _delete(path: Path) -> None:
    """A folder with all that is in it, a file, or a link but not what it points to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _to_bytes(metadata: Mapping[str, Any]) -> bytes:
    return json.dumps(metadata, indent=1).encode()
