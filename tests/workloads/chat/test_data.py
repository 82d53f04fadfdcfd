"""Datasets and prompts: what is broken is named by its line, refused or counted; token ids stay token ids."""

from dataclasses import replace

import datasets
import pytest
import torch
from tiny.chat import chat_config, write_lines
from tiny.llama import byte_tokenizer, save_model

from groupwise.core.errors import UserError
from groupwise.data.rows import read_rows
from groupwise.workloads.chat.build import build
from groupwise.workloads.chat.config import DataConfig, JudgeConfig, PolicyConfig, SamplingParams
from groupwise.workloads.chat.data import PromptLimits, make_prompt_set

CPU = torch.device("cpu")
TOKENIZER = byte_tokenizer()
GOOD = [{"prompt": "one?", "answer": "1"}, {"prompt": "two?", "answer": "2"}]
EXACT = JudgeConfig(functions=("exact",))


def table_of(path, rows, bad_rows="refuse", required=("prompt", "answer")):
    return read_rows(str(write_lines(path / "rows.jsonl", rows)), required=required, bad_rows=bad_rows)


def prompts_of(path, rows, judge=EXACT, tokenizer=TOKENIZER, longest=128, **data):
    config = DataConfig(**data)
    table = table_of(path, rows, config.bad_rows, required=("prompt",))
    return make_prompt_set(table, tokenizer, config, judge, PromptLimits(longest, 16, 300))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": "x", "answer": ', r"rows.jsonl, line 3: it is not JSON \(Expecting value.*one whole object"),
        ("[1, 2]", "line 3: it holds list"),
        ({"prompt": "x"}, r"line 3: it has no column 'answer'; it has 'prompt'.*judge.answer_column"),
        ({"prompt": "x", "answer": None}, "line 3: it has no column 'answer'"),
        ({"prompt": "x", "answer": "y", "level": 1}, "line 3: column 'level' is not in the rows before"),
    ],
)
def test_a_broken_line_is_named_or_dropped_and_counted(tmp_path, line, says):
    with pytest.raises(UserError, match=says + r".*data\.bad_rows 'drop'"):
        table_of(tmp_path, [*GOOD, line, GOOD[0]])
    table = table_of(tmp_path, [*GOOD, line, GOOD[0]], bad_rows="drop")
    assert len(table.rows) == 3
    assert sum(table.dropped.values()) == 1


def test_bytes_that_are_no_text_and_files_that_are_not_there(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(UserError, match="line 1: byte 13 is not UTF-8"):
        read_rows(str(tmp_path / "rows.jsonl"), required=(), bad_rows="refuse")
    with pytest.raises(UserError, match="There is no dataset at"):
        read_rows(str(tmp_path / "none.jsonl"), required=(), bad_rows="refuse")
    with pytest.raises(UserError, match=r"no usable row \(2 without a column\)"):
        table_of(tmp_path, [{"a": 1}, {"a": 2}], bad_rows="drop")


def test_blank_lines_are_no_rows_and_line_numbers_count_them(tmp_path):
    table = table_of(tmp_path, [GOOD[0], "", GOOD[1]])
    assert [place.rpartition(" ")[2] for place in table.places] == ["1", "3"]


def test_a_folder_that_datasets_saved(tmp_path):
    saved = datasets.Dataset.from_list(GOOD)
    saved.save_to_disk(tmp_path / "one")
    table = read_rows(str(tmp_path / "one"), required=("prompt",), bad_rows="refuse")
    assert [dict(row) for row in table.rows] == GOOD
    datasets.DatasetDict({"train": saved, "test": saved}).save_to_disk(tmp_path / "both")
    with pytest.raises(UserError, match=r"holds 2 splits, train, test: name one of them, as .*both/train"):
        read_rows(str(tmp_path / "both"), required=(), bad_rows="refuse")
    assert len(read_rows(str(tmp_path / "both" / "test"), required=(), bad_rows="refuse").rows) == 2
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="is not a folder that `datasets` has written"):
        read_rows(str(tmp_path / "empty"), required=(), bad_rows="refuse")


def test_text_goes_through_the_template_and_messages_too(tmp_path):
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    rows = [{"prompt": "hi", "answer": "1"}, {"prompt": messages, "answer": "2"}]
    prompts = prompts_of(tmp_path, rows, system="be kind")
    said = [TOKENIZER.decode(list(ids)) for ids in prompts.ids]
    assert said[0] == "<system>be kind<end><user>hi<end><assistant>"
    assert said[1] == "<system>be kind<end><user>a<end><assistant>b<end><user>c<end><assistant>"
    assert prompts.shown[0] == [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    assert prompts.columns == {"answer": ["1", "2"]}
    assert prompts.is_dialogue


def test_without_the_template_text_is_encoded_as_it_stands_and_ids_are_never_touched(tmp_path):
    rows = [{"prompt": "hi", "answer": "1"}, {"prompt": [5, 250, 5, 6], "answer": "2"}]
    prompts = prompts_of(tmp_path, rows, template="none")
    assert TOKENIZER.decode(list(prompts.ids[0])) == "hi"
    assert prompts.ids[1] == (5, 250, 5, 6)
    assert prompts.shown == ["hi", [5, 250, 5, 6]]
    assert not prompts.is_dialogue


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "line 3: column 'prompt' is empty"),
        ("  \n", "is empty"),
        ([], "is empty"),
        ([{"role": "user", "content": " "}], "all of its messages are empty"),
        (7, "holds int: a prompt is a text, a list of messages or a list of token ids"),
        (["a", 3], "neither all token ids nor all messages"),
        ([{"role": "user"}], "neither all token ids nor all messages"),
        ([{"role": "assistant", "content": "x"}], "its last message is the assistant's"),
        ([5, 400], "holds token 400 and the model has a vocabulary of 300"),
        ("x" * 200, r"has 203 tokens, and the model has 128 positions, of which sampling.max_new_tokens takes 16"),
    ],
)
def test_a_prompt_that_cannot_be_used_is_refused_or_dropped_and_never_cut(tmp_path, prompt, says):
    rows = [*GOOD, {"prompt": prompt, "answer": "3"}]
    with pytest.raises(UserError, match=says):
        prompts_of(tmp_path, rows)
    kept = prompts_of(tmp_path, rows, bad_rows="drop")
    assert len(kept) == 2
    assert sum(kept.dropped.values()) == 1


