"""Run cases, each in a fork: `attempt.py MODULE FOLDER BASE NUMBER..`; prints the results as JSON.

Runs as a fork of `tests/rank_host.py`, which has done the slow imports.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import json
import os
import runpy
import select
import shutil
import signal
import subprocess
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)]
LIMIT_S = 60.0
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2): orphaned grandchildren become children and are detected
CONFIG = """
run: {dir: FOLDER/run, num_rollout: 2}
model: {path: FOLDER/model, dtype: float32}
rollout: {max_context: 192, max_new_tokens: 40, samples_per_prompt: 4, concurrency: 8}
data: {train: FOLDER/train.jsonl, prompts_per_step: 4}
reward: {functions: [sum_reward:even]}
track: {progress: false}
"""


def contents(folder: Path) -> dict[str, int]:
    """Return the size of every file and folder, without Python's caches."""
    result = {}
    for path in folder.rglob("*"):
        if "__pycache__" not in path.parts:
            result[str(path.relative_to(folder))] = path.lstat().st_size if path.is_file() else 0
    return result


def children() -> list[str]:
    result = []
    for task in os.listdir("/proc/self/task"):
        pids: list[str] = []
        with contextlib.suppress(OSError):  # the thread has ended
            pids = Path(f"/proc/self/task/{task}/children").read_text().split()
        for pid in pids:
            with contextlib.suppress(OSError):
                result.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
    return [command for command in result if "resource_tracker" not in command]


def run_case(module: str, number: int, folder: Path, base_folder: Path) -> dict[str, object]:
    case = importlib.import_module(module).CASES[number]
    shutil.copytree(base_folder, folder)
    (folder / "config.yaml").write_text(CONFIG.replace("FOLDER", str(folder)))
    sys.path.insert(0, str(folder))  # modules that a case writes
    case.prepare(folder)
    before = contents(folder), sorted(os.listdir(ROOT))
    arguments = [text.replace("FOLDER", str(folder)) for text in (*case.command, *case.overrides)]
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.update({name: text.replace("FOLDER", str(folder)) for name, text in case.environment.items()})
    os.chdir(ROOT)
    out, err, code = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            if arguments[0] == "megarl.train":
                from megarl.train import main

                code = main([str(folder / "config.yaml"), *arguments[1:]])
            elif arguments[0] == "bash":
                process = subprocess.run(arguments, capture_output=True, text=True)
                out.write(process.stdout)
                err.write(process.stderr)
                code = process.returncode
            elif arguments[0] == "-m":
                sys.argv = arguments[1:]
                runpy.run_module(arguments[1], run_name="__main__")
                code = 0
            else:
                sys.argv = arguments
                sys.path.insert(0, str((ROOT / arguments[0]).parent))  # as the interpreter does
                runpy.run_path(str(ROOT / arguments[0]), run_name="__main__")
                code = 0
        except SystemExit as exit_error:
            code = exit_error.code if isinstance(exit_error.code, int) else int(exit_error.code is not None)
            if isinstance(exit_error.code, str):
                print(exit_error.code, file=sys.stderr)
        except BaseException:  # noqa: B036  as the interpreter would show it
            traceback.print_exc()
            code = 1
    after = contents(folder), sorted(os.listdir(ROOT))
    changed = sorted({*before[0].items(), *map(str, before[1])} ^ {*after[0].items(), *map(str, after[1])}, key=str)
    return {
        "code": code,
        "out": out.getvalue()[-4000:],
        "err": err.getvalue()[-4000:],
        "changed": [str(item) for item in changed],
        "children": children(),
    }


def run_forked(module: str, number: int, folder: Path, base_folder: Path) -> dict[str, object]:
    """Run `run_case` in a fork; return its result, or why there is none."""
    readable, writable = os.pipe()
    if not (pid := os.fork()):
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(SUBREAPER, 1)
        try:
            result = run_case(module, number, folder, base_folder)
        except BaseException:  # noqa: B036  an error of the case itself
            result = {"broken": traceback.format_exc()}
        with os.fdopen(writable, "w") as pipe:
            pipe.write(json.dumps(result) + "\n")
        os._exit(0)
    os.close(writable)
    with os.fdopen(readable) as pipe:
        text = pipe.readline() if select.select([pipe], [], [], LIMIT_S)[0] else ""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return json.loads(text) if text else {"broken": f"no answer within {LIMIT_S:.0f} s", "status": status}


if __name__ == "__main__":
    import megarl.dry_run.validation
    import megarl.flow
    import megarl.train  # noqa: F401

    module, folder, base_folder, *numbers = sys.argv[1:]
    results = {number: run_forked(module, int(number), Path(folder) / number, Path(base_folder)) for number in numbers}
    print("RESULT", json.dumps(results))
