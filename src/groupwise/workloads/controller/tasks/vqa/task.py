"""A model from a folder or the hub with a dataset from disk, as a controller's task.
Pictures on disk for a model: cut when they are looked at, since a dataset's crops would not fit into memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from groupwise.core.errors import UserError
from groupwise.core.groups import content_hash
from groupwise.data.rows import RowFilter
from groupwise.workloads.controller.latency.estimates import KnobLatencyEstimator, KnobLatencyModel
from groupwise.workloads.controller.latency.source import PROPORTIONAL, load_estimator
from groupwise.workloads.controller.model.adapters import Sample
from groupwise.workloads.controller.model.answer_cache import AnswerCache
from groupwise.workloads.controller.model.executor import Executor
from groupwise.workloads.controller.model.images import open_image
from groupwise.workloads.controller.model.inputs import (
    check_length,
    check_processors,
    prompt_token_ids,
    stop_token_id,
)
from groupwise.workloads.controller.model.load import LoadedModel, load_model
from groupwise.workloads.controller.serving.server import ServedTimer
from groupwise.workloads.controller.task import ModelSource, Question, Task
from groupwise.workloads.controller.tasks.vqa.config import VqaConfig
from groupwise.workloads.controller.tasks.vqa.dataset import (
    Entry,
    Part,
    describe_errors,
    filter_entries,
    read_entries,
    select_split,
)

CACHED_IMAGES = 8


class ImageStore:
    """Makes questions of files. The last few pictures stay cut."""

    def __init__(self, loaded: LoadedModel):
        self.loaded, self._statistics = loaded, check_processors(loaded)
        self.cut = lru_cache(CACHED_IMAGES)(self._cut)
        self._look = lru_cache(None)(self._look_once)
        self._shapes = lru_cache(None)(self._cut_blank)

    def fault(self, file: Path) -> str:
        """Why a picture cannot be used, or nothing."""
        try:
            _, size = self._look(file)
            self._shapes(size)
        except UserError as error:
            return str(error)
        return ""

    def question(self, file: Path, text: str, answers: tuple[str, ...], *, prompt: str) -> Question:
        """The picture's content goes into the sample's name; its crops are made when they are wanted."""
        content, size = self._look(file)
        before, after = prompt_token_ids(prompt.replace("{question}", text), self.loaded)
        shapes = self._shapes(size)
        check_length(len(before) + len(after), shapes, self.loaded)
        options = self.loaded.options
        sight = (dict(options.crops_by_tier), dict(options.pixels), self._statistics)
        name = content_hash(repr((content, sight, before, after)))
        spoken = len(before) + len(after)
        tokens = {tier: spoken + self.loaded.adapter.image_tokens(blank) for tier, blank in shapes.items()}
        return Question(Sample(name, _LazyCrops(self, file), after, before), text, answers, tokens, image=file.name)

    def _cut(self, file: Path) -> Mapping[str, Tensor]:
        return self.loaded.adapter.crop(open_image(file), self.loaded.options, self._statistics)

    def _look_once(self, file: Path) -> tuple[str, tuple[int, int]]:
        """A hash of the file, and the picture's size; a damaged file is refused."""
        size = open_image(file).size
        return content_hash(file.read_bytes()), size

    def _cut_blank(self, size: tuple[int, int]) -> Mapping[str, Tensor]:
        """Pictures of one size become crops of the same shapes: kept without memory behind them."""
        crops = self.loaded.adapter.crop(Image.new("RGB", size), self.loaded.options, self._statistics)
        return {tier: pixels.to("meta") for tier, pixels in crops.items()}


class _LazyCrops(Mapping[str, Tensor]):
    """Looks like the crops of every tier, and is made of a file."""

    def __init__(self, album: ImageStore, file: Path):
        self._album, self._file = album, file

    def __getitem__(self, tier: str) -> Tensor:
        return self._album.cut(self._file)[tier]

    def __iter__(self) -> Iterator[str]:
        return iter(self._album.loaded.options.crops_by_tier)

    def __len__(self) -> int:
        return len(self._album.loaded.options.crops_by_tier)


