"""Tries one case in this process: `attempt.py MODULE NUMBER FOLDER MATERIAL`; prints what came of it.

Runs as a fork of `tests/rank_host.py`, which has imported what takes time.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import runpy
import shutil
import subprocess
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)]
CONFIG = """
run: {dir: FOLDER/run, num_rollout: 2}
model: {path: FOLDER/model, dtype: float32}
rollout: {max_context: 192, max_new_tokens: 40, samples_per_prompt: 4, concurrency: 8}
data: {train: FOLDER/train.jsonl, prompts_per_step: 4}
reward: {functions: [sum_reward:even]}
track: {progress: false}
"""


def contents(folder: Path) -> dict[str, int]:
    """Every file and folder with its size; not what Python leaves behind when it imports."""
    found = {}
    for path in folder.rglob("*"):
        if "__pycache__" not in path.parts:
            found[str(path.relative_to(folder))] = path.lstat().st_size if path.is_file() else 0
    return found


def children() -> list[str]:
    found = []
    for task in os.listdir("/proc/self/task"):
        for pid in Path(f"/proc/self/task/{task}/children").read_text().split():
            with contextlib.suppress(OSError):
                found.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
    return [command for command in found if "resource_tracker" not in command]


def attempt(module: str, number: int, folder: Path, material: Path) -> dict[str, object]:
    case = importlib.import_module(module).CASES[number]
    shutil.copytree(material, folder)
    (folder / "config.yaml").write_text(CONFIG.replace("FOLDER", str(folder)))
    case.prepare(folder)
    before = contents(folder), sorted(os.listdir(ROOT))
    given = [text.replace("FOLDER", str(folder)) for text in (*case.command, *case.given)]
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.update({name: text.replace("FOLDER", str(folder)) for name, text in case.environment.items()})
    os.chdir(ROOT)
    out, err, code = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            if given[0] == "megarl.train":
                from megarl.train import main

                code = main([str(folder / "config.yaml"), *given[1:]])
            elif given[0] == "bash":
                done = subprocess.run(given, capture_output=True, text=True)
                out.write(done.stdout)
                err.write(done.stderr)
                code = done.returncode
            elif given[0] == "-m":
                sys.argv = given[1:]
                runpy.run_module(given[1], run_name="__main__")
                code = 0
            else:
                sys.argv = given
                runpy.run_path(str(ROOT / given[0]), run_name="__main__")
                code = 0
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
            if isinstance(leaving.code, str):
                print(leaving.code, file=sys.stderr)
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


if __name__ == "__main__":
    result = attempt(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
    print("RESULT", json.dumps(result))
