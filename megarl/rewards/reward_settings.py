"""Check the reward role's settings before anything starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from megarl.config import Config, ConfigError, RolloutConfig
from megarl.config.strict import closest_match, short_repr
from megarl.environments.catalog import ENVIRONMENTS_KEY, load_catalog
from megarl.parallel.placement import MEGATRON, is_engine_role, role_backends
from megarl.parallel.policy_configs import JUDGE, policy_config
from megarl.rewards import composite
from megarl.rewards.functions import load_functions
from megarl.rewards.judge import Judge, JudgeOptions
from megarl.rewards.sequence_classifier import ClassifierOptions
from megarl.rewards.service import HttpScorer, Service, ServiceOptions
from megarl.types.requirements import Requirements
from megarl.types.reward_values import MAX_REWARD

_OPTIONS = {"http": ServiceOptions, "judge": JudgeOptions, "transformers": ClassifierOptions}


def options_without(options: Mapping[str, Any], other_backend: str) -> dict[str, Any]:
    """Return the role's options without `reward_fn` and those of its other backend, if any."""
    other = _OPTIONS.get(other_backend)
    other_names = {field.name for field in dataclasses.fields(other)} if other else set()
    return {name: value for name, value in options.items() if name not in other_names and name != "reward_fn"}


def build_service(config: Config, options: Mapping[str, Any]) -> HttpScorer | None:
    """Build the client of the reward service or judge, None without one. Raises ConfigError for invalid options."""
    model, service_backend = role_backends(config, "reward")
    service_options = options_without(options, model)
    has_engines = is_engine_role(config, JUDGE)
    if has_engines and service_backend != "judge":
        raise ConfigError(
            "roles.judge has engines for a judge, but the reward has none: set roles.reward.backend to judge, or "
            "[megatron, judge] beside a model, or remove roles.judge"
        )
    if service_backend == "http":
        return Service(ServiceOptions.read(service_options))
    if service_backend != "judge":
        return None
    if has_engines:
        rollout = policy_config(config, JUDGE).rollout
        return Judge(JudgeOptions.read_own(service_options, rollout.concurrency, rollout.request_timeout))
    return Judge(JudgeOptions.read(service_options))


def check_reward(config: Config, requirements: Requirements, options: dict[str, Any]) -> None:
    """Raise ConfigError if nothing computes a reward, or if a backend and its options do not match."""
    functions, model = list(load_functions(config.reward.functions)), config.reward.model
    backend, service_backend = role_backends(config, "reward")
    model_opts = options_without(options, service_backend)
    service = build_service(config, options)
    if not service and backend != "transformers" and model_opts:
        raise ConfigError(
            f"roles.reward.options.{min(model_opts)}: the backend {backend or MEGATRON} takes no options; remove it"
        )
    if backend == "transformers":
        ClassifierOptions.read(model_opts)
        if not model:
            raise ConfigError("roles.reward.backend=transformers needs reward.model, the folder of a classifier")
    if backend == "pool" and model:
        raise ConfigError(f"reward.model={model} with roles.reward.backend=pool, which has no model: remove one")
    has_other_parts = bool(functions or model or "reward_fn" in options or service)
    has_environment = has_environment_reward(config.rollout, has_other_parts)
    if not has_other_parts and not has_environment:
        raise ConfigError(
            f"reward.functions is empty; {requirements.name} needs at least one, such as megarl.rewards.gsm8k:gsm8k, "
            "or reward.model, or a service, roles.reward.backend=http or judge, or rollout.environments"
        )
    reward_fn = options.get("reward_fn")
    function_names = functions if reward_fn is None else [getattr(reward_fn, "__name__", "reward_fn")]
    parts = (has_environment and composite.PART, model and "model", service and service.part)
    other_names = [part for part in parts if part]
    check_names(function_names, other_names)
    check_weights(config.reward.weights, [*function_names, *other_names])


def check_names(functions: Collection[str], other_parts: Collection[str]) -> None:
    """Raise ConfigError for a reward function with the name of another part of the reward."""
    for name in other_parts:
        if name in functions:
            raise ConfigError(f"a reward function may not be called {name!r}, which is another part; rename it")


def has_environment_reward(config: RolloutConfig, has_other_parts: bool) -> bool:
    """Return whether any environment has a `reward`. Raises ConfigError for one without any part of the reward."""
    environments = load_catalog(config).environments.values()
    for environment in environments:
        if not environment.has_reward and not has_other_parts:
            raise ConfigError(
                f"{ENVIRONMENTS_KEY}: {environment.spec} has no `reward`, and there are no reward.functions, so its "
                f"conversations have no reward; add one of the two"
            )
    return any(environment.has_reward for environment in environments)


def check_weights(weights: Any, parts: Collection[str], key: str = "reward.weights") -> dict[str, float]:
    """Return the weights as floats. Raises ConfigError for an unknown part or a weight beyond `MAX_REWARD`."""
    if not isinstance(weights, Mapping):
        raise ConfigError(
            f"{key} must be a mapping of parts to numbers, such as {{gsm8k: 0.5}}, not {short_repr(weights)}"
        )
    for name, weight in weights.items():
        if name not in parts:
            match = closest_match(str(name), parts)
            hint = f"; did you mean {match}?" if match else ""
            raise ConfigError(
                f"{key}: no part of the reward is called {short_repr(name)}{hint} (it has {', '.join(parts)})"
            )
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not abs(weight) <= MAX_REWARD:
            raise ConfigError(
                f"{key}.{name} must be a number from -{MAX_REWARD:g} to {MAX_REWARD:g}, not {short_repr(weight)}"
            )
    return {name: float(weight) for name, weight in weights.items()}
