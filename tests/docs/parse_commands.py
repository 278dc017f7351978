"""Run programs up to where their command lines are parsed: stdin has a JSON list of [program, arguments], stdout one of
what was wrong with each, empty where nothing was."""

from __future__ import annotations

import argparse
import io
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch  # noqa: F401  once, for all of them
import transformers  # noqa: F401


def stop_behind(name: str) -> None:
    """From here on a program ends where it has parsed its arguments by this method."""
    parse = getattr(argparse.ArgumentParser, name)

    def parsed(*value: Any, **named: Any) -> None:
        parse(*value, **named)
        os.write(pipe, b"parsed")
        os._exit(0)

    setattr(argparse.ArgumentParser, name, parsed)


stop_behind("parse_args")
stop_behind("parse_intermixed_args")
results = []
for program, arguments in json.load(sys.stdin):
    read, pipe = os.pipe()
    if (child := os.fork()) == 0:
        events = io.StringIO()
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.stderr = events
            sys.argv = [program, *arguments]
            if program.startswith("-m "):
                runpy.run_module(program[3:], run_name="__main__", alter_sys=True)
            else:
                sys.path.insert(0, str(Path(program).parent))
                runpy.run_path(program, run_name="__main__")
        except BaseException as error:  # noqa: B036
            os.write(pipe, f"{type(error).__name__}: {error} {events.getvalue()[-2000:]}".encode())
        os._exit(1)
    os.close(pipe)
    said = os.fdopen(read).read()
    os.waitpid(child, 0)
    results.append("" if said == "parsed" else said or "ended before it had parsed anything")
print(json.dumps(results))
