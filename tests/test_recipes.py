"""Recipes: named algorithms set defaults, which user values override."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megarl.config import Config, ConfigError, from_dict, load_config
from megarl.config.keys import KLConfig
from megarl.config.recipes import RECIPES, Recipe, apply_recipe
from megarl.controllers.controller import find_controller, load_requirements

pytestmark = pytest.mark.alone


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_recipe_has_a_controller_and_sets_existing_keys(name: str) -> None:
    config = from_dict({"algorithm": name})
    assert load_requirements(config).name == name and find_controller(name).__name__.endswith("Controller")
    for key, value in RECIPES[name].defaults.items():
        section, _, leaf = key.rpartition(".")
        assert getattr(getattr(config, section) if section else config, leaf) == value


def test_user_values_override_the_recipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(
        RECIPES, "mine", Recipe("no.such:Module", {"kl.apply_to": "loss", "kl.coef": 0.5, "loss.clip": 0.3})
    )
    config = from_dict({"algorithm": "mine", "kl": {"coef": 0.25}})
    assert (config.kl, config.loss.clip) == (KLConfig(apply_to="loss", coef=0.25), 0.3)
    path = tmp_path / "a.yaml"
    path.write_text("algorithm: ppo\nloss:\n  clip: 0.1\n")
    config = load_config(path, ["algorithm=mine", "kl.apply_to=none"])  # an override of `algorithm` selects its recipe
    assert (config.kl.apply_to, config.kl.coef, config.loss.clip) == ("none", 0.5, 0.1)
    assert from_dict({}) == Config()


def test_apply_recipe_leaves_its_input_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPES, "mine", Recipe("no.such:Module", {"kl.apply_to": "loss", "options": {"a": 1}}))
    tree = {"kl": {"coef": 0.25}}
    assert apply_recipe(tree, "mine") == {"kl": {"apply_to": "loss", "coef": 0.25}, "options": {"a": 1}}
    assert tree == {"kl": {"coef": 0.25}}
    with pytest.raises(ConfigError, match="^kl "):
        from_dict({"algorithm": "mine", "kl": 3})


def test_loads_the_recipe_of_a_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lab_recipes.py").write_text(
        "from megarl.config.recipes import GRPO, Recipe\nmine = Recipe(GRPO, {'advantage.norm_by_std': False})\n"
    )
    try:
        config = from_dict({"algorithm": "lab_recipes:mine"})
        assert config.advantage.norm_by_std is False and load_requirements(config).name == "lab_recipes:mine"
    finally:
        sys.modules.pop("lab_recipes", None)


def test_recipes_match_their_papers() -> None:
    """DAPO (arXiv:2503.14476), VAPO (arXiv:2504.05118), PF-PPO (arXiv:2409.06957), Dr. GRPO (arXiv:2503.20783)."""
    dapo, vapo, pf_ppo, dr_grpo = (from_dict({"algorithm": name}) for name in ("dapo", "vapo", "pf_ppo", "dr_grpo"))
    for item in (dapo, vapo):
        assert (item.loss.clip, item.loss.clip_high) == (0.2, 0.28)
        assert (item.loss.agg_mode, item.kl.apply_to) == ("token-mean", "none")
    result = find_controller("dapo").read_options(dapo)
    assert (result.max_num_gen_batches, result.overlong_buffer_len) == (10, None) and dapo.advantage.norm_by_std
    result = find_controller("vapo").read_options(vapo)
    assert (result.critic_lam, result.length_adaptive_alpha, result.positive_nll_coef) == (1.0, 0.05, 0.1)
    assert vapo.critic.warmup_steps == 50 and vapo.advantage.gamma == 1.0 and vapo.rollout.samples_per_prompt > 1
    result = find_controller("pf_ppo").read_options(pf_ppo)
    assert (result.drop_prob, result.buffer_size) == (0.8, 10_000)
    assert (dr_grpo.advantage.norm_by_std, dr_grpo.loss.agg_mode) == (False, "seq-mean-token-sum-norm")


@pytest.mark.parametrize("name", ["gspo", "cispo", "sapo", "gmpo", "clip_cov", "kl_cov"])
def test_loss_recipe_selects_its_loss(name: str) -> None:
    config = from_dict({"algorithm": name})
    if name == "clip_cov":  # the paper's loss is -A rho of what is not marked: no clip of 0.2, no dual clip of 3
        assert (config.loss.clip, config.loss.clip_high, config.loss.dual_clip) == (1.0, 100.0, None)
    assert config.loss.policy_loss == name and (config.loss.agg_mode == "seq-mean-token-mean") == (
        name in ("gspo", "sapo", "gmpo")
    )
