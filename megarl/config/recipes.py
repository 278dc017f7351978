"""Algorithms by name: a controller, and the values that make it that algorithm.

`algorithm: dapo` in a configuration is all that it takes. What a recipe sets is the default of these keys; what the
user sets wins. One of a fork is found by `module:name`, or by an entry point in the group megarl.controllers: a
`Recipe`, or a controller, whose recipe is that it sets nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megarl.config import plugins
from megarl.config.strict import ConfigError, closest_match

ENTRY_POINT_GROUP = "megarl.controllers"
"""Entry points of a fork's recipes and controllers."""


@dataclass(frozen=True)
class Recipe:
    controller: str | type
    """`module:name` of the class, or the class."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Keys as `section.key`, and what they are where the user says nothing."""


PPO = "megarl.controllers.ppo:PPOController"
GRPO = "megarl.controllers.grpo:GRPOController"

_NO_KL = {"kl.place": "none"}
_KL_LOSS = {"kl.place": "loss"}
_GROUP = {"advantage.kind": "group", "advantage.group_std": True}

RECIPES: dict[str, Recipe] = {
    # --- with a critic ---
    # arXiv:1707.06347, token by token, with the KL in the reward as in arXiv:1909.08593.
    "ppo": Recipe(PPO),
    # arXiv:2504.05118: a critic that is trained first, on whole returns; a lambda that follows the length.
    "vapo": Recipe(
        PPO,
        {
            **_NO_KL,
            "options": {"critic_lam": 1.0, "length_adaptive": 0.05, "positive_nll": 0.1},
            "loss.clip": 0.2,
            "loss.clip_high": 0.28,
            "loss.mean": "token",
            "critic.warmup_steps": 50,
        },
    ),
    # arXiv:2409.06957: the samples whose reward can be relied on, and a buffer of them.
    "pf_ppo": Recipe("megarl.controllers.pf_ppo:PFPPOController"),
    # --- against the other samples of the prompt ---
    # arXiv:2402.03300, with the KL in the loss (eq. 3). Its mean over sequences is `loss.mean=sequence`.
    "grpo": Recipe(GRPO, {**_KL_LOSS, **_GROUP}),
    # arXiv:2503.20783: without the two normalisations, by the group's deviation and by an answer's length.
    "dr_grpo": Recipe(
        GRPO, {**_NO_KL, "advantage.kind": "group", "advantage.group_std": False, "loss.mean": "constant"}
    ),
    # arXiv:2503.14476: clip-higher, sampling until the batch is full, token mean, a penalty of what is too long.
    "dapo": Recipe(
        "megarl.controllers.dapo:DAPOController",
        {**_NO_KL, **_GROUP, "loss.clip": 0.2, "loss.clip_high": 0.28, "loss.mean": "token"},
    ),
    # arXiv:2402.14740: the mean of the others is the baseline; the KL is in the reward.
    "rloo": Recipe(GRPO, {"advantage.kind": "rloo", "kl.place": "reward"}),
    # arXiv:2501.03262: no group, the KL in the reward, normalised over the batch; then with the group's mean as
    # baseline, and the KL in the loss.
    "reinforce_pp": Recipe(GRPO, {"advantage.kind": "reinforce", "kl.place": "reward"}),
    "reinforce_pp_baseline": Recipe(GRPO, {**_KL_LOSS, "advantage.kind": "reinforce_baseline", "kl.estimator": "k2"}),
    # arXiv:2505.23585: on policy, the baseline weighted by length, neither KL nor entropy.
    "opo": Recipe(GRPO, {**_NO_KL, "advantage.kind": "opo"}),
    # arXiv:2310.10505: against the greedy answer.
    "remax": Recipe("megarl.controllers.remax:ReMaxController", {"kl.place": "reward"}),
    # --- as GRPO, with another loss ---
    # arXiv:2507.18071, with its clip range, two orders of magnitude below that of tokens.
    "gspo": Recipe(GRPO, {**_NO_KL, **_GROUP, "loss.policy": "gspo", "loss.mean": "sequence"}),
    # arXiv:2506.13585.
    "cispo": Recipe(GRPO, {**_NO_KL, **_GROUP, "loss.policy": "cispo", "loss.mean": "token"}),
    # arXiv:2511.20347.
    "sapo": Recipe(GRPO, {**_NO_KL, **_GROUP, "loss.policy": "sapo", "loss.mean": "sequence"}),
    # arXiv:2507.20673.
    "gmpo": Recipe(GRPO, {**_NO_KL, **_GROUP, "loss.policy": "gmpo", "loss.mean": "sequence"}),
    # arXiv:2505.22617. Neither loss has PPO's clip or a dual clip: the range of Clip-Cov's ratio is opened as far as
    # the keys go (its authors' scripts bound it by 2).
    "clip_cov": Recipe(
        GRPO,
        {
            **_NO_KL,
            **_GROUP,
            "loss.policy": "clip_cov",
            "loss.clip": 1.0,
            "loss.clip_high": 100.0,
            "loss.dual_clip": None,
        },
    ),
    "kl_cov": Recipe(GRPO, {**_NO_KL, **_GROUP, "loss.policy": "kl_cov"}),
    # --- without a reward ---
    # Reverse KL to the role `teacher`, which is what holds the policy.
    "distill": Recipe("megarl.controllers.distill:DistillController", {"kl.place": "none"}),
    "sft": Recipe("megarl.controllers.sft:SFTController"),
    # arXiv:2203.02155, section 3.5.
    "reward_model": Recipe("megarl.controllers.reward_model:RewardModelController"),
    # --- nothing is trained ---
    # Rollouts of a data set, scored and recorded.
    "generate": Recipe("megarl.controllers.generate:GenerateController", {"run.export": False, "data.shuffle": False}),
}


def find_recipe(name: str) -> Recipe:
    """The recipe that `algorithm` names. Raises ConfigError for one that is not there or cannot be imported."""
    if name in RECIPES:
        return RECIPES[name]
    declared = plugins.list_entry_points(ENTRY_POINT_GROUP)
    if name in declared:
        found = plugins.load(declared[name].value, f"algorithm={name}")
    elif ":" in name:
        found = plugins.load(name, "algorithm")
    else:
        known = [*RECIPES, *declared]
        near = closest_match(name, known)
        hint = f"; did you mean {near}?" if near else ""
        raise ConfigError(
            f"algorithm must be one of {', '.join(known)}, or module:name of a Controller, not {name[:200]!r}{hint}"
        )
    return found if isinstance(found, Recipe) else Recipe(found)


def apply_recipe(tree: dict[str, Any], name: str) -> dict[str, Any]:
    """The tree of a configuration with what the recipe sets where it sets nothing; the given one stays as it is."""
    made = dict(tree)
    for key, value in find_recipe(name).defaults.items():
        section, _, leaf = key.rpartition(".")
        if not section and isinstance(value, Mapping):
            given = made.get(leaf) or {}
            made[leaf] = {**value, **given} if isinstance(given, dict) else given
        elif not section:
            made.setdefault(leaf, value)
        elif isinstance(
            given := made.get(section) or {}, dict
        ):  # else it is no section, which is said where it is read
            made[section] = {leaf: value, **given}
    return made
