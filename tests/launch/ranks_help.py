"""What programs answer to `--help`: their exit statuses and what they say."""

import contextlib
import io
import json
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path("tools").resolve()))  # as for a tool that is started by its name
codes, said = {}, {}
for program in sys.argv[1:]:
    sys.argv = [program, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            if program.startswith("-m "):
                runpy.run_module(program.removeprefix("-m "), run_name="__main__")
            else:
                runpy.run_path(program, run_name="__main__")
        except SystemExit as leaving:
            codes[program] = leaving.code
    said[program] = out.getvalue()[:200]
print("RESULT", json.dumps({"codes": codes, "said": said}))
