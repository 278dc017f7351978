"""Recipes: algorithms by name, each a controller with defaults for configuration keys.

`algorithm: dapo` in a configuration is enough to select one. Keys that the user sets override the recipe. A fork's
recipe is named by `module:name` or by an entry point in the group megarl.controllers; it is a `Recipe`, or a controller
without defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megarl.config import plugins
from megarl.config.strict import ConfigError, did_you_mean

ENTRY_POINT_GROUP = "megarl.controllers"
"""Entry point group of a fork's recipes and controllers."""


@dataclass(frozen=True)
class Recipe:
    controller: str | type
    """`module:name` of the class, or the class."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Default values of keys, as `section.key`."""


PPO = "megarl.controllers.ppo:PPOController"
GRPO = "megarl.controllers.grpo:GRPOController"
DPO = "megarl.controllers.dpo:DPOController"
DISTILL = "megarl.controllers.distill:DistillController"

_NO_KL = {"kl.apply_to": "none"}
_KL_LOSS = {"kl.apply_to": "loss"}
_GROUP = {"advantage.estimator": "grpo", "advantage.norm_by_std": True}
_CLIP_HIGHER = {"loss.clip": 0.2, "loss.clip_high": 0.28, "loss.agg_mode": "token-mean"}
_NO_REFERENCE = {"reference_free": True}
_GROUP_NO_KL = {**_NO_KL, **_GROUP}

