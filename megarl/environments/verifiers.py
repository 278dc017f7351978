"""Environments of the `verifiers` package as agents: `verifiers:NAME`, or `verifiers:NAME{"argument": "value"}`.

NAME is what `vf.load_environment` takes, and the arguments go there (verifiers up to 0.3); or it is a task set of
`verifiers.v1` (from 0.3), and the arguments are those of its `EnvConfig`: {"taskset": {...}, "agent": {...}}. The
environment plays an episode as a client of the policy; its reward is the rollout's, its metrics are parts of it.
`.venv/bin/python tools/environment_rows.py verifiers:NAME FILE.jsonl` makes prompts of its data set.
"""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

from megarl.config import ConfigError

INSTALL_HINT = "needs the package verifiers: pip install --no-deps -r launch/requirements-verifiers.txt"
COLUMN = "verifiers"
"""Of a row: the environment's own row, as it made it."""
_API_KEY_VARIABLE = "MEGARL_POLICY_KEY"


class EpisodeRunner(Protocol):
    """What both generations of the package come to."""

    def list_rows(self, evaluation: bool) -> list[dict[str, Any]]:
        """Its own, as JSON has them."""

    def build_prompt(self, row: Mapping[str, Any]) -> list[dict[str, Any]]: ...

    async def run_episode(self, row: Mapping[str, Any], base_url: str, api_key: str) -> tuple[float, Mapping[str, Any]]:
        """Reward and metrics of an episode. Raises RuntimeError where it came to no end."""


