"""Program of `test_sglang_server.py`: print the GPU of each rank of an engine as JSON, instead of starting the ranks.

SGLang validates its settings and chooses the GPUs itself. Arguments: ServerArgs as JSON, the offsets of the GPUs.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import sys
from pathlib import Path
from typing import Any

from megarl.engine.sglang import sglang_server

sglang_server.preload()
from sglang.srt.entrypoints import engine  # noqa: E402
from sglang.srt.managers import scheduler  # noqa: E402

GPUS: list[int] = []


class RecordedProcess:
    """Calls what SGLang would run in a process, as that process would receive it."""

    pid = 0

    def __init__(self, target: Any, args: tuple[Any, ...]) -> None:
        self._target, self._args = pickle.loads(pickle.dumps(target)), args

    def start(self) -> None:
        self._target(*self._args)


def record_gpu(server_args: Any, port_args: Any, gpu_id: int, *others: Any) -> None:
    GPUS.append(gpu_id)


launch = engine.Engine.__dict__["_launch_scheduler_processes"].__func__


def launch_and_print(cls: Any, *arguments: Any, **named: Any) -> None:
    launch(cls, *arguments, **named)
    print(json.dumps(GPUS), flush=True)
    os._exit(0)


if __name__ == "__main__":
    server_args, offsets = json.loads(sys.argv[1]), json.loads(sys.argv[2])
    multiprocessing.Process = RecordedProcess  # type: ignore[assignment, misc]
    scheduler.run_scheduler_process = record_gpu
    engine.Engine._launch_scheduler_processes = classmethod(launch_and_print)
    folder = Path(server_args["model_path"]).parent
    names = {"start_method": "", "secret": "a secret", "tool_call_parser": "qwen25", "facts": str(folder / "facts")}
    names |= {"has_truncated_sampling": False}
    sglang_server.main({**names, "folder": str(folder), "server_args": server_args, "gpu_offsets": offsets})
