"""Every recipe runs on 1, 2, 4 and 8 ranks without further flags."""

import pytest

from groupwise.core.shape import UNKNOWN_DATASET_SIZE
from groupwise.recipes import load_recipe


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("recipe", ["chat", "controller", "flow"])
def test_a_recipe_fits_any_number_of_ranks(recipe, ranks):
    config = load_recipe(recipe)
    shape = config.shape(conditions=UNKNOWN_DATASET_SIZE, ranks=ranks)
    assert shape.rollouts_per_rank * ranks == config.conditions_per_step * config.group_size
    assert shape.passes * shape.largest_pass >= shape.rollouts_per_rank
