"""Questions about images from disk, in VQA v2's two JSON files or as rows; splits by image. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.core.errors import UserError
from groupwise.core.io.files import open_regular
from groupwise.data.rows import BadRow, Record, RowFilter, read_rows, require_columns
from groupwise.workloads.controller.task import Split

_MAX_NAMED = 5
_DATASETS_FILE, _DATASETS_SPLITS = "state.json", "dataset_dict.json"


@dataclass(frozen=True)
class Entry:
    """One question as the dataset has it; its image and answers may be missing."""

    source: str
    """Its id, or its line. It decides the order within a split."""
    image_id: str
    image: Path
    question: str
    answers: tuple[str, ...]
    question_type: str = ""
    """Where the dataset has one."""

    @property
    def error(self) -> str:
        """What is missing, or nothing."""
        if not self.answers:
            return f"{self.source} has no answers"
        return "" if self.image.is_file() else f"{self.source} has no image {self.image}"


def read_entries(
    questions: Path, annotations: Path | None, images: Path, image_name: str, row_filter: RowFilter
) -> list[Entry]:
    """All questions of a dataset, in its order."""
    if not images.is_dir():
        raise UserError(f"There is no folder of images {images}. Check workload.images.")
    if questions.suffix != ".json":
        if annotations is not None:
            raise UserError(f"{questions} holds its own answers: leave workload.annotations ({annotations}) out.")
        return _from_rows(questions, images, row_filter)
    if annotations is None:
        raise UserError(
            f"workload.annotations is not given: {questions} holds questions alone in VQA's format. Name the"
            " annotations file too, or a .jsonl file with answers in it."
        )
    return _from_vqa(questions, annotations, images, image_name)


def find_rows_file(questions: Path) -> Path:
    """The one file of rows in a folder; any other path, such as a folder that `datasets` saved, as it is."""
    if not questions.is_dir() or (questions / _DATASETS_FILE).is_file() or (questions / _DATASETS_SPLITS).is_file():
        return questions
    candidates = sorted(file for file in questions.iterdir() if file.suffix in (".jsonl", ".parquet"))
    if len(candidates) == 1:
        return candidates[0]
    files = (
        f"{len(candidates)} files of rows: {', '.join(file.name for file in candidates[:_MAX_NAMED])}"
        if candidates
        else "no rows"
    )
    raise UserError(
        f"workload.questions is the folder {questions}, which holds {files}. Put one .jsonl or .parquet file beside the"
        " images, or name the file."
    )


def filter_entries(entries: Sequence[Entry], *, skip: bool) -> tuple[list[Entry], list[str]]:
    """The complete entries, and the errors of the others; refused unless they are to be skipped."""
    errors = [entry.error for entry in entries if entry.error]
    if errors and not skip:
        raise UserError(
            f"{describe_errors(errors, len(entries))} Complete the dataset, or leave these questions out with"
            " --workload.on-bad-row skip: they are then counted and reported."
        )
    return [entry for entry in entries if not entry.error], errors


def describe_errors(errors: Sequence[str], total: int) -> str:
    """Some of the errors by name, and how many there are."""
    more = f" and {len(errors) - _MAX_NAMED:,} more" if len(errors) > _MAX_NAMED else ""
    return f"{len(errors):,} of {total:,} questions cannot be used: {'; '.join(errors[:_MAX_NAMED])}{more}."


def select_split(
    entries: Sequence[Entry], split: Split, *, selection_share: float, test_share: float, seed: int
) -> list[Entry]:
    """The questions of one split, in an order that the seed decides.

    A hash of the image's id decides its split: no image is in two splits, and an image keeps its split when others are
    added or removed.
    """
    selection_end = test_share + selection_share
    bounds = {
        Split.TEST: (0.0, test_share),
        Split.SELECT: (test_share, selection_end),
        Split.TRAIN: (selection_end, 1.0),
    }
    low, high = bounds[split]
    members = [entry for entry in entries if low <= _hash_fraction(seed, entry.image_id) < high]
    return sorted(members, key=lambda entry: _hash_fraction(seed, entry.image_id, entry.source))


def _hash_fraction(*key: object) -> float:
    """From 0 to below 1, the same for the same key everywhere."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=6)
    return int.from_bytes(digest.digest()) / 256**6


