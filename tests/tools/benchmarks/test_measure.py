"""Ratios of ways that take turns, processor seconds, and the format of cells."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from benchmarks.measure import Ratio, Samples, Stopwatch, compute_ratio, process_seconds, rotate, tree_seconds
from benchmarks.output import format_value

pytestmark = pytest.mark.alone

BURN = "import time\nwhile time.process_time() < 0.3: pass"


def test_ratio_is_the_median_of_those_within_a_turn() -> None:
    ratio = compute_ratio([2.0, 30.0, 8.0, 5.0], [1.0, 10.0, 2.0, 1.0])  # 2, 3, 4, 5
    assert ratio == Ratio(3.5, 3.0, 4.0)
    assert compute_ratio([1.0, 2.0], [1.0, 0.0]) is None


def test_each_way_is_the_first_equally_often() -> None:
    orders = [rotate(("a", "b", "c"), turn) for turn in range(6)]
    assert orders[:3] == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]] and orders[3:] == orders[:3]


def test_rows_compare_with_the_base() -> None:
    samples = Samples(("a", "b"), base="b")
    for turn in (1.0, 2.0, 3.0):
        samples.add("a", 2 * turn, turn)
        samples.add("b", turn, 4 * turn)
    first, second = samples.rows({"a": {"more": 7}})
    assert first["seconds"] == 4.0 and first["more"] == 7 and "more" not in second
    assert first["ratio"].median == 2.0 and first["ratio of processor s"].median == 0.25
    assert second["ratio"].median == 1.0 and second["samples"]["processor s"] == [4.0, 8.0, 12.0]


def test_counts_processor_seconds_of_reaped_children() -> None:
    before = process_seconds()
    with Stopwatch() as watch:
        subprocess.run([sys.executable, "-c", BURN], check=True)
    assert watch.processor_s >= 0.28 and watch.seconds > 0.25
    assert process_seconds(os.getpid()) - before >= 0.28


def test_counts_processor_seconds_of_living_descendants() -> None:
    program = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BURN + chr(10) + 'input()'!r}])"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as process:
        while tree_seconds(process.pid) < 0.28:
            assert process.poll() is None
        assert process_seconds(process.pid) < tree_seconds(process.pid)
        process.communicate(b"\n")
    assert tree_seconds(process.pid) == 0.0


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        ("a", 1234567, "1,234,567"),
        ("a", 1234.5, "1,234"),
        ("a", 123.45, "123.5"),
        ("a", 12.345, "12.35"),
        ("a", 0.5, "0.500"),
        ("a", 0.0012345, "0.0012"),
        ("share, %", 0.123, "12.3"),
        ("a", None, "-"),
        ("a", compute_ratio([2.0], [1.0]), "2.00 (2.00 to 2.00)"),
    ],
)
def test_formats_cells(column: str, value: object, text: str) -> None:
    assert format_value(column, value) in (text, text.replace("12.35", "12.34"))
