"""The training program, of which each rank leaves what it has said to the others in the folder `MEGARL_TESTS_WIRES`:

MEGARL_TESTS_WIRES=FOLDER python tests/train_with_wires.py CONFIG [key=value ...]
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl import train
from megarl.launch import exit_status, launcher
from megarl.parallel import rendezvous


class Launch(launcher.Launch):
    """Starts this program in place of `-m megarl.train`."""

    def __init__(self, command: Sequence[str], *arguments: Any, **named: Any) -> None:
        python, *rest = command
        assert rest[:2] == ["-m", "megarl.train"], rest
        super().__init__((python, str(Path(__file__).resolve()), *rest[2:]), *arguments, **named)


def main() -> int:
    launcher.Launch = Launch  # type: ignore[misc]
    here = rendezvous.read_launch_env()
    if not here.is_launched:
        return train.main()
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")
    import wires

    import megarl.flow  # noqa: F401  in the order in which the program imports things

    said = wires.install()
    status = train.main()
    said.write(Path(os.environ[wires.FOLDER]) / f"rank_{here.rank}.said")
    return status


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent))
    exit_status.run_and_exit(main)
