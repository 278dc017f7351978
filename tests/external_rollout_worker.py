"""A rollout worker of a run whose pool of engines changes: `roles: {rollout: {worker: external_rollout_worker:...}}`.

The environment variable EXTERNAL_ENGINE holds the address at which an engine outside of the job is to listen.

- Step 1 starts it, and adds it to the run.
- Step 3 stops its program (SIGSTOP) before the step's requests, kills it when the first conversation has finished on
  the run's own engine, at the latest before the weight sync, and starts it again.
- Step 4 removes it from the run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import external_engine

from megarl.types import Rollout, Rollouts
from megarl.workers.actor import ActorWorker
from megarl.workers.context import Context
from megarl.workers.rollout import RolloutWorker


class ExternalRolloutWorker(RolloutWorker):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._address = os.environ["EXTERNAL_ENGINE"]
        self._server: subprocess.Popen[str] | None = None
        self._is_stopped = False
        context.on_rollout_finished.subscribe(self._on_rollout_finished)

    def generate(self, *arguments: Any, **named: Any) -> Rollouts:
        if self.engines.lead_engine is not None:
            self._change_pool()
        return super().generate(*arguments, **named)

    def _change_pool(self) -> None:
        if self.step == 1:
            self._start_server()
            self._tool("add", self._address)
            print(self._tool("list"), flush=True)
        if self.step == 3:
            print(self._tool("list"), flush=True)
            self._is_stopped = True
            assert self._server is not None
            self._server.send_signal(signal.SIGSTOP)
        if self.step == 4:
            self._tool("remove", self._address)

    def _on_rollout_finished(self, rollout: Rollout) -> None:
        if self._is_stopped and self._server is not None:
            self._is_stopped = False
            self._end_server()

    def update_weights(self, actor: ActorWorker) -> None:
        if self.step == 3 and self.engines.lead_engine is not None:
            self._is_stopped = False
            self._end_server()  # in an asynchronous run all conversations may have finished before
            self._start_server()
        super().update_weights(actor)

    def close(self) -> None:
        super().close()
        self._end_server()

    def _start_server(self) -> None:
        folder = self.config.run.dir
        self._server = external_engine.start(folder, self._address, Path(folder, "external"))

    def _end_server(self) -> None:
        if self._server is not None:
            external_engine.end(self._server)
            self._server = None

    def _tool(self, command: str, *arguments: str) -> str:
        done = [sys.executable, external_engine.TOOL, command, self.config.run.dir, *arguments]
        return subprocess.run(done, check=True, stdout=subprocess.PIPE, text=True).stdout
