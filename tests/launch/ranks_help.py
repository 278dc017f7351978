"""Run programs with `--help` and report exit statuses and output."""

import contextlib
import io
import json
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path("tools").resolve()))  # as when a tool is started by its path
codes, outputs = {}, {}
for program in sys.argv[1:]:
    sys.argv = [program, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            if program.startswith("-m "):
                runpy.run_module(program.removeprefix("-m "), run_name="__main__")
            else:
                runpy.run_path(program, run_name="__main__")
        except SystemExit as error:
            codes[program] = error.code
    outputs[program] = out.getvalue()[:200]
print("RESULT", json.dumps({"codes": codes, "outputs": outputs}))
