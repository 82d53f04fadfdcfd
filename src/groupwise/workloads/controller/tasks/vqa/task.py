"""A controller's task from a model (folder or hub) and a dataset on disk: its splits, and images cropped on demand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from groupwise.core.errors import UserError
from groupwise.core.groups import content_hash
from groupwise.data.rows import RowFilter
from groupwise.workloads.controller.latency.estimates import KnobLatencyEstimator, KnobLatencyModel
from groupwise.workloads.controller.latency.source import PROPORTIONAL, load_estimator
from groupwise.workloads.controller.model.adapters import Sample
from groupwise.workloads.controller.model.answer_cache import AnswerCache
from groupwise.workloads.controller.model.executor import Executor
from groupwise.workloads.controller.model.images import LazyCrops, Sides
from groupwise.workloads.controller.model.inputs import (
    check_length,
    check_processors,
    open_for,
    prompt_token_ids,
    stop_token_id,
)
from groupwise.workloads.controller.model.load import LoadedModel, load_model
from groupwise.workloads.controller.rewards import check_annotators
from groupwise.workloads.controller.serving.server import ServedTimer
from groupwise.workloads.controller.task import ModelSource, Question, Split, Task
from groupwise.workloads.controller.tasks.vqa.config import VqaConfig
from groupwise.workloads.controller.tasks.vqa.dataset import (
    Entry,
    describe_errors,
    filter_entries,
    find_rows_file,
    read_entries,
    select_split,
)

CACHED_IMAGES = 8


class ImageStore:
    """Makes questions from image files. Crops are made on demand, since those of a dataset would not fit into memory;
    the last few images stay cropped.
    """

    def __init__(self, loaded: LoadedModel):
        self.loaded, self._normalization = loaded, check_processors(loaded)
        self.crops_of = lru_cache(CACHED_IMAGES)(self._crop)
        self._hash_and_sides = lru_cache(None)(self._read_hash_and_sides)
        self._crop_shapes = lru_cache(None)(partial(loaded.adapter.crop_shapes, options=loaded.options))

    def error(self, file: Path) -> str:
        """Why an image cannot be used; empty if it can."""
        try:
            _, sides = self._hash_and_sides(file)
            self._crop_shapes(sides)
        except UserError as error:
            return str(error)
        return ""

    def question(
        self, file: Path, text: str, answers: tuple[str, ...], *, prompt: str, question_type: str = ""
    ) -> Question:
        """The sample's name is a hash of the image's content, how it is cropped, and the prompt."""
        content, sides = self._hash_and_sides(file)
        before, after = prompt_token_ids(prompt.replace("{question}", text), self.loaded)
        shapes, text_tokens = self._crop_shapes(sides), len(before) + len(after)
        crops = LazyCrops(
            shapes, lambda tier: self.crops_of(file)[tier], overview=lambda: _overview(self.crops_of(file))
        )
        check_length(text_tokens, crops, self.loaded)
        options = self.loaded.options
        cropping = (dict(options.crops_by_tier), dict(options.pixels), self._normalization)
        name = content_hash(repr((content, cropping, self.loaded.exif_orientation, before, after)))
        tokens = {tier: text_tokens + self.loaded.adapter.image_tokens(shape) for tier, shape in shapes.items()}
        sample = Sample(name, crops, after, before)
        return Question(sample, text, answers, tokens, image=file.name, question_type=question_type)

    def _crop(self, file: Path) -> LazyCrops:
        return self.loaded.adapter.crop(open_for(self.loaded, file), self.loaded.options, self._normalization)

    def _read_hash_and_sides(self, file: Path) -> tuple[str, Sides]:
        """A damaged file is refused."""
        sides = open_for(self.loaded, file).sides
        return content_hash(file.read_bytes()), sides


def _overview(crops: LazyCrops) -> Tensor:
    assert crops.overview is not None, "an opened image can be seen whole"
    return crops.overview()


@dataclass(frozen=True)
class QuestionSplits:
    """The dataset's questions by split, and why some of them were left out."""

    train: Sequence[Question]
    select: Sequence[Question]
    test: Sequence[Question]
    errors: Sequence[str]
    total: int
    """Questions in the dataset."""


def vqa_task(config: VqaConfig, device: torch.device) -> Task:
    loaded, warnings = load_for(config, device), list[str]()
    estimator = load_estimator(
        config.estimator,
        loaded,
        new_tokens=config.max_new_tokens,
        timer_for=ServedTimer,
        allow_mismatch=config.allow_estimator_mismatch,
        warn=warnings.append,
    )
    splits = read_splits(config, loaded)
    stop, drop_order = stop_token_id(loaded), tuple(loaded.options.drop_order)
    cache = f"{loaded.fingerprint}, {drop_order}, {config.max_new_tokens} tokens to {stop}"
    return Task(
        executor=Executor(loaded.adapter, loaded.options),
        answers=AnswerCache(cache, config.answers),
        estimator=estimator,
        questions=splits.train,
        held_out=splits.select[: config.held_out_questions],
        decode=loaded.front_end.decode,
        max_new_tokens=config.max_new_tokens,
        stop_token=stop,
        source=ModelSource(
            _absolute_path(config.model),
            loaded.fingerprint,
            _name_of(loaded.model.dtype),
            config.prompt,
            config.published_crop_rule,
            config.exif_orientation,
        ),
        notes=[*_notes(config, loaded, splits), *_estimator_mismatch_notes(estimator)],
        selection_questions=lambda: splits.select[: config.selection_questions],
        test_questions=(lambda: splits.test) if splits.test else None,
        warnings=warnings,
    )


