"""The embedded model: its task, its tokenizer, its pretraining, and what it can and cannot do as it is shipped."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tools.arithmetic.pretrain import PretrainConfig, batches, pretrain
from tools.arithmetic.tokenizer import train_tokenizer

from groupwise.core.errors import UserError
from groupwise.recipes import load_recipe
from groupwise.workloads.chat.build import load_tokenizer
from groupwise.workloads.chat.config import ChatConfig, ChatEvalConfig
from groupwise.workloads.chat.evaluate import sample_and_grade
from groupwise.workloads.chat.rewards import answer_in_completion
from groupwise.workloads.chat.tasks.arithmetic.task import (
    MODEL_FOLDER,
    Problem,
    Split,
    answer_directly,
    draw_problem,
    make_dialogue,
    make_rows,
    remaining_problem,
    solve_step_by_step,
)

CPU = torch.device("cpu")
TOKENIZER = train_tokenizer()


def test_by_hand():
    problem = Problem((14, -2, 9))
    assert problem.text == "14 - 2 + 9"
    assert problem.answer == 21
    assert solve_step_by_step(problem) == "14-2=12\n12+9=21\n#### 21"
    assert answer_directly(problem) == "#### 21"


@given(st.integers(0, 2**32), st.sampled_from(list(Split)))
def test_problems_stay_in_range_and_in_their_split(seed, split):
    random = np.random.default_rng(seed)
    problem = draw_problem(random, split)
    assert problem.split is split
    assert all(0 <= total <= 40 for total in problem.totals)
    assert 3 <= len(problem.terms) <= 5
    messages = make_dialogue(problem, random)
    rest = remaining_problem(problem, messages)
    for reply in (solve_step_by_step(rest), answer_directly(rest)):
        assert answer_in_completion(reply) == problem.answer
    if len(messages) == 3:
        assert answer_in_completion(messages[1]["content"]) == rest.terms[0]


def test_no_question_is_in_two_splits():
    texts = [{str(row["prompt"]) for row in make_rows(split, 200, seed=0)} for split in (Split.TRAIN, Split.HELD_OUT)]
    assert [len(each) for each in texts] == [200, 200]
    assert not texts[0] & texts[1]
    assert make_rows(Split.TRAIN, 5, seed=0) == make_rows(Split.TRAIN, 200, seed=0)[:5]


@given(st.text(max_size=40))
def test_any_text_can_be_encoded_and_comes_back(text):
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert TOKENIZER.decode(ids) == text
    assert all(len(TOKENIZER.decode([token])) == 1 for token in ids if TOKENIZER.decode([token]).isdigit())


def test_the_shipped_tokenizer_is_the_one_that_is_trained():
    shipped = load_tokenizer(ChatConfig())
    assert shipped.get_vocab() == TOKENIZER.get_vocab()
    assert shipped.chat_template == TOKENIZER.chat_template
    assert sum(path.stat().st_size for path in MODEL_FOLDER.iterdir()) < 6e6


def test_only_the_last_reply_is_learned():
    config = PretrainConfig(dialogues_per_step=8, dialogues_per_pass=4)
    cuts = list(batches(config, TOKENIZER, step=3))
    assert [ids.shape[0] for ids, _ in cuts] == [4, 4]
    for ids, labels in cuts:
        for line, wanted in zip(ids, labels, strict=True):
            text = TOKENIZER.decode(line[wanted != -100])
            before, _, reply = TOKENIZER.decode(line[line != TOKENIZER.pad_token_id]).rpartition("<|assistant|>")
            assert text == reply
            assert text.endswith("<|end|>")
            assert before.startswith("<|user|>")


def test_pretraining_that_was_killed_goes_on_as_if_it_had_not_been(tmp_path):
    config = PretrainConfig(
        steps=4, dialogues_per_step=4, dialogues_per_pass=2, width=16, hidden=16, layers=1, warmup_steps=2
    )
    losses = {"straight": [], "killed": []}

    def run(name, **options):
        def record(step, loss):
            losses[name].append(loss)

        return pretrain(config, TOKENIZER, tmp_path / name, on_step=record, checkpoint_every=1, **options)

    straight = run("straight").state_dict()
    run("killed", stop_after=2)
    killed = run("killed").state_dict()
    assert losses["straight"] == losses["killed"]
    assert all(torch.equal(straight[name], killed[name]) for name in straight)
    with pytest.raises(UserError, match="written with another plan"):
        pretrain(replace(config, seed=1), TOKENIZER, tmp_path / "killed", on_step=print)


def test_as_shipped_it_is_right_a_third_to_three_fifths_of_the_time_and_better_when_it_works_things_out():
    config = replace(load_recipe("chat").workload, eval=ChatEvalConfig(questions=100))
    workload = config.build(CPU)
    exam = sample_and_grade(workload, workload.parts.held_out, samples=2)
    right = exam.passed.flatten()
    assert 0.3 <= right.double().mean() <= 0.6
    has_worked = torch.tensor(["=" in text for text in workload.texts(exam.completions)])
    assert right[has_worked].double().mean() > right[~has_worked].double().mean() + 0.4
    assert exam.truncated_share < 0.05
