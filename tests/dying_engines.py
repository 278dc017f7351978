"""A rollout worker whose engines fail, for tests of whole runs: `roles: {rollout: {worker: dying_engines:Dying}}`.

What is to happen is in the environment, DYING: {step: [what, engine]}. `kill` and `stop` send an engine's scheduler
SIGKILL or SIGSTOP when the first of its conversations in that step has ended, `push` SIGKILL in the middle of the push
that ends the step. `host` sends SIGKILL to the process that all engines of the launcher are started from, `stopped`
SIGSTOP, and SIGKILL to the scheduler. Each appends a line [step, what, engine, time.time()] to the file `died` in the
run's folder.
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


class Dying(RolloutWorker):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._plan = {int(step): what for step, what in json.loads(os.environ["DYING"]).items()}
        context.on_rollout_finished.subscribe(self._one_has_ended)
        if (engine := self.engines.lead_engine) is not None:
            order = engine.call_loader

            def and_die(payloads: list[str], draft: bool = False, is_session: bool = False) -> None:
                self._die("push")
                order(payloads, draft, is_session)

            engine.call_loader = and_die  # type: ignore[method-assign]

    def _one_has_ended(self, rollout: Rollout) -> None:
        for how in ("kill", "stop", "host", "stopped"):
            self._die(how)

    def _die(self, how: str) -> None:
        engine = self.engines.lead_engine
        if engine is None or self._plan.get(self.step) != [how, engine.index]:
            return
        del self._plan[self.step]
        with open(f"{self.config.run.dir}/died", "a") as file:
            file.write(json.dumps([self.step, how, engine.index, time.time()]) + "\n")
        if how in ("host", "stopped"):
            host_of_engines().send_signal(signal.SIGKILL if how == "host" else signal.SIGSTOP)
        if how != "host":
            scheduler_of(engine).send_signal(signal.SIGSTOP if how == "stop" else signal.SIGKILL)


def host_of_engines() -> psutil.Process:
    """The one that the launcher of this rank has started."""
    launcher = psutil.Process(os.getppid())
    living = [item for item in launcher.children() if item.status() != psutil.STATUS_ZOMBIE]
    (result,) = [item for item in living if "megarl.engine.engine_host" in item.cmdline()]
    return result


def scheduler_of(engine: Any) -> psutil.Process:
    """The first process that the engine's server, which listens at its port, has started."""
    result = {
        item.pid
        for item in psutil.net_connections("tcp4")
        if item.status == psutil.CONN_LISTEN and item.laddr.port == engine.port
    }
    (server,) = result
    return min(psutil.Process(server).children(), key=psutil.Process.create_time)
