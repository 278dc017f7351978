"""Algorithms by name: what a recipe sets is the default, what the user sets wins."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megarl.config import Config, ConfigError, from_dict, load_config
from megarl.config.learning import KLConfig
from megarl.controllers.registry import declare, find_controller
from megarl.recipes import RECIPES, Recipe, with_recipe


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_recipe_is_a_whole_controller_and_sets_keys_that_are_there(name: str) -> None:
    config = from_dict({"algorithm": name})
    assert declare(config).name == name and find_controller(name).__name__.endswith("Controller")
    for key, value in RECIPES[name].values.items():
        section, _, leaf = key.rpartition(".")
        assert getattr(getattr(config, section) if section else config, leaf) == value


def test_what_the_user_sets_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(
        RECIPES, "mine", Recipe("no.such:Module", {"kl.place": "loss", "kl.coef": 0.5, "loss.clip": 0.3})
    )
    config = from_dict({"algorithm": "mine", "kl": {"coef": 0.25}})
    assert (config.kl, config.loss.clip) == (KLConfig(place="loss", coef=0.25), 0.3)
    path = tmp_path / "a.yaml"
    path.write_text("algorithm: ppo\nloss:\n  clip: 0.1\n")
    config = load_config(path, ["algorithm=mine", "kl.place=none"])  # an override of the name brings its recipe
    assert (config.kl.place, config.kl.coef, config.loss.clip) == ("none", 0.5, 0.1)
    assert from_dict({}) == Config()


def test_the_given_tree_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPES, "mine", Recipe("no.such:Module", {"kl.place": "loss", "options": {"a": 1}}))
    tree = {"kl": {"coef": 0.25}}
    assert with_recipe(tree, "mine") == {"kl": {"place": "loss", "coef": 0.25}, "options": {"a": 1}}
    assert tree == {"kl": {"coef": 0.25}}
    with pytest.raises(ConfigError, match="^kl "):
        from_dict({"algorithm": "mine", "kl": 3})


def test_a_fork_has_recipes_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lab_recipes.py").write_text(
        "from megarl.recipes import GRPO, Recipe\nmine = Recipe(GRPO, {'advantage.group_std': False})\n"
    )
    try:
        config = from_dict({"algorithm": "lab_recipes:mine"})
        assert config.advantage.group_std is False and declare(config).name == "lab_recipes:mine"
    finally:
        sys.modules.pop("lab_recipes", None)
