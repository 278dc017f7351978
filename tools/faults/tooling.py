"""User code of a run with engines: a calculator of which one call hangs, and a reward that counts rewarded
conversations."""

from __future__ import annotations

import os
import time
from pathlib import Path

from faults.judging import NOTES
from megarl.environments.ready.calculator import calculate
from megarl.environments.ready.calculator import calculator as plain
from megarl.environments.tools import Tool
from megarl.types import Rollout

SEEN, HANG, HUNG = "seen", "hang", "hung"
"""Files of the notes: a byte per rewarded conversation; a request that a call hangs; the process that hung."""


def _calculate(expression: str) -> str:
    notes = Path(os.environ[NOTES])
    try:
        (notes / HANG).unlink()
    except FileNotFoundError:
        return calculate(expression)
    (notes / HUNG).write_text(str(os.getpid()))
    while True:
        time.sleep(1)


calculator = Tool(schema=plain.schema, function=_calculate)


def counted(rollout: Rollout) -> float:
    with Path(os.environ[NOTES], SEEN).open("ab") as file:
        file.write(b".")
    return float(sum(int(turn.token_ids.sum()) for turn in rollout.turns if turn.is_action) % 2)
