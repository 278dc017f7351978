"""Check the reward role's settings before anything starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from megarl.config import Config, ConfigError, RolloutConfig
from megarl.config.strict import closest_match, short_repr
from megarl.environments.catalog import ENVIRONMENTS_KEY, load_catalog
from megarl.parallel.placement import MEGATRON, SERVICES, is_engine_role, role_backends
from megarl.parallel.policy_configs import JUDGE, policy_config
from megarl.rewards import composite
from megarl.rewards.functions import load_functions
from megarl.rewards.judge import Judge, JudgeOptions
from megarl.rewards.sequence_classifier import ClassifierOptions
from megarl.rewards.service import OPTIONS_PREFIX, HttpScorer, Service, ServiceOptions
from megarl.types.requirements import Requirements
from megarl.types.reward_values import MAX_REWARD

_OPTIONS = {"http": ServiceOptions, "judge": JudgeOptions, "transformers": ClassifierOptions}
_SHARED_OPTIONS = ("reward_fn", "services")
"""Options of the role with any backend."""


def options_without(options: Mapping[str, Any], other_backend: str) -> dict[str, Any]:
    """Return the options of one backend: those of the role without its other backend's and without
    `_SHARED_OPTIONS`."""
    other = _OPTIONS.get(other_backend)
    other_names = {field.name for field in dataclasses.fields(other)} if other else set()
    return {name: value for name, value in options.items() if name not in other_names and name not in _SHARED_OPTIONS}


def build_services(config: Config, options: Mapping[str, Any]) -> dict[str, HttpScorer]:
    """Build the clients of the reward services and judges, by the names of their parts: that of the role's backend, and
    those of the option `services`, `{style: {backend: http, url: ..}}`. A judge without a `url` is on the job's engines
    of the role `judge`. Raises ConfigError for invalid options."""
    model, backend = role_backends(config, "reward")
    scorers = [_build_service(config, backend, options_without(options, model))] if backend else []
    services = {scorer.part: scorer for scorer in scorers}
    named = options.get("services") or {}
    if not isinstance(named, Mapping):
        raise ConfigError(
            f"{OPTIONS_PREFIX}services must be a mapping of parts to options, such as {{style: {{backend: http, "
            f"url: http://judge:8000/score}}}}, not {short_repr(named)}"
        )
    for name, settings in named.items():
        key = f"{OPTIONS_PREFIX}services.{name}"
        kind = settings.get("backend") if isinstance(settings, Mapping) else None
        if kind not in SERVICES:
            raise ConfigError(f"{key}.backend is {short_repr(kind)}; it must be one of {', '.join(SERVICES)}")
        if not str(name).isidentifier() or name in (*services, "model", composite.PART):
            raise ConfigError(f"{key}: its name is that of a part of the reward, so it must be a new name of letters")
        try:
            scorer = _build_service(config, kind, {key: settings[key] for key in settings if key != "backend"})
        except ConfigError as error:
            raise ConfigError(str(error).replace(OPTIONS_PREFIX, f"{key}.")) from None
        scorer.part, scorer.options_prefix = name, f"{key}."
        services[name] = scorer
    if is_engine_role(config, JUDGE) and not any(isinstance(s, Judge) and s.has_job_engines for s in services.values()):
        raise ConfigError(
            "roles.judge has engines for a judge, but there is none without a url: set roles.reward.backend to judge, "
            "or [megatron, judge] beside a model, or remove roles.judge"
        )
    return services


def _build_service(config: Config, backend: str, options: dict[str, Any]) -> HttpScorer:
    if backend == "http":
        return Service(ServiceOptions.read(options))
    if "url" in options or not is_engine_role(config, JUDGE):
        return Judge(JudgeOptions.read(options))
    rollout = policy_config(config, JUDGE).rollout
    return Judge(
        JudgeOptions.read_for_job_engines(options, rollout.concurrency, rollout.request_timeout), has_job_engines=True
    )


def check_reward(config: Config, requirements: Requirements, options: dict[str, Any]) -> None:
    """Raise ConfigError if nothing computes a reward, or if a backend and its options do not match."""
    functions, model = list(load_functions(config.reward.functions)), config.reward.model
    backend, service_backend = role_backends(config, "reward")
    model_opts = options_without(options, service_backend)
    services = build_services(config, options)
    if not service_backend and backend != "transformers" and model_opts:
        raise ConfigError(
            f"roles.reward.options.{min(model_opts)}: the backend {backend or MEGATRON} takes no options; remove it"
        )
    if backend == "transformers":
        ClassifierOptions.read(model_opts)
        if not model:
            raise ConfigError("roles.reward.backend=transformers needs reward.model, the folder of a classifier")
    if backend == "pool" and model:
        raise ConfigError(f"reward.model={model} with roles.reward.backend=pool, which has no model: remove one")
    has_other_parts = bool(functions or model or "reward_fn" in options or services)
    has_environment = has_environment_reward(config.rollout, has_other_parts)
    if not has_other_parts and not has_environment:
        raise ConfigError(
            f"reward.functions is empty; {requirements.name} needs at least one, such as megarl.rewards.gsm8k:gsm8k, "
            "or reward.model, or a service, roles.reward.backend=http or judge, or rollout.environments"
        )
    reward_fn = options.get("reward_fn")
    function_names = functions if reward_fn is None else [getattr(reward_fn, "__name__", "reward_fn")]
    parts = (has_environment and composite.PART, model and "model", *services)
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
            f"{key} must be a mapping of parts, such as {{right: 1, short: 0.1}}, not {short_repr(weights)}; "
            f"a function's part has its name, and the environment's part is named {composite.PART}"
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
