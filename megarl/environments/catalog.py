"""The run's tools and environments as described to the rank, which imports none of their modules."""

from __future__ import annotations

import asyncio
import functools
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.config import ConfigError, RolloutConfig
from megarl.config.strict import closest_match
from megarl.environments.loading import ENVIRONMENTS_KEY, TOOLS_KEY
from megarl.environments.protocol import EnvironmentInfo
from megarl.environments.tools import Tool
from megarl.processes.children import ProcessLimits
from megarl.processes.worker_process import ForkServer, WorkerUnavailable
from megarl.types import Prompt

SERVE = "megarl.environments.environment_process:serve"
COLUMN = "environment"
"""Column of a prompt that names its environment."""


@dataclass(frozen=True)
class EnvironmentCatalog:
    """The run's tools and environments.

    Attributes:
        tools: of `rollout.tools`, by name
        environments: of `rollout.environments`, by name, in order
    """

    tools: Mapping[str, Tool] = field(default_factory=dict)
    environments: Mapping[str, EnvironmentInfo] = field(default_factory=dict)

    @property
    def all_tools(self) -> dict[str, Tool]:
        """All tools known so far, including those of environments; of equal names the first."""
        tools = dict(self.tools)
        for environment in self.environments.values():
            for schema in environment.schemas:
                tools.setdefault(schema["function"]["name"], Tool(schema, _refuse_call, environment.spec))
        return tools

    def find_environment(self, prompt: Prompt) -> EnvironmentInfo | None:
        """Return the environment that the prompt names, else the first; None if the run has none.

        Raises ConfigError for an unknown name, and if the prompt lacks a column that `reset` requires.
        """
        if not self.environments:
            return None
        name = prompt.extra.get(COLUMN)
        if name is None or name == "":
            environment = next(iter(self.environments.values()))
        elif isinstance(name, str) and name in self.environments:
            environment = self.environments[name]
        else:
            closest = closest_match(str(name), self.environments)
            hint = f"; did you mean {closest}?" if closest else ""
            available = ", ".join(self.environments)
            raise ConfigError(
                f"prompt {prompt.id}: its {COLUMN!r}, {str(name)[:80]!r}, is not in {ENVIRONMENTS_KEY}{hint} "
                f"({available})"
            )
        row = build_row(prompt)
        if missing := [column for column in environment.required_columns if column not in row]:
            raise ConfigError(
                f"prompt {prompt.id} has no column {missing[0]!r}, which reset of {environment.spec} needs "
                f"(it has {', '.join(row)})"
            )
        return environment

    def is_run_by_agent(self, prompt: Prompt) -> bool:
        """Return whether an agent runs the prompt's conversations."""
        environment = self.find_environment(prompt)
        return environment is not None and environment.kind == "agent"

    def select_schemas(self, prompt: Prompt, schemas: Sequence[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
        """Return schemas of the tools this prompt allows: those it lists, else all, its environment's first.

        `schemas` overrides the environment's, if they are known only at run time. Raises ConfigError if the prompt
        lists an unknown tool.
        """
        environment = self.find_environment(prompt)
        if schemas is None:
            schemas = environment.schemas if environment is not None else ()
        schema_by_name = {schema["function"]["name"]: schema for schema in schemas}
        schema_by_name |= {name: tool.schema for name, tool in self.tools.items() if name not in schema_by_name}
        has_dynamic_tools = environment is not None and environment.has_dynamic_tools
        for name in prompt.tools:
            if name not in schema_by_name and not has_dynamic_tools:
                raise ConfigError(
                    f"prompt {prompt.id} asks for the tool {name}, which {TOOLS_KEY} does not load"
                    + (f" and the {environment.kind} {environment.spec} does not have" if environment else "")
                    + f"; add it to {TOOLS_KEY} (module:{name}), or remove the column `tools` from the data"
                )
        return [schema_by_name[name] for name in prompt.tools or schema_by_name if name in schema_by_name]


def build_row(prompt: Prompt) -> dict[str, Any]:
    """Return the prompt's columns, as `reset` and agents receive them."""
    messages = [dict(message) for message in prompt.messages]
    columns = {"prompt": messages, "ground_truth": prompt.ground_truth, "data_source": prompt.data_source}
    return {**prompt.extra, **columns}


def load_catalog(config: RolloutConfig) -> EnvironmentCatalog:
    """Describe `rollout.tools` and `rollout.environments`.

    Raises ConfigError if an entry cannot be loaded or described, its module ends the process or times out, or two
    entries share a name.
    """
    specs = [(TOOLS_KEY, spec) for spec in config.tools] + [(ENVIRONMENTS_KEY, spec) for spec in config.environments]
    described = _describe_all(tuple(dict.fromkeys(specs)), ProcessLimits(config.pass_env, config.tool_memory_mb))
    tools: dict[str, Tool] = {}
    for spec in config.tools:
        for schema in described[TOOLS_KEY, spec].schemas:
            tool = Tool(schema, _refuse_call, spec)
            if tool.name in tools:
                raise ConfigError(f"{TOOLS_KEY}: {tools[tool.name].spec} and {spec} are both called {tool.name}")
            tools[tool.name] = tool
    environments: dict[str, EnvironmentInfo] = {}
    for spec in config.environments:
        info = described[ENVIRONMENTS_KEY, spec]
        if info.name in environments:
            raise ConfigError(
                f"{ENVIRONMENTS_KEY}: {environments[info.name].spec} and {spec} are both called {info.name}, which is "
                "how prompts name them; rename one"
            )
        for schema in info.schemas:
            if (name := schema["function"]["name"]) in tools:
                raise ConfigError(
                    f"{ENVIRONMENTS_KEY}: {spec} has a tool {name}, and so has {TOOLS_KEY}, {tools[name].spec}; "
                    "rename one"
                )
        environments[info.name] = info
    return EnvironmentCatalog(tools, environments)


def load_tools(specs: Sequence[str]) -> dict[str, Tool]:
    """Return tools by name; errors as in `load_catalog`. Their functions cannot be called in this process."""
    return dict(load_catalog(RolloutConfig(tools=tuple(specs))).tools)


def _refuse_call(**arguments: Any) -> str:
    raise RuntimeError("tools run in processes of their own, see EnvironmentPool")


@functools.cache
def _describe_all(specs: tuple[tuple[str, str], ...], limits: ProcessLimits) -> dict[tuple[str, str], EnvironmentInfo]:
    """Load each (key, spec) in another process and return the descriptions that it sends."""
    if not specs:
        return {}

    async def load(log: Path) -> list[dict[str, Any]]:
        fork_server = ForkServer(SERVE, {}, log, limits)
        try:
            process = await fork_server.start_worker({"load": specs})
            process.end()
            return list(process.ready_message)
        except WorkerUnavailable as error:
            failed_spec = error.loading or ", ".join(spec for _, spec in specs)
            key = next((key for key, spec in specs if spec == failed_spec), TOOLS_KEY)
            if "could not load it: " in (message := str(error)):
                raise ConfigError(message.partition("could not load it: ")[2]) from None
            hint = " ".join(log.read_text(errors="replace").split())[-300:] if log.is_file() else ""
            hint = f" ({hint})" if hint else "; maybe its module ends the interpreter"
            raise ConfigError(f"{key}: {message}{hint}") from None
        finally:
            await asyncio.to_thread(fork_server.close)

    # asyncio.run needs its own thread: an event loop may be running in this one.
    with ThreadPoolExecutor(1) as executor, tempfile.TemporaryDirectory() as folder:
        descriptions = executor.submit(asyncio.run, load(Path(folder, "log"))).result()
    described = {}
    for spec, description in zip(specs, descriptions, strict=True):  # JSON has made lists of tuples
        fields: dict[str, Any] = {
            n: tuple(value) if isinstance(value, list) else value for n, value in description.items()
        }
        described[spec] = EnvironmentInfo(**fields)
    return described
