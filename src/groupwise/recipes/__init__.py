"""Built-in recipes by name. A recipe is a function without arguments that returns a full Config."""

from __future__ import annotations

import dataclasses
from difflib import get_close_matches
from pathlib import Path

from groupwise.core.errors import UserError
from groupwise.core.io.imports import import_object, user_code
from groupwise.training.config import Config

RECIPES: dict[str, str] = {
    "chat": "groupwise.recipes.chat:recipe",
    "chat-gsm8k": "groupwise.recipes.chat_gsm8k:recipe",
    "controller": "groupwise.recipes.controller:recipe",
    "controller-molmoe": "groupwise.recipes.controller_molmoe:recipe",
    "flow": "groupwise.recipes.flow:recipe",
    "flow-flux": "groupwise.recipes.flow_flux:recipe",
    "flow-image": "groupwise.recipes.flow_image:recipe",
    "flow-qwen-image": "groupwise.recipes.flow_qwen_image:recipe",
    "flow-recam": "groupwise.recipes.flow_recam:recipe",
    "flow-sd3": "groupwise.recipes.flow_sd3:recipe",
    "flow-wan": "groupwise.recipes.flow_wan:recipe",
}
"""Built-in recipes: name to `module:function`. Strings, so that a recipe is imported only when it is used."""

RECIPE_NAMING_HELP = (
    "A recipe is a built-in name, a file of yours such as examples/doors.py (its function `recipe`, or another one as"
    " file.py:function), or module:function."
)


def load_recipe(name: str) -> Config:
    """The config of a recipe, with the recipe's name and, unless it sets one, a run folder of that name."""
    spec = RECIPES.get(name, name)
    file, _, function_name = spec.partition(":")
    is_file = file.endswith(".py")
    if ":" not in spec and not is_file:
        close = get_close_matches(name, RECIPES, n=1)
        hint = f" Did you mean '{close[0]}'?" if close else ""
        raise UserError(f"There is no recipe '{name}'.{hint} Built-in: {', '.join(RECIPES)}. {RECIPE_NAMING_HELP}")
    try:
        function = import_object(spec, "Recipe", default_name="recipe")
    except UserError as error:
        raise UserError(f"{error} {RECIPE_NAMING_HELP}") from error
    with user_code(f"Recipe '{name}'"):
        config = function()
    if not isinstance(config, Config):
        raise UserError(f"Recipe '{name}' returned {type(config).__name__}: it must return a groupwise.Config.")
    run_dir = config.run.run_dir or Path("runs") / Path(name.partition(":")[0].removesuffix(".py")).name
    if is_file:  # an absolute path, so that the run can be continued from any folder
        name = ":".join([str(Path(file).resolve()), *filter(None, [function_name])])
    return dataclasses.replace(config, recipe=name, run=dataclasses.replace(config.run, run_dir=run_dir))