def vqa_task(config: VqaConfig, device: torch.device) -> Task:
    loaded = _model(config, device)
    estimator = load_estimator(
        config.estimator,
        loaded,
        new_tokens=config.max_new_tokens,
        timer_for=ServedTimer,
        allow_mismatch=config.allow_estimator_mismatch,
    )
    entries, missing = _entries(config)
    album = ImageStore(loaded)
    training, damaged = _questions(config, album, entries, "train", config.train_questions)
    held_out, others = _questions(config, album, entries, "choose", config.held_out_questions)
    stop, kept = stop_token_id(loaded), tuple(loaded.options.drop_order)
    return Task(
        executor=Executor(loaded.adapter, loaded.options),
        answers=AnswerCache(f"{loaded.fingerprint}, {kept}, {config.max_new_tokens} tokens to {stop}", config.answers),
        estimator=estimator,
        questions=training,
        held_out=held_out,
        spell=loaded.front_end.decode,
        max_new_tokens=config.max_new_tokens,
        stop_token=stop,
        source=ModelSource(
            _absolute_path(config.model), loaded.fingerprint, _name_of(loaded.model.dtype), config.prompt
        ),
        notes=[
            *_notes(config, loaded, training, held_out),
            *_estimator_mismatch_notes(estimator),
            *(
                [describe_errors([*missing, *damaged, *others], len(entries) + len(missing))]
                if missing or damaged or others
                else []
            ),
        ],
    )


def final_questions(config: VqaConfig, loaded: LoadedModel, most: int) -> list[Question]:
    """Questions about images that training never touches."""
    entries, _ = _entries(config)
    return _questions(config, ImageStore(loaded), entries, "test", most)[0]


def _model(config: VqaConfig, device: torch.device) -> LoadedModel:
    dtype = "auto" if config.dtype == "auto" else getattr(torch, config.dtype)
    loaded = load_model(config.model, dtype=dtype, device=device)
    if not config.crops:
        return loaded
    if loaded.options.pixels:
        raise UserError(
            f"workload.crops is {dict(config.crops)}, but {config.model} sees an image whole, at a number of pixels."
            " Leave workload.crops out."
        )
    return replace(loaded, options=replace(loaded.options, crops_by_tier=dict(config.crops)))


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _absolute_path(model: str) -> str:
    """A folder's name must not depend on where one stands."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def _entries(config: VqaConfig) -> tuple[list[Entry], list[str]]:
    assert config.questions is not None
    assert config.images is not None
    row_filter = RowFilter(config.on_bad_row, "--workload.on-bad-row")
    entries = read_entries(config.questions, config.annotations, config.images, config.image_name, row_filter)
    if not entries:
        raise UserError(f"{config.questions} holds no questions.")
    complete, errors = filter_entries(entries, skip=config.on_bad_row == "skip")
    return complete, [*row_filter.messages, *errors]


def _questions(
    config: VqaConfig, album: ImageStore, entries: Sequence[Entry], part: Part, most: int
) -> tuple[list[Question], list[str]]:
    """Up to `most` questions of a part whose pictures can be read, and what was wrong with the ones passed over."""
    chosen = select_split(entries, part, held_out=config.held_out_share, test=config.test_share, seed=config.split_seed)
    if not chosen:
        images = len({entry.image_id for entry in entries})
        raise UserError(
            f"No image fell to the part '{part}': there are {images} images, held_out_share is {config.held_out_share}"
            f" and test_share {config.test_share}. Give more images, other shares, or another split_seed."
        )
    wrong: list[str] = []

    def usable(entry: Entry) -> bool:
        fault = album.fault(entry.image)
        if fault and config.on_bad_row == "refuse":
            raise UserError(f"{entry.source} cannot be used. {fault} Or leave it out with --workload.on-bad-row skip.")
        wrong.extend([f"{entry.source}: {fault}"] if fault else [])
        return not fault

    picked = islice((entry for entry in chosen if usable(entry)), most)
    return [album.question(entry.image, entry.question, entry.answers, prompt=config.prompt) for entry in picked], wrong


def _estimator_mismatch_notes(estimator: KnobLatencyModel) -> list[str]:
    """What is not the same here as where the estimator was fitted."""
    mismatches = estimator.estimator.mismatches if isinstance(estimator, KnobLatencyEstimator) else {}
    return [
        f"the estimator was fitted for {name} {text}: its latencies were measured on other hardware"
        for name, text in mismatches.items()
    ]


def _notes(
    config: VqaConfig, loaded: LoadedModel, training: Sequence[Question], held_out: Sequence[Question]
) -> list[str]:
    def images(questions: Sequence[Question]) -> int:
        return len({question.image for question in questions})

    notes = [
        f"{len(training):,} questions about {images(training):,} images to train on, {len(held_out):,} about"
        f" {images(held_out):,} others held out"
    ]
    if not loaded.drop_order_is_measured:
        notes.append(f"which blocks go first is a guess: {config.model} holds no importance.json")
    if config.estimator == PROPORTIONAL:
        notes.append("times are counted work: right in ratios, not in milliseconds")
    return notes
