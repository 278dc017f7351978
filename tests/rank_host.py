"""Forks the ranks of test jobs.

A rank needs seven seconds of a core to import torch, Megatron and transformers; this process does it once. Otherwise a
rank starts like a fresh interpreter.

Reads one order per line: {"script", "args", "environment", "world", "outputs": a file per rank, "timeout",
"fresh": start interpreters instead of forks, "record": record what the ranks communicate}. Answers with one line: the
exit status of each rank, None for ranks that were killed after the timeout. The communication record of a rank
(`megarl.rehearse.comm_recorder`) is written beside its output.
"""

from __future__ import annotations

import faulthandler
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
    """Import modules in the order of ranks: Megatron with its CPU shim comes first."""
    if "torch" in sys.modules:
        return
    import megarl.flow
    import megarl.megatron.dist_checkpoint
    import megarl.rehearse.comm_recorder  # noqa: F401
    import megarl.workers.critic
    import megarl.workers.rollout  # noqa: F401

    sys.path.insert(0, str(Path(__file__).parent / "megatron"))
    import tiny

    for family in tiny.HF:
        tiny.hf_model(family)
    del sys.modules["tiny"], sys.path[0]  # a script may have a module of this name
    tasks = [task for task in Path("/proc/self/task").iterdir() if task.name != str(os.getpid())]
    # pyarrow's allocator, which has a thread, is safe to fork.
    thread_names = [name for task in tasks if (name := (task / "comm").read_text().strip()) != "jemalloc_bg_thd"]
    assert threading.active_count() == 1 and not thread_names, f"threads do not survive a fork: {thread_names}"
    gc.collect()
    gc.freeze()  # else each rank would copy these pages when it collects garbage


def fork(order: dict[str, Any], rank: int) -> int:
    """Fork a rank with its own output, environment and random state; return its process ID."""
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
        faulthandler.enable()  # else a signal would leave no trace of where
        random.seed()
        sys.argv = [order["script"], *order["args"]]
        search_path = [str(Path(order["script"]).parent), *environment.get("PYTHONPATH", "").split(os.pathsep)]
        sys.path[:0] = [folder for folder in search_path if folder not in sys.path]
        if order["record"]:
            from megarl.rehearse import comm_recorder

            record = comm_recorder.install()
        runpy.run_path(order["script"], run_name="__main__")
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:  # noqa: B036  the rank must never continue as the host
        traceback.print_exc()
    finally:
        if status == 0 and record is not None:
            record.write(Path(f"{order['outputs'][rank]}.record"))
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
                kill_ranks(ranks, signal.SIGTERM)  # they would wait for the failed rank
        elif time.monotonic() > deadline:
            kill_ranks(ranks, signal.SIGKILL)
            for pid in ranks:
                os.waitpid(pid, 0)
            break
        else:
            time.sleep(0.02)
    return result


def kill_ranks(ranks: dict[int, int], number: signal.Signals) -> None:
    for pid in ranks:
        os.kill(pid, number)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
