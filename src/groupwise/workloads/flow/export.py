"""`export`: what a run trained, as files that diffusers' pipelines and ReCamMaster's own code load."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import DiffusionPipeline, ModelMixin, WanTransformer3DModel
from torch import Tensor

from groupwise.core.errors import UserError
from groupwise.core.io.files import read_json
from groupwise.core.io.json_types import misfit
from groupwise.workloads.checkpoint_files import (
    has_ema,
    load_weights,
    newest_valid_checkpoint,
    refuse_other_adapter,
    tensors_of,
)
from groupwise.workloads.flow.config import TrainedPartsConfig
from groupwise.workloads.flow.models.camera_layers import add_camera_layers, camera_weights
from groupwise.workloads.flow.models.checkpoints import load_camera_layers, original_state
from groupwise.workloads.flow.models.pipeline_folder import diffusers_class, load_transformer, read_index
from groupwise.workloads.flow.models.trained_parts import select_trained_parameters
from groupwise.workloads.flow.models.wan import HIGH_NOISE, LOW_NOISE
from groupwise.workloads.lora import merge_lora

CAMERA_CHECKPOINT = "recam.ckpt"


@dataclass(frozen=True)
class _Pipeline:
    """The types of a run's settings that are read here, beside `TrainedPartsConfig`."""

    pipeline: str
    dtype: Literal["bfloat16", "float32"]
    camera_layers: str | None = None


def export(
    run: Path | str, folder: Path | str, *, ema: bool = False, merge: bool = False, checkpoint: Path | None = None
) -> Path:
    """Write what the newest valid checkpoint of a run holds, or one that has been checked; with `ema` averaged weights.

    A LoRA adapter becomes a file for `pipe.load_lora_weights(folder)`, that of a second transformer in
    `folder/transformer_2`. With `merge`, and where other weights were trained, whole transformers are written as
    `folder/transformer`, for from_pretrained; with camera layers one `recam.ckpt` under the original names instead.
    """
    run, folder = Path(run), Path(folder)
    if checkpoint is None:
        checkpoint = newest_valid_checkpoint(run / "checkpoints", lambda message: warnings.warn(message, stacklevel=2))
    if checkpoint is None or not (run / "config.json").is_file():
        raise UserError(f"{run} holds no checkpoint of a run. Name a run folder, such as runs/flow-wan.")
    settings = read_json(run / "config.json").get("workload")
    if not isinstance(settings, dict) or not settings.get("pipeline"):
        raise UserError(f"The run in {run} trained no pipeline, so there is none to export to.")
    if ema and not has_ema(checkpoint):
        raise UserError(f"{checkpoint} has no averaged weights: its run had no --optimizer.ema-decay. Leave ema out.")
    train = _trained_parts(run / "config.json", settings)
    if train.part == "lora":
        refuse_other_adapter(checkpoint, train.lora_rank)
    transformers = _load_transformers(settings, train)
    load_weights(checkpoint, _tensors(transformers), ema=ema)
    folder.mkdir(parents=True, exist_ok=True)
    for name, transformer in transformers.items():
        _write(transformer, folder, name, settings, adapter=train.part == "lora" and not merge)
    return folder


def _write(transformer: Any, folder: Path, name: str, settings: Mapping[str, Any], *, adapter: bool) -> None:
    has_camera = isinstance(transformer, WanTransformer3DModel) and bool(camera_weights(transformer))
    if adapter and has_camera:
        raise UserError(
            "The adapter is on camera layers, too, which no pipeline of diffusers has. Leave --adapter out (from"
            f" Python: merge=True): {CAMERA_CHECKPOINT} is written, for ReCamMaster and --workload.camera-layers."
        )
    if adapter:
        _write_adapter(transformer, folder if name == HIGH_NOISE else folder / name, settings)
        return
    if hasattr(transformer, "peft_config"):
        merge_lora(transformer)
    transformer.to(getattr(torch, settings["dtype"]))
    if has_camera:
        torch.save(original_state(transformer), folder / CAMERA_CHECKPOINT)
    else:
        transformer.save_pretrained(folder / name, max_shard_size="1GB")  # so much is copied before it is written


def _write_adapter(transformer: Any, folder: Path, settings: Mapping[str, Any]) -> None:
    """With the adapter's config, so that it is loaded with the scale alpha / rank that it was trained with."""
    from peft.utils import get_peft_model_state_dict

    folder_of_model = Path(settings["pipeline"])
    pipeline = diffusers_class(folder_of_model, read_index(folder_of_model).get("_class_name"), DiffusionPipeline)
    pipeline.save_lora_weights(
        folder,
        transformer_lora_layers=get_peft_model_state_dict(transformer),
        transformer_lora_adapter_metadata=transformer.peft_config["default"].to_dict(),
    )


def _load_transformers(settings: Mapping[str, Any], train: TrainedPartsConfig) -> dict[str, Any]:
    """As the run began with them, in float32 on the CPU."""
    folder = Path(settings["pipeline"])
    index = read_index(folder)
    loaded = {}
    for name in (HIGH_NOISE, LOW_NOISE):
        listed = index.get(name)
        class_name = listed[1] if isinstance(listed, list) and len(listed) == 2 else None
        if class_name is None:
            continue
        kind = diffusers_class(folder, class_name, ModelMixin)
        loaded[name] = load_transformer(kind, folder, "float32", torch.device("cpu"), name)
        if "camera_layers" in settings:
            add_camera_layers(loaded[name])
            if settings["camera_layers"]:
                load_camera_layers(loaded[name], Path(settings["camera_layers"]))
        select_trained_parameters(loaded[name], train)
    return loaded


def _trained_parts(file: Path, settings: Mapping[str, Any]) -> TrainedPartsConfig:
    """What was trained; settings of other types than a run of ours has are refused."""
    saved = settings.get("train")
    known, read_here = ({field.name for field in fields(record)} for record in (TrainedPartsConfig, _Pipeline))
    values: dict[str, Any] = {name: saved[name] for name in saved if name in known} if isinstance(saved, dict) else {}
    problem = misfit(TrainedPartsConfig, values if isinstance(saved, dict) else saved) or misfit(
        _Pipeline, {name: value for name, value in settings.items() if name in read_here}
    )
    if problem:
        raise UserError(f"{file} is damaged (in 'workload' {problem}). Restore it.")
    targets = {"lora_targets": tuple(values["lora_targets"])} if "lora_targets" in values else {}
    return TrainedPartsConfig(**{**values, **targets})


def _tensors(transformers: Mapping[str, Any]) -> dict[str, Tensor]:
    """By their names in a checkpoint."""
    prefixes = {name: f"{name}." if len(transformers) > 1 else "" for name in transformers}
    return {
        f"{prefixes[name]}{key}": tensor
        for name, transformer in transformers.items()
        for key, tensor in tensors_of(transformer).items()
    }
