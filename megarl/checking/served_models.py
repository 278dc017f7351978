"""Models that a configuration names and that are not trained: reward models, teachers, those of a fork's roles.

Pure, like `named_models.py`: they are looked at where they lie, and what they need is worked out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from megarl.checking.named_models import check_positions, check_same_tokenizer, folder_config, whole_folder
from megarl.checkpoint.hf import open_hf
from megarl.config import Config, ConfigError
from megarl.models.classifier import VALUE_HEAD, is_classifier
from megarl.models.family import HFConfig
from megarl.models.memory import ServedStage, served_stages, served_whole
from megarl.models.registry import param_count
from megarl.parallel.placement import role_config
from megarl.parallel.roles import OURS, backends_of, on_megatron, role_settings
from megarl.rewards.backends import options_for_model
from megarl.rewards.classifier import ClassifierOptions, label_of, positions
from megarl.types.declared import Declared
from megarl.workers.registry import TEACHER, Registered, options_of, who_plays


@dataclass(frozen=True)
class Served:
    laid_out: Mapping[str, HFConfig]
    """config.json of those that Megatron computes, by role."""
    judge: tuple[HFConfig, int, str] | None
    """Of the reward model that transformers computes: config.json, the number of its elements, their type."""

    @property
    def roles(self) -> tuple[str, ...]:
        return (*self.laid_out, *(("reward",) if self.judge else ()))

    def elements(self, role: str) -> int:
        """Of a language model, whatever its head."""
        return (
            sum(param_count(self.laid_out[role]).values()) if role in self.laid_out or not self.judge else self.judge[1]
        )

    def stages(self, config: Config, declared: Declared) -> dict[str, list[ServedStage]]:
        """By role, what a rank of each pipeline stage needs. Raises ConfigError where the layout does not divide."""
        found = {}
        for role, hf in self.laid_out.items():
            head = role == "reward" or is_classifier(hf)
            dtype: str = "float32" if role == "reward" else config.model.dtype
            found[role] = served_stages(hf, role_config(config, role), declared, head, dtype)
        if self.judge:
            found["reward"] = served_whole(*self.judge, config)
        return found


def served_models(
    hf: HFConfig,
    config: Config,
    declared: Declared,
    registered: Mapping[str, Registered],
    judged: bool,
    dry_run: bool,
    warnings: list[str],
) -> Served:
    """All of them. hf: the policy's. judged: whether one of our workers rewards, with options that it has. Raises
    ConfigError; `warnings` gets a line for what is surely not meant."""

    def of(role: str) -> Registered:
        return registered.get(role, Registered())

    judge = None
    if judged:
        judge = _classifier(hf, config, options_of(config, "reward", of("reward")), dry_run, warnings)
    rewards = _reward_model(hf, config, declared, dry_run, warnings)
    teachers = [role for role in declared.roles if who_plays(config, declared, role, of(role)) == TEACHER]
    others = _of_roles(hf, config, declared, teachers, dry_run, warnings)
    return Served(({} if rewards is None else {"reward": rewards}) | others, judge)


def _reward_model(
    hf: HFConfig, config: Config, declared: Declared, dry_run: bool, warnings: list[str]
) -> HFConfig | None:
    """config.json of the reward model that serves on Megatron; None where there is none. It reads the policy's token
    ids."""
    path = config.reward.model
    if not path:
        return None
    if "reward" not in declared.roles:
        warnings.append(f"reward.model is set, but {declared.name} has no rollouts to score")
        return None
    if not on_megatron(config, "reward"):
        return None
    if dry_run and not Path(path).exists():
        warnings.append(f"reward.model={path} is not here; planned as if it were the policy's model")
        return hf
    found = whole_folder(path, "reward.model", head=True)
    if VALUE_HEAD not in open_hf(path).names():
        raise ConfigError(
            f"reward.model={path} has no {VALUE_HEAD}: it is no reward model; train one with algorithm=reward_model"
        )
    must = "the reward model reads the policy's tokens, so it must have its tokenizer and vocabulary"
    if found.get("vocab_size") != hf.get("vocab_size"):
        raise ConfigError(
            f"reward.model={path} has a vocabulary of {found.get('vocab_size')}, the policy of "
            f"{hf.get('vocab_size')}; {must}"
        )
    check_same_tokenizer(config, f"reward.model={path}", path, must)
    check_positions(found, config, f"reward.model={path}")
    return found


def _classifier(
    hf: HFConfig, config: Config, given: dict[str, Any], dry_run: bool, warnings: list[str]
) -> tuple[HFConfig, int, str] | None:
    """As `Served.judge`. It may have a tokenizer of its own. given: options of its worker."""
    path = config.reward.model
    model, service = backends_of(config, "reward")
    if not path or model != "transformers":
        return None
    options = ClassifierOptions.read(options_for_model(given, service))
    if dry_run and not Path(path).exists():
        warnings.append(f"reward.model={path} is not here; planned as if it were the policy's model")
        return hf, sum(param_count(hf).values()), options.dtype
    found = folder_config(path, "reward.model")
    label_of(found, options, path)
    if not list(Path(path).glob("tokenizer*")) and not (Path(path) / "vocab.txt").is_file():
        raise ConfigError(f"reward.model={path} has no tokenizer; put tokenizer.json beside config.json")
    longest = positions(found, config.rollout.max_context)
    if longest < config.rollout.max_context and options.longer == "stop":
        warnings.append(
            f"rollout.max_context={config.rollout.max_context} is beyond the {longest} positions of "
            f"reward.model={path}: a longer conversation ends the run, or is cut with roles.reward.options.longer=cut"
        )
    weights = open_hf(path)
    return found, sum(prod(weights.shape(name)) for name in weights.names()), options.dtype


def _of_roles(
    hf: HFConfig, config: Config, declared: Declared, teachers: Collection[str], dry_run: bool, warnings: list[str]
) -> dict[str, HFConfig]:
    """config.json of the models that `roles` names, by role, of those that Megatron computes: they read the policy's
    token ids. teachers: roles whose models say log-probs of words."""
    warnings += [
        f"roles.{role} is set, but {declared.name} has no {role}" for role in config.roles if role not in declared.roles
    ]
    found: dict[str, HFConfig] = {}
    for role in declared.roles:
        path, key = role_settings(config, role).model, f"roles.{role}.model"
        if role in OURS:
            continue
        if not path:
            if role in teachers:
                raise ConfigError(f"{key} is not set; it must name the HF folder of the {role}")
            continue
        if dry_run and not Path(path).exists():
            warnings.append(f"{key}={path} is not here; planned as if it were the policy's model")
            found |= {role: hf} if on_megatron(config, role) else {}
            continue
        if not on_megatron(config, role):
            folder_config(path, key)
            continue
        found[role] = whole_folder(path, key, head=False)
        if role in teachers and is_classifier(found[role]):
            raise ConfigError(
                f"{key}={path} is a classifier, {found[role]['architectures'][0]}, which has no log-probs of words"
            )
        must = f"the {role} reads the policy's tokens, so it must have its tokenizer, and at least as many words"
        if int(found[role]["vocab_size"]) < int(hf["vocab_size"]):
            raise ConfigError(
                f"{key}={path} has a vocabulary of {found[role]['vocab_size']}, the policy of {hf['vocab_size']}; "
                f"{must}"
            )
        check_same_tokenizer(config, f"{key}={path}", path, must)
        if declared.generates:
            check_positions(found[role], config, f"{key}={path}")
    return found