def environment(spec: str) -> Callable[..., Coroutine[Any, Any, dict[str, Any]]]:
    """What `verifiers:SPEC` stands for. Raises ConfigError where there is no such environment, or no package."""
    played = load_environment(spec)

    async def run(row: Mapping[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
        own = row.get(COLUMN)
        if not isinstance(own, dict):
            raise ConfigError(
                f"the row has no column {COLUMN!r}; tools/environment_rows.py verifiers:{spec} makes them"
            )
        reward, metrics = await played.run_episode(own, base_url, api_key)
        return {"reward": float(reward), "parts": _filter_finite(metrics)}

    return run


def rows(spec: str, evaluation: bool = False) -> list[dict[str, Any]]:
    """A prompt for each row of its data set, as `data.train` has them; evaluation: of the one that it has for that."""
    played = load_environment(spec)
    found = []
    for number, own in enumerate(played.list_rows(evaluation)):
        shown = {
            "prompt": played.build_prompt(own),
            "ground_truth": own.get("answer") or "",
            "data_source": _parse_spec(spec)[0],
        }
        found.append({"id": f"{_parse_spec(spec)[0]}-{number}", **shown, "environment": spec, COLUMN: own})
    return found


def load_environment(spec: str) -> EpisodeRunner:
    name, arguments = _parse_spec(spec)
    try:
        importlib.import_module("verifiers")
    except ImportError as error:
        raise ConfigError(f"{INSTALL_HINT} ({error})") from None
    module = name.replace("-", "_").rsplit("/", 1)[-1]
    for of in (module, f"verifiers.v1.tasksets.{module}"):
        try:
            found = importlib.import_module(of)
            break
        except ModuleNotFoundError as error:
            if not f"{of}.".startswith(f"{error.name}."):  # it is there, and lacks another
                raise ConfigError(f"{of} cannot be imported: {error}") from None
    else:
        raise ConfigError(f"there is no module {module}; install the environment where this runs")
    return _LegacyRunner(name, arguments) if hasattr(found, "load_environment") else _TaskSetRunner(name, arguments)


def _parse_spec(spec: str) -> tuple[str, dict[str, Any]]:
    name, brace, rest = spec.partition("{")
    try:
        arguments = json.loads(brace + rest) if brace else {}
    except ValueError as error:
        raise ConfigError(f"what follows {name} is not JSON: {error}") from None
    return name.strip(), arguments


def _filter_finite(metrics: Mapping[str, Any]) -> dict[str, float]:
    plain = {name: value for name, value in metrics.items() if isinstance(value, bool | int | float)}
    return {name: float(value) for name, value in plain.items() if math.isfinite(value)}


class _LegacyRunner:
    """`vf.Environment`, of verifiers up to 0.3."""

    def __init__(self, name: str, arguments: Mapping[str, Any]) -> None:
        try:
            import verifiers as package

            self._environment = package.load_environment(name, **arguments)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"{name} has load_environment, which this version of verifiers does not know ({error}); "
                "pip install --no-deps -r launch/requirements-verifiers.txt"
            ) from None
        if getattr(self._environment, "requires_group_rollouts", False):
            raise ConfigError(f"{name} rewards a group as a whole; episodes are played one by one here")

    def list_rows(self, evaluation: bool) -> list[dict[str, Any]]:
        found = self._environment.get_eval_dataset() if evaluation else self._environment.get_dataset()
        return [dict(row) for row in found]

    def build_prompt(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        said = row["prompt"]
        if isinstance(said, str):
            return [{"role": "user", "content": said}]
        return [{name: value for name, value in message.items() if value is not None} for message in said]

    async def run_episode(self, row: Mapping[str, Any], base_url: str, api_key: str) -> tuple[float, Mapping[str, Any]]:
        from openai import AsyncOpenAI
        from verifiers.clients import OpenAIChatCompletionsClient

        # No limit, and no second try: the run has limits of its own, and another request is another sample.
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=None, max_retries=0) as client:
            model = await _fetch_model_name(client)
            said = await self._environment.run_rollout(dict(row), OpenAIChatCompletionsClient(client), model, {})
        if error := said.get("error"):
            raise RuntimeError(f"{error.get('error_chain_repr') or error}"[:1000])
        return said["reward"], said.get("metrics") or {}


class _TaskSetRunner:
    """A task set of `verifiers.v1`, played by one agent that only talks and calls the task's tools."""

    def __init__(self, name: str, arguments: Mapping[str, Any]) -> None:
        try:
            import verifiers.v1 as package
            from verifiers.v1.utils import loaders
        except ImportError as error:
            raise ConfigError(f"{name} has no load_environment, and verifiers no v1 ({error})") from None
        plain = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
        config = {**arguments, "taskset": {**arguments.get("taskset", {}), "id": name}}
        try:
            made = loaders.environment_class(name, config.get("id", ""))
            if not issubclass(made, package.SingleAgentEnv):
                raise ConfigError(f"{name} is played by several agents; there is one policy")
            config["agent"] = {**plain, **arguments.get("agent", {})}
            self._environment = loaders.load_environment(loaders.resolve_env_config(config))
        except (TypeError, ValueError, AttributeError, ImportError) as error:
            raise ConfigError(f"{name} cannot be loaded: {' '.join(str(error).split())[:1000]}") from None
        agent, task = self._environment.config.agent, self._environment.taskset.task_type()
        here = agent.runtime.type == "subprocess"
        if here and (agent.harness is None or loaders.load_harness(agent.harness).EXECUTES_CODE):
            raise ConfigError(
                f"{name}: its harness runs what the policy writes on this machine; give it another runtime"
            )
        if here and task.NEEDS_CONTAINER:
            raise ConfigError(f"{name}: its tasks need a container; give it another runtime")
        self._package, self._task = package, task
        self._serving: Any = None

    def list_rows(self, evaluation: bool) -> list[dict[str, Any]]:
        taskset = self._environment.taskset
        if taskset.INFINITE:
            raise ConfigError("its task set has no end; rows cannot be made of it")
        return [task.data.model_dump(mode="json", exclude_none=True) for task in taskset]

    def build_prompt(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        said = row.get("prompt") or ""
        system = [{"role": "system", "content": row["system_prompt"]}] if row.get("system_prompt") else []
        return system + ([{"role": "user", "content": said}] if isinstance(said, str) else [dict(one) for one in said])

    async def run_episode(self, row: Mapping[str, Any], base_url: str, api_key: str) -> tuple[float, Mapping[str, Any]]:
        from openai import AsyncOpenAI

        if self._serving is None:  # until the process ends
            self._serving = self._environment.serving()
            await self._serving.__aenter__()
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            model = await _fetch_model_name(client)
        os.environ[_API_KEY_VARIABLE] = api_key
        endpoint = self._package.EvalClientConfig(base_url=base_url, api_key_var=_API_KEY_VARIABLE)
        context = self._package.ModelContext(client=endpoint, model=model, sampling=self._package.SamplingConfig())
        task = self._task(self._task.data_type().model_validate(row), self._environment.taskset.config.task)
        episode = await self._environment.run_episode(task, context)
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok or errors:
            raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors)[:1000] or "no episode")
        trace = episode.traces[-1]
        return trace.reward, {**trace.metrics, **{name: part.score for name, part in trace.rewards.items()}}


async def _fetch_model_name(client: Any) -> str:
    """The name that the policy has as a model."""
    return str((await client.models.list()).data[0].id)