def _from_rows(questions: Path, images: Path, row_filter: RowFilter) -> list[Entry]:
    records = read_rows(str(questions), row_filter, setting="workload.questions")
    entries = []
    for row, source, number in zip(records.rows, records.sources, records.numbers, strict=True):
        try:
            entries.append(_entry(row, f"line {number}", images))
        except BadRow as bad:
            row_filter.reject(source, bad)
    return entries


def _entry(row: Record, source: str, images: Path) -> Entry:
    require_columns(row, ("image", "question"))
    image, answers = row["image"], row.get("answers") or []
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(image, str) or not isinstance(answers, list) or not all(isinstance(a, str) for a in answers):
        raise BadRow("of another type", "image must be a text and answers a text or a list of texts.")
    if not _is_question(row["question"]):
        raise BadRow("without a question", f"its question is {row['question']!r}: it must be a text, not empty.")
    question_type = str(row.get("question_type") or "")
    return Entry(source, image, images / image, row["question"], _non_empty(answers), question_type)


def _from_vqa(questions: Path, annotations: Path, images: Path, image_name: str) -> list[Entry]:
    questions_file, annotations_file = _read_json(questions, "questions"), _read_json(annotations, "annotations")
    answers: dict[object, tuple[str, ...]] = {}
    types: dict[object, str] = {}
    for index, annotation in enumerate(annotations_file["annotations"]):
        (question_id,) = _fields(annotation, ["question_id"], f"annotation {index} of {annotations}")
        answers[question_id] = _answers_of(annotation, f"The annotation of question {question_id} in {annotations}")
        types[question_id] = str(annotation.get("question_type") or "")
    entries: dict[object, Entry] = {}
    for index, question in enumerate(questions_file["questions"]):
        where = f"question {index} of {questions}"
        question_id, image_id, text = _fields(question, ["question_id", "image_id", "question"], where)
        if question_id in entries:
            raise UserError(
                f"{questions} holds question_id {question_id} twice. Every question needs an id of its own."
            )
        if not _is_question(text):
            raise UserError(f"{where} is {text!r}: a question must be a text that is not empty. Fix the file.")
        image = images / _image_name(image_name, questions_file.get("data_subtype", ""), image_id)
        source, answered = f"question {question_id}", answers.get(question_id, ())
        entries[question_id] = Entry(source, str(image_id), image, text, answered, types.get(question_id, ""))
    return list(entries.values())


def _answers_of(annotation: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """One from each annotator; where there are none, the agreed one."""
    given = annotation.get("answers") or []
    answers = [entry.get("answer") if isinstance(entry, dict) else None for entry in given]
    if not all(isinstance(answer, str) for answer in answers):
        raise UserError(f'{where} has answers that are not of the form {{"answer": "..."}}. Fix the file.')
    agreed = annotation.get("multiple_choice_answer")
    return _non_empty(answers) or _non_empty([agreed] if isinstance(agreed, str) else [])


def _non_empty(answers: Sequence[Any]) -> tuple[str, ...]:
    return tuple(answer for answer in answers if answer.strip())


def _is_question(text: Any) -> bool:
    return isinstance(text, str) and bool(text.strip())


def _image_name(template: str, subtype: str, image_id: object) -> str:
    try:
        return template.format(subtype=subtype, image_id=image_id)
    except (KeyError, ValueError, IndexError) as error:
        raise UserError(
            f"workload.image_name is {template!r}, which cannot be filled in for image_id {image_id!r} ({error}). It"
            " may hold {subtype} and {image_id}, such as '{image_id}.jpg'."
        ) from error


def _read_json(file: Path, name: str) -> dict[str, Any]:
    if not file.is_file():
        raise UserError(f"There is no file {file}. Check workload.questions and workload.annotations.")
    with open_regular(file, follow_links=True) as opened:
        try:
            content = json.load(opened)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{file} is not JSON ({error}). Fix it.") from error
    if not isinstance(content, dict) or not isinstance(content.get(name), list):
        raise UserError(f"{file} is not VQA's {name} file: it must be an object with a list '{name}'.")
    return content


def _fields(record: Any, names: Sequence[str], where: str) -> list[Any]:
    missing = [name for name in names if not isinstance(record, dict) or name not in record]
    if missing:
        raise UserError(f"{where} has no '{missing[0]}'. It needs {', '.join(names)}.")
    wrong = [name for name in names if isinstance(record[name], list | dict)]
    if wrong:
        raise UserError(f"{where} has {type(record[wrong[0]]).__name__} as its '{wrong[0]}'. It must be one value.")
    return [record[name] for name in names]
