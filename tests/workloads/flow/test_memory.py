"""An out-of-memory error while clips are decoded or rewarded changes the batch size, not the result."""

from dataclasses import dataclass, replace

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

import groupwise as gw
from groupwise.training.run_folder import read_jsonl
from groupwise.workloads.flow.tasks.plane.model import PlaneModel
from workloads.flow.small import SmallConfig, recipe


def short_of_memory(rows: int, most: int) -> None:
    if rows > most:
        raise torch.OutOfMemoryError(f"CUDA out of memory. {rows} clips are {rows - most} too many.")


class LargeDecoder(PlaneModel):
    """Its decoder has room for so many clips."""

    most = 2

    def decode(self, latents):
        short_of_memory(len(latents), self.most)
        return super().decode(latents)


@dataclass(frozen=True)
class LargeConfig(SmallConfig):
    judged: int = 1000
    """Clips that the judge has room for."""

    def task(self, device):
        task = super().task(device)
        warmth = task.rewards["warmth"]

        def large_judge(prompts, completions, **columns):
            short_of_memory(len(completions), self.judged)
            return warmth(prompts, completions, **columns)

        rewards = {**task.rewards, "warmth": large_judge}
        return replace(task, model=LargeDecoder(task.model.policy), rewards=rewards, held_out=[])


def run_of(folder, workload):
    config = replace(recipe(), workload=workload, steps=2)
    gw.train(replace(config, run=replace(config.run, run_dir=folder, preflight=False)))
    return read_jsonl(folder / "metrics.jsonl"), load_file(
        folder / "checkpoints" / "step-000002" / "policy.safetensors"
    )


@pytest.fixture(scope="module")
def plenty(tmp_path_factory):
    return run_of(tmp_path_factory.mktemp("plenty"), SmallConfig(reference=True))


@pytest.mark.parametrize("step_rewards", [False, True])
def test_fewer_clips_are_decoded_at_a_time(tmp_path, plenty, step_rewards):
    metrics, weights = run_of(tmp_path, LargeConfig(reference=True, encode_rows_per_pass=8, step_rewards=step_rewards))
    assert [entry["out_of_memory"] for entry in metrics] == [2, 0]
    assert [entry["rows_per_reward_pass"] for entry in metrics] == [2, 2]
    assert {entry["rows_per_pass"] for entry in metrics} == {4}
    assert "reward_rows" not in metrics[0]
    if not step_rewards:
        assert [entry["reward"] for entry in metrics] == pytest.approx([entry["reward"] for entry in plenty[0]])
        for name, weight in weights.items():
            assert_close(weight, plenty[1][name], rtol=0, atol=1e-5)


def test_then_fewer_groups_are_judged_at_a_time(tmp_path, plenty):
    metrics, weights = run_of(tmp_path, LargeConfig(reference=True, encode_rows_per_pass=2, judged=4))
    # 2 -> 1 in vain, then 16 -> 8 -> 4: one group
    assert [entry["out_of_memory"] for entry in metrics] == [3, 0]
    assert [(entry["rows_per_reward_pass"], entry["reward_rows"]) for entry in metrics] == [(1, 4)] * 2
    for name, weight in weights.items():
        assert_close(weight, plenty[1][name], rtol=0, atol=1e-5)


def test_a_judge_that_never_has_room_stops_the_run_with_advice(tmp_path):
    with pytest.raises(gw.UserError, match="Out of memory in reward with reward_rows 1, and there are no smaller"):
        run_of(tmp_path, LargeConfig(judged=0))
