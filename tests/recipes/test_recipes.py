"""Every recipe runs on 1, 2, 4 and 8 ranks without further flags, and the commands in their docstrings are right."""

import shlex
from importlib import import_module

import pytest

from groupwise.cli.arguments import read_config
from groupwise.core.shape import UNKNOWN_DATASET_SIZE
from groupwise.recipes import RECIPES, load_recipe


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("recipe", ["chat", "controller", "flow"])
def test_a_recipe_fits_any_number_of_ranks(recipe, ranks):
    config = load_recipe(recipe)
    shape = config.shape(conditions=UNKNOWN_DATASET_SIZE, ranks=ranks)
    assert shape.rollouts_per_rank * ranks == config.conditions_per_step * config.group_size
    assert shape.passes * shape.largest_pass >= shape.rollouts_per_rank


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_command_in_a_recipes_docstring_is_understood(recipe):
    docstring = import_module(f"groupwise.recipes.{recipe.replace('-', '_')}").__doc__
    for command in docstring.replace("\\\n", " ").splitlines():
        if "groupwise train" in command:
            named, *arguments = shlex.split(command.split("groupwise train")[1])
            assert named == recipe
            read_config("train", [named, *arguments], "")
