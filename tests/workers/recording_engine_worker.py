"""A rollout worker on one rank without its server, which records calls of the engine."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megarl.environments.catalog import EnvironmentCatalog
from megarl.observe.clock import Clock
from megarl.parallel.policy_configs import find_shared_ranks
from megarl.parallel.ranks import Ranks
from megarl.types import Prompt
from megarl.workers.context import Context
from megarl.workers.rollout import RolloutWorker


class RecordingWorker(RolloutWorker):
    """The rollout worker with fake server responses, conversations and weight transport."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        engine = self.engines.engine
        assert engine is not None and self._runner is not None
        self.calls: list[str] = []
        engine._server = SimpleNamespace(poll=lambda: None)  # type: ignore[assignment]
        engine._platform = SimpleNamespace(HAS_MEMORY_SAVER=True)  # type: ignore[assignment]
        engine._call = self.call  # type: ignore[assignment, method-assign]
        self._runner.generate = lambda *args, **options: self.calls.append("generate")  # type: ignore
        self.engines.weight_sync.sync = self.push  # type: ignore[assignment, method-assign]

    def call(self, path: str, body: dict[str, Any] | None = None) -> None:
        self.calls.append(" ".join([path.partition("?")[0], *(body or {}).get("tags", [])]))

    def push(self, local: Any, version: int) -> bool:
        engine = self.engines.engine
        assert engine is not None
        engine.begin_update()
        self.calls.append("push")
        engine.end_update(version)
        return True


def make_worker(config: Any, hf: dict[str, Any], ranks: Ranks) -> RecordingWorker:
    chat: Any = SimpleNamespace(select_schemas=lambda prompt: [], catalog=EnvironmentCatalog())
    config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, tool_call_parser=""))
    shared = find_shared_ranks(config, ("rollout", "actor"), "rollout")
    updates = {"actor": 1}
    return RecordingWorker(
        Context(config, ranks.job, hf, chat, Clock(), Path("."), num_updates=updates, shared_ranks=shared)
    )


def generation_numbers(config: Any, hf: dict[str, Any], ranks: Ranks) -> list[tuple[int, int, bool]]:
    """Return (seed, first group, greedy) of each generation in two steps with an evaluation between them."""
    worker = make_worker(config, hf, ranks)
    result: list[tuple[int, int, bool]] = []

    def generate(prompts: Any, **options: Any) -> None:
        result.append((options["seed"], options["first_group"], options["greedy"]))

    assert worker._runner is not None
    worker._runner.generate = generate  # type: ignore[assignment, method-assign]
    prompt = Prompt("p", ())
    worker.begin_step(1)
    worker.generate([prompt] * 3, 1, greedy=True)
    worker.generate([prompt] * 3, 1)
    worker.generate([prompt] * 2, 1)
    worker.begin_step(1)  # as the flow does before it evaluates
    worker.generate([prompt] * 3, 1, greedy=True)
    worker.generate([prompt] * 3, 1)
    worker.begin_step(2)
    worker.generate([prompt] * 3, 1)
    return result


def engine_calls(config: Any, hf: dict[str, Any], ranks: Ranks) -> list[str]:
    """Return the calls of a step and the next generation."""
    worker = make_worker(config, hf, ranks)
    actor: Any = SimpleNamespace(synced_weights=lambda: nullcontext({}))
    worker.generate([], 1)
    worker.sleep()
    worker.update_weights(actor)
    assert worker.engines.engine is not None and worker.engines.engine.is_usable
    worker.generate([], 1)
    return worker.calls
