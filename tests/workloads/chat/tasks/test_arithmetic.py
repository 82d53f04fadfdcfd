"""The embedded example: its problems, its tokenizer, its pretraining, and the accuracy of the shipped model."""

from dataclasses import replace
from pathlib import Path

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
from groupwise.workloads.chat.config import ChatEvalConfig
from groupwise.workloads.chat.evaluate import sample_and_grade
from groupwise.workloads.chat.rewards import answer_in_completion
from groupwise.workloads.chat.tasks.arithmetic.task import (
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


def test_the_two_ways_to_answer_by_hand():
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
    assert list(map(len, texts)) == [200, 200]
    assert not texts[0] & texts[1]
    assert make_rows(Split.TRAIN, 5, seed=0) == make_rows(Split.TRAIN, 200, seed=0)[:5]


@given(st.text(max_size=40))
def test_any_text_can_be_encoded_and_decoded(text):
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert TOKENIZER.decode(ids) == text
    assert all(len(TOKENIZER.decode([token])) == 1 for token in ids if TOKENIZER.decode([token]).isdigit())


def test_the_shipped_tokenizer_is_the_one_that_is_trained():
    config = load_recipe("chat").workload
    shipped = load_tokenizer(config)
    assert shipped.get_vocab() == TOKENIZER.get_vocab()
    assert shipped.chat_template == TOKENIZER.chat_template
    assert sum(path.stat().st_size for path in Path(config.policy.folder_or_name).iterdir()) < 6e6


def test_only_the_last_reply_is_learned():
    config = PretrainConfig(dialogues_per_step=8, dialogues_per_pass=4)
    micro_batches = list(batches(config, TOKENIZER, step=3))
    assert [ids.shape[0] for ids, _ in micro_batches] == [4, 4]
    for ids, labels in micro_batches:
        for line, line_labels in zip(ids, labels, strict=True):
            text = TOKENIZER.decode(line[line_labels != -100])
            before, _, reply = TOKENIZER.decode(line[line != TOKENIZER.pad_token_id]).rpartition("<|assistant|>")
            assert text == reply
            assert text.endswith("<|end|>")
            assert before.startswith("<|user|>")


def test_pretraining_that_was_killed_continues_bit_identical(tmp_path):
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


def test_the_shipped_model_passes_a_third_to_three_fifths_and_more_often_with_steps():
    config = replace(load_recipe("chat").workload, eval=ChatEvalConfig(num_prompts=100))
    workload = config.build(CPU)
    graded = sample_and_grade(
        workload, workload.components.held_out, torch.arange(workload.num_held_out), samples_per_prompt=2
    )
    passed = graded.passed.flatten()
    assert 0.3 <= passed.double().mean() <= 0.6
    has_steps = torch.tensor(["=" in text for text in workload.decode_completions(graded.completions)])
    assert passed[has_steps].double().mean() > passed[~has_steps].double().mean() + 0.4
    assert graded.truncated_fraction < 0.05
