"""A model and a dataset from disk: splits by image, errors that name the row, and the recipe from train to eval."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from processes import groupwise
from tiny.estimator import fixed_estimator
from tiny.llava import save_llava
from tiny.vqa import QUESTIONS_PER_IMAGE, file_name, write, write_lines, write_vqa
from torch.testing import assert_close

from groupwise.core.errors import UserError
from groupwise.data.rows import RowFilter
from groupwise.latency.machine import current_machine
from groupwise.recipes import load_recipe
from groupwise.rewards.config import RewardFunctionsConfig
from groupwise.workloads.controller.latency.source import load_estimator
from groupwise.workloads.controller.model.load import load_model
from groupwise.workloads.controller.serving.server import ServedTimer
from groupwise.workloads.controller.task import Split
from groupwise.workloads.controller.tasks.vqa.config import VqaConfig
from groupwise.workloads.controller.tasks.vqa.dataset import Entry, read_entries, select_split
from groupwise.workloads.controller.tasks.vqa.task import ImageStore

CPU = torch.device("cpu")
VQA = RewardFunctionsConfig(functions=("vqa",))
REFUSE = RowFilter("refuse", "--workload.on-bad-row")
IMAGES = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_llava(folder)
    return folder


@pytest.fixture
def data(tmp_path):
    return write_vqa(tmp_path / "data", IMAGES)


def config(model, paths, **changed):
    settings = {"dtype": "float32", "selection_share": 0.3, "estimator": "proportional", "max_new_tokens": 2, **changed}
    return VqaConfig(model=str(model), rewards=VQA, **paths, **settings)


def test_both_formats_hold_the_same(tmp_path):
    two = read_entries(*write_vqa(tmp_path / "two", 3).values(), image_name=VqaConfig.image_name, row_filter=REFUSE)
    lines = write_lines(tmp_path / "one", 3)
    one = read_entries(lines["questions"], None, lines["images"], "", REFUSE)
    assert [(each.question, each.answers, each.image.name, each.question_type) for each in one] == [
        (each.question, each.answers, each.image.name, each.question_type) for each in two
    ]
    assert [each.question_type for each in two[:2]] == ["what is word0", "what is word1"]
    assert (two[3].source, two[3].image_id, two[3].image.name) == ("question 101001", "101", file_name(101))
    assert two[3].answers == ("word1",) * 6 + ("word2",) * 4
    assert one[3].source == "line 4"


@given(st.sets(st.integers(0, 10**6), min_size=1, max_size=60), st.floats(0, 0.5), st.floats(0, 0.4), st.integers(0, 9))
def test_no_image_is_in_two_splits_and_each_keeps_its_split_when_others_leave(images, selection, test, seed):
    entries = [
        Entry(f"{image} {nth}", str(image), Path(), "what", ("this",)) for image in sorted(images) for nth in (0, 1)
    ]

    def splits(some):
        shares = {"selection_share": selection, "test_share": test}
        return {split: [each.source for each in select_split(some, split, seed=seed, **shares)] for split in Split}

    whole = splits(entries)
    assert sorted(place for places in whole.values() for place in places) == sorted(each.source for each in entries)
    seen = [{place.split()[0] for place in places} for places in whole.values()]
    assert sum(map(len, seen)) == len(images)
    fewer = splits(entries[: len(entries) // 2])
    assert all(set(fewer[split]) <= set(whole[split]) for split in whole)


def test_the_task_has_every_question_in_one_split_and_crops_images_on_demand(model, data):
    task = config(model, data).task(CPU)
    loaded = load_model(model)
    splits = (task.questions, task.selection_questions(), task.test_questions())
    images = [{each.image for each in split} for split in splits]
    assert sum(map(len, images)) == len(set.union(*images)) == IMAGES
    assert [len(split) for split in splits] == [QUESTIONS_PER_IMAGE * len(names) for names in images]
    assert all(images)
    assert task.held_out == task.selection_questions()
    assert {each.question_type for each in task.test_questions()} == {"what is word0", "what is word1"}
    asked = task.questions[0]
    prompt = f"{asked.text}\nAnswer the question using a single word or phrase."
    seen = loaded.front_end.sample(data["images"] / asked.image, prompt)
    assert (asked.sample.prefix_ids, asked.sample.question_ids) == (seen.prefix_ids, seen.question_ids)
    for tier, crops in asked.sample.crops_by_tier.items():
        assert_close(crops, seen.crops_by_tier[tier], rtol=0, atol=0)
        assert asked.prompt_tokens[tier] == 4 * len(crops) + len(seen.prefix_ids) + len(seen.question_ids)
    assert len({each.sample.name for each in task.questions}) == len(task.questions)


def test_sizes_of_the_splits_are_limits_and_without_a_test_share_there_is_no_test(model, data):
    sizes = {"train_questions": 3, "held_out_questions": 1, "selection_questions": 4, "test_questions": 2}
    task = config(model, data, **sizes).task(CPU)
    assert [len(each) for each in (task.questions, task.held_out)] == [3, 1]
    assert [len(task.selection_questions()), len(task.test_questions())] == [4, 2]
    assert task.held_out == task.selection_questions()[:1]
    without = config(model, data, test_share=0.0).task(CPU)
    assert without.test_questions is None
    assert "none to test, so `groupwise eval` has no report" in without.notes[0]


def test_a_sample_is_named_by_the_picture_and_by_how_it_is_seen(model, tmp_path, data):
    loaded = load_model(model)
    file = data["images"] / file_name(100)
    (tmp_path / "copy.jpg").write_bytes(file.read_bytes())
    coarse = replace(loaded, options=replace(loaded.options, crops_by_tier={"low": 1, "high": 2}))

    def named(file, loaded):
        return ImageStore(loaded).question(file, "what", ("this",), prompt="{question}").sample.name

    assert named(file, loaded) == named(tmp_path / "copy.jpg", loaded)
    assert len({named(file, loaded), named(file, coarse), named(data["images"] / file_name(101), loaded)}) == 3


def spoil(data, kind):
    """Take something away from image 101 or question 102000; damage image 103."""
    if kind == "image":
        (data["images"] / file_name(101)).unlink()
    elif kind == "damaged":
        (data["images"] / file_name(103)).write_bytes(b"no picture")
    else:
        content = json.loads(data["annotations"].read_text())
        for each in content["annotations"]:
            if each["question_id"] == 102000:
                each |= {"answers": [], "multiple_choice_answer": ""}
        write(data["annotations"], content)


@pytest.mark.parametrize(
    ("kind", "named", "left_out"),
    [
        ("image", r"2 of 24 questions cannot be used: question 101000 has no image .*COCO_val2014_000000000101.jpg", 2),
        ("answers", r"1 of 24 questions cannot be used: question 102000 has no answers", 1),
        ("damaged", r"question 10300\d.*COCO_val2014_000000000103.jpg cannot be read as an image", 2),
    ],
)
def test_what_is_missing_is_refused_by_name_or_skipped_and_reported(model, data, kind, named, left_out):
    shares = {"selection_share": 0.6, "test_share": 0.0}
    whole = config(model, data, **shares).task(CPU)
    spoil(data, kind)
    with pytest.raises(UserError, match=named):
        config(model, data, **shares).task(CPU)
    task = config(model, data, on_bad_row="skip", **shares).task(CPU)
    asked = [len(each.questions) + len(each.held_out) for each in (whole, task)]
    assert asked == [24, 24 - left_out]
    assert any(f"{left_out} of 24 questions cannot be used" in note for note in task.notes)


def test_broken_lines_are_skipped_and_reported(model, tmp_path):
    lines = write_lines(tmp_path / "lines", IMAGES)
    with lines["questions"].open("a") as file:
        file.write('{"image": \n')
    task = config(model, lines, on_bad_row="skip", selection_share=0.6, test_share=0.0).task(CPU)
    assert len(task.questions) + len(task.held_out) == 24
    assert any("1 of 25 questions cannot be used" in note and "line 25: it is not JSON" in note for note in task.notes)


def test_bad_files_are_reported_with_the_line(model, data, tmp_path):
    lines = tmp_path / "lines.jsonl"
    for content, told in (
        ("{", r"lines.jsonl, line 1: it is not JSON"),
        ('\n{"image": "a.jpg"}', r"lines.jsonl, line 2: it has no column 'question'"),
        ('{"image": "a.jpg", "question": " "}', r"line 1: its question is ' '"),
        ('{"image": "a.jpg", "question": "what", "answers": 3}', r"line 1: .*answers a text or a list of texts"),
        ("", "holds no usable row"),
    ):
        lines.write_text(content)
        with pytest.raises(UserError, match=told):
            config(model, {"questions": lines, "images": data["images"]}).task(CPU)
    with pytest.raises(UserError, match=r"lines.jsonl holds its own answers"):
        config(model, data | {"questions": lines}).task(CPU)
    with pytest.raises(UserError, match=r"workload.annotations is not given"):
        config(model, {name: data[name] for name in ("questions", "images")}).task(CPU)
    with pytest.raises(UserError, match=r"is not VQA's questions file"):
        config(model, data | {"questions": data["annotations"]}).task(CPU)
    with pytest.raises(UserError, match=r"workload.image_name is '{number}.png', which cannot be filled in"):
        config(model, data, image_name="{number}.png").task(CPU)


def test_a_folder_with_images_and_one_file_of_rows_is_enough(model, tmp_path):
    lines = write_lines(tmp_path / "lines", IMAGES)
    folder = lines["images"]
    rows = lines["questions"].rename(folder / "rows.jsonl")
    task = config(model, {"questions": folder}, selection_share=0.6, test_share=0.0).task(CPU)
    assert len(task.questions) + len(task.held_out) == 24
    rows.with_name("more.jsonl").write_text(rows.read_text())
    with pytest.raises(UserError, match=r"holds 2 files of rows: more.jsonl, rows.jsonl.*or name the file"):
        config(model, {"questions": folder}).task(CPU)
    with pytest.raises(UserError, match="holds no rows"):
        config(model, {"questions": model}).task(CPU)


def test_one_text_is_one_answer(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"image": "a.png", "question": "what", "answers": "yes"}')
    (entry,) = read_entries(tmp_path / "rows.jsonl", None, tmp_path, "", REFUSE)
    assert entry.answers == ("yes",)


@pytest.mark.parametrize("crops", [{"low": 12, "high": 3}, {"low": 3, "high": 3}, {"low": 0, "high": 3}])
def test_crops_must_rise_from_coarse_to_fine(crops):
    given = " ".join(f"{tier} {count}" for tier, count in crops.items())
    with pytest.raises(UserError, match=f"workload.crops is {given}: the tiers must go from coarse to fine"):
        VqaConfig(crops=crops)


def test_ignoring_the_orientation_makes_other_samples_and_is_kept_for_serving(model, tmp_path):
    lines = write_lines(tmp_path / "lines", IMAGES)
    upright, stored = (
        config(model, lines, exif_orientation=respected, selection_share=0.6, test_share=0.0).task(CPU)
        for respected in (True, False)
    )
    assert {each.sample.name for each in upright.questions}.isdisjoint(each.sample.name for each in stored.questions)
    assert [task.source.exif_orientation for task in (upright, stored)] == [True, False]


def test_data_that_is_too_small_for_three_splits_is_refused(model, tmp_path):
    few = write_vqa(tmp_path / "few", 2)
    with pytest.raises(UserError, match=r"The (train|select|test) split is empty: the dataset has 2 usable images"):
        config(model, few).task(CPU)
    with pytest.raises(UserError, match=r"The select split .* Give more images, a larger workload.selection_share"):
        config(model, few, selection_share=1e-9, test_share=0.0).task(CPU)
    with pytest.raises(UserError, match=r"The test split is empty.*\(or 0, to train without a final evaluation\)"):
        config(model, few, selection_share=0.3, test_share=1e-9).task(CPU)
    with pytest.raises(UserError, match=r"workload.selection_share is 0.0: it must be above 0"):
        config(model, few, selection_share=0.0)
    with pytest.raises(UserError, match=r"selection_share \+ workload.test_share is 1.1: it must be below 1"):
        config(model, few, selection_share=0.6, test_share=0.5)


def test_an_estimator_is_named_by_file_and_refused_elsewhere(model, data, tmp_path):
    loaded = load_model(model)
    asked = config(model, data).task(CPU).questions
    estimator = fixed_estimator(loaded.model)
    estimator.save(tmp_path / "here.json")
    here = config(model, data, estimator=str(tmp_path / "here.json")).task(CPU)
    # 1 ms a crop, 0.5 a block and 0.01 a token-expert pair, for the prompt and one more token. Of 8 blocks with 4
    # experts the last one sends the prompt's last token alone to them.
    full, tokens = loaded.options.full, asked[0].prompt_tokens["high"]
    (estimated,) = here.estimator.estimate(asked[0].prompt_tokens, [full])
    assert estimated.total_ms == pytest.approx(13 + 0.5 * 16 + 0.01 * 4 * (7 * tokens + 1 + 8))
    elsewhere = replace(current_machine(), cpu="another")
    replace(estimator, machine=elsewhere).save(tmp_path / "elsewhere.json")
    strange = config(model, data, estimator=str(tmp_path / "elsewhere.json"))
    with pytest.raises(UserError, match=r"elsewhere.json was fitted for cpu another, not"):
        strange.task(CPU)
    told = replace(strange, allow_estimator_mismatch=True).task(CPU).notes
    assert any("fitted for cpu another" in note for note in told)
    with pytest.raises(UserError, match=r"workload.estimator is empty.* 'proportional' for latency in proportion"):
        load_estimator("", loaded, new_tokens=1, timer_for=ServedTimer)


def test_the_recipe_checks_trains_and_evaluates_from_the_command_line(model, data, tmp_path):
    paths = [word for name, path in data.items() for word in (f"--workload.{name}", path)]
    words = ["controller-molmoe", "--workload.model", model, *paths, "--workload.selection-share", 0.3]
    words += ["--workload.estimator", "proportional", "--workload.answers", tmp_path / "answers.db"]
    words += ["--workload.max-new-tokens", 2, "--conditions-per-step", 4, "--rows-per-pass", 16]
    words += ["--workload.eval.timed-answers", 3, "--workload.eval.timed-answers-other-methods", 2]
    words += ["--workload.eval.timed-answers-per-configuration", 1, "--workload.eval.predictor-steps", 20]
    checked = groupwise("check", *words, "--json")
    assert checked.returncode == 0, checked.stderr
    details = [each["detail"] for each in json.loads(checked.stdout)["checks"] if each["name"] == "note"]
    assert details[1] == "questions: 12 about 6 images to train, 10 about 5 images to select, 2 about 1 images to test"
    assert "has no importance.json" in details[2]
    run = tmp_path / "run"
    trained = groupwise("train", *words, "--steps", 2, "--run-dir", run, "--no-preflight", "--json")
    assert trained.returncode == 0, trained.stderr
    assert json.loads(trained.stdout)["steps"] == 2
    assert (tmp_path / "answers.db").stat().st_size > 0

    evaluated = groupwise("eval", run)
    assert evaluated.returncode == 0, evaluated.stderr
    for table in ("Accuracy by budget", "Measured latency of one answer", "The controller's choices", "Headline"):
        assert table in evaluated.stdout
    metrics = json.loads((run / "eval.json").read_text())
    assert (metrics["test_questions"], metrics["selection_questions"]) == (2, 10)
    methods = {"controller", "lookup", "question_type_oracle", "per_question_oracle", "cheapest"}
    assert methods < set(metrics["mean_accuracy"])
    for entry in metrics["budgets"]:
        assert all(entry[method]["p50_ms"] > 0 for method in methods)
    assert (run / "eval.png").read_bytes().startswith(b"\x89PNG")


def test_the_recipe_fills_eight_ranks_and_says_what_it_needs():
    recipe = load_recipe("controller-molmoe")
    shape = recipe.shape(conditions=1000, ranks=8)
    assert shape.passes == 1
    with pytest.raises(UserError, match=r"workload.model is not given.*--workload.model FOLDER_OR_NAME"):
        recipe.workload.build(CPU)
