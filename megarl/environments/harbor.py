"""Task folders in Harbor's format as environments: `harbor:FOLDER`.

The policy has a tool `bash`; the reward is what the task's verifier writes. A prompt's column `task` names the folder;
`.venv/bin/python tools/environment_rows.py harbor:FOLDER FILE.jsonl` makes prompts of all of them. A task with an image
runs in a container of docker or podman, whichever answers here; one without in the sandbox. Nothing else is tried.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from megarl.config import ConfigError
from megarl.environments.containers import Container, find_runtime
from megarl.environments.harbor_tasks import Task, parse_reward, read_tasks
from megarl.environments.protocol import SessionLost
from megarl.environments.task_boxes import TaskBox

COMMAND_LIMIT_S = 120.0
"""How long a command of the policy's may take."""
_MARGIN_S = 120.0


class TaskMachine(Protocol):
    """Where a task runs, for one session. lost: what the policy did ended it."""

    is_lost: bool

    async def start(self) -> None: ...

    async def run(self, command: str, seconds: float) -> tuple[int | None, str]: ...

    async def verify(self) -> tuple[dict[str, bytes], str]: ...

    async def close(self) -> None: ...


def environment(folder: str) -> type[HarborTask]:
    """What `harbor:FOLDER` stands for. Raises ConfigError for a folder that has a task which cannot be run here."""
    tasks, probed = read_tasks(folder), False
    for task in tasks:
        try:
            if task.image or task.has_dockerfile:
                find_runtime()
            else:
                box = TaskBox(task)
                if not probed:
                    asyncio.run(box.probe())
                probed = True
        except ConfigError as error:
            own = (
                "has an image of its own"
                if task.image or task.has_dockerfile
                else "has no image, which is for the sandbox"
            )
            raise ConfigError(f"task {task.name} {own}: {error}") from None
    longest = max(task.build_timeout + task.verifier_timeout for task in tasks) + _MARGIN_S
    about = {"tasks": {task.name: task for task in tasks}, "timeout": max(longest, COMMAND_LIMIT_S + _MARGIN_S)}
    return type("HarborTask", (HarborTask,), about)


def rows(folder: str) -> list[dict[str, Any]]:
    """A prompt for each task, as `data.train` has them."""
    same = {"ground_truth": "", "data_source": "harbor", "environment": folder}
    return [{"id": task.name, "prompt": task.instruction, "task": task.name, **same} for task in read_tasks(folder)]


class HarborTask:
    """One task, for one session. The class of a spec is made by `environment`."""

    tasks: dict[str, Task] = {}
    timeout = 0.0
    _machine: TaskMachine | None = None

    async def reset(self, task: str) -> None:
        if task not in self.tasks:
            raise ConfigError(f"there is no task {task!r}; there are {', '.join(self.tasks)}")
        found = self.tasks[task]
        self._machine = Container(found) if found.image or found.has_dockerfile else TaskBox(found)
        await self._machine.start()

    async def bash(self, command: str) -> str:
        """Run a command with bash and read what it prints. Files stay; each command is a shell of its own.

        Args:
            command: the command, or a script of several lines
        """
        assert self._machine is not None
        if self._machine.is_lost:
            return "Error: the machine is gone"
        status, text = await self._machine.run(command, COMMAND_LIMIT_S)
        if self._machine.is_lost:
            return f"{text}\nError: the machine ended, and with it all files".strip()
        if status is None:
            return f"{text}\n[stopped after {COMMAND_LIMIT_S:g} s]".strip()
        return text if status == 0 else f"{text}\n[exit status {status}]".strip()

    async def reward(self) -> dict[str, Any]:
        """What the verifier wrote. A machine that the policy has ended is worth nothing, and so is one in which the
        verifier came to no end; a verifier that ends and has written no number is an error."""
        assert self._machine is not None
        if self._machine.is_lost:
            return {"reward": 0.0}
        files, said = await self._machine.verify()
        if self._machine.is_lost:
            return {"reward": 0.0}
        try:
            reward, parts = parse_reward(files)
        except ValueError as error:
            last = " ".join(said.split())[-300:]
            raise SessionLost(f"the verifier failed: {error}" + (f" ({last})" if last else "")) from None
        return {"reward": reward, "parts": parts}

    async def close(self) -> None:
        if self._machine is not None:
            await self._machine.close()
