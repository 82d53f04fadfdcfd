"""How often the host waits for the device in each stage of a training step, by recipe: one more wait fails here."""

from collections import Counter

import pytest

from accelerator.steps import RECIPES, small_recipe
from groupwise.training import loop
from groupwise.training.setup import set_up
from groupwise.workloads.chat.config import STOP_CHECK_STEPS

STAGES = {"generate_rollouts": "rollout", "compute_rewards": "reward", "update": "update"}
OTHERS = 2
"""Waits outside of the stages: two numbers where a workload describes its rollouts."""
IN_REWARD = {"doors": 2, "chat": 1, "flow": 5, "flow-image": 2, "controller": 1}
"""The end of the stage, and what judges read: an answer, or latents (whose decoder has three tables on the host)."""
BLOCKS_BEFORE_INSERTION = 5


@pytest.fixture
def waits(counters, monkeypatch):
    """Waits and results of each stage of the next steps."""
    counted: Counter[str] = Counter()
    results: dict[str, object] = {}

    def count(name: str, stage: str) -> None:
        function = getattr(loop, name)

        def called(*arguments):
            before = counters.counters()["host_syncs"]
            results[stage] = function(*arguments)
            counted[stage] += counters.counters()["host_syncs"] - before
            return results[stage]

        monkeypatch.setattr(loop, name, called)

    for name, stage in STAGES.items():
        count(name, stage)
    return counted, results


def allowed_in_rollout(name: str, setup, rollouts, prefix_passes: int) -> int:
    """Besides the end of the stage."""
    if name == "doors":  # random numbers and doors are tensors of the host
        return 3
    if name == "chat":  # the first tokens, a look at stop tokens in every block of steps, ids and log-probs at the end
        return 1 + -(-rollouts.logp.shape[1] // STOP_CHECK_STEPS) + 2
    if name == "controller":  # four decisions and new questions a pass; each new question's blocks, and their result
        return 5 * setup.shape.passes + (BLOCKS_BEFORE_INSERTION + 1) * prefix_passes
    return 0  # a flow model waits in no denoising step


def allowed_in_update(name: str, passes: int) -> int:
    """One wait a pass, the end of the stage, the norms of gradient and weights; where rows are, a check and a mask."""
    return passes + (3 if name == "chat" else 5)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ("doors", "chat") else pytest.mark.device) for n in RECIPES]
)
def test_a_step_waits_no_more_often_than_it_must(device, counters, waits, monkeypatch, name):
    (counted, results), setup = waits, set_up(small_recipe(name, device=device.type))
    prefix_passes: Counter[str] = Counter()
    if name == "controller":
        executor = setup.workload.task.executor
        run_prefix = executor.run_prefix
        counting = lambda *rows, **named: prefix_passes.update(["run"]) or run_prefix(*rows, **named)  # noqa: E731
        monkeypatch.setattr(executor, "run_prefix", counting)
    loop.train_step(setup)
    counted.clear()
    prefix_passes.clear()
    counters.reset_counters()
    metrics = loop.train_step(setup).metrics
    assert counted["rollout"] <= 1 + allowed_in_rollout(name, setup, results["rollout"], prefix_passes.total())
    assert counted["reward"] <= IN_REWARD[name]
    assert counted["update"] <= allowed_in_update(name, setup.shape.passes)
    assert counters.counters()["host_syncs"] <= counted.total() + OTHERS
    assert metrics["host_syncs"] <= counters.counters()["host_syncs"]
