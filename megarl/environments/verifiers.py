"""Environments of the `verifiers` package as agents: `verifiers:NAME`, or `verifiers:NAME{"argument": "value"}`.

NAME and the arguments are passed to `vf.load_environment` (verifiers up to 0.3). Alternatively, NAME is a task set of
`verifiers.v1` (from 0.3), and the arguments are its `EnvConfig`: {"taskset": {...}, "agent": {...}}. See `ADAPTERS.md`.
"""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from megarl.config import ConfigError

INSTALL_HINT = "needs the package verifiers: pip install --no-deps -r launch/requirements-verifiers.txt"
COLUMN = "verifiers"
"""Column of a row that holds the environment's own row."""
_API_KEY_VARIABLE = "MEGARL_POLICY_KEY"


def environment(spec: str) -> Callable[..., Coroutine[Any, Any, dict[str, Any]]]:
    """Return the agent for `verifiers:SPEC`. Raises ConfigError if the environment or the package is missing."""
    runner = load_environment(spec)

    async def run(row: Mapping[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
        environment_row = row.get(COLUMN)
        if not isinstance(environment_row, dict):
            raise ConfigError(
                f"the row has no column {COLUMN!r}; tools/environment_rows.py verifiers:{spec} creates them"
            )
        reward, metrics = await runner.run_episode(environment_row, base_url, api_key)
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, bool | int | float)}
        return {"reward": float(reward), "parts": {name: x for name, x in numbers.items() if math.isfinite(x)}}

    return run


def rows(spec: str, evaluation: bool = False) -> list[dict[str, Any]]:
    """Return a row of `data.train` for each row of its dataset, or of its evaluation dataset if `evaluation`."""
    runner = load_environment(spec)
    name, _ = _parse_spec(spec)
    return [
        {
            "id": f"{name}-{number}",
            "prompt": runner.build_prompt(environment_row),
            "ground_truth": environment_row.get("answer") or "",
            "data_source": name,
            "environment": spec,
            COLUMN: environment_row,
        }
        for number, environment_row in enumerate(runner.list_rows(evaluation))
    ]


def load_environment(spec: str) -> _LegacyRunner | _TaskSetRunner:
    name, arguments = _parse_spec(spec)
    try:
        importlib.import_module("verifiers")
    except ImportError as error:
        raise ConfigError(f"{INSTALL_HINT} ({error})") from None
    module = name.replace("-", "_").rsplit("/", 1)[-1]
    for candidate in (module, f"verifiers.v1.tasksets.{module}"):
        try:
            loaded = importlib.import_module(candidate)
            break
        except ModuleNotFoundError as error:
            if not f"{candidate}.".startswith(f"{error.name}."):  # it exists, but one of its imports does not
                raise ConfigError(f"{candidate} cannot be imported: {error}") from None
    else:
        raise ConfigError(f"no module {module}; install the environment on this machine")
    return _LegacyRunner(name, arguments) if hasattr(loaded, "load_environment") else _TaskSetRunner(name, arguments)


def _parse_spec(spec: str) -> tuple[str, dict[str, Any]]:
    name, brace, rest = spec.partition("{")
    try:
        arguments = json.loads(brace + rest) if brace else {}
    except ValueError as error:
        raise ConfigError(f"the text after {name} is not JSON: {error}") from None
    return name.strip(), arguments


class _LegacyRunner:
    """A `vf.Environment` of verifiers up to 0.3. `_TaskSetRunner` has the same methods."""

    def __init__(self, name: str, arguments: Mapping[str, Any]) -> None:
        try:
            import verifiers as package

            self._environment = package.load_environment(name, **arguments)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"{name} has load_environment, which this version of verifiers does not support ({error}); "
                "pip install --no-deps -r launch/requirements-verifiers.txt"
            ) from None
        if getattr(self._environment, "requires_group_rollouts", False):
            raise ConfigError(f"{name} rewards a group as a whole; episodes are scored one by one here")

    def list_rows(self, evaluation: bool) -> list[dict[str, Any]]:
        """Return the environment's own rows as JSON values."""
        dataset = self._environment.get_eval_dataset() if evaluation else self._environment.get_dataset()
        return [dict(row) for row in dataset]

    def build_prompt(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        messages = row["prompt"]
        if isinstance(messages, str):
            return [{"role": "user", "content": messages}]
        return [{name: value for name, value in message.items() if value is not None} for message in messages]

    async def run_episode(self, row: Mapping[str, Any], base_url: str, api_key: str) -> tuple[float, Mapping[str, Any]]:
        """Return an episode's reward and metrics. Raises RuntimeError if it did not finish."""
        from openai import AsyncOpenAI
        from verifiers.clients import OpenAIChatCompletionsClient

        # No timeout and no retry: the run has its own limits, and a repeated request is another sample.
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=None, max_retries=0) as client:
            model = (await client.models.list()).data[0].id
            state = await self._environment.run_rollout(dict(row), OpenAIChatCompletionsClient(client), model, {})
        if error := state.get("error"):
            raise RuntimeError(f"{error.get('error_chain_repr') or error}"[:1000])
        return state["reward"], state.get("metrics") or {}


class _TaskSetRunner:
    """A task set of `verifiers.v1`, played by one agent that only chats and calls the task's tools."""

    def __init__(self, name: str, arguments: Mapping[str, Any]) -> None:
        try:
            import verifiers.v1 as package
            from verifiers.v1.utils import loaders
        except ImportError as error:
            raise ConfigError(f"{name} has no load_environment, and verifiers no v1 ({error})") from None
        defaults = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
        config = {**arguments, "taskset": {**arguments.get("taskset", {}), "id": name}}
        try:
            environment_class = loaders.environment_class(name, config.get("id", ""))
            if not issubclass(environment_class, package.SingleAgentEnv):
                raise ConfigError(f"{name} needs several agents, but there is one policy")
            config["agent"] = {**defaults, **arguments.get("agent", {})}
            self._environment = loaders.load_environment(loaders.resolve_env_config(config))
        except (TypeError, ValueError, AttributeError, ImportError) as error:
            raise ConfigError(f"{name} cannot be loaded: {' '.join(str(error).split())[:1000]}") from None
        agent, task = self._environment.config.agent, self._environment.taskset.task_type()
        is_local = agent.runtime.type == "subprocess"
        if is_local and (agent.harness is None or loaders.load_harness(agent.harness).EXECUTES_CODE):
            raise ConfigError(f"{name}: its harness runs the policy's code on this machine; configure another runtime")
        if is_local and task.NEEDS_CONTAINER:
            raise ConfigError(f"{name}: its tasks need a container; configure another runtime")
        self._package, self._task = package, task
        self._serving: Any = None

    def list_rows(self, evaluation: bool) -> list[dict[str, Any]]:
        taskset = self._environment.taskset
        if taskset.INFINITE:
            raise ConfigError("its task set is infinite; rows cannot be made from it")
        return [task.data.model_dump(mode="json", exclude_none=True) for task in taskset]

    def build_prompt(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        user_prompt = row.get("prompt") or ""
        system = [{"role": "system", "content": row["system_prompt"]}] if row.get("system_prompt") else []
        if isinstance(user_prompt, str):
            return [*system, {"role": "user", "content": user_prompt}]
        return [*system, *map(dict, user_prompt)]

    async def run_episode(self, row: Mapping[str, Any], base_url: str, api_key: str) -> tuple[float, Mapping[str, Any]]:
        from openai import AsyncOpenAI

        if self._serving is None:  # open until the process ends
            self._serving = self._environment.serving()
            await self._serving.__aenter__()
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            model = (await client.models.list()).data[0].id
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
