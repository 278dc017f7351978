"""A rollout worker that injects engine faults: `roles: {rollout: {worker: faulty_rollout_worker:FaultyRolloutWorker}}`.

The environment variable ENGINE_FAULTS holds the plan as JSON, {step: [fault, engine]}. Each fault happens once:

- `kill`, `stop`: SIGKILL or SIGSTOP to the engine's scheduler when its first rollout of the step finishes.
- `weight_sync`: SIGKILL to the scheduler during the weight sync that ends the step.
- `host`: SIGKILL to the engine host process, from which all engines of the launcher are forked.
- `stopped`: SIGSTOP to the engine host process and SIGKILL to the scheduler.

Each fault appends a line [step, fault, engine, time.time()] to the file `died` in the run folder.
"""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import psutil

from megarl.types import Rollout
from megarl.workers.context import Context
from megarl.workers.rollout import RolloutWorker


class FaultyRolloutWorker(RolloutWorker):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._plan = {int(step): fault for step, fault in json.loads(os.environ["ENGINE_FAULTS"]).items()}
        context.on_rollout_finished.subscribe(self._on_rollout_finished)
        if (engine := self.engines.lead_engine) is not None:
            call_loader = engine.call_loader

            def fail_in_sync(payloads: list[str], draft: bool = False, is_session: bool = False) -> None:
                self._inject("weight_sync")
                call_loader(payloads, draft, is_session)

            engine.call_loader = fail_in_sync  # type: ignore[method-assign]

    def _on_rollout_finished(self, rollout: Rollout) -> None:
        for fault in ("kill", "stop", "host", "stopped"):
            self._inject(fault)

    def _inject(self, fault: str) -> None:
        engine = self.engines.lead_engine
        if engine is None or self._plan.get(self.step) != [fault, engine.index]:
            return
        del self._plan[self.step]
        with open(f"{self.config.run.dir}/died", "a") as file:
            file.write(json.dumps([self.step, fault, engine.index, time.time()]) + "\n")
        if fault in ("host", "stopped"):
            engine_host_process().send_signal(signal.SIGKILL if fault == "host" else signal.SIGSTOP)
        if fault != "host":
            scheduler_process(engine).send_signal(signal.SIGSTOP if fault == "stop" else signal.SIGKILL)


def engine_host_process() -> psutil.Process:
    """Return the engine host process of this rank's launcher."""
    launcher = psutil.Process(os.getppid())
    living = [item for item in launcher.children() if item.status() != psutil.STATUS_ZOMBIE]
    (result,) = [item for item in living if "megarl.engine.engine_host" in item.cmdline()]
    return result


def scheduler_process(engine: Any) -> psutil.Process:
    """Return the oldest child of the server process that listens on the engine's port."""
    result = {
        item.pid
        for item in psutil.net_connections("tcp4")
        if item.status == psutil.CONN_LISTEN and item.laddr.port == engine.port
    }
    (server,) = result
    return min(psutil.Process(server).children(), key=psutil.Process.create_time)
