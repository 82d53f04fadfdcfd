"""A trained controller as files: config.json, weights, and estimator.json for a fitted estimator."""

from __future__ import annotations

import json
import math
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from groupwise.core.errors import UserError
from groupwise.core.io.files import MAX_JSON_BYTES, parse_json
from groupwise.core.io.json_types import misfit
from groupwise.core.io.tensor_files import TensorFiles
from groupwise.core.units import format_bytes
from groupwise.workloads.checkpoint_files import (
    AVERAGED,
    EMA_WEIGHTS,
    TRAINED,
    WEIGHTS,
    has_ema,
    is_in_parts,
    newest_valid_checkpoint,
    open_tensors,
)
from groupwise.workloads.controller.conditions import Conditions
from groupwise.workloads.controller.config import BudgetConfig
from groupwise.workloads.controller.latency.estimates import (
    KnobLatencyEstimator,
    KnobLatencyModel,
    ProportionalEstimator,
)
from groupwise.workloads.controller.latency.source import PROPORTIONAL, load_estimator_file
from groupwise.workloads.controller.model.knobs import KnobOptions
from groupwise.workloads.controller.model.load import LoadedModel, load_model
from groupwise.workloads.controller.policy.network import ControllerNetwork
from groupwise.workloads.controller.task import ModelSource, Task

CONFIG, ESTIMATOR, PRETRAINED_WEIGHTS = "config.json", "estimator.json", "model.safetensors"
NETWORK_VERSION = 4
"""Goes up with every change of what the network reads, how it decides or what config.json contains: the weights alone
would not show it."""
_MODEL_TYPE = "groupwise-controller"
_MOST_OPTIONS = 4096
_FITTED, _CUSTOM = "fitted", "custom"


@dataclass(frozen=True)
class ControllerSettings:
    """Everything about a trained controller except its weights."""

    source: ModelSource
    width: int
    """Of the model's hidden states."""
    options: KnobOptions
    budget: BudgetConfig
    max_new_tokens: int
    stop_token: int | None
    estimator: KnobLatencyModel
    sees_overview: bool = True
    """Whether stage one looks at the overview."""
    trained_budget_range: tuple[float, float] = (0.0, 1.0)
    """The smallest and the largest relative budget that it was trained on."""


def settings_from_task(
    task: Task, conditions: Conditions, width: int, *, sees_overview: bool = True
) -> ControllerSettings:
    """The settings of a controller that is trained under these conditions. The task must have a `source`."""
    assert task.source is not None
    return ControllerSettings(
        source=task.source,
        width=width,
        options=task.executor.options,
        budget=conditions.config,
        max_new_tokens=task.max_new_tokens,
        stop_token=task.stop_token,
        estimator=task.estimator,
        sees_overview=sees_overview,
        trained_budget_range=(conditions.relative_budget.min().item(), conditions.relative_budget.max().item()),
    )


def save_controller(folder: Path, settings: ControllerSettings, policy: ControllerNetwork) -> None:
    """Write what `load_controller` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, raw in settings_to_files(settings).items():
        (folder / name).write_bytes(raw)
    weights = {name: weight.detach().cpu().contiguous() for name, weight in policy.state_dict().items()}
    (folder / PRETRAINED_WEIGHTS).write_bytes(save(weights, metadata={"format": "pt"}))


def settings_to_files(settings: ControllerSettings) -> dict[str, bytes]:
    """The contents of config.json and estimator.json; equal settings give equal bytes."""
    estimator, described = settings.estimator, {"kind": _CUSTOM}
    fitted = {}
    if isinstance(estimator, ProportionalEstimator):
        described = {"kind": PROPORTIONAL} | {
            entry.name: getattr(estimator, entry.name) for entry in fields(estimator) if entry.name != "options"
        }
    elif isinstance(estimator, KnobLatencyEstimator):
        described, fitted = {"kind": _FITTED}, {ESTIMATOR: _estimator_file(estimator)}
    config = {
        "model_type": _MODEL_TYPE,
        "network": NETWORK_VERSION,
        **asdict(settings.source),
        "width": settings.width,
        "options": asdict(settings.options),
        "budget": asdict(settings.budget),
        "sees_overview": settings.sees_overview,
        "trained_budget_range": settings.trained_budget_range,
        "max_new_tokens": settings.max_new_tokens,
        "stop_token": settings.stop_token,
        "estimator": described,
    }
    return {CONFIG: (json.dumps(config, indent=1) + "\n").encode(), **fitted}


def _estimator_file(estimator: KnobLatencyEstimator) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / ESTIMATOR
        estimator.estimator.save(file)
        return file.read_bytes()


def find_checkpoint(run: Path) -> tuple[Path, Path]:
    """The folder of a run's newest valid checkpoint, and its weights: the EMA weights if the run kept them."""
    checkpoint = newest_valid_checkpoint(run / "checkpoints", warnings.warn)
    if checkpoint is None:
        raise UserError(f"{run} holds no checkpoint. Name the folder of a run that `groupwise train` has written.")
    if not (checkpoint / CONFIG).is_file():
        raise UserError(
            f"The run {run} has not trained a controller that can be used without its task: {checkpoint.name} has no"
            f" {CONFIG}. Name a run of `groupwise train controller`; a task of your own needs a `source`."
        )
    if is_in_parts(checkpoint):
        return checkpoint, checkpoint
    ema = checkpoint / EMA_WEIGHTS
    return checkpoint, ema if ema.is_file() else checkpoint / WEIGHTS


