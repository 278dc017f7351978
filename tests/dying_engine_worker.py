"""Engines whose servers end at the beginning of the second step."""

from __future__ import annotations

from megarl.workers.engines import EngineWorker


class DyingEngineWorker(EngineWorker):
    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        engine = self.engines.engine
        if step == 2 and engine is not None and engine._server is not None:
            engine._server.close()
