"""What is to be said of the reward role's settings before anything starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from megarl.config import Config, ConfigError
from megarl.parallel.role_settings import MEGATRON, role_backends
from megarl.rewards import composite, judge, service
from megarl.rewards.composite import check_weights
from megarl.rewards.functions import load_functions
from megarl.rewards.judge import Judge, JudgeOptions
from megarl.rewards.sequence_classifier import ClassifierOptions
from megarl.rewards.service import Service, ServiceOptions
from megarl.types.requirements import Requirements

_OF_SERVICE = {"http": ServiceOptions, "judge": JudgeOptions}
PARTS = {"http": service.PART, "judge": judge.PART}


def options_for_model(options: Mapping[str, Any], service: str) -> dict[str, Any]:
    """Those of the role's options that are for what computes `reward.model`. service: what is asked beside it, if
    any."""
    own = {field.name for field in dataclasses.fields(_OF_SERVICE[service])} if service else set()
    return {name: value for name, value in options.items() if name not in own and name != "reward_fn"}


def options_for_service(options: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Those that are for what is asked. model: what computes `reward.model` beside it, if anything."""
    own = {field.name for field in dataclasses.fields(ClassifierOptions)} if model == "transformers" else set()
    return {name: value for name, value in options.items() if name not in own and name != "reward_fn"}


def build_service(config: Config, options: Mapping[str, Any]) -> Service | Judge | None:
    """What is asked elsewhere for a part of the reward, None where nobody is. Raises ConfigError for its options."""
    model, asked = role_backends(config, "reward")
    given = options_for_service(options, model)
    if asked == "http":
        return Service(ServiceOptions.read(given))
    return Judge(JudgeOptions.read(given)) if asked == "judge" else None


def check_reward(config: Config, declared: Requirements, options: dict[str, Any]) -> None:
    """Raise ConfigError where nothing would reward anything, or a backend and its options do not go together.

    options: of the role's worker, one of ours; `reward_fn` may be among them.
    """
    functions, model = list(load_functions(config.reward.functions)), config.reward.model
    backend, asked = role_backends(config, "reward")
    rest = options_for_model(options, asked)
    if asked:
        build_service(config, options)
    elif backend != "transformers" and rest:
        raise ConfigError(
            f"roles.reward.options.{min(rest)}: the backend {backend or MEGATRON} takes no options; leave it out"
        )
    if backend == "transformers":
        ClassifierOptions.read(rest)
        if not model:
            raise ConfigError("roles.reward.backend=transformers needs reward.model, the folder of a classifier")
    if backend == "pool" and model:
        raise ConfigError(f"reward.model={model} with roles.reward.backend=pool, which has no model: leave one out")
    others = bool(functions or model or "reward_fn" in options or asked)
    played = composite.has_environment_reward(config.rollout, others)
    if not others and not played:
        raise ConfigError(
            f"reward.functions is empty; {declared.name} needs at least one, such as megarl.rewards.gsm8k:gsm8k, or "
            "reward.model, or what answers elsewhere, roles.reward.backend=http or judge, or rollout.environments"
        )
    given = options.get("reward_fn")
    parts = functions if given is None else [getattr(given, "__name__", "reward_fn")]
    further = [composite.PART] if played else []
    further += [*(["model"] if model else []), *([PARTS[asked]] if asked else [])]
    check_names(parts, further)
    check_weights(config.reward.weights, [*parts, *further])


def check_names(functions: Collection[str], others: Collection[str]) -> None:
    """Raise ConfigError for a reward function that is called like another part of the reward."""
    for name in others:
        if name in functions:
            raise ConfigError(f"a reward function may not be called {name!r}, which is another part; rename it")