def load_controller(
    folder: Path,
    weights: Path,
    model: LoadedModel | Path | str | None = None,
    estimator: KnobLatencyModel | None = None,
    *,
    allow_mismatch: bool = False,
) -> tuple[LoadedModel, ControllerSettings, ControllerNetwork]:
    """The frozen model (loaded by the name in config.json unless it is given), the settings and the network."""
    config = _read_config(folder)
    source = _source(config)
    if not isinstance(model, LoadedModel):
        model = load_model(
            model or source.model,
            dtype=getattr(torch, source.dtype),
            published_crop_rule=source.published_crop_rule,
        )
    model = replace(model, exif_orientation=source.exif_orientation)
    settings = read_settings(folder, config, model, estimator=estimator, allow_mismatch=allow_mismatch)
    return model, settings, load_policy(weights, settings)


def _read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a controller; any other is refused."""
    file = folder / CONFIG
    if not file.is_file():
        raise UserError(
            f"{folder} holds no {CONFIG}, so no controller. Name a folder that save_pretrained() has written, or a run"
            " folder to AdaptiveModel.load()."
        )
    try:
        config = parse_json(_bounded(file))
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{file} is damaged ({error}). Restore it, or save the controller again.") from error
    if not isinstance(config, dict) or config.get("model_type") != _MODEL_TYPE:
        raise UserError(f"{file} is not of a controller: it has no model_type '{_MODEL_TYPE}'. Name another folder.")
    if config.get("network") != NETWORK_VERSION:
        raise UserError(
            f"The controller in {folder} was saved by another version of groupwise, whose network or settings differ."
            " Train it again."
        )
    problem = _config_problem(config)
    if problem:
        raise UserError(f"{file} is damaged ({problem}). Restore it, or save the controller again.")
    return config


def _bounded(file: Path) -> bytes:
    if file.stat().st_size > MAX_JSON_BYTES:
        raise UserError(f"{file} cannot be read: it has more than {format_bytes(MAX_JSON_BYTES)}. Restore it.")
    return file.read_bytes()


@dataclass(frozen=True)
class _ConfigFile:
    """The types of config.json beside those of `ModelSource`."""

    width: int
    options: Mapping[str, Any]
    budget: Mapping[str, Any]
    sees_overview: bool
    trained_budget_range: tuple[float, float]
    max_new_tokens: int
    stop_token: int | None
    estimator: Mapping[str, Any]


def _config_problem(config: Mapping[str, Any]) -> str | None:
    """What does not fit in a config.json of the right version; None where all does."""
    source = {entry.name for entry in fields(ModelSource)}
    rest = {name: value for name, value in config.items() if name not in (*source, "model_type", "network")}
    problem = misfit(ModelSource, {name: config[name] for name in source if name in config}) or misfit(
        _ConfigFile, rest
    )
    if problem:
        return problem
    nested = {"options": KnobOptions, "budget": BudgetConfig}
    if config["estimator"].get("kind") == PROPORTIONAL:
        nested["estimator"] = ProportionalEstimator
    for name, record in nested.items():
        content = {key: value for key, value in config[name].items() if key != "kind"}
        problem = misfit(record, content, ignore=("options",))
        if problem:
            return f"in {name!r} {problem}"
    return _range_problem(config)


def _range_problem(config: Mapping[str, Any]) -> str | None:
    """Numbers that would take all memory or time, or that mean nothing."""
    options = config["options"]
    counts = [options.get(name, 0) for name in ("total_blocks", "full_top_k", "max_dropped_blocks", "smallest_top_k")]
    counts += [*options["crops_by_tier"].values(), *options.get("insertion_positions", ())]
    numbers = [*config["trained_budget_range"], *config["budget"].get("values", ())]
    rules = {
        "'max_new_tokens' is not from 1 to 1,048,576": 1 <= config["max_new_tokens"] <= 2**20,
        "'width' is not from 1 to 1,048,576": 1 <= config["width"] <= 2**20,
        "a count in 'options' is not from 0 to 4,096": all(0 <= count <= _MOST_OPTIONS for count in counts),
        "'options' has no tier or no insertion position": bool(
            options["crops_by_tier"] and options.get("insertion_positions", (1,))
        ),
        "'options' has too many entries": max(map(len, (options["crops_by_tier"], options["drop_order"])))
        <= _MOST_OPTIONS,
        "a budget is not a finite number": all(math.isfinite(number) for number in numbers),
        "'dtype' is no dtype": isinstance(getattr(torch, config.get("dtype", "float32"), None), torch.dtype),
    }
    return next((problem for problem, holds in rules.items() if not holds), None)


def read_settings(
    folder: Path,
    config: Mapping[str, Any],
    loaded: LoadedModel,
    *,
    estimator: KnobLatencyModel | None = None,
    allow_mismatch: bool = False,
) -> ControllerSettings:
    """The settings in a folder; a model other than the one the controller was trained for is refused."""
    options = KnobOptions(**{name: _tuple(value) for name, value in config["options"].items()})
    _check_model(folder, config, loaded)
    if estimator is None:
        estimator = _estimator(folder, config, loaded, options, allow_mismatch=allow_mismatch)
    budget = BudgetConfig(**{name: _tuple(value) for name, value in config["budget"].items()})
    return ControllerSettings(
        source=_source(config),
        width=config["width"],
        options=options,
        budget=budget,
        max_new_tokens=config["max_new_tokens"],
        stop_token=config["stop_token"],
        estimator=estimator,
        sees_overview=config["sees_overview"],
        trained_budget_range=_tuple(config["trained_budget_range"]),
    )


def _source(config: Mapping[str, Any]) -> ModelSource:
    return ModelSource(**{entry.name: config[entry.name] for entry in fields(ModelSource) if entry.name in config})


def load_policy(file: Path, settings: ControllerSettings) -> ControllerNetwork:
    """The network with the weights of a file, or of a checkpoint folder of a sharded run."""
    if file.is_dir():
        files, prefix = open_tensors(file), AVERAGED if has_ema(file) else TRAINED
    else:
        files, prefix = TensorFiles([(file.resolve(), "")]), ""  # in the hub's cache it is a link
    policy = ControllerNetwork(settings.width, settings.options, sees_overview=settings.sees_overview)
    expected = {f"{prefix}{name}": (tensor.shape, tensor.dtype) for name, tensor in policy.state_dict().items()}
    wrong = [
        name for name, kind in expected.items() if name not in files or kind != (files.shape(name), files.dtype(name))
    ]
    if wrong:
        raise UserError(
            f"The weights {file} do not belong to the {CONFIG} beside them: '{wrong[0]}' is missing or has another"
            " shape or dtype. Restore both from the same save."
        )
    policy.load_state_dict({name.removeprefix(prefix): files.read(name) for name in expected})
    return policy.eval()


def _check_model(folder: Path, config: Mapping[str, Any], loaded: LoadedModel) -> None:
    hidden, blocks = loaded.adapter.text_config.hidden_size, len(loaded.adapter.blocks)
    differences = [
        f"{name} {trained}, not {given}"
        for name, trained, given in (
            ("width", config["width"], hidden),
            ("blocks", config["options"]["total_blocks"], blocks),
        )
        if trained != given
    ]
    if not differences and config["identity"] != loaded.fingerprint:
        differences = [f"the same shape but other weights (identity {config['identity']}, not {loaded.fingerprint})"]
    if differences:
        raise UserError(
            f"The controller in {folder} was trained for another model than {loaded.name!r}: {', '.join(differences)}."
            f" Load it with the model it was trained for, {config['model']!r}, or train one for this model."
        )


def _estimator(
    folder: Path, config: Mapping[str, Any], loaded: LoadedModel, options: KnobOptions, *, allow_mismatch: bool
) -> KnobLatencyModel:
    described = dict(config["estimator"])
    kind = described.pop("kind")
    if kind == PROPORTIONAL:
        return ProportionalEstimator(options, **described)
    if kind == _FITTED:
        return load_estimator_file(
            folder / ESTIMATOR,
            replace(loaded, options=options),
            new_tokens=config["max_new_tokens"],
            allow_mismatch=allow_mismatch,
        )
    raise UserError(
        f"The controller in {folder} was trained with a latency estimator of your own, which is not saved with it. Pass"
        " it as estimator=."
    )


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
