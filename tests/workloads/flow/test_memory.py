"""An out-of-memory error while clips are decoded or rewarded changes the batch size, not the result."""

from dataclasses import dataclass, replace

import pytest
import torch
from safetensors.torch import load_file
from tiny.pixel_clips import PixelClipModel
from torch.testing import assert_close

import groupwise as gw
from groupwise.core.io.files import read_jsonl
from workloads.flow.small import SmallConfig, recipe


def limit_memory(rows: int, max_rows: int) -> None:
    if rows > max_rows:
        raise torch.OutOfMemoryError(f"CUDA out of memory. {rows} clips are {rows - max_rows} too many.")


class LargeDecoder(PixelClipModel):
    """Its decoder has memory for two clips."""

    max_rows = 2

    def decode(self, latents):
        limit_memory(len(latents), self.max_rows)
        return super().decode(latents)


@dataclass(frozen=True)
class LargeConfig(SmallConfig):
    max_rewarded: int = 1000
    """Clips that the reward has memory for."""

    def task(self, device):
        task = super().task(device)
        warmth = task.rewards["warmth"]

        def large_reward(prompts, completions, **columns):
            limit_memory(len(completions), self.max_rewarded)
            return warmth(prompts, completions, **columns)

        rewards = {**task.rewards, "warmth": large_reward}
        return replace(task, model=LargeDecoder(task.model.policy), rewards=rewards, held_out=[])


def run_of(folder, workload):
    config = replace(recipe(), workload=workload, steps=2)
    gw.train(replace(config, run=replace(config.run, run_dir=folder, preflight=False)))
    return read_jsonl(folder / "metrics.jsonl"), load_file(
        folder / "checkpoints" / "step-000002" / "policy.safetensors"
    )


@pytest.fixture(scope="module")
def unlimited(tmp_path_factory):
    return run_of(tmp_path_factory.mktemp("unlimited"), SmallConfig(reference=True))


@pytest.mark.parametrize("step_rewards", [False, True])
def test_fewer_clips_are_decoded_at_a_time(tmp_path, unlimited, step_rewards):
    metrics, weights = run_of(tmp_path, LargeConfig(reference=True, encode_rows=8, step_rewards=step_rewards))
    assert [entry["oom_retries"] for entry in metrics] == [2, 0]
    assert [entry["encode_rows"] for entry in metrics] == [2, 2]
    assert {entry["rows_per_pass"] for entry in metrics} == {4}
    assert "reward_rows" not in metrics[0]
    if not step_rewards:
        assert [entry["reward"] for entry in metrics] == pytest.approx([entry["reward"] for entry in unlimited[0]])
        for name, weight in weights.items():
            assert_close(weight, unlimited[1][name], rtol=0, atol=1e-5)


def test_then_fewer_groups_are_rewarded_at_a_time(tmp_path, unlimited):
    metrics, weights = run_of(tmp_path, LargeConfig(reference=True, encode_rows=2, max_rewarded=4))
    # 2 -> 1 in vain, then 16 -> 8 -> 4: one group
    assert [entry["oom_retries"] for entry in metrics] == [3, 0]
    assert [(entry["encode_rows"], entry["reward_rows"]) for entry in metrics] == [(1, 4)] * 2
    for name, weight in weights.items():
        assert_close(weight, unlimited[1][name], rtol=0, atol=1e-5)


def test_a_reward_that_never_fits_stops_the_run_with_advice(tmp_path):
    with pytest.raises(gw.UserError, match="Out of memory in reward with reward_rows 1, which cannot be halved"):
        run_of(tmp_path, LargeConfig(max_rewarded=0))
