"""Task folders in Harbor's format as environments: `harbor:FOLDER`.

The policy has a tool `bash`; the reward is what the task's verifier writes. A prompt's column `task` names the folder.
A task with an image runs in a container, one without in the sandbox; there is no fallback. See `ADAPTERS.md`.
"""

from __future__ import annotations

from typing import Any

from megarl.config import ConfigError
from megarl.environments.containers import Container, find_runtime
from megarl.environments.harbor_tasks import Task, parse_reward, read_tasks
from megarl.environments.protocol import SessionLost
from megarl.environments.task_sandbox import TaskSandbox
from megarl.sandbox.box import Sandbox, probe

COMMAND_LIMIT_S = 120.0
"""Timeout of one of the policy's commands."""
_MARGIN_S = 120.0


def environment(folder: str) -> type[HarborTask]:
    """Return the class for `harbor:FOLDER`. Raises ConfigError if a task of the folder cannot run here."""
    tasks = read_tasks(folder)
    for task in tasks:
        try:
            if task.has_container:
                find_runtime()
            else:
                TaskSandbox(task)  # checks its settings
                probe(Sandbox.from_environment().settings)
        except ConfigError as error:
            image = "has its own image" if task.has_container else "has no image, which is for the sandbox"
            raise ConfigError(f"task {task.name} {image}: {error}") from None
    max_seconds = max(task.environment.build_timeout_sec + task.verifier.timeout_sec for task in tasks)
    timeout = max(max_seconds, COMMAND_LIMIT_S) + _MARGIN_S
    return type("HarborTask", (HarborTask,), {"tasks": {task.name: task for task in tasks}, "timeout": timeout})


def rows(folder: str) -> list[dict[str, Any]]:
    """Return a row of `data.train` for each task."""
    shared = {"ground_truth": "", "data_source": "harbor", "environment": folder}
    return [{"id": task.name, "prompt": task.instruction, "task": task.name, **shared} for task in read_tasks(folder)]


class HarborTask:
    """One task for one session. `environment` makes the class for a spec."""

    tasks: dict[str, Task] = {}
    timeout = 0.0
    _machine: Container | TaskSandbox | None = None

    async def reset(self, task: str) -> None:
        if task not in self.tasks:
            raise ConfigError(f"no task {task!r}; tasks are {', '.join(self.tasks)}")
        machine_class = Container if self.tasks[task].has_container else TaskSandbox
        self._machine = machine_class(self.tasks[task])
        await self._machine.start()

    async def bash(self, command: str) -> str:
        """Run a command with bash and read what it prints. Files stay; each command is a shell of its own.

        Args:
            command: the command, or a script of several lines
        """
        assert self._machine is not None
        if self._machine.is_lost:
            return "Error: the machine was lost"
        status, text = await self._machine.run(command, COMMAND_LIMIT_S)
        if self._machine.is_lost:
            return f"{text}\nError: the machine stopped; all its files are lost".strip()
        if status is None:
            return f"{text}\n[stopped after {COMMAND_LIMIT_S:g} s]".strip()
        return text if status == 0 else f"{text}\n[exit status {status}]".strip()

    async def reward(self) -> dict[str, Any]:
        """Run the verifier and return the reward it wrote.

        The reward is 0 if the policy ended the machine or the verifier did not finish. A verifier that finishes without
        writing a number raises SessionLost.
        """
        assert self._machine is not None
        if self._machine.is_lost:
            return {"reward": 0.0}
        files, output = await self._machine.verify()
        if self._machine.is_lost:
            return {"reward": 0.0}
        try:
            reward, parts = parse_reward(files)
        except ValueError as error:
            output_tail = " ".join(output.split())[-300:]
            raise SessionLost(f"the verifier failed: {error}" + (f" ({output_tail})" if output_tail else "")) from None
        return {"reward": reward, "parts": parts}

    async def close(self) -> None:
        if self._machine is not None:
            await self._machine.close()
