"""Questions about images from disk, in VQA v2's two JSON files or as JSONL; splits by image."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.core.errors import UserError
from groupwise.workloads.controller.task import Split

_NAMED = 5


@dataclass(frozen=True)
class Entry:
    """One question as the dataset has it; its image and answers may be missing."""

    place: str
    """Where it stands: its id, or its line."""
    image_id: str
    image: Path
    question: str
    answers: tuple[str, ...]
    question_type: str = ""
    """Where the dataset has one."""

    @property
    def fault(self) -> str:
        """What is missing, or nothing."""
        if not self.answers:
            return f"{self.place} has no answers"
        return "" if self.image.is_file() else f"{self.place} has no image {self.image}"


def read_entries(questions: Path, annotations: Path | None, images: Path, image_name: str) -> list[Entry]:
    """All questions of a dataset, in its order."""
    if not images.is_dir():
        raise UserError(f"There is no folder of images {images}. Check workload.images.")
    if questions.suffix == ".jsonl":
        if annotations is not None:
            raise UserError(f"{questions} holds its own answers: leave workload.annotations ({annotations}) out.")
        return _from_lines(questions, images)
    if annotations is None:
        raise UserError(
            f"workload.annotations is not given: {questions} holds questions alone in VQA's format. Name the"
            " annotations file too, or a .jsonl file with answers in it."
        )
    return _from_vqa(questions, annotations, images, image_name)


def filter_entries(entries: Sequence[Entry], *, skip: bool) -> tuple[list[Entry], list[str]]:
    """The whole entries, and what is wrong with the others; refused unless they are to be skipped."""
    faults = [entry.fault for entry in entries]
    wrong = [fault for fault in faults if fault]
    if wrong and not skip:
        raise UserError(
            f"{told(wrong, len(entries))} Complete the dataset, or leave these questions out with --workload.on-missing"
            " skip: they are then counted and told."
        )
    return [entry for entry, fault in zip(entries, faults, strict=True) if not fault], wrong


def told(faults: Sequence[str], total: int) -> str:
    """Some of the faults by name, and how many there are."""
    more = f" and {len(faults) - _NAMED:,} more" if len(faults) > _NAMED else ""
    return f"{len(faults):,} of {total:,} questions cannot be used: {'; '.join(faults[:_NAMED])}{more}."


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
    members = [entry for entry in entries if low <= _number(seed, entry.image_id) < high]
    return sorted(members, key=lambda entry: _number(seed, entry.image_id, entry.place))


def _number(*key: object) -> float:
    """From 0 to below 1, the same for the same key everywhere."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=6)
    return int.from_bytes(digest.digest()) / 256**6


def _from_vqa(questions: Path, annotations: Path, images: Path, image_name: str) -> list[Entry]:
    asked, answered = _json(questions, "questions"), _json(annotations, "annotations")
    answers: dict[object, tuple[str, ...]] = {}
    types: dict[object, str] = {}
    for number, each in enumerate(answered["annotations"]):
        (known,) = _fields(each, ["question_id"], f"annotation {number} of {annotations}")
        answers[known] = _answers_of(each, f"The annotation of question {known} in {annotations}")
        types[known] = str(each.get("question_type") or "")
    entries: dict[object, Entry] = {}
    for number, each in enumerate(asked["questions"]):
        where = f"question {number} of {questions}"
        known, image_id, text = _fields(each, ["question_id", "image_id", "question"], where)
        if known in entries:
            raise UserError(f"{questions} holds question_id {known} twice. Every question needs an id of its own.")
        image = images / _image_name(image_name, asked.get("data_subtype", ""), image_id)
        entries[known] = Entry(
            f"question {known}",
            str(image_id),
            image,
            _text(text, where),
            answers.get(known, ()),
            types.get(known, ""),
        )
    return list(entries.values())


def _answers_of(annotation: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """One from each annotator; where nobody is named, the agreed one."""
    given = annotation.get("answers") or []
    said = [each.get("answer") if isinstance(each, dict) else None for each in given]
    if not all(isinstance(answer, str) for answer in said):
        raise UserError(f'{where} has answers that are not of the form {{"answer": "..."}}. Mend the file.')
    agreed = annotation.get("multiple_choice_answer")
    return _non_empty(said) or _non_empty([agreed] if isinstance(agreed, str) else [])


def _non_empty(answers: Sequence[Any]) -> tuple[str, ...]:
    return tuple(answer for answer in answers if answer.strip())


def _image_name(template: str, subtype: str, image_id: object) -> str:
    try:
        return template.format(subtype=subtype, image_id=image_id)
    except (KeyError, ValueError, IndexError) as error:
        raise UserError(
            f"workload.image_name is {template!r}, which cannot be filled in for image_id {image_id!r} ({error}). It"
            " may hold {subtype} and {image_id}, such as '{image_id}.jpg'."
        ) from error


def _from_lines(file: Path, images: Path) -> list[Entry]:
    entries = []
    for number, line in enumerate(_read(file).splitlines(), start=1):
        if not line.strip():
            continue
        where = f"line {number} of {file}"
        record = _parsed(line, where)
        image, text = _fields(record, ["image", "question"], where)
        given, question_type = record.get("answers") or [], str(record.get("question_type") or "")
        if not isinstance(image, str) or not isinstance(given, list) or not all(isinstance(a, str) for a in given):
            raise UserError(f"{where}: image must be a text and answers a list of texts.")
        answers = _non_empty(given)
        entries.append(Entry(f"line {number}", image, images / image, _text(text, where), answers, question_type))
    return entries


def _json(file: Path, name: str) -> dict[str, Any]:
    content = _parsed(_read(file), str(file))
    if not isinstance(content, dict) or not isinstance(content.get(name), list):
        raise UserError(f"{file} is not VQA's {name} file: it must be an object with a list '{name}'.")
    return content


def _read(file: Path) -> str:
    if not file.is_file():
        raise UserError(f"There is no file {file}. Check workload.questions and workload.annotations.")
    return file.read_text(encoding="utf-8")


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"{where} is not JSON ({error}). Mend it.") from error


def _fields(record: Any, names: Sequence[str], where: str) -> list[Any]:
    missing = [name for name in names if not isinstance(record, dict) or name not in record]
    if missing:
        raise UserError(f"{where} has no '{missing[0]}'. It needs {', '.join(names)}.")
    return [record[name] for name in names]


def _text(question: Any, where: str) -> str:
    if not isinstance(question, str) or not question.strip():
        raise UserError(f"{where} asks {question!r}: a question must be a text that is not empty.")
    return question
