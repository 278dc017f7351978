"""Tools in worker processes: calls, failures, limits and schemas."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from megarl.config import ConfigError
from megarl.environments.catalog import EnvironmentCatalog, load_tools
from megarl.environments.environment_process import OUTPUT_LIMIT
from megarl.environments.loading import TOOLS_KEY, load
from megarl.environments.process_sessions import EnvironmentPool
from megarl.environments.protocol import ToolResult
from megarl.environments.tools import Tool, check_function, check_schema
from megarl.processes import worker_process
from megarl.processes.forkserver import MAX_OUTPUT_BYTES
from megarl.types import Prompt

pytestmark = [pytest.mark.alone, pytest.mark.slow]

PROMPT = Prompt("p", ({"role": "user", "content": "x"},))
NAMES = ("raises", "hangs", "dies", "exits", "prints", "long", "table", "slow", "pid", "modules")


def make_pool(*names: str, timeout: float = 60.0, size: int = 1, log: Path | None = None) -> Any:
    return aclosing(
        EnvironmentPool(
            EnvironmentCatalog(load_tools([f"misbehaving_tools:{name}" for name in names])), timeout, size, log
        )
    )


def call_tools(calls: list[tuple[str, Any]], timeout: float = 30.0, size: int = 2) -> list[ToolResult]:
    """Make the calls in order in one session."""

    async def call_all() -> list[ToolResult]:
        async with make_pool(*NAMES, timeout=timeout, size=size) as pool:
            session = await pool.open_session(PROMPT)
            return [await session.call(*item) for item in calls]

    return asyncio.run(call_all())


def test_awaits_coroutine_functions() -> None:
    names = ("waits", "waits_and_raises", "waits_as_object", "pid")

    async def call_all() -> list[ToolResult]:
        async with make_pool(*names, timeout=1.0) as pool:
            calls = [("waits", {"seconds": 0.01}), ("waits_as_object", {"seconds": 0}), ("waits_and_raises", {})]
            calls += [("pid", {}), ("waits", {"seconds": 60}), ("waits", {"seconds": 0})]
            return [await pool.call_tool(*call) for call in calls]

    waited, number, raised, pid, timed_out, after_timeout = asyncio.run(call_all())
    assert (waited, after_timeout) == (ToolResult("waited 0.01 s", True), ToolResult("waited 0 s", True))
    assert number == ToolResult("0", True) and pid.ok
    assert raised == ToolResult("Error: no such place", False)
    assert timed_out == ToolResult("Error: the tool was stopped after 1 s", False)


def test_counts_calls_and_failures() -> None:
    async def call_all() -> Any:
        async with make_pool("raises", "dies", "table", "slow", timeout=1.0) as pool:
            session = await pool.open_session(PROMPT)
            calls: list[tuple[str, Any]] = [("raises", {}), ("raises", {}), ("dies", {}), ("table", {})]
            calls += [("slow", {"seconds": 60}), ("slow", {"seconds": "x"}), ("unknown", {}), ("slow", {})]
            for call in calls:
                await session.call(*call)
            return pool.tool_call_stats

    actual = asyncio.run(call_all())
    assert {name: (item.num_calls, item.num_failed) for name, item in actual.items()} == {
        **{"raises": (2, 2), "dies": (1, 1), "table": (1, 0), "slow": (1, 1)},
    }
    assert (
        actual["raises"].first_error.startswith("'no such city' (KeyError at ") and "died" in actual["dies"].first_error
    )
    assert actual["slow"].first_error == "the tool was stopped after 1 s" and actual["table"].first_error == ""


MISBEHAVING_TOOLS = [
    *(
        "unprintable_error",
        "interrupts",
        "prints_much",
        "returns_bytes",
        "generates",
        "nan",
        "returns_none",
        "deeply_nested",
        "circular",
        "huge_output",
        "lone_surrogate",
    ),
    *("closes_stdout", "closes_all", "changes_directory", "working_directory", "unserializable", "pid"),
]


def test_misbehaving_tools_do_not_break_later_calls(tmp_path: Path) -> None:
    """All calls share one process while it lives."""
    log = tmp_path / "logs/tools.log"

    async def call_all() -> dict[str, ToolResult]:
        async with make_pool(*MISBEHAVING_TOOLS, log=log) as pool:
            first = {name: await pool.call_tool(name, {}) for name in MISBEHAVING_TOOLS}
            for _ in range(30):
                await pool.call_tool("returns_bytes", {})
            return first

    actual = asyncio.run(call_all())
    assert {name for name, result in actual.items() if result.ok} == {
        *(
            "nan",
            "returns_none",
            "huge_output",
            "lone_surrogate",
            "closes_stdout",
            "changes_directory",
            "working_directory",
            "pid",
        )
    }
    expected = {
        "unprintable_error": "Error: _UnprintableError",
        "interrupts": "Error: KeyboardInterrupt",
        "prints_much": "Error: no such thing",
        "returns_bytes": "Error: the tool returned bytes; it must return text, or a JSON value",
        "generates": "Error: Object of type generator is not JSON serializable",
        "nan": "NaN",
        "returns_none": "null",
        "circular": "Error: Circular reference detected",
        "lone_surrogate": "half \ufffd of it",
        "closes_stdout": "closed",
        "closes_all": "Error: the tool's process died",
        "working_directory": os.getcwd(),
        "unserializable": "Error: Object of type _UnprintableError is not JSON serializable",
    }
    assert {name: actual[name].text for name in expected} == expected
    assert "recursion" in actual["deeply_nested"].text
    assert f" ... ({300_000_000 - OUTPUT_LIMIT} characters cut) ... x" in actual["huge_output"].text
    log_text = log.read_text()
    assert "prints_much {}: Error: no such thing" in log_text and 'raise LookupError("no such thing")' in log_text
    assert (
        "it prints too much: this is not all of it" in log_text
        and "_UnprintableError: <exception str() failed>" in log_text
    )
    assert log_text.count("returns_bytes {}") == 10 and "further ones are not logged" in log_text
    assert len(log_text) < MAX_OUTPUT_BYTES + 100_000


def wait_until_exited(pids: list[int]) -> bool:
    deadline = time.monotonic() + 20
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_running, pids))


def read_pids(pid_file: Path) -> list[int]:
    return [int(line) for line in pid_file.read_text().split()]


def test_closing_the_pool_kills_processes_of_tools(tmp_path: Path) -> None:
    """A child, a child in its own session, and a daemon that keeps the pipes open. Closing does not wait for them."""
    pid_file = tmp_path / "pids"
    actual: list[ToolResult] = []

    async def call() -> None:
        async with make_pool("background", timeout=60.0, size=1) as pool:
            for behavior in ("child", "session", "daemon"):
                actual.append(await pool.call_tool("background", {"pid_file": str(pid_file), "behavior": behavior}))
            assert all(map(is_running, read_pids(pid_file)))

    asyncio.run(call())
    assert [result.text for result in actual] == ["left"] * 3
    assert len(read_pids(pid_file)) == 3 and not any(map(is_running, read_pids(pid_file)))


@pytest.mark.parametrize(
    ("behavior", "message"),
    [("die", "process died"), ("fault", "process died"), ("hang", "stopped after 3 s"), ("wait", "")],
)
def test_kills_children_of_ended_tool_processes(tmp_path: Path, behavior: str, message: str) -> None:
    pid_file = tmp_path / "pids"

    async def call() -> ToolResult:
        async with make_pool("leaves_processes", timeout=3.0, size=1) as pool:
            return await pool.call_tool("leaves_processes", {"pid_file": str(pid_file), "behavior": behavior})

    assert message in asyncio.run(call()).text
    assert len(read_pids(pid_file)) == 2 and not any(map(is_running, read_pids(pid_file)))


def test_no_process_outlives_a_killed_rank(tmp_path: Path) -> None:
    pid_file = tmp_path / "pids"
    script = f"""
