import asyncio
import os
import time
from collections.abc import Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from megarl.config import ConfigError
from megarl.rollout.tools import OUTPUT_LIMIT, ToolPool, ToolResult, load_tool, load_tools

NAMES = ("raises", "hangs", "dies", "exits", "prints", "long", "table", "slow", "pid", "modules")


def run(calls: list[tuple[str, Any]], timeout: float = 30.0, size: int = 2) -> list[ToolResult]:
    """The calls one after another in one pool."""

    async def all_of_them() -> list[ToolResult]:
        async with aclosing(ToolPool(load_tools([*(f"odd_tools:{name}" for name in NAMES)]), timeout, size)) as pool:
            return [await pool.call(name, arguments) for name, arguments in calls]

    return asyncio.run(all_of_them())


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_results_are_text_or_json_and_long_ones_are_cut() -> None:
    table, long = run([("table", {}), ("long", {})])
    assert table == ToolResult('{"a": [1, "ä"]}', True)
    assert long.text.startswith("x" * OUTPUT_LIMIT + " ...") and len(long.text) < OUTPUT_LIMIT + 50


def test_a_tool_that_raises_exits_or_dies_is_an_observation_and_the_next_call_works() -> None:
    raised, exited, died, fine = run([("raises", {}), ("exits", {}), ("dies", {}), ("prints", {})], size=1)
    assert not raised.ok and "no such city" in raised.text
    assert not exited.ok
    assert not died.ok and "died" in died.text
    assert fine == ToolResult("real", True)


def test_a_tool_that_prints_cannot_forge_an_answer() -> None:
    assert run([("prints", {}), ("table", {})], size=1)[1].text.startswith('{"a"')


def test_a_tool_that_hangs_is_killed_with_its_children_and_its_place_refilled(tmp_path: Path) -> None:
    mark = tmp_path / "pids"
    first, hung, second = run([("pid", {}), ("hangs", {"mark": str(mark)}), ("pid", {})], timeout=10.0, size=1)
    assert not hung.ok and "stopped after 10 s" in hung.text
    assert second.ok and second.text != first.text
    tool, child = map(int, mark.read_text().split())
    assert str(tool) == first.text
    deadline = time.monotonic() + 10
    while (is_running(tool) or is_running(child)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(tool) and not is_running(child)


def test_processes_end_with_the_pool_and_are_reused() -> None:
    first, second = run([("pid", {}), ("pid", {})])
    assert first == second and int(first.text) != os.getpid()
    assert not is_running(int(first.text))


def test_quick_calls_wait_for_a_process_instead_of_starting_one_each() -> None:
    async def many() -> set[str]:
        async with aclosing(ToolPool(load_tools(["odd_tools:pid"]), 60.0, 16)) as pool:
            return {result.text for result in await asyncio.gather(*(pool.call("pid", {}) for _ in range(64)))}

    assert len(asyncio.run(many())) < 8


def test_tool_processes_import_nothing_heavy() -> None:
    assert run([("modules", {})])[0].text == "[]"


def test_calls_run_at_the_same_time() -> None:
    async def both() -> float:
        async with aclosing(ToolPool(load_tools(["odd_tools:slow"]), 60.0, 2)) as pool:
            await asyncio.gather(*(pool.call("slow", {"seconds": 0.01}) for _ in range(2)))  # starts the processes
            start = time.monotonic()
            await asyncio.gather(*(pool.call("slow", {"seconds": 2}) for _ in range(2)))
            return time.monotonic() - start

    assert asyncio.run(both()) < 3.5


def test_a_cancelled_call_does_not_answer_the_next_one() -> None:
    async def cancel() -> ToolResult:
        async with aclosing(ToolPool(load_tools(["odd_tools:slow"]), 60.0, 1)) as pool:
            await pool.call("slow", {"seconds": 0})
            cut: Coroutine[Any, Any, ToolResult] = pool.call("slow", {"seconds": 0.3})
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(cut, 0.05)
            await asyncio.sleep(0.5)
            return await pool.call("slow", {"seconds": 0.001})

    assert asyncio.run(cancel()).text == "0.001"


@pytest.mark.parametrize(
    ("name", "arguments", "complaint"),
    [
        ("weather", {}, "there is no tool 'weather'; there are: raises"),
        ("slow", {}, "argument seconds is missing"),
        ("slow", {"seconds": 1, "minutes": 2}, "there is no argument minutes"),
        ("slow", {"seconds": "1"}, "argument seconds must be of type number"),
        ("slow", {"seconds": True}, "argument seconds must be of type number"),
        ("slow", [1], "must be a JSON object"),
    ],
)
def test_bad_calls_are_refused_in_words(name: str, arguments: Any, complaint: str) -> None:
    result = run([(name, arguments)])[0]
    assert not result.ok and complaint in result.text


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("calculator", "not of the form module:name"),
        ("no_such_module:x", "cannot import no_such_module"),
        ("odd_tools:weather", "odd_tools has no weather"),
        ("odd_tools:not_a_tool", "is a int, not"),
    ],
)
def test_a_wrong_tool_in_the_configuration(spec: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_tool(spec)


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="both called pid"):
        load_tools(["odd_tools:pid", "odd_tools:pid"])
