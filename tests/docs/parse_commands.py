"""Run programs until they have parsed their arguments.

stdin: a JSON list of [program, arguments]; stdout: a JSON list of errors, empty strings for none.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch  # noqa: F401  imported once, before the forks
import transformers  # noqa: F401


def exit_after(name: str) -> None:
    """Patch a method of ArgumentParser to exit the process after parsing."""
    parse = getattr(argparse.ArgumentParser, name)

    def parse_and_exit(*positional: Any, **named: Any) -> None:
        parse(*positional, **named)
        os.write(pipe, b"parsed")
        os._exit(0)

    setattr(argparse.ArgumentParser, name, parse_and_exit)


exit_after("parse_args")
exit_after("parse_intermixed_args")
results = []
for program, arguments in json.load(sys.stdin):
    read, pipe = os.pipe()
    if (child := os.fork()) == 0:
        stderr = io.StringIO()
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.stderr = stderr
            sys.argv = [program, *arguments]
            if program.startswith("-m "):
                runpy.run_module(program[3:], run_name="__main__", alter_sys=True)
            else:
                sys.path.insert(0, str(Path(program).parent))
                runpy.run_path(program, run_name="__main__")
        except BaseException as error:  # noqa: B036
            os.write(pipe, f"{type(error).__name__}: {error} {stderr.getvalue()[-2000:]}".encode())
        os._exit(1)
    os.close(pipe)
    message = os.fdopen(read).read()
    os.waitpid(child, 0)
    results.append("" if message == "parsed" else message or "ended before it had parsed anything")
print(json.dumps(results))
