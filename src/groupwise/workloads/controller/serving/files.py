"""A trained controller as files: config.json, weights, and estimator.json where one was fitted."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from groupwise.core.errors import UserError
from groupwise.workloads.controller.conditions import Conditions
from groupwise.workloads.controller.config import BudgetConfig
from groupwise.workloads.controller.latency.estimates import (
    KnobLatencyEstimator,
    KnobLatencyModel,
    ProportionalEstimator,
)
from groupwise.workloads.controller.latency.source import COUNTED, load_estimator
from groupwise.workloads.controller.model.knobs import KnobOptions
from groupwise.workloads.controller.model.load import LoadedModel
from groupwise.workloads.controller.policy.network import ControllerNetwork
from groupwise.workloads.controller.task import ModelSource, Task

CONFIG, ESTIMATOR = "config.json", "estimator.json"
_KIND = "groupwise-controller"
NETWORK_VERSION = 2
"""What it reads and in which order it decides: counted up with every change, since the weights look the same."""
_FITTED, _OWN = "fitted", "own"


@dataclass(frozen=True)
class ControllerSettings:
    """Everything about a trained controller but its weights."""

    source: ModelSource
    width: int
    """Of the model's hidden states."""
    options: KnobOptions
    budget: BudgetConfig
    max_new_tokens: int
    stop_token: int | None
    estimator: KnobLatencyModel
    trained_shares: tuple[float, float] = (0.0, 1.0)
    """The smallest and the largest budget that it was trained on, between the cheapest configuration and the full."""


def settings_from_task(task: Task, conditions: Conditions, width: int) -> ControllerSettings:
    """Of a controller that is trained under these conditions, on a task whose model can be loaded again."""
    assert task.source is not None
    return ControllerSettings(
        source=task.source,
        width=width,
        options=task.executor.options,
        budget=conditions.config,
        max_new_tokens=task.max_new_tokens,
        stop_token=task.stop_token,
        estimator=task.estimator,
        trained_shares=(conditions.relative_budget.min().item(), conditions.relative_budget.max().item()),
    )


def settings_to_files(settings: ControllerSettings) -> dict[str, bytes]:
    """The same settings are always the same bytes."""
    estimator, described = settings.estimator, {"kind": _OWN}
    fitted = {}
    if isinstance(estimator, ProportionalEstimator):
        described = {"kind": COUNTED} | {
            entry.name: getattr(estimator, entry.name) for entry in fields(estimator) if entry.name != "options"
        }
    elif isinstance(estimator, KnobLatencyEstimator):
        described, fitted = {"kind": _FITTED}, {ESTIMATOR: _estimator_file(estimator)}
    config = {
        "model_type": _KIND,
        "network": NETWORK_VERSION,
        **asdict(settings.source),
        "width": settings.width,
        "options": asdict(settings.options),
        "budget": asdict(settings.budget),
        "trained_shares": settings.trained_shares,
        "max_new_tokens": settings.max_new_tokens,
        "stop_token": settings.stop_token,
        "estimator": described,
    }
    return {CONFIG: (json.dumps(config, indent=1) + "\n").encode(), **fitted}


def _estimator_file(estimator: KnobLatencyEstimator) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / ESTIMATOR
        replace(estimator.estimator, differs={}).save(file)
        return file.read_bytes()


def read_config(folder: Path) -> dict[str, Any]:
    """What `settings_to_files` has written; refused if it is something else."""
    file = folder / CONFIG
    if not file.is_file():
        raise UserError(
            f"{folder} holds no {CONFIG}, so no controller. Name a folder that save_pretrained() has written, or a run"
            " folder to AdaptiveModel.load()."
        )
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise UserError(f"{file} is damaged ({error}). Restore it, or save the controller again.") from error
    if not isinstance(config, dict) or config.get("model_type") != _KIND:
        raise UserError(f"{file} is not of a controller: it has no model_type '{_KIND}'. Name another folder.")
    if config.get("network") != NETWORK_VERSION:
        raise UserError(
            f"The controller in {folder} is of an earlier version, which saw and decided otherwise: this one would make"
            " nothing of its weights. Train it again."
        )
    return config


def read_settings(
    folder: Path,
    config: Mapping[str, Any],
    loaded: LoadedModel,
    *,
    estimator: KnobLatencyModel | None = None,
    anyway: bool = False,
) -> ControllerSettings:
    """The settings in a folder for a model that is loaded; refused if it is another than they were made with."""
    source = source_of(config)
    options = KnobOptions(**{name: _tuple(value) for name, value in config["options"].items()})
    _check_model(folder, config, loaded)
    if estimator is None:
        estimator = _estimator(folder, config, loaded, options, anyway=anyway)
    budget = BudgetConfig(**{name: _tuple(value) for name, value in config["budget"].items()})
    return ControllerSettings(
        source=source,
        width=config["width"],
        options=options,
        budget=budget,
        max_new_tokens=config["max_new_tokens"],
        stop_token=config["stop_token"],
        estimator=estimator,
        trained_shares=_tuple(config.get("trained_shares", [0.0, 1.0])),
    )


def source_of(config: Mapping[str, Any]) -> ModelSource:
    return ModelSource(**{entry.name: config[entry.name] for entry in fields(ModelSource)})


def load_policy(file: Path, settings: ControllerSettings) -> ControllerNetwork:
    """The network with the weights in a file."""
    try:
        saved: dict[str, Tensor] = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"The weights {file} cannot be read ({error}). Restore the file, or save it again.") from error
    policy = ControllerNetwork(settings.width, settings.options)
    wanted = policy.state_dict()
    wrong = [name for name in wanted if name not in saved or saved[name].shape != wanted[name].shape]
    if wrong:
        raise UserError(
            f"The weights {file} do not belong to the {CONFIG} beside them: '{wrong[0]}' is missing or has another"
            " shape. Restore both from the same save."
        )
    policy.load_state_dict({name: saved[name] for name in wanted})
    return policy.eval()


def _check_model(folder: Path, config: Mapping[str, Any], loaded: LoadedModel) -> None:
    hidden, blocks = loaded.adapter.text_config.hidden_size, len(loaded.adapter.blocks)
    differences = [
        f"{name} {then}, not {now}"
        for name, then, now in (
            ("width", config["width"], hidden),
            ("blocks", config["options"]["total_blocks"], blocks),
        )
        if then != now
    ]
    if not differences and config["identity"] != loaded.identity:
        differences = [f"the same shape but other weights (identity {config['identity']}, not {loaded.identity})"]
    if differences:
        raise UserError(
            f"The controller in {folder} was trained for another model than {loaded.name!r}: {', '.join(differences)}."
            f" Load it with the model it was trained for, {config['model']!r}, or train one for this model."
        )


def _estimator(
    folder: Path, config: Mapping[str, Any], loaded: LoadedModel, options: KnobOptions, *, anyway: bool
) -> KnobLatencyModel:
    described = dict(config["estimator"])
    kind = described.pop("kind")
    if kind == COUNTED:
        return ProportionalEstimator(options, **described)
    if kind == _FITTED:
        name, tokens = str(folder / ESTIMATOR), config["max_new_tokens"]
        return load_estimator(name, replace(loaded, options=options), new_tokens=tokens, anyway=anyway)
    raise UserError(
        f"The controller in {folder} was trained with a latency estimator of your own, which is not saved with it. Pass"
        " it as estimator=."
    )


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
