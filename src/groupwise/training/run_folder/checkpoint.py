"""Restore checkpoints, and refuse those of another run. `checkpoint_writer` writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from groupwise.core.errors import UserError
from groupwise.core.io.files import parse_json, read_bytes
from groupwise.core.io.tensor_files import TensorFiles
from groupwise.dist.sharded_files import read_into
from groupwise.training.config import differing_fields
from groupwise.training.offload import host_moment
from groupwise.training.state import State, trainable_weights
from groupwise.workloads.checkpoint_files import (
    AVERAGED,
    MOMENTS,
    OPTIMIZER,
    TRAINED,
    is_in_parts,
    open_tensors,
    read_metadata,
)

_Kind = tuple[torch.Size, torch.dtype]
"""Of a tensor."""
_LARGEST_COUNT = 2**53


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


def restore(path: Path, state: State) -> None:
    """Set the state to what the checkpoint holds, bit-identical, whether it or the state is sharded or not.

    Each rank reads its own rows.
    """
    metadata = read_metadata(path)
    _refuse_pickled_optimizer(path)
    files = open_tensors(path)
    targets = {name: tensor for name, tensor in all_tensors(state).items() if not name.startswith(MOMENTS)}
    saved = {name for name in files if not name.startswith(MOMENTS) and (state.ema or not name.startswith(AVERAGED))}
    wrong = sorted(set(targets) ^ saved) or [
        name
        for name, tensor in targets.items()
        if (tensor.shape, tensor.dtype) != (files.shape(name), files.dtype(name))
    ]
    if wrong:
        raise UserError(_other_policy(path, wrong[0].partition("/")[2]))
    by_weight = _read_moments(path, state, files, updates=metadata["updates"])
    for name, tensor in targets.items():
        read_into(tensor, files, name)
    _set_optimizer(state, by_weight)
    state.step, state.updates = metadata["step"], metadata["updates"]


def _read_moments(path: Path, state: State, files: TensorFiles, *, updates: int) -> dict[str, dict[str, Tensor]]:
    """What AdamW keeps of each weight. A sharded run saves no steps: each weight has had all updates."""
    weights = trainable_weights(state.policy)
    kinds: dict[str, dict[str, _Kind]] = {}
    for key in files:
        if key.startswith(MOMENTS):
            name, _, field = key.removeprefix(MOMENTS).rpartition(".")
            kinds.setdefault(name, {})[field] = files.shape(key), files.dtype(key)
    wrong = [name for name, fields in kinds.items() if not _is_adam_state(weights.get(name), fields)]
    if wrong:
        raise UserError(
            f"The checkpoint {path} does not belong to this policy: the optimizer's state of '{wrong[0]}' is of another"
            " weight. Use the recipe that the run was started with."
        )
    by_weight: dict[str, dict[str, Tensor]] = {}
    for name, fields in kinds.items():
        weight = weights[name].detach()
        empty = host_moment if state.offloaded else torch.empty_like
        by_weight[name] = {field: empty(weight) for field in fields if field != "step"}
        for field, moment in by_weight[name].items():
            read_into(moment, files, f"{MOMENTS}{name}.{field}", placed_as=weight)
        step = f"{MOMENTS}{name}.step"
        by_weight[name]["step"] = files.read(step) if step in files else torch.tensor(float(updates))
        if not 0 <= by_weight[name]["step"] < _LARGEST_COUNT:
            raise UserError(f"The checkpoint {path} has no count of the updates of '{name}'. Restore it.")
    return by_weight


def _refuse_pickled_optimizer(path: Path) -> None:
    if not is_in_parts(path) and not (path / OPTIMIZER).is_file():
        raise UserError(
            f"The checkpoint {path} has no {OPTIMIZER}: earlier versions of groupwise pickled the optimizer's state,"
            " and pickles are no longer read, because loading one can run code. Start a new run with another"
            " --run-dir, or finish this one with the version that it was started with."
        )


def all_tensors(state: State) -> dict[str, Tensor]:
    """Policy, averaged weights and moments under one name each, as the parts of a sharded run hold them."""
    tensors = {f"{TRAINED}{name}": tensor for name, tensor in policy_tensors(state).items()}
    tensors |= {f"{AVERAGED}{name}": tensor for name, tensor in (state.ema.weights if state.ema else {}).items()}
    moments = {name: tensor for name, tensor in optimizer_tensors(state).items() if not name.endswith(".step")}
    return tensors | {f"{MOMENTS}{name}": tensor for name, tensor in moments.items()}


def moments_placed_as(state: State) -> dict[str, Tensor]:
    """The weight of each moment, which is sharded as the weight is."""
    weights = trainable_weights(state.policy)
    return {f"{MOMENTS}{name}.{field}": weights[name] for name in weights for field in ("exp_avg", "exp_avg_sq")}


def policy_tensors(state: State) -> dict[str, Tensor]:
    """What training changes: trainable weights and buffers. Frozen weights are loaded from their own source."""
    return {**trainable_weights(state.policy), **dict(state.policy.named_buffers())}


def optimizer_tensors(state: State) -> dict[str, Tensor]:
    """What AdamW keeps of each weight, as `weight.exp_avg`. Its settings are in the config, so they are not saved."""
    return {
        f"{name}.{field}": value
        for name, weight in trainable_weights(state.policy).items()
        for field, value in state.optimizer.state.get(weight, {}).items()
    }


def _set_optimizer(state: State, by_weight: Mapping[str, Mapping[str, Tensor]]) -> None:
    if state.offloaded:  # torch would move the moments to the device
        for name, weight in trainable_weights(state.policy).items():
            state.optimizer.state[weight] = dict(by_weight.get(name, {}))
        return
    # The groups are this run's: AdamW's settings are in the config, and whether it is fused depends on the device.
    groups = state.optimizer.state_dict()["param_groups"]
    names = trainable_weights(state.policy)
    by_index = {index: dict(by_weight[name]) for index, name in enumerate(names) if name in by_weight}
    state.optimizer.load_state_dict({"state": by_index, "param_groups": groups})


def _is_adam_state(weight: Tensor | None, fields: Mapping[str, _Kind]) -> bool:
    """Two moments of the weight's shape and dtype, and maybe a step."""
    step_shape, step_dtype = fields.get("step", (torch.Size(), torch.float32))
    if weight is None or step_shape != torch.Size() or not step_dtype.is_floating_point:
        return False
    moments = {name: kind for name, kind in fields.items() if name != "step"}
    return moments == dict.fromkeys(("exp_avg", "exp_avg_sq"), (weight.shape, weight.dtype))


def _other_policy(path: Path, name: str) -> str:
    return (
        f"The checkpoint {path} does not belong to this policy: '{name}' is missing on one side, or has another shape"
        " or dtype. Use the recipe that the run was started with."
    )
