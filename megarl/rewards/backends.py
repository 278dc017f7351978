"""What is to be said of the reward role's settings before anything starts."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from megarl.config import Config, ConfigError
from megarl.parallel.roles import MEGATRON, role_settings
from megarl.rewards import by_environment, judge, service
from megarl.rewards.classifier import ClassifierOptions
from megarl.rewards.functions import load_functions
from megarl.rewards.fusion import checked_weights
from megarl.rewards.judge import JudgeOptions
from megarl.rewards.service import ServiceOptions
from megarl.types.declared import Declared


def check_reward(config: Config, declared: Declared, options: dict[str, Any]) -> None:
    """Raise ConfigError where nothing would reward anything, or a backend and its options do not go together.

    options: of the role's worker, one of ours; `reward_fn` may be among them.
    """
    functions, model = list(load_functions(config.reward.functions)), config.reward.model
    backend = role_settings(config, "reward").backend or MEGATRON
    rest = {name: value for name, value in options.items() if name != "reward_fn"}
    if backend in (MEGATRON, "pool") and rest:
        raise ConfigError(f"roles.reward.options.{min(rest)}: the backend {backend} takes no options; leave it out")
    if backend == "http":
        ServiceOptions.read(rest)
    if backend == "judge":
        JudgeOptions.read(rest)
    if backend == "transformers":
        ClassifierOptions.read(rest)
        if not model:
            raise ConfigError("roles.reward.backend=transformers needs reward.model, the folder of a classifier")
    if backend in ("http", "judge", "pool") and model:
        raise ConfigError(
            f"reward.model={model} with roles.reward.backend={backend}, which has no model: leave one of them out"
        )
    others = bool(functions or model or "reward_fn" in options or backend in ("http", "judge"))
    played = by_environment.is_part(config.rollout, others)
    if not others and not played:
        raise ConfigError(
            f"reward.functions is empty; {declared.name} needs at least one, such as megarl.rewards.gsm8k:gsm8k, or "
            "reward.model, or what answers elsewhere, roles.reward.backend=http or judge, or rollout.environments"
        )
    given = options.get("reward_fn")
    parts = functions if given is None else [getattr(given, "__name__", "reward_fn")]
    further = {"http": [service.PART], "judge": [judge.PART]}.get(backend, ["model"] if model else [])
    further += [by_environment.PART] if played else []
    check_names(parts, further)
    checked_weights(config.reward.weights, [*parts, *further])


def check_names(functions: Collection[str], others: Collection[str]) -> None:
    """Raise ConfigError for a reward function that is called like another part of the reward."""
    for name in others:
        if name in functions:
            raise ConfigError(f"a reward function may not be called {name!r}, which is another part; rename it")
