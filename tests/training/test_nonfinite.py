"""A step with a number that is not finite leaves no trace in weights and optimizer, on any rank."""

import re
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from fakes import recipe as healthy_recipe
from faulty import LAST_CONDITION, FaultyConfig, recipe
from processes import on_ranks

import groupwise as gw
from groupwise.core.errors import UserError
from groupwise.core.io.files import read_jsonl
from groupwise.training.loop import train_step
from groupwise.training.nonfinite import NonfiniteError
from groupwise.training.run import train
from groupwise.training.setup import set_up

FAULTS = ("rollout logp", "reward nan", "reward inf", "logp", "reference", "gradient")
LOSSES = {"clipped": gw.LossConfig(kl=0.05), "ranking": gw.LossConfig(kind="ranking", kl=0.05)}


def faulty(fault, *, loss="clipped", first=2, last=2, updates=1, **run):
    config = recipe()
    return replace(
        config,
        workload=FaultyConfig(fault=fault, first_step=first, last_step=last),
        loss=LOSSES[loss],
        optimizer=replace(config.optimizer, updates_per_step=updates),
        run=replace(config.run, **run),
    )


def saved_state(setup):
    state = setup.state
    tensors = [*state.policy.state_dict().values(), *state.ema.weights.values()]
    moments = [value for entry in state.optimizer.state.values() for value in entry.values()]
    return deepcopy([*tensors, *moments, state.updates])


def are_equal(first, second):
    return len(first) == len(second) and all(
        torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_skipped_update_leaves_weights_and_optimizer_bit_equal(fault, loss):
    setup = set_up(faulty(fault, loss=loss, on_nonfinite="skip"))
    for step in range(4):
        before = saved_state(setup)
        result = train_step(setup)
        assert result.metrics["skipped_step"] == (step == 2)
        assert bool(result.skipped) == (step == 2)
        assert are_equal(before, saved_state(setup)) == (step == 2)
    assert setup.state.step == 4


@pytest.mark.parametrize("fault", ["logp", "gradient"])
def test_steps_after_a_skipped_one_are_those_of_a_run_that_never_saw_it(fault):
    """The random numbers of a step depend on (seed, step) alone, so only the weights could carry a trace."""
    struck, healthy = set_up(faulty(fault, on_nonfinite="skip")), set_up(faulty("", on_nonfinite="skip"))
    for step in range(4):
        train_step(struck)
        if step == 2:
            healthy.state.step += 1
        else:
            train_step(healthy)
    assert are_equal(saved_state(struck), saved_state(healthy))


def test_a_second_update_that_is_not_finite_keeps_the_first():
    setup = set_up(faulty("logp", updates=3, first=0, on_nonfinite="skip"))
    once = set_up(faulty("", updates=1, on_nonfinite="skip"))
    setup.workload.fault = replace(setup.workload.fault, first_step=9)
    score, calls = setup.workload.score, []

    def score_until_second_update(rollouts):
        calls.append(len(rollouts))
        if sum(calls) > 32:
            setup.workload.fault = replace(setup.workload.fault, first_step=0)
        return score(rollouts)

    setup.workload.score = score_until_second_update
    assert train_step(setup).skipped
    assert setup.state.updates == 1
    assert train_step(once).skipped == ""
    weights = (list(entry.state.policy.parameters()) for entry in (setup, once))
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


@pytest.mark.parametrize("fault", FAULTS)
def test_stop_saves_the_offending_groups_and_the_complete_steps(tmp_path, fault):
    config = faulty(fault, run_dir=tmp_path)
    with pytest.raises(UserError, match="--on-nonfinite skip leaves such steps out") as raised:
        train(config)
    assert "\n" not in str(raised.value)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]
    samples = read_jsonl(tmp_path / "nonfinite.jsonl")
    groups = {entry["group"] for entry in samples}
    assert len(samples) == 4 * len(groups) > 0
    if not fault.startswith("reward"):
        assert all(entry["condition"] < LAST_CONDITION for entry in samples)
    if fault == "rollout logp":
        assert {number for entry in samples for number in entry["logp"] if isinstance(number, str)} == {"-inf"}


def test_skipped_steps_are_counted_and_limited_in_a_row(tmp_path):
    with pytest.raises(NonfiniteError, match="3 steps in a row could not be trained, and --max-skipped is 2"):
        train(faulty("reward nan", first=1, last=5, on_nonfinite="skip", max_skipped=2, run_dir=tmp_path))
    assert [entry["skipped_step"] for entry in read_jsonl(tmp_path / "metrics.jsonl")] == [0, 1, 1]
    assert (tmp_path / "checkpoints" / "step-000003").is_dir()
    summary = train(faulty("reward nan", first=1, last=2, on_nonfinite="skip", max_skipped=2, run_dir=tmp_path / "2"))
    assert summary.steps == 6


def test_a_healthy_run_has_the_same_weights_under_both_policies(tmp_path):
    weights = []
    for policy in ("stop", "skip"):
        config = healthy_recipe()
        setup = set_up(replace(config, run=replace(config.run, on_nonfinite=policy)))
        train_step(setup)
        weights.append(saved_state(setup))
    assert are_equal(*weights)


def test_what_is_not_finite_on_one_rank_is_skipped_by_both(tmp_path):
    program = ["-m", "groupwise", "train", "faulty:recipe", "--run-dir", tmp_path, "--workload.fault", "gradient"]
    ended = on_ranks(2, [*program, "--workload.rank", "1", "--on-nonfinite", "skip"])
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert [entry["skipped_step"] for entry in read_jsonl(tmp_path / "metrics.jsonl")] == [0, 0, 1, 0, 0, 0]
    assert "Step 3 is skipped: The gradient of step 2 is not finite" in ended.stderr
    ends = re.findall(r"weights after 6 rollouts: (\w+)", ended.stderr)
    assert len(ends) == 2
    assert len(set(ends)) == 1, "the ranks have different weights"


@pytest.mark.slow
def test_what_is_not_finite_on_one_rank_stops_both_with_one_paragraph(tmp_path):
    program = ["-m", "groupwise", "train", "faulty:recipe", "--run-dir", tmp_path, "--workload.fault", "logp"]
    ended = on_ranks(2, [*program, "--workload.rank", "1"])
    for rank in (0, 1):
        assert f"groupwise (rank {rank}): The loss of step 2 is not finite" in ended.stderr
    assert "groupwise/training" not in ended.stderr  # no frame of ours
    assert (tmp_path / "checkpoints" / "step-000002").is_dir()
    assert read_jsonl(tmp_path / "nonfinite.jsonl")
