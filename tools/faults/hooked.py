"""The training program with points at which a tool can inject faults:

    .venv/bin/python tools/faults/hooked.py CONFIG [key=value ...]

It is `megarl.train` plus what `points.py` installs. If it starts ranks, they run this program, too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from faults import points  # noqa: E402
from megarl import train  # noqa: E402
from megarl.launch import exit_status, launcher  # noqa: E402
from megarl.parallel import rendezvous  # noqa: E402


class HookedLaunch(launcher.Launch):
    """Launches this program instead of `-m megarl.train`."""

    def __init__(self, command: Sequence[str], *arguments: Any, **keywords: Any) -> None:
        python, *script_arguments = command
        if script_arguments[:2] == ["-m", "megarl.train"]:
            script_arguments = [str(Path(__file__).resolve()), *script_arguments[2:]]
        super().__init__((python, *script_arguments), *arguments, **keywords)


def main() -> int:
    launcher.Launch = HookedLaunch  # type: ignore[misc]
    variable = os.environ.get(points.VARIABLE, "")
    if variable and (rendezvous.read_launch_env().is_launched or "parallel.world_size=1" in sys.argv):
        import megarl.flow  # noqa: F401  in the order in which the program imports things

        points.install(variable)
    return train.main()


if __name__ == "__main__":
    exit_status.run_and_exit(main)
