"""What a run's tools and environments are, in the rank, where none of their modules is imported."""

from __future__ import annotations

import asyncio
import functools
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.config.strict import ConfigError, closest_match
from megarl.environments.loading import ENVIRONMENTS_KEY, TOOLS_KEY, check_spec
from megarl.environments.protocol import EnvironmentInfo
from megarl.environments.tools import Tool
from megarl.processes.process_limits import NO_LIMITS, ProcessLimits
from megarl.processes.worker_process import ForkServer, WorkerUnavailable

if TYPE_CHECKING:
    from megarl.config import RolloutConfig
    from megarl.types import Prompt

SERVE = "megarl.environments.environment_process:serve"
COLUMN = "environment"
"""Of a prompt: which environment it has."""


@dataclass(frozen=True)
class EnvironmentCatalog:
    """tools: of `rollout.tools`, by name. environments: by name, in their order."""

    tools: Mapping[str, Tool] = field(default_factory=dict)
    environments: Mapping[str, EnvironmentInfo] = field(default_factory=dict)

    @property
    def all_tools(self) -> dict[str, Tool]:
        """All tools that are known by now, of environments too, by name; of several by one name the first."""
        found = dict(self.tools)
        for environment in self.environments.values():
            for schema in environment.schemas:
                found.setdefault(schema["function"]["name"], Tool(schema, _refuse_call, environment.spec))
        return found

    def find_environment(self, prompt: Prompt) -> EnvironmentInfo | None:
        """Its environment: the one that it names, else the first; None where the run has none.

        Raises ConfigError for one that there is not, and where the prompt lacks what `reset` must have.
        """
        if not self.environments:
            return None
        name = prompt.extra.get(COLUMN)
        if name is None or name == "":
            found = next(iter(self.environments.values()))
        elif isinstance(name, str) and name in self.environments:
            found = self.environments[name]
        else:
            near = closest_match(str(name), self.environments)
            hint = f"; did you mean {near}?" if near else ""
            have = ", ".join(self.environments)
            raise ConfigError(
                f"prompt {prompt.id}: its {COLUMN!r}, {str(name)[:80]!r}, is none of {ENVIRONMENTS_KEY}{hint} ({have})"
            )
        row = build_row(prompt)
        for column in found.required_columns:
            if column not in row:
                have = ", ".join(row)
                raise ConfigError(
                    f"prompt {prompt.id} has no column {column!r}, which reset of {found.spec} needs (it has {have})"
                )
        return found

    def is_run_by_agent(self, prompt: Prompt) -> bool:
        """Whether its conversations are an agent's."""
        return (
            bool(self.environments) and (found := self.find_environment(prompt)) is not None and found.kind == "agent"
        )

    def select_schemas(self, prompt: Prompt, own: Sequence[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
        """Of the tools that this prompt allows: those that it lists, else all, of its environment first. own: of its
        environment, where they were found at run time. Raises ConfigError for one that it lists and that there is
        not."""
        environment = self.find_environment(prompt)
        if own is None:
            own = environment.schemas if environment is not None else ()
        found = {schema["function"]["name"]: schema for schema in own}
        found |= {name: tool.schema for name, tool in self.tools.items() if name not in found}
        dynamic = environment is not None and environment.has_dynamic_tools
        for name in prompt.tools:
            if name not in found and not dynamic:
                raise ConfigError(
                    f"prompt {prompt.id} asks for the tool {name}, which {TOOLS_KEY} does not load"
                    + (f" and the {environment.kind} {environment.spec} does not have" if environment else "")
                    + f"; add it to {TOOLS_KEY} (module:{name}), or leave the column `tools` out of the data"
                )
        return [found[name] for name in prompt.tools or found if name in found]


def build_row(prompt: Prompt) -> dict[str, Any]:
    """What `reset` and agents are given: the columns of the prompt."""
    own = {
        "prompt": [dict(message) for message in prompt.messages],
        "ground_truth": prompt.ground_truth,
        "data_source": prompt.data_source,
    }
    return {**prompt.extra, **own}


def load_catalog(config: RolloutConfig) -> EnvironmentCatalog:
    """Of `rollout.tools` and `rollout.environments`. Raises ConfigError for what cannot be loaded or described, for a
    module that ends its process or takes too long, and for two of one name."""
    limits = ProcessLimits(config.pass_env, config.tool_memory_mb)
    described = _describe_all(config.tools, config.environments, limits)
    tools: dict[str, Tool] = {}
    for spec in config.tools:
        for schema in described[TOOLS_KEY, spec].schemas:
            tool = Tool(schema, _refuse_call, spec)
            if tool.name in tools:
                raise ConfigError(f"{TOOLS_KEY}: {tools[tool.name].spec} and {spec} are both called {tool.name}")
            tools[tool.name] = tool
    environments: dict[str, EnvironmentInfo] = {}
    for spec in config.environments:
        one = described[ENVIRONMENTS_KEY, spec]
        if one.name in environments:
            raise ConfigError(
                f"{ENVIRONMENTS_KEY}: {environments[one.name].spec} and {spec} are both called {one.name}, which is how "
                "prompts name them; rename one"
            )
        for schema in one.schemas:
            if (name := schema["function"]["name"]) in tools:
                raise ConfigError(
                    f"{ENVIRONMENTS_KEY}: {spec} has a tool {name}, and so has {TOOLS_KEY}, {tools[name].spec}; rename one"
                )
        environments[one.name] = one
    return EnvironmentCatalog(tools, environments)


def load_tools(specs: Sequence[str]) -> dict[str, Tool]:
    """Tools by the name that the policy calls them; errors as of `load_catalog`. Their functions cannot be called here."""
    from megarl.config import RolloutConfig

    return dict(load_catalog(RolloutConfig(tools=tuple(specs))).tools)


def _refuse_call(**arguments: Any) -> str:
    raise RuntimeError("tools run in processes of their own, see Sessions")


@functools.cache
def _describe_all(
    tools: tuple[str, ...], environments: tuple[str, ...], limits: ProcessLimits = NO_LIMITS
) -> Mapping[tuple[str, str], EnvironmentInfo]:
    specs = {(TOOLS_KEY, spec): None for spec in tools} | {(ENVIRONMENTS_KEY, spec): None for spec in environments}
    for key, spec in specs:
        check_spec(spec, key)
    if not specs:
        return {}
    with ThreadPoolExecutor(1) as thread, tempfile.TemporaryDirectory() as folder:  # an event loop may be running here
        log = Path(folder, "log")
        said = thread.submit(asyncio.run, _load_descriptions(list(specs), log, limits)).result()
    return dict(zip(specs, said, strict=True))


async def _load_descriptions(
    specs: Sequence[tuple[str, str]], log: Path, limits: ProcessLimits
) -> list[EnvironmentInfo]:
    nursery = ForkServer(SERVE, {}, log, limits)
    try:
        process = await nursery.start_worker({"load": specs})
        process.end()
        return [
            EnvironmentInfo(**{name: _lists_to_tuples(value) for name, value in one.items()})
            for one in process.ready_message
        ]
    except WorkerUnavailable as error:
        loading = error.loading or ", ".join(spec for _, spec in specs)
        key = next((key for key, spec in specs if spec == loading), TOOLS_KEY)
        if "could not load it: " in (text := str(error)):
            raise ConfigError(text.partition("could not load it: ")[2]) from None
        hint = " ".join(log.read_text(errors="replace").split())[-300:] if log.is_file() else ""
        hint = f" ({hint})" if hint else "; maybe its module ends the interpreter"
        raise ConfigError(f"{key}: {text}{hint}") from None
    finally:
        await asyncio.to_thread(nursery.close)


def _lists_to_tuples(value: Any) -> Any:
    """Lists that JSON has made of tuples, on the outside."""
    return tuple(value) if isinstance(value, list) else value
