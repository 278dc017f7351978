"""Start an engine and wait to be killed: `hold_engine.py MODEL RUN`. Prints the pid of its own host, or 0."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from engine_config import make_config

from megarl.engine.sglang_engine import Engine

if __name__ == "__main__":
    engine = Engine(make_config(Path(sys.argv[1]), Path(sys.argv[2])), threads=1)
    engine.start()
    print(engine._host.process.pid if engine._host else 0, flush=True)
    time.sleep(600)
