"""Chat as a workload: the laws hold for it through the real loop."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from processes import TESTS, on_ranks
from tiny.chat import QUESTIONS, chat_config, recipe
from tiny.llama import byte_tokenizer
from torch.testing import assert_close

import groupwise as gw
from groupwise.core.errors import UserError
from groupwise.core.io.files import read_jsonl
from groupwise.core.placement import RolloutRows
from groupwise.training.config import differing_fields, to_dict
from groupwise.workloads.chat.config import ChatEvalConfig, ChatRewardsConfig, PolicyConfig, SamplingParams
from groupwise.workloads.chat.engine.generate import generate
from groupwise.workloads.chat.workload import ChatWorkload
from workloads.chat.ranks import outcome

CPU = torch.device("cpu")
GOLDEN = TESTS / "golden" / "chat.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("chat")


@pytest.fixture(scope="module")
def workload(folder):
    return chat_config(folder).build(CPU)


def rows_of(conditions, members, step=0):
    condition = torch.arange(conditions).repeat_interleave(members)
    return RolloutRows(5, step, 1000, condition, torch.arange(members).repeat(conditions), condition)


def some(rows, numbers):
    return replace(rows, group=rows.group[numbers], member=rows.member[numbers], condition=rows.condition[numbers])


def ids_of(completions):
    return [completion.ids for completion in completions]


def train(config, path, **run):
    return gw.train(replace(config, run=gw.RunConfig(run_dir=path, **run)))


def test_a_rollout_has_the_log_probs_that_scoring_gives(workload):
    rollouts = workload.rollout(rows_of(6, 4))
    assert len(rollouts) == 24
    scored = workload.score(rollouts)
    assert_close(scored.logp.detach()[rollouts.mask], rollouts.logp[rollouts.mask], rtol=0, atol=1e-5)
    lengths = torch.tensor([len(completion.ids) for completion in rollouts.data["completion"]])
    assert torch.equal(rollouts.mask.sum(1), lengths)
    assert torch.equal(rollouts.group_ids, workload.components.training.group_ids[rollouts.data["condition"]])


def test_a_completion_depends_on_its_key_alone(workload, folder):
    rows = rows_of(6, 4)
    together = workload.rollout(rows).data["completion"]
    numbers = torch.tensor([17, 3, 8])
    apart = workload.rollout(some(rows, numbers)).data["completion"]
    narrow = chat_config(folder, decode_rows=2).build(CPU).rollout(rows).data["completion"]
    later = workload.rollout(rows_of(6, 4, step=1)).data["completion"]
    assert ids_of(apart) == ids_of([together[row] for row in numbers.tolist()])
    assert ids_of(narrow) == ids_of(together)
    assert ids_of(later) != ids_of(together)


def test_stop_tokens_are_trained_and_truncation_can_be_masked(folder):
    ends = chat_config(folder, sampling=SamplingParams(max_new_tokens=40, temperature=3.0), mask_truncated=True).build(
        CPU
    )
    rollouts = ends.rollout(rows_of(12, 8))
    stopped = torch.tensor([completion.stopped for completion in rollouts.data["completion"]])
    assert stopped.any()
    assert (~stopped).any()
    assert not rollouts.mask[~stopped].any()
    for row in stopped.nonzero().flatten().tolist():
        completion = rollouts.data["completion"][row]
        assert completion.ids[-1] == byte_tokenizer().eos_token_id
        assert rollouts.mask[row].sum() == len(completion.ids)


def test_rewards_receive_the_dialogue_the_columns_and_the_ids(folder, monkeypatch):
    received = {}

    def record(prompts, completions, completion_ids, answer, **columns):
        received.update(prompts=prompts, completions=completions, ids=completion_ids, answer=answer)
        return [0.0] * len(completions)

    monkeypatch.setattr(sys.modules["tiny.chat"], "record", record, raising=False)
    workload = chat_config(folder, rewards=ChatRewardsConfig(functions=("tiny.chat:record",))).build(CPU)
    rollouts = workload.rollout(rows_of(2, 2))
    assert list(workload.rewards(rollouts).per_rollout) == ["record"]
    assert received["prompts"][2] == [{"role": "user", "content": "say 1"}]
    assert received["answer"] == ["#### 0", "#### 0", "#### 1", "#### 1"]
    assert [tuple(ids) for ids in received["ids"]] == ids_of(rollouts.data["completion"])
    assert [messages[0]["role"] for messages in received["completions"]] == ["assistant"] * 4


def test_training_follows_the_golden_curve_and_leaves_its_metrics(folder, tmp_path):
    summary = train(replace(recipe(folder), steps=12), tmp_path, show_samples_every=6)
    metrics = read_jsonl(tmp_path / "metrics.jsonl")
    rewards = [entry["reward"] for entry in metrics]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15
    assert rewards == pytest.approx(json.loads(GOLDEN.read_text()), abs=0.02)
    for entry in metrics:
        assert entry["completion_tokens"] == pytest.approx(6, abs=0.7)
        assert 0 <= entry["truncated_fraction"] <= 1
        assert {
            "completion_tokens_positive_advantage",
            "completion_tokens_negative_advantage",
            "rollout_entropy",
            "entropy",
            "ratio_max",
            "zero_spread_share",
        } <= set(entry)
    (sample, *_) = read_jsonl(tmp_path / "samples.jsonl")
    assert set(sample) >= {"prompt", "completion", "answer", "tokens", "truncated", "reward", "rewards", "advantage"}
    assert sample["prompt"].startswith("<user>say ")
    assert summary.eval_after["early_letters_sampled"] > summary.eval_before["early_letters_sampled"] + 0.1
    assert set(summary.eval_after) >= {"early_letters_greedy", "pass@2", "completion_tokens", "truncated_fraction"}


def test_neither_placement_nor_passes_change_the_run(folder):
    whole = outcome(folder, "whole", rows_per_pass=8)
    assert whole["gradient"].abs().max() > 1e-3
    for placement, rows, tokens in (("shuffled", 2, None), ("whole", 3, None), ("spread", 32, None), ("whole", 32, 40)):
        other = outcome(folder, placement, rows_per_pass=rows, tokens_per_pass=tokens)
        assert other["completions"] == whole["completions"]
        assert_close(other["gradient"], whole["gradient"], rtol=0, atol=1e-6)


def test_two_ranks_with_spread_groups_do_what_one_rank_does(folder, tmp_path):
    ended = on_ranks(2, [Path(__file__).with_name("ranks.py"), folder, tmp_path / "two.pt"])
    assert ended.returncode == 0, ended.stderr[-3000:]
    one, two = outcome(folder, "whole", rows_per_pass=8), torch.load(tmp_path / "two.pt")
    assert two["ranks"] == 2
    assert two["completions"] == one["completions"]
    assert_close(two["gradient"], one["gradient"], rtol=0, atol=1e-6)
    assert two["metrics"] == pytest.approx(one["metrics"], abs=1e-6)


def test_a_resumed_run_is_bit_identical(folder, tmp_path):
    for name, steps in (("straight", (3,)), ("stopped", (1, 3))):
        for last in steps:
            train(replace(recipe(folder), steps=last), tmp_path / name, resume=True, preflight=False)
    straight, stopped = (
        (tmp_path / name / "checkpoints" / "step-000003" / "policy.safetensors").read_bytes()
        for name in ("straight", "stopped")
    )
    assert straight == stopped
    ignored = ("rollout_s", "reward_s", "update_s", "memory_bytes")
    both = [read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("straight", "stopped")]
    without = [[{key: e[key] for key in e if key not in ignored} for e in entries] for entries in both]
    assert without[0] == without[1]


def test_a_run_does_not_continue_with_other_prompts(tmp_path):
    """A condition is a prompt by its index: with one line more at the top, each would be another."""
    config = replace(recipe(tmp_path), steps=1)
    train(config, tmp_path / "run", preflight=False)
    file = Path(config.workload.data.train)
    first, *rest = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*rest, first]))
    with pytest.raises(UserError, match=r"another questions\.json"):
        train(replace(config, steps=2), tmp_path / "run", resume=True, preflight=False)


def test_out_of_memory_halves_the_rows_of_evaluations_and_rollouts(folder, tmp_path, monkeypatch):
    workload, asked = chat_config(folder).build(CPU), []
    expected = workload.summarize_evaluation(workload.evaluate(torch.arange(workload.num_held_out)))

    def cramped_generate(*arguments, decode_rows):
        asked.append(decode_rows)
        if decode_rows > 8:
            raise MemoryError
        return generate(*arguments, decode_rows=decode_rows)

    monkeypatch.setattr("groupwise.workloads.chat.workload.generate", cramped_generate)
    summary = train(replace(recipe(folder), steps=2), tmp_path, preflight=False)
    assert asked[:6] == [256, 128, 64, 32, 16, 8]
    assert summary.eval_before == pytest.approx(expected)
    assert [entry["eval_rows"] for entry in read_jsonl(tmp_path / "metrics.jsonl")] == [8, 8]


def test_out_of_memory_at_one_row_stops_the_run(folder, tmp_path, monkeypatch):
    def cramped_score(self, rollouts):
        raise MemoryError

    monkeypatch.setattr(ChatWorkload, "score", cramped_score)
    with pytest.raises(UserError, match="Out of memory in update with rows_per_pass 1, which cannot be halved"):
        train(replace(recipe(folder), steps=1), tmp_path, preflight=False)


def test_memory_limits_may_change_on_resume_and_other_settings_may_not(folder):
    config = recipe(folder)
    smaller = replace(config, workload=replace(config.workload, decode_rows=3, tokens_per_pass=99))
    assert differing_fields(to_dict(smaller), to_dict(config)) == []
    hotter = replace(
        config, workload=replace(config.workload, sampling=SamplingParams(max_new_tokens=6, temperature=2.0))
    )
    (difference,) = differing_fields(to_dict(hotter), to_dict(config))
    assert difference == "workload.sampling.temperature was 1.0 and is now 2.0"


def test_an_adapter_trains_with_the_base_model_as_its_reference(folder, tmp_path):
    lora = PolicyConfig(model=str(folder / "model"), lora_rank=2, reference="adapter")
    config = replace(recipe(folder, policy=lora), loss=gw.LossConfig(kl=0.1))
    train(config, tmp_path)
    metrics = read_jsonl(tmp_path / "metrics.jsonl")
    assert metrics[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert metrics[-1]["kl"] > 0


def test_nearly_all_truncated_warns_once_or_stops_the_run(folder, tmp_path, capsys):
    short = replace(recipe(folder, sampling=SamplingParams(max_new_tokens=2)), steps=3)
    train(short, tmp_path / "warned", preflight=False)
    output = " ".join(capsys.readouterr().err.split())
    assert output.count("of this step's completions reached sampling.max_new_tokens 2 without a stop token") == 1
    assert "Warning: Step 1: " in output
    assert read_jsonl(tmp_path / "warned" / "metrics.jsonl")[0]["truncated_fraction"] > 0.9
    with pytest.raises(UserError, match=r"completions reached sampling\.max_new_tokens 2"):
        train(short, tmp_path / "stopped", preflight=False, on_warning="stop")
    assert [path.name for path in (tmp_path / "stopped" / "checkpoints").iterdir()] == ["step-000001"]


def test_a_reward_that_hangs_is_missing_and_too_many_stop_the_run(folder, tmp_path, monkeypatch):
    def hangs(prompts, completions, **columns):
        while True:
            pass

    monkeypatch.setattr(sys.modules["tiny.chat"], "hangs", hangs, raising=False)
    rewards = ChatRewardsConfig(functions=("tiny.chat:early_letters", "tiny.chat:hangs"), timeout_s=0.2)
    config = recipe(folder, rewards=rewards, data=replace(chat_config(folder).data, held_out=""))
    with pytest.raises(
        UserError, match=r"32 of 32 rollouts.*hangs: raised TimeoutError: it took longer than the 0\.2 s"
    ):
        train(config, tmp_path, preflight=False)


def test_the_report_has_pass_at_k_of_the_trained_policy_and_the_base_model(folder, tmp_path):
    config = replace(
        recipe(
            folder,
            eval=ChatEvalConfig(num_prompts=5, samples_per_prompt=2, report_samples_per_prompt=3, pass_threshold=0.5),
        ),
        steps=2,
    )
    train(config, tmp_path)
    workload = config.workload.build(CPU)
    report = workload.reporter.final_report()
    policies = report.metrics["report"]["policies"]
    assert policies["trained"] == policies["base"]  # no checkpoint was loaded into this workload
    assert list(policies["trained"]["pass_at"]) == ["1", "2", "3"]
    assert sum(policies["trained"]["prompts_by_passed"]) == 5
    assert report.tables[0].title == "pass@k on 5 held-out prompts"
    report.images["eval.png"](tmp_path / "eval.png")
    assert (tmp_path / "eval.png").stat().st_size > 5000


def test_without_held_out_prompts_there_is_nothing_to_evaluate(folder):
    blind = chat_config(folder, data=replace(chat_config(folder).data, held_out="")).build(CPU)
    assert blind.num_held_out == 0
    assert blind.reporter.final_report() is None
    assert len(QUESTIONS) == blind.num_conditions