import asyncio, os, signal
from megarl.environments.catalog import EnvironmentCatalog, load_tools
from megarl.environments.process_sessions import EnvironmentPool
async def call():
    pool = EnvironmentPool(EnvironmentCatalog(load_tools(["misbehaving_tools:leaves_processes"])), 60.0, 1)
    await pool.call_tool("leaves_processes", {{"pid_file": {str(pid_file)!r}, "behavior": "wait"}})
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(call())
"""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    process = subprocess.run([sys.executable, "-c", script], env=dict(os.environ, PYTHONPATH=path), timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert len(read_pids(pid_file)) == 2 and wait_until_exited(read_pids(pid_file))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_results_are_text_or_json_and_truncated() -> None:
    table, long = call_tools([("table", {}), ("long", {})])
    assert table == ToolResult('{"a": [1, "ä"]}', True)
    half_limit = "x" * (OUTPUT_LIMIT // 2)
    assert long.text == f"{half_limit} ... ({100_000 - OUTPUT_LIMIT} characters cut) ... {half_limit}"


def test_failures_of_tools_are_observations() -> None:
    raised, exited, died, fine = call_tools([("raises", {}), ("exits", {}), ("dies", {}), ("prints", {})], size=1)
    assert not raised.ok and "no such city" in raised.text
    assert not exited.ok
    assert not died.ok and "died" in died.text
    assert fine == ToolResult("real", True)


def test_printed_output_cannot_forge_a_result() -> None:
    assert call_tools([("prints", {}), ("table", {})], size=1)[1].text.startswith('{"a"')


def test_replaces_hanging_tool_processes(tmp_path: Path) -> None:
    pid_file = tmp_path / "pids"
    first, hung, second = call_tools(
        [("pid", {}), ("hangs", {"pid_file": str(pid_file)}), ("pid", {})], timeout=4.0, size=1
    )
    assert not hung.ok and "stopped after 4 s" in hung.text
    assert second.ok and second.text != first.text
    tool, child = map(int, pid_file.read_text().split())
    assert str(tool) == first.text
    deadline = time.monotonic() + 10
    while (is_running(tool) or is_running(child)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(tool) and not is_running(child)


def test_reuses_processes_until_the_pool_closes() -> None:
    first, second = call_tools([("pid", {}), ("pid", {})])
    assert first == second and int(first.text) != os.getpid()
    assert not is_running(int(first.text))


def test_quick_calls_share_few_processes() -> None:
    async def call_concurrently() -> set[str]:
        async with make_pool("pid", timeout=60.0, size=64) as pool:
            return {result.text for result in await asyncio.gather(*(pool.call_tool("pid", {}) for _ in range(64)))}

    # As many as start, one after the other, while calls wait: 64 if a start took no longer than a call.
    assert len(asyncio.run(call_concurrently())) < 32


def test_tool_processes_import_no_heavy_modules() -> None:
    assert call_tools([("modules", {})])[0].text == "[]"


def test_runs_calls_concurrently() -> None:
    async def time_two_calls() -> float:
        async with make_pool("slow", timeout=60.0, size=2) as pool:
            await asyncio.gather(*(pool.call_tool("slow", {"seconds": 0.01}) for _ in range(2)))  # starts the processes
            start = time.monotonic()
            await asyncio.gather(*(pool.call_tool("slow", {"seconds": 2}) for _ in range(2)))
            return time.monotonic() - start

    assert asyncio.run(time_two_calls()) < 3.5


def test_a_cancelled_call_does_not_answer_the_next() -> None:
    async def cancel() -> ToolResult:
        async with make_pool("slow", timeout=60.0, size=1) as pool:
            await pool.call_tool("slow", {"seconds": 0})
            cancelled_call: Coroutine[Any, Any, ToolResult] = pool.call_tool("slow", {"seconds": 0.3})
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(cancelled_call, 0.05)
            await asyncio.sleep(0.5)
            return await pool.call_tool("slow", {"seconds": 0.001})

    assert asyncio.run(cancel()).text == "0.001"


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("weather", {}, "unknown tool 'weather'; available: raises"),
        ("slow", {}, "argument seconds is missing"),
        ("slow", {"seconds": 1, "minutes": 2}, "unknown argument minutes"),
        ("slow", {"seconds": "1"}, "argument seconds must be of type number"),
        ("slow", {"seconds": True}, "argument seconds must be of type number"),
        ("slow", [1], "must be a JSON object"),
    ],
)
def test_refuses_invalid_calls(name: str, arguments: Any, message: str) -> None:
    result = call_tools([(name, arguments)])[0]
    assert not result.ok and message in result.text


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("calculator", "calculator"),
        ("no_such_module:x", "cannot import no_such_module"),
        ("misbehaving_tools:weather", "misbehaving_tools has no 'weather'"),
        ("misbehaving_tools:not_a_tool", "is a int, not"),
    ],
)
def test_refuses_invalid_specs(spec: str, message: str) -> None:
    for loads in (lambda spec: load(spec, TOOLS_KEY), lambda spec: load_tools([spec])):
        with pytest.raises(ConfigError, match=message):
            loads(spec)


def schema(name: Any = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "it must have type=function"),
        ("text", "it must have type=function"),
        ({"type": "function"}, "`function` must be a mapping"),
        (schema(""), "its name must be 1 to 64 of the characters"),
        (schema("a b"), "its name must be"),
        (schema("<|im_end|>"), "its name must be"),
        (schema(3), "its name must be"),
        (schema("x" * 65), "its name must be"),
        (schema(description=3), "`description` must be text"),
        (schema(parameters=[]), "`parameters` must be a mapping"),
        (schema(parameters={"properties": ["x"]}), "`properties` must map names to mappings"),
        (schema(parameters={"properties": {"x": "number"}}), "`properties` must map names to mappings"),
        (schema(parameters={"required": "x"}), "`required` must be a list"),
        (schema(parameters={"required": ["x"]}), "`required` names 'x', which is not among"),
        (schema(parameters={"properties": {"x": {"default": float("nan")}}}), "it is not JSON"),
        (schema(parameters={"properties": {"x": {"default": {1, 2}}}}), "it is not JSON"),
    ],
)
def test_refuses_invalid_schemas(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match="rollout.tools: m:f has no OpenAI function schema: .*" + message):
        check_schema(value, "m:f")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: "1", "cannot be called with the schema's arguments .x.: got an unexpected keyword argument 'x'"),
        (lambda x, y: "1", "missing a required argument: 'y'"),
        ("text", "is a str"),
        (lambda x: (yield x), "is a generator"),
    ],
)
def test_refuses_functions_that_do_not_match_their_schema(function: Any, message: str) -> None:
    described = schema(parameters={"properties": {"x": {"type": "number"}}, "required": ["x"]})
    with pytest.raises(ConfigError, match="rollout.tools: .* of m:f .*" + message):
        check_function(Tool(described, function), "m:f")


def test_loads_modules_only_in_tool_processes() -> None:
    sys.modules.pop("misbehaving_tools", None)
    tools = load_tools(["misbehaving_tools:table"])
    assert "misbehaving_tools" not in sys.modules and tools["table"].spec == "misbehaving_tools:table"
    with pytest.raises(RuntimeError, match="processes of their own"):
        tools["table"].function()


def test_limits_the_time_to_load_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_module.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(worker_process, "LOAD_LIMIT_S", 2.0)
    with pytest.raises(ConfigError, match="rollout.tools: slow_module:f did not load in another process within 2 s"):
        load_tools(["slow_module:f"])


def test_refuses_duplicate_names() -> None:
    with pytest.raises(ConfigError, match="both called pid"):
        load_tools(["misbehaving_tools:pid", "misbehaving_tools:pid"])
