"""A dataset of VQA v2's format, made on the spot: a few small pictures, two questions about each, ten annotators."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

SUBTYPE = "val2014"
QUESTIONS_PER_IMAGE = 2


def file_name(image_id: int) -> str:
    return f"COCO_{SUBTYPE}_{image_id:012d}.jpg"


def write_vqa(folder: Path, images: int) -> dict[str, Path]:
    """The three paths that the recipe wants, by the names of its fields."""
    (folder / "images").mkdir(parents=True)
    questions, annotations = [], []
    for image_id in range(100, 100 + images):
        shades = np.random.default_rng(image_id).integers(0, 256, (48, 64, 3), dtype=np.uint8)
        Image.fromarray(shades).save(folder / "images" / file_name(image_id))
        for nth in range(QUESTIONS_PER_IMAGE):
            known = 1000 * image_id + nth
            asked = {"image_id": image_id, "question": f"what is word{nth}", "question_id": known}
            said = [f"word{(image_id + annotator // 6) % 20}" for annotator in range(10)]
            questions.append(asked)
            annotations.append(
                {
                    "question_id": known,
                    "image_id": image_id,
                    "answers": [{"answer": word, "answer_id": each + 1} for each, word in enumerate(said)],
                    "multiple_choice_answer": said[0],
                }
            )
    write(folder / "questions.json", {"data_subtype": SUBTYPE, "questions": questions})
    write(folder / "annotations.json", {"data_subtype": SUBTYPE, "annotations": annotations})
    return {
        "questions": folder / "questions.json",
        "annotations": folder / "annotations.json",
        "images": folder / "images",
    }


def write(file: Path, content: object) -> None:
    file.write_text(json.dumps(content))


def write_lines(folder: Path, images: int) -> dict[str, Path]:
    """The same as lines of JSON."""
    paths = write_vqa(folder, images)
    asked = json.loads(paths["questions"].read_text())["questions"]
    answered = json.loads(paths["annotations"].read_text())["annotations"]
    lines = [
        {
            "image": file_name(question["image_id"]),
            "question": question["question"],
            "answers": [each["answer"] for each in annotation["answers"]],
        }
        for question, annotation in zip(asked, answered, strict=True)
    ]
    (folder / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {"questions": folder / "lines.jsonl", "images": paths["images"]}
