"""Forks the ranks of the tests' jobs. Importing torch, Megatron and transformers takes a rank seven seconds of a core
and is done once here; what a rank finds is otherwise what a fresh interpreter would give it.

Reads one order per line: {"script", "args", "environment", "world", "outputs": a file per rank, "timeout",
"fresh": start interpreters instead of forks, "record": record what the ranks communicate}. Answers with one line: the
exit status of each rank, None for ranks that were killed after the timeout. The record of a rank lies beside its
output, see `wires.py`.
"""

from __future__ import annotations

import gc
import json
import os
import random
import runpy
import signal
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from megarl.processes.children import die_with_parent

warnings.filterwarnings("ignore")


def preload() -> None:
    """In the order in which ranks import them: Megatron with its shim comes first."""
    if "torch" in sys.modules:
        return
    import wires  # noqa: F401

    import megarl.flow
    import megarl.megatron.dist_checkpoint
    import megarl.workers.critic
    import megarl.workers.rollout  # noqa: F401

    sys.path.insert(0, str(Path(__file__).parent / "megatron"))
    import tiny

    for family in tiny.HF:
        tiny.hf_model(family)
    del sys.modules["tiny"], sys.path[0]  # a script's own modules are its own
    tasks = [task for task in Path("/proc/self/task").iterdir() if task.name != str(os.getpid())]
    # pyarrow's allocator, which has a thread, is safe to fork.
    others = [name for task in tasks if (name := (task / "comm").read_text().strip()) != "jemalloc_bg_thd"]
    assert threading.active_count() == 1 and not others, f"threads do not survive a fork: {others}"
    gc.collect()
    gc.freeze()  # else each rank would copy these pages when it collects garbage


def fork(order: dict[str, Any], rank: int) -> int:
    """Pid of a rank, which has its own output, variables and random numbers."""
    host, record = os.getpid(), None
    if pid := os.fork():
        return pid
    status = 1
    try:
        die_with_parent(host)
        output = os.open(order["outputs"][rank], os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        environment = order["environment"] | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        if order["fresh"]:
            os.execve(sys.executable, [sys.executable, "-W", "ignore", order["script"], *order["args"]], environment)
        os.environ.clear()
        os.environ.update(environment)
        random.seed()
        sys.argv = [order["script"], *order["args"]]
        search_path = [str(Path(order["script"]).parent), *environment.get("PYTHONPATH", "").split(os.pathsep)]
        sys.path[:0] = [folder for folder in search_path if folder not in sys.path]
        if order["record"]:
            import wires

            record = wires.install()
        runpy.run_path(order["script"], run_name="__main__")
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:  # noqa: B036  whatever it is, the rank must not go on as its host
        traceback.print_exc()
    finally:
        if status == 0 and record is not None:
            record.write(Path(f"{order['outputs'][rank]}.said"))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run(order: dict[str, Any]) -> list[int | None]:
    if not order["fresh"]:
        preload()
    ranks = {fork(order, rank): rank for rank in range(order["world"])}
    deadline = time.monotonic() + order["timeout"]
    result: list[int | None] = [None] * len(ranks)
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            code = result[ranks.pop(pid)] = os.waitstatus_to_exitcode(status)
            if code:
                end(ranks, signal.SIGTERM)  # they wait for it
        elif time.monotonic() > deadline:
            end(ranks, signal.SIGKILL)
            for pid in ranks:
                os.waitpid(pid, 0)
            break
        else:
            time.sleep(0.02)
    return result


def end(ranks: dict[int, int], how: signal.Signals) -> None:
    for pid in ranks:
        os.kill(pid, how)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
