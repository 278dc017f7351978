"""A controller that trains STEPS steps with each recipe in turn, on the same engine and models."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from megarl.config import Config, from_dict, to_dict
from megarl.config.recipes import RECIPES
from megarl.controllers.controller import StepResult, make_controller
from megarl.controllers.policy_gradient import PolicyController
from megarl.types import Prompt

STEPS = 2
"""Steps per recipe."""


def recipe_names() -> list[str]:
    """Return the recipes that train on prompts with no roles beyond actor, critic, reference, rollout and reward."""
    from megarl.controllers.controller import load_requirements

    role_names = {"rollout", "actor", "critic", "reference", "reward"}
    requirements = {name: load_requirements(from_dict({"algorithm": name})) for name in RECIPES}
    return [
        name
        for name, metrics_of in requirements.items()
        if metrics_of.item == "prompts" and metrics_of.trained_roles and set(metrics_of.roles) <= role_names
    ]


class EveryAlgorithm(PolicyController):
    trained_roles = ("actor", "critic")

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        tree = {name: value for name, value in to_dict(config).items() if name in ("run", "rollout", "data", "train")}
        local = {"dapo": {"max_num_gen_batches": 2}}
        short = {"critic": {"warmup_steps": 0}}
        self.controllers = [
            make_controller(from_dict({**tree, **short, "algorithm": name, "options": local.get(name, {})}))
            for name in recipe_names()
        ]
        self.num_steps = 0

    @classmethod
    def roles(cls, config: Config) -> tuple[str, ...]:
        return ("rollout", "actor", "reference", "critic", "reward")

    def step(self, flow: Any, items: Sequence[Prompt]) -> StepResult:
        controller = self.controllers[self.num_steps // STEPS]
        self.num_steps += 1
        result = controller.step(flow, items)
        return dataclasses.replace(result, metrics={**result.metrics, "recipe": float((self.num_steps - 1) // STEPS)})

    def state_dict(self) -> dict[str, Any]:
        return {
            "num_steps": self.num_steps,
            "controllers": [metrics_of.state_dict() for metrics_of in self.controllers],
        }
