"""Every embedded recipe runs on any number of ranks that divides its conditions, without further flags."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ENVIRONMENT

WORKER = Path(__file__).parent / "recipes_worker.py"
RANKS = (1, 2, 4, 8)


@pytest.fixture(scope="module")
def first_steps(tmp_path_factory):
    """The metrics of the first step by number of ranks and recipe."""
    folder = tmp_path_factory.mktemp("recipes")
    program = [sys.executable, WORKER, folder, *map(str, RANKS)]
    ended = subprocess.run(program, env=ENVIRONMENT, capture_output=True, text=True, timeout=170, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return {ranks: json.loads((folder / f"{ranks}.json").read_text()) for ranks in RANKS}


@pytest.mark.parametrize("ranks", RANKS[1:])
@pytest.mark.parametrize("recipe", ["chat", "controller", "flow"])
def test_a_recipe_trains_in_its_default_shape_on_several_ranks_with_the_same_result(first_steps, recipe, ranks):
    alone, together = first_steps[1][recipe], first_steps[ranks][recipe]
    assert alone["trained_rollouts"] > 0
    for name in ("trained_rollouts", "rows_per_pass", "zero_spread_share", "missing_rewards"):
        assert together[name] == alone[name], name
    assert together["reward"] == pytest.approx(alone["reward"], abs=1e-4)
    assert together["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-2)
