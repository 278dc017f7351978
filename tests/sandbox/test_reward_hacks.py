"""Reward hacks earn nothing: the grader keeps the answers outside and accepts only sent results."""

import json
import sys
import time
from pathlib import Path

import pytest

from megarl.sandbox.results import Limits

sys.path.append(str(Path(__file__).parent))
from reward_hacks import HACKS  # noqa: E402
from sync_sandbox import SyncSandbox, needs_bubblewrap  # noqa: E402

pytestmark = [needs_bubblewrap, pytest.mark.alone]
INPUTS, ANSWERS = [[2, 3], [10, -4], [0, 0]], [5, 6, 0]
HARNESS = """
import json
program, inputs = json.load(open("task.json"))
names = {"__name__": "solution"}
exec(program, names)
for number, arguments in enumerate(inputs):
    send(number, names["add"](*arguments))
"""
HONEST = "def add(a, b): return a + b"
# Runs in the process that knows the nonce, so it can send results, but only values that it computed.
INSIDER = """
import sys, gc
def nonce():
    for o in gc.get_objects():
        if callable(o) and getattr(o, "__name__", "") == "send": return o.__closure__
    return None
def add(a, b):
    for cell in nonce() or ():
        if isinstance(cell.cell_contents, str):
            import os
            for n, v in enumerate(FORGED): os.write(3, f"{cell.cell_contents} {n} {v}\\n".encode())
    os._exit(0)
"""


def is_same(value, expected):
    return type(value) is type(expected) and value == expected


def count_correct(result):
    """Count the correct answers, or return 0 unless every test sent one."""
    if not result.is_complete:
        return 0
    return sum(is_same(result.results[number], answer) for number, answer in enumerate(ANSWERS))


@pytest.fixture(scope="module")
def graded():
    sandbox = SyncSandbox(max_boxes=4)
    limits = Limits(seconds=3, output_bytes=1 << 18)
    programs = {"honest": HONEST, **HACKS, "insider": "FORGED = [1, 2, 3]" + INSIDER}
    started = time.monotonic()
    result = sandbox.all(
        {
            name: sandbox.async_sandbox.run_harness(
                HARNESS, 3, {"task.json": json.dumps([program, INPUTS]).encode()}, limits=limits
            )
            for name, program in programs.items()
        }
    )
    assert time.monotonic() - started < 300
    yield result
    sandbox.close()


def test_honest_program_passes(graded):
    assert count_correct(graded["honest"]) == 3 and graded["honest"].run.ok


@pytest.mark.parametrize("name", HACKS)
def test_hacks_do_not_pass(graded, name):
    assert count_correct(graded[name]) < 3, graded[name]


def test_exit_status_0_is_no_result(graded):
    result = graded["exits at once in the function"]
    assert result.run.ok and result.run.status == 0 and not result.is_complete and result.results == {}


def test_subclasses_arrive_as_plain_values(graded):
    assert graded["equals everything"].results == {0: 7, 1: 7, 2: 7}
    assert type(graded["equals everything as text"].results[0]) is str


def test_forged_lines_with_the_nonce_earn_nothing(graded):
    assert graded["insider"].results == {0: 1, 1: 2, 2: 3} or graded["insider"].results == {}
    assert count_correct(graded["insider"]) == 0


def test_printed_output_is_no_result(graded):
    assert graded["prints results"].results == {} == graded["forges lines without the nonce"].results
    assert b"PASSED" in graded["prints results"].run.stdout
