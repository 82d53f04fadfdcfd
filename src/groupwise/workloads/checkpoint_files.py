"""Find, verify and read a checkpoint folder, which may come from a stranger. Used by training, export and serving.

A run that is not sharded writes whole files; a sharded one a part from each rank.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.core.errors import UserError, printable
from groupwise.core.io.files import open_regular, read_json

if TYPE_CHECKING:
    from torch import Tensor, nn

    from groupwise.core.io.tensor_files import TensorFiles

METADATA_FILE = "checkpoint.json"
WEIGHTS, EMA_WEIGHTS, OPTIMIZER = "policy.safetensors", "ema.safetensors", "optimizer.safetensors"
TRAINED, AVERAGED, MOMENTS = "policy/", "ema/", "optimizer/"
"""What the names of the tensors of each begin with, in `open_tensors` and in the parts of a sharded run."""
PART = re.compile(r"shard-[0-9]{5}-model-[0-9]{5}-of-[0-9]{5}\.safetensors")
"""A file that one rank of a sharded run has written."""
_NAME = re.compile(r"step-([0-9]{1,15})")
_LARGEST_COUNT = 2**53


def newest_valid_checkpoint(folder: Path, warn: Callable[[str], None]) -> Path | None:
    """The newest checkpoint without errors; warns of each damaged one that is newer, and of what is no checkpoint."""
    refuse_other_than_folder(folder)
    for path in strangers(folder):
        warn(printable(f"{path} is ignored: checkpoints are called step- and a number of digits."))
    checkpoints = newest_first(folder)
    for path in checkpoints:
        error = next(checkpoint_errors(path), None)
        if error is None:
            return path
        warn(printable(f"Checkpoint {path} is damaged ({error}); trying the one before it."))
    if checkpoints:
        raise UserError(
            f"Every checkpoint in {folder} is damaged, so there is nothing to resume from. Restore one from a backup,"
            " or start a new run with another --run-dir."
        )
    return None


def refuse_other_than_folder(folder: Path) -> None:
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        kind = "a link" if folder.is_symlink() else "not a folder"
        raise UserError(f"{folder} is {kind}: it must be a folder within the run folder. Move it away, or restore it.")


def read_metadata(path: Path) -> dict[str, Any]:
    return read_json(path / METADATA_FILE)


def newest_first(folder: Path) -> list[Path]:
    return sorted((path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)), key=step_of, reverse=True)


def strangers(folder: Path) -> list[Path]:
    """Entries that look like checkpoints and are none of ours, such as step-000020.bak."""
    return sorted(path for path in folder.glob("step-*") if not _NAME.fullmatch(path.name))


def step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def metadata_hash(metadata: Mapping[str, Any]) -> str:
    """Hash of all metadata but the hash itself."""
    hashes = {name: value for name, value in metadata["sha256"].items() if name != METADATA_FILE}
    rest = {**metadata, "sha256": hashes}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def checkpoint_errors(path: Path) -> Iterator[str]:
    """Why a checkpoint cannot be used, if it cannot."""
    if path.is_symlink() or not path.is_dir():
        yield "it is a link" if path.is_symlink() else "it is not a folder"
        return
    try:
        metadata = read_metadata(path)
    except UserError as error:
        yield str(error).rstrip(".")
        return
    wrong = next(_metadata_errors(metadata), None)
    if wrong is not None:
        yield f"in {METADATA_FILE} {wrong}"
        return
    hashes = dict(metadata["sha256"])
    if hashes.pop(METADATA_FILE) != metadata_hash(metadata) or metadata["step"] != step_of(path):
        yield f"{METADATA_FILE} is not what was written"
    yield from _file_errors(path, hashes)


def _metadata_errors(metadata: Mapping[str, Any]) -> Iterator[str]:
    """What has another type than we write: right hashes prove only that one program wrote it, not that it was ours."""
    limits, hashes, config = metadata.get("row_limits"), metadata.get("sha256"), metadata.get("config")
    for name, least in {"step": 0, "updates": 0, "ranks": 1}.items():
        if not _is_count(metadata.get(name), least):
            yield f"'{name}' is not a number from {least}"
    if not isinstance(limits, dict) or not all(_is_count(rows, 1) for rows in limits.values()):
        yield "'row_limits' is not numbers of rows by name"
    if not isinstance(config, dict) or not isinstance(config.get("workload", {}), dict):
        yield "'config' is not the settings of a run"
    if not isinstance(hashes, dict) or METADATA_FILE not in hashes or not any(map(_holds_weights, hashes)):
        yield f"'sha256' is not hashes by name, those of {METADATA_FILE} and {WEIGHTS} (or parts of it) among them"
    elif not all(isinstance(value, str) for value in hashes.values()):
        yield "'sha256' has a value that is no text"


def _file_errors(path: Path, hashes: Mapping[str, str]) -> Iterator[str]:
    """Files that differ from their hash, and those without one that somebody might read."""
    present = {entry.name for entry in path.iterdir()}
    readable = {name for name in present if name.endswith((".json", ".safetensors"))}
    for name in sorted((readable | set(hashes)) - {METADATA_FILE}):
        if Path(name).name != name:
            yield f"{name} is not the name of a file in it"
        elif name not in hashes:
            yield f"{name} is not among the files that were written"
        elif name not in present:
            yield f"{name} is missing"
        elif _hash(path / name) != hashes[name]:
            yield f"{name} is not what was written"


def _holds_weights(name: str) -> bool:
    return name == WEIGHTS or PART.fullmatch(name) is not None


def is_in_parts(path: Path) -> bool:
    """Whether a sharded run has written the checkpoint."""
    return any(PART.fullmatch(entry.name) for entry in path.iterdir())


def open_tensors(path: Path) -> TensorFiles:
    """All tensors of a checkpoint, as policy/NAME, ema/NAME and optimizer/NAME.FIELD, in whole files or in parts."""
    from groupwise.core.io.tensor_files import TensorFiles

    if is_in_parts(path):
        return TensorFiles((entry, "") for entry in sorted(path.iterdir()) if PART.fullmatch(entry.name))
    prefixes = {WEIGHTS: TRAINED, EMA_WEIGHTS: AVERAGED, OPTIMIZER: MOMENTS}
    return TensorFiles((path / name, prefix) for name, prefix in prefixes.items() if (path / name).is_file())


def has_ema(path: Path) -> bool:
    """Whether a checkpoint holds averaged weights."""
    return any(name.startswith(AVERAGED) for name in open_tensors(path))


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def load_weights(path: Path, own: Mapping[str, Tensor], *, ema: bool) -> None:
    """Copy the trained weights (or their average) and buffers of a checkpoint into a model's own, one at a time.

    Each must be one of the model, and each that requires a gradient must be there. Nothing else is read.
    """
    import torch

    files, prefix = open_tensors(path), AVERAGED if ema else TRAINED
    trained = {prefix + name for name, tensor in own.items() if tensor.requires_grad}
    saved = {name for name in files if name.startswith(prefix)}
    problem = next((f"lacks '{name}'" for name in sorted(trained - saved)), None) or next(
        (f"'{name}' is {found}" for name in sorted(saved) if (found := _misfit(files, name, own, prefix))), None
    )
    if problem:
        raise UserError(
            f"The checkpoint {path} does not belong to this model: {problem}. Use the model that the run was started"
            " with."
        )
    with torch.no_grad():
        for name in saved:
            own[name.removeprefix(prefix)].copy_(files.read(name))


def refuse_other_adapter(path: Path, rank: int) -> None:
    """Before memory is taken for a LoRA adapter of this rank: the checkpoint must hold one of the same."""
    files = open_tensors(path)
    saved = {files.shape(name)[0] for name in files if ".lora_A." in name and files.shape(name)}
    if saved != {rank}:
        found = f"one of rank {min(saved)}" if saved else "no adapter"
        raise UserError(
            f"The run's config.json has a LoRA adapter of rank {rank}, and {path} has {found}. Restore them."
        )


def _misfit(files: TensorFiles, name: str, own: Mapping[str, Tensor], prefix: str) -> str | None:
    """How a saved tensor differs from the model's own; None where it fits. Its precision may be another."""
    tensor = own.get(name.removeprefix(prefix))
    if tensor is None:
        return "none of its weights"
    if files.shape(name) != tensor.shape:
        return f"{list(files.shape(name))[:8]}, and the model's is {list(tensor.shape)}"
    same_kind = files.dtype(name).is_floating_point == tensor.dtype.is_floating_point
    return None if same_kind else f"of {files.dtype(name)}, and the model's is of {tensor.dtype}"


def read_weights(path: Path, *, ema: bool) -> Iterator[tuple[str, Tensor]]:
    """The trained weights (or their average) and buffers of a checkpoint, by name: one whole tensor at a time."""
    files, prefix = open_tensors(path), AVERAGED if ema else TRAINED
    for name in files:
        if name.startswith(prefix):
            yield name.removeprefix(prefix), files.read(name)


def _hash(path: Path) -> str | None:
    """None for what is no regular file."""
    try:
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except UserError:
        return None


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < _LARGEST_COUNT