def test_a_limit_of_ones_own_on_prompts(tmp_path):
    with pytest.raises(UserError, match=r"has 7 tokens, and data\.longest_prompt is 6"):
        prompts_of(tmp_path, GOOD, longest_prompt=6)
    with pytest.raises(UserError, match=r"No row of the dataset can be used: 2 overlong prompt"):
        prompts_of(tmp_path, GOOD, longest_prompt=6, bad_rows="drop")


def test_a_right_answer_without_a_number_is_refused_for_the_numeric_reward(tmp_path):
    rows = [*GOOD, {"prompt": "three?", "answer": "three"}]
    with pytest.raises(UserError, match=r"line 3: column 'answer' is 'three', in which the reward 'numeric' finds no"):
        prompts_of(tmp_path, rows, judge=JudgeConfig())


def test_a_group_is_its_content(tmp_path):
    same = prompts_of(tmp_path, GOOD)
    assert torch.equal(same.group_ids, prompts_of(tmp_path, GOOD).group_ids)
    other = prompts_of(tmp_path, [GOOD[0], {**GOOD[1], "answer": "3"}])
    assert (same.group_ids == other.group_ids).tolist() == [True, False]
    twice = prompts_of(tmp_path, [GOOD[0], GOOD[0]])
    assert len(twice.group_ids.unique()) == 2


def test_a_column_with_a_name_that_rewards_use_otherwise(tmp_path):
    with pytest.raises(UserError, match="has a column 'completions'"):
        prompts_of(tmp_path, [{**GOOD[0], "completions": 1}])


def test_a_tokenizer_without_a_template(tmp_path):
    with pytest.raises(UserError, match=r"no chat template.*data\.template 'none'"):
        prompts_of(tmp_path, GOOD, tokenizer=byte_tokenizer(template=None))


def test_a_tokenizer_without_a_stop_token_needs_one_named(tmp_path):
    config = chat_config(tmp_path)
    endless = replace(config, policy=PolicyConfig(model=str(save_model(tmp_path / "endless", end=False))))
    with pytest.raises(UserError, match=r"has no end-of-sequence token.*--workload\.stop-tokens"):
        build(endless, CPU)
    with pytest.raises(UserError, match="names '<stop>', which is not one token"):
        build(replace(endless, stop_tokens=("<stop>",)), CPU)
    named = build(replace(endless, stop_tokens=("<user>", ".")), CPU)
    assert {TOKENIZER.decode([token]) for token in named.components.sampling.stop_token_ids} == {"<user>", "."}
    own = build(config, CPU)
    assert own.components.sampling.stop_token_ids == (TOKENIZER.eos_token_id,)


def test_dropped_rows_are_shown_before_training(tmp_path):
    config = chat_config(tmp_path)
    write_lines(tmp_path / "some.jsonl", [*GOOD, "{", {"prompt": "", "answer": "1"}, *GOOD])
    data = DataConfig(train=str(tmp_path / "some.jsonl"), held_out="", bad_rows="drop")
    notes = build(replace(config, data=data), CPU).reporter.preflight_notes()
    assert "training rows dropped: 1 broken line, 1 empty prompt; 4 are left" in notes
    assert "a completion ends with '<end>', or after 6 tokens" in notes


def test_other_questions_to_evaluate_on_than_to_train_on_are_pointed_out(tmp_path):
    own = replace(chat_config(tmp_path).data, held_out="arithmetic")
    notes = build(
        chat_config(tmp_path, data=own, sampling=SamplingParams(max_new_tokens=6)), CPU
    ).reporter.preflight_notes()
    assert any("evaluation uses the embedded sums" in note for note in notes)
    assert not any("embedded sums" in note for note in build(chat_config(tmp_path), CPU).reporter.preflight_notes())


def test_a_model_without_a_tokenizer(tmp_path):
    config = chat_config(tmp_path)
    for file in (tmp_path / "model").glob("tokenizer*"):
        file.unlink()
    with pytest.raises(UserError, match="whose tokenizer cannot be loaded"):
        build(config, CPU)


def test_greedy_training_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"sampling\.temperature is 0: all members of a group would be equal"):
        chat_config(tmp_path, sampling=SamplingParams(temperature=0.0))
