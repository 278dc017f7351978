"""Algorithms by name: a controller, and the values that make it that algorithm.

`algorithm: dapo` in a configuration is all that it takes. What a recipe sets is the default of these keys; what the
user sets wins. One of a fork is found by `module:name`, or by an entry point in the group megarl.controllers: a
`Recipe`, or a controller, whose recipe is that it sets nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megarl import forks
from megarl.strict import ConfigError

GROUP = "megarl.controllers"
"""Entry points of a fork's recipes and controllers."""


@dataclass(frozen=True)
class Recipe:
    controller: str | type
    """`module:name` of the class, or the class."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Keys as `section.key`, and what they are where the user says nothing."""


PPO = "megarl.controllers.ppo:PPOController"
GRPO = "megarl.controllers.grpo:GRPOController"

RECIPES: dict[str, Recipe] = {
    # arXiv:1707.06347, token by token, with the KL in the reward as in arXiv:1909.08593.
    "ppo": Recipe(PPO),
    # arXiv:2402.03300.
    "grpo": Recipe(GRPO),
    "sft": Recipe("megarl.controllers.sft:SFTController"),
    "reward_model": Recipe("megarl.controllers.reward_model:RewardModelController"),
    # Reverse KL to the role `teacher`, which is what holds the policy.
    "distill": Recipe("megarl.controllers.distill:DistillController", {"kl.place": "none"}),
}


def find_recipe(name: str) -> Recipe:
    """The recipe that `algorithm` names. Raises ConfigError for one that is not there or cannot be imported."""
    if name in RECIPES:
        return RECIPES[name]
    declared = forks.entries(GROUP)
    if name in declared:
        found = forks.load(declared[name].value, f"algorithm={name}")
    elif ":" in name:
        found = forks.load(name, "algorithm")
    else:
        known = [*RECIPES, *declared]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"algorithm must be one of {', '.join(known)}, or module:name of a Controller, not {name[:200]!r}{hint}"
        )
    return found if isinstance(found, Recipe) else Recipe(found)


def with_recipe(tree: dict[str, Any], name: str) -> dict[str, Any]:
    """The tree of a configuration with what the recipe sets where it sets nothing; the given one stays as it is."""
    made = dict(tree)
    for key, value in find_recipe(name).values.items():
        section, _, leaf = key.rpartition(".")
        if not section:
            made.setdefault(leaf, value)
        elif isinstance(
            given := made.get(section) or {}, dict
        ):  # else it is no section, which is said where it is read
            made[section] = {leaf: value, **given}
    return made
