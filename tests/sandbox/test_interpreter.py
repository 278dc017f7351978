"""Interpreter sessions keep state between calls and enforce limits."""

import asyncio
import sys
import time
from pathlib import Path

import pytest

from megarl.sandbox.box_memory import list_descendants
from megarl.sandbox.results import Limits

sys.path.append(str(Path(__file__).parent))
from sync_sandbox import SyncSandbox, needs_bubblewrap  # noqa: E402

pytestmark = [needs_bubblewrap, pytest.mark.alone]


@pytest.fixture(scope="module")
def sandbox():
    sandbox = SyncSandbox(max_boxes=2)
    yield sandbox
    sandbox.close()


@pytest.fixture()
def run(sandbox):
    session = sandbox.interpreter(Limits(seconds=20, output_bytes=2000, memory_mb=200))
    yield lambda code, seconds=None: sandbox.wait(session.run(code, seconds))
    sandbox.wait(session.close())
    assert sandbox.wait(session.run("1")).reason == "closed"


def test_keeps_names_between_calls(run):
    assert run("x = 41").stdout == ""
    output = run("def f(n):\n    return n + 1\nprint('called')\nf(x)")
    assert output.ok and output.stdout == "called\n42\n" and not output.is_state_lost


def test_exceptions_are_reported_and_keep_the_state(run):
    run("x = 1")
    output = run("x = 2\n1 / 0")
    assert (output.ok, output.reason, output.is_state_lost) == (False, "exit", False)
    assert "ZeroDivisionError" in output.stderr and "1 / 0" in output.stderr and "inside" not in output.stderr
    for code in ("raise SystemExit(3)", "exit()", "raise KeyboardInterrupt", "(", "x = '\0'", "raise BaseException"):
        assert run(code).reason == "exit"
    assert run("x").stdout == "2\n"


def test_a_timeout_resets_the_session(run):
    run("x = 1")
    output = run("print('before', flush=True)\nwhile True: pass", seconds=0.5)
    assert (output.reason, output.is_state_lost, output.stdout) == ("time", True, "before\n")
    assert "NameError" in run("x").stderr


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os; os._exit(0)", "exit"),
        ("import os; os.kill(os.getpid(), 9)", "exit"),
        ("import os; os.close(3)", "exit"),
        ("import os; os.closerange(0, 99)", "exit"),
        ("a = b'x' * (1 << 30)", "memory"),
        ("import os\nwhile True: os.write(1, b'x' * 9999)", "output"),
    ],
)
def test_a_dead_interpreter_is_replaced(run, code, reason):
    output = run(code)
    assert (output.ok, output.is_state_lost) == (False, True) and output.reason == reason
    assert run("1 + 1").stdout == "2\n"


def test_truncates_output_in_the_middle(run):
    output = run("print('a' * 3000)\nprint('z' * 3000)")
    assert output.ok and len(output.stdout) < 2100
    assert output.stdout.startswith("aaa") and output.stdout.endswith("zzz\n") and "left out" in output.stdout


def test_children_and_threads_cannot_reply(run):
    assert run("import os\nprint('one', flush=True)\nif os.fork() == 0: print('child')").ok
    assert run("import threading, time; threading.Thread(target=time.sleep, args=(50,)).start()").ok
    assert run("2").stdout.endswith("2\n")


def test_pauses_between_calls(sandbox, run):
    """Threads and child processes stop, because nothing enforces limits between calls."""
    run("import os, threading, time\nn = 0\ndef count():\n    global n\n    while True: n += 1")
    run("threading.Thread(target=count, daemon=True).start()\nif os.fork() == 0:\n    while True: pass")
    before = run("n").stdout
    time.sleep(0.5)
    states = []
    for pid in list_descendants(sandbox.async_sandbox.runner_pid):
        if b"an interpreter" in Path(f"/proc/{pid}/cmdline").read_bytes():
            states.append(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0])
    assert len(states) >= 2 and set(states) <= {"T", "S"} and states.count("T") >= 2
    assert run("n").ok and before


def test_serializes_concurrent_calls(sandbox):
    async def run_concurrently():
        async with await sandbox.async_sandbox.interpreter() as session:
            calls = [session.run(f"import time; time.sleep(0.1); x = {i}; x") for i in range(3)]
            return [output.stdout for output in await asyncio.gather(*calls)]

    assert sandbox.wait(run_concurrently()) == ["0\n", "1\n", "2\n"]


def test_cancellation_resets_the_session(sandbox):
    async def cancelled():
        async with await sandbox.async_sandbox.interpreter() as session:
            await session.run("x = 1")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(session.run("while True: pass"), 0.3)
            return await session.run("x")

    assert "NameError" in sandbox.wait(cancelled()).stderr


def test_a_forged_reply_ends_only_its_call(run):
    run("import os, time; os.write(3, b'1\\n')\nx = 1\ntime.sleep(0.2)")
    assert run("y = 1").reason in ("", "exit")


def test_handles_unicode_and_invalid_bytes(run):
    assert run("print('ä€𝄞\\udc80'.encode('utf-8', 'replace'), '\\x1b[0m', 'ä')").stdout.endswith("ä\n")
    assert run("import sys; sys.stdout.buffer.write(b'\\xff\\n'); sys.stdout.flush()").stdout.startswith("�")
    assert run("").ok and run("# only a comment").ok and run("x = 1;").ok


def test_idle_sessions_do_not_count_as_running(sandbox):
    async def open_sessions():
        sessions = [await sandbox.async_sandbox.interpreter() for _ in range(6)]
        outputs = await asyncio.gather(*(session.run(f"x = {i}") for i, session in enumerate(sessions)))
        assert all(output.ok for output in outputs)
        assert (await sandbox.async_sandbox.run(["true"])).ok
        outputs = await asyncio.gather(*(session.run("x") for session in sessions))
        assert [output.stdout for output in outputs] == [f"{i}\n" for i in range(6)]
        for session in sessions:
            await session.close()

    sandbox.wait(open_sessions())
