"""A model from a folder or the hub with a dataset from disk, as a controller's task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch

from groupwise.core.errors import UserError
from groupwise.workloads.controller.answers import Answers
from groupwise.workloads.controller.asking import speller, stop_token_of
from groupwise.workloads.controller.chosen_estimator import COUNTED, chosen_estimator
from groupwise.workloads.controller.estimates import LatencyEstimator
from groupwise.workloads.controller.executor import Executor
from groupwise.workloads.controller.knob_estimator import KnobEstimator
from groupwise.workloads.controller.loading import LoadedModel, load_model
from groupwise.workloads.controller.task import Question, Source, Task
from groupwise.workloads.controller.vqa.album import Album
from groupwise.workloads.controller.vqa.control import VqaControllerConfig
from groupwise.workloads.controller.vqa.dataset import Entry, Part, in_part, leave_out, read_entries, told


def vqa_task(config: VqaControllerConfig, device: torch.device) -> Task:
    loaded = _model(config, device)
    estimator = chosen_estimator(
        config.estimator, loaded, new_tokens=config.max_new_tokens, anyway=config.estimator_anyway
    )
    entries, missing = _entries(config)
    album = Album(loaded)
    training, damaged = _questions(config, album, entries, "train", config.train_questions)
    held_out, others = _questions(config, album, entries, "choose", config.held_out_questions)
    stop, kept = stop_token_of(loaded), tuple(loaded.options.drop_order)
    return Task(
        executor=Executor(loaded.adapter, loaded.options),
        answers=Answers(f"{loaded.identity}, {kept}, {config.max_new_tokens} tokens to {stop}", config.answers),
        estimator=estimator,
        questions=training,
        held_out=held_out,
        spell=speller(loaded),
        max_new_tokens=config.max_new_tokens,
        stop_token=stop,
        source=Source(_found_again(config.model), loaded.identity, _name_of(loaded.model.dtype), config.prompt),
        notes=[
            *_notes(config, loaded, training, held_out),
            *_strange(estimator),
            *(
                [told([*missing, *damaged, *others], len(entries) + len(missing))]
                if missing or damaged or others
                else []
            ),
        ],
    )


def final_questions(config: VqaControllerConfig, loaded: LoadedModel, most: int) -> list[Question]:
    """Questions about images that training never touches."""
    entries, _ = _entries(config)
    return _questions(config, Album(loaded), entries, "test", most)[0]


def _model(config: VqaControllerConfig, device: torch.device) -> LoadedModel:
    dtype = "auto" if config.dtype == "auto" else getattr(torch, config.dtype)
    loaded = load_model(config.model, dtype=dtype, device=device)
    if not config.crops:
        return loaded
    if loaded.options.pixels:
        raise UserError(
            f"workload.crops is {dict(config.crops)}, but {config.model} sees an image whole, at a number of pixels."
            " Leave workload.crops out."
        )
    return replace(loaded, options=replace(loaded.options, crops=dict(config.crops)))


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _found_again(model: str) -> str:
    """A folder's name must not depend on where one stands."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def _entries(config: VqaControllerConfig) -> tuple[list[Entry], list[str]]:
    assert config.questions is not None
    assert config.images is not None
    entries = read_entries(config.questions, config.annotations, config.images, config.image_name)
    if not entries:
        raise UserError(f"{config.questions} holds no questions.")
    return leave_out(entries, skip=config.on_missing == "skip")


def _questions(
    config: VqaControllerConfig, album: Album, entries: Sequence[Entry], part: Part, most: int
) -> tuple[list[Question], list[str]]:
    """Up to `most` questions of a part whose pictures can be read, and what was wrong with the ones passed over."""
    chosen = in_part(entries, part, held_out=config.held_out_share, test=config.test_share, seed=config.split_seed)
    if not chosen:
        images = len({entry.image_id for entry in entries})
        raise UserError(
            f"No image fell to the part '{part}': there are {images} images, held_out_share is {config.held_out_share}"
            f" and test_share {config.test_share}. Give more images, other shares, or another split_seed."
        )
    wrong: list[str] = []

    def usable(entry: Entry) -> bool:
        fault = album.fault(entry.image)
        if fault and config.on_missing == "refuse":
            raise UserError(f"{entry.place} cannot be asked. {fault} Or leave it out with --workload.on-missing skip.")
        wrong.extend([f"{entry.place}: {fault}"] if fault else [])
        return not fault

    picked = islice((entry for entry in chosen if usable(entry)), most)
    return [album.question(entry.image, entry.question, entry.answers, prompt=config.prompt) for entry in picked], wrong


def _strange(estimator: LatencyEstimator) -> list[str]:
    """What is not the same here as where the estimator was fitted."""
    differs = estimator.estimator.differs if isinstance(estimator, KnobEstimator) else {}
    return [f"the estimator was fitted for {name} {text}: its times are not of here" for name, text in differs.items()]


def _notes(
    config: VqaControllerConfig, loaded: LoadedModel, training: Sequence[Question], held_out: Sequence[Question]
) -> list[str]:
    def images(questions: Sequence[Question]) -> int:
        return len({question.image for question in questions})

    notes = [
        f"{len(training):,} questions about {images(training):,} images to train on, {len(held_out):,} about"
        f" {images(held_out):,} others held out"
    ]
    if not loaded.drop_order_is_measured:
        notes.append(f"which blocks go first is a guess: {config.model} holds no importance.json")
    if config.estimator == COUNTED:
        notes.append("times are counted work: right in ratios, not in milliseconds")
    return notes