RECIPES: dict[str, Recipe] = {
    # --- with a critic ---
    # arXiv:1707.06347, per token, with the KL in the reward as in arXiv:1909.08593.
    "ppo": Recipe(PPO),
    # arXiv:2504.05118: critic warm-up on full returns; a lambda that depends on the length.
    "vapo": Recipe(
        PPO,
        {
            **_NO_KL,
            **_CLIP_HIGHER,
            "options": {"critic_lam": 1.0, "length_adaptive_alpha": 0.05, "positive_nll_coef": 0.1},
            "critic.warmup_steps": 50,
        },
    ),
    # arXiv:2409.06957: filters for samples with a reliable reward, and buffers them.
    "pf_ppo": Recipe("megarl.controllers.pf_ppo:PFPPOController"),
    # --- relative to the other samples of the prompt ---
    # arXiv:2402.03300, with the KL in the loss (eq. 3). Its mean over sequences is `loss.agg_mode=seq-mean-token-mean`.
    "grpo": Recipe(GRPO, {**_KL_LOSS, **_GROUP}),
    # arXiv:2601.05242: each part of the reward is normalized on its own.
    "gdpo": Recipe(GRPO, {**_KL_LOSS, "advantage.estimator": "gdpo"}),
    # arXiv:2503.20783: no normalization by the group's deviation or by the response's length.
    "dr_grpo": Recipe(
        GRPO,
        {**_GROUP_NO_KL, "advantage.norm_by_std": False, "loss.agg_mode": "seq-mean-token-sum-norm"},
    ),
    # arXiv:2503.14476: clip-higher, dynamic sampling until the batch is full, token mean, overlong penalty.
    "dapo": Recipe("megarl.controllers.dapo:DAPOController", {**_GROUP_NO_KL, **_CLIP_HIGHER}),
    # arXiv:2402.14740: leave-one-out baseline; the KL is in the reward.
    "rloo": Recipe(GRPO, {"advantage.estimator": "rloo", "kl.apply_to": "reward"}),
    # arXiv:2501.03262: no group, the KL in the reward, normalized over the batch; the second has the group's mean as
    # baseline and the KL in the loss.
    "reinforce_pp": Recipe(GRPO, {"advantage.estimator": "reinforce_pp", "kl.apply_to": "reward"}),
    "reinforce_pp_baseline": Recipe(
        GRPO, {**_KL_LOSS, "advantage.estimator": "reinforce_pp_baseline", "kl.estimator": "k2"}
    ),
    # arXiv:2505.23585: on policy, length-weighted baseline, no KL, no entropy bonus.
    "opo": Recipe(GRPO, {**_NO_KL, "advantage.estimator": "opo"}),
    # arXiv:2310.10505: the greedy response's reward is the baseline.
    "remax": Recipe("megarl.controllers.remax:ReMaxController", {"kl.apply_to": "reward"}),
    # --- GRPO with another loss ---
    # arXiv:2507.18071, with its clip range, two orders of magnitude below that of token ratios.
    "gspo": Recipe(GRPO, {**_GROUP_NO_KL, "loss.policy_loss": "gspo", "loss.agg_mode": "seq-mean-token-mean"}),
    # arXiv:2506.13585.
    "cispo": Recipe(GRPO, {**_GROUP_NO_KL, "loss.policy_loss": "cispo", "loss.agg_mode": "token-mean"}),
    # arXiv:2511.20347.
    "sapo": Recipe(GRPO, {**_GROUP_NO_KL, "loss.policy_loss": "sapo", "loss.agg_mode": "seq-mean-token-mean"}),
    # arXiv:2507.20673.
    "gmpo": Recipe(GRPO, {**_GROUP_NO_KL, "loss.policy_loss": "gmpo", "loss.agg_mode": "seq-mean-token-mean"}),
    # arXiv:2505.22617. Neither loss has PPO's clip or a dual clip: Clip-Cov's clip range is as wide as the keys allow
    # (its authors' scripts bound the ratio by 2).
    "clip_cov": Recipe(
        GRPO,
        {
            **_GROUP_NO_KL,
            **{"loss.policy_loss": "clip_cov", "loss.clip": 1.0, "loss.clip_high": 100.0, "loss.dual_clip": None},
        },
    ),
    "kl_cov": Recipe(GRPO, {**_GROUP_NO_KL, "loss.policy_loss": "kl_cov"}),
    # --- without a reward ---
    # Reverse KL to the role `teacher`, in place of a KL to the reference.
    "distill": Recipe(DISTILL, _NO_KL),
    # arXiv:2601.18734: the teacher is the policy with its initial weights, which knows the reference answer.
    "self_distill": Recipe(
        DISTILL,
        {
            **_NO_KL,
            "options": {
                "teachers": {
                    "reference": {
                        "prompt": "{prompt}\n\nHere is the reference solution:\n{ground_truth}\n\n"
                        "Make sure that you understand it, then answer in your own words."
                    }
                }
            },
        },
    ),
    "sft": Recipe("megarl.controllers.sft:SFTController"),
    # arXiv:2203.02155, section 3.5.
    "reward_model": Recipe("megarl.controllers.reward_model:RewardModelController"),
    # --- on preference pairs ---
    # arXiv:2305.18290.
    "dpo": Recipe(DPO),
    # arXiv:2310.12036.
    "ipo": Recipe(DPO, {"options": {"loss": "ipo"}}),
    # arXiv:2405.14734, with the values of its published runs: beta 2, gamma half of it.
    "simpo": Recipe(DPO, {"options": {**_NO_REFERENCE, "length_normalized": True, "beta": 2.0, "target_margin": 1.0}}),
    # arXiv:2401.08417.
    "cpo": Recipe(DPO, {"options": {**_NO_REFERENCE, "sft_coef": 1.0}}),
    # arXiv:2403.07691; beta is the paper's lambda.
    "orpo": Recipe(
        DPO, {"options": {**_NO_REFERENCE, "loss": "orpo", "length_normalized": True, "beta": 0.1, "sft_coef": 1.0}}
    ),
    # --- without training ---
    # Generates, scores and records rollouts for a data set.
    "generate": Recipe("megarl.controllers.generate:GenerateController", {"run.export": False, "data.shuffle": False}),
}


def find_recipe(name: str) -> Recipe:
    """Return the recipe of an algorithm. Raises ConfigError if it is unknown or cannot be imported."""
    if name in RECIPES:
        return RECIPES[name]
    declared = plugins.list_entry_points(ENTRY_POINT_GROUP)
    if name in declared:
        target = plugins.load(declared[name].value, f"algorithm={name}")
    elif ":" in name:
        target = plugins.load(name, "algorithm")
    else:
        names = [*RECIPES, *declared]
        hint = did_you_mean(name, names)
        raise ConfigError(
            f"algorithm must be one of {', '.join(names)}, or module:name of a Controller, not {name[:200]!r}{hint}"
        )
    return target if isinstance(target, Recipe) else Recipe(target)


def apply_recipe(tree: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a copy of a configuration tree with the recipe's defaults for keys that it does not set."""
    merged = dict(tree)
    for key, value in find_recipe(name).defaults.items():
        section, _, leaf = key.rpartition(".")
        defaults = {leaf: value} if section else value
        section = section or leaf
        if not isinstance(defaults, Mapping):
            merged.setdefault(leaf, value)
        elif isinstance(user_values := merged.get(section) or {}, dict):  # `build_dataclass` rejects other types
            merged[section] = {**defaults, **user_values}
    return merged
