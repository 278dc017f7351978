"""Start an engine and wait to be killed: `hold_engine.py MODEL RUN`. Prints its own host's pid and socket, or 0."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from engine_config import make_config

from megarl.engine.sglang.sglang_engine import SGLangEngine

if __name__ == "__main__":
    engine = SGLangEngine(make_config(Path(sys.argv[1]), Path(sys.argv[2])), threads=1)
    engine.start()
    host = engine._host
    print(*((host.process.pid, host.path) if host else (0,)), flush=True)
    time.sleep(600)