def load_for(config: VqaConfig, device: torch.device) -> LoadedModel:
    """The model with the tiers of the settings."""
    dtype = "auto" if config.dtype == "auto" else getattr(torch, config.dtype)
    loaded = load_model(config.model, dtype=dtype, device=device, published_crop_rule=config.published_crop_rule)
    loaded = replace(loaded, exif_orientation=config.exif_orientation)
    if not config.crops:
        return loaded
    if loaded.options.pixels:
        raise UserError(
            f"workload.crops is {dict(config.crops)}, but {config.model} takes an image whole, at a number of pixels."
            " Leave workload.crops out."
        )
    return replace(loaded, options=replace(loaded.options, crops_by_tier=dict(config.crops)))


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _absolute_path(model: str) -> str:
    """A folder's name must not depend on the working directory."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def training_questions(config: VqaConfig, loaded: LoadedModel) -> list[Question]:
    """The train split alone; the others may be empty."""
    complete, errors, _ = _complete_entries(config)
    return _questions(config, ImageStore(loaded), complete, Split.TRAIN, config.train_questions, errors)


def read_splits(config: VqaConfig, loaded: LoadedModel) -> QuestionSplits:
    """All three splits. Images of the test split are checked now, not after hours of training."""
    complete, errors, total = _complete_entries(config)
    store = ImageStore(loaded)
    limits = {
        Split.TRAIN: config.train_questions,
        Split.SELECT: max(config.held_out_questions, config.selection_questions),
        Split.TEST: config.test_questions if config.test_share else 0,
    }
    questions = {
        split: _questions(config, store, complete, split, limit, errors) for split, limit in limits.items() if limit
    }
    check_annotators(config.rewards, [question.answers for split in questions.values() for question in split])
    return QuestionSplits(
        questions[Split.TRAIN],
        questions[Split.SELECT],
        questions.get(Split.TEST, []),
        errors,
        total,
    )


def _complete_entries(config: VqaConfig) -> tuple[list[Entry], list[str], int]:
    """The entries with an image and answers, the errors of the others, and how many there are together."""
    assert config.questions is not None
    row_filter = RowFilter(config.on_bad_row, "--workload.on-bad-row")
    rows_file = find_rows_file(config.questions)
    images = config.images or rows_file.parent
    entries = read_entries(rows_file, config.annotations, images, config.image_name, row_filter)
    if not entries:
        raise UserError(f"{config.questions} holds no questions. Name a file with at least one.")
    complete, errors = filter_entries(entries, skip=config.on_bad_row == "skip")
    return complete, [*row_filter.messages, *errors], len(entries) + len(row_filter.messages)


def _questions(
    config: VqaConfig, images: ImageStore, entries: Sequence[Entry], split: Split, limit: int, errors: list[str]
) -> list[Question]:
    """Up to `limit` questions of a split whose images can be read; errors of the others are appended."""
    members = select_split(
        entries, split, selection_share=config.selection_share, test_share=config.test_share, seed=config.split_seed
    )

    def usable(entry: Entry) -> bool:
        error = images.error(entry.image)
        if error and config.on_bad_row == "refuse":
            raise UserError(f"{entry.source} cannot be used. {error} Or leave it out with --workload.on-bad-row skip.")
        errors.extend([f"{entry.source}: {error}"] if error else [])
        return not error

    questions = [
        images.question(
            entry.image, entry.question, entry.answers, prompt=config.prompt, question_type=entry.question_type
        )
        for entry in islice((entry for entry in members if usable(entry)), limit)
    ]
    if not questions:
        raise _empty_split_error(config, split, images=len({entry.image_id for entry in entries}))
    return questions


def _empty_split_error(config: VqaConfig, split: Split, *, images: int) -> UserError:
    larger = {
        Split.TRAIN: "smaller workload.selection_share and workload.test_share",
        Split.SELECT: "a larger workload.selection_share",
        Split.TEST: "a larger workload.test_share (or 0, to train without a final evaluation)",
    }[split]
    return UserError(
        f"The {split} split is empty: the dataset has {images} usable images, and with selection_share"
        f" {config.selection_share:g}, test_share {config.test_share:g} and split_seed {config.split_seed} none of them"
        f" is in it. Each split needs at least one image. Give more images, {larger}, or another workload.split_seed."
    )


def _estimator_mismatch_notes(estimator: KnobLatencyModel) -> list[str]:
    differs = estimator.estimator.mismatches if isinstance(estimator, KnobLatencyEstimator) else {}
    return [
        f"the estimator was fitted for {name} {text}: its times were measured on other hardware"
        for name, text in differs.items()
    ]


def _notes(config: VqaConfig, loaded: LoadedModel, splits: QuestionSplits) -> list[str]:
    def count(questions: Sequence[Question]) -> str:
        return f"{len(questions):,} about {len({question.image for question in questions}):,} images"

    test = f"{count(splits.test)} to test" if splits.test else "none to test, so `groupwise eval` has no report"
    notes = [f"questions: {count(splits.train)} to train, {count(splits.select)} to select, {test}"]
    if not loaded.drop_order_is_measured:
        published = ", ".join(map(str, loaded.adapter.published_drop_order))
        known = f"begins with {published}, published and measured elsewhere" if published else "is a default"
        notes.append(f"the drop order of blocks {known}: {config.model} has no importance.json")
    if config.estimator == PROPORTIONAL:
        notes.append("latency is proportional to counted work: right in ratios, not in milliseconds")
    if splits.errors:
        notes.append(describe_errors(splits.errors, splits.total))
    return notes
