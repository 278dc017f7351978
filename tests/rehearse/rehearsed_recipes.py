"""Rehearses recipes, one after the other, and prints the exit status and the report of each as JSON by name.

argv: a file with `{name: [CONFIG, overrides ...]}`.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

from megarl import train


def main(file: str) -> None:
    results = {}
    for name, arguments in json.loads(Path(file).read_text()).items():
        with contextlib.redirect_stdout(io.StringIO()) as report, contextlib.redirect_stderr(io.StringIO()) as errors:
            status = train.main([*arguments, "--rehearse"])
        results[name] = [status, report.getvalue(), errors.getvalue()]
    print("RESULT", json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
