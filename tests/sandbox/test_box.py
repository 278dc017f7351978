"""Real sandboxes: commands, files, limits, concurrency and recovery."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from megarl.config import ConfigError, SandboxConfig
from megarl.sandbox import runner_client
from megarl.sandbox.box import VARIABLE, Sandbox, to_environment
from megarl.sandbox.box import probe as probe_once
from megarl.sandbox.results import Limits
from megarl.sandbox.runner_client import SandboxError

sys.path.append(str(Path(__file__).parent))
from sync_sandbox import SyncSandbox, needs_bubblewrap  # noqa: E402

pytestmark = [needs_bubblewrap, pytest.mark.alone]


@pytest.fixture(scope="module")
def sandbox():
    sandbox = SyncSandbox(max_boxes=4)
    yield sandbox
    sandbox.close()


def python(sandbox, source, **kwargs):
    return sandbox.run(["python3", "-c", source], **kwargs)


def test_runs_with_files_and_stdin(sandbox):
    result = python(
        sandbox,
        "import sys; print(open('a/b.txt').read(), input()); print('error', file=sys.stderr)\n"
        "open('a/out', 'wb').write(b'\\0\\xff')",
        files={"a/b.txt": b"content"},
        stdin=b"line\nanother",
        fetch=["a/out", "a/b.txt", "none"],
    )
    assert result.ok and result.status == 0 and result.reason == ""
    assert (result.stdout, result.stderr) == (b"content line\n", b"error\n")
    assert result.files == {"a/out": b"\0\xff", "a/b.txt": b"content"}


def test_passes_large_input_and_output(sandbox):
    data = os.urandom(3 << 20)
    result = sandbox.run(["cat", "in", "-"], {"in": data}, stdin=data, limits=Limits(output_bytes=8 << 20))
    assert result.ok and result.stdout == data + data


def test_handles_unread_stdin_and_closed_output(sandbox):
    assert sandbox.run(["true"], stdin=b"x" * (8 << 20)).ok
    result = sandbox.run(["sh", "-c", "exec 1>&- 2>&-; sleep 0.2; exit 3"])
    assert (result.status, result.reason) == (3, "exit")


def test_reports_exit_statuses_and_signals(sandbox):
    expected = {
        "exit 7": (7, "exit"),
        "kill -9 $$": (-9, "signal"),
        "kill -11 $$": (-11, "signal"),
        "exit 255": (255, "exit"),
    }
    for line, expected_result in expected.items():
        result = sandbox.run(["sh", "-c", line])
        assert (result.status, result.reason, result.ok) == (*expected_result, False)
    result = sandbox.run(["no-such-program"])
    assert result.status == 127 and b"no-such-program" in result.stderr


def test_provides_numpy_and_sympy(sandbox):
    pytest.importorskip("numpy")
    result = python(
        sandbox, "import numpy, sympy; print(numpy.arange(4).sum(), sympy.sqrt(8))", limits=Limits(seconds=60)
    )
    assert result.stdout == b"6 2*sqrt(2)\n", result


def test_hides_other_installed_packages(sandbox):
    source = "import os, sys; print([p for p in sys.path if p.endswith('site-packages') and os.listdir(p)])"
    assert python(sandbox, source).stdout == b"[]\n"


def test_runs_share_no_files(sandbox):
    python(sandbox, "open('/tmp/left', 'w'); open('/dev/shm/left', 'w')")
    assert python(sandbox, "import os; print(os.listdir('/tmp'), os.listdir('/dev/shm'))").stdout == b"[] []\n"


def test_fetches_only_regular_files(sandbox):
    result = python(
        sandbox,
        "import os\nos.symlink('/etc/passwd', 'link'); os.symlink('/', 'root'); os.mkfifo('fifo')\n"
        "open('a', 'w').write('a')\n"
        "os.link('a', 'hard'); os.mkdir('folder'); open('b', 'w').write('b'); os.symlink('b', 'to_b')\n"
        "open('big', 'wb').write(bytes(3 << 20)); os.symlink('.', 'here')",
        fetch=["link", "root/etc/passwd", "fifo", "a", "hard", "folder", "b", "to_b", "here/b", "big"],
        limits=Limits(output_bytes=1 << 17),
    )
    assert result.ok and result.files == {"b": b"b"}
    refused = {"link", "root/etc/passwd", "fifo", "a", "hard", "folder", "to_b", "here/b", "big"}
    assert result.refused.keys() == refused
    assert result.refused["hard"] == "has another name (a hard link)"
    assert result.refused["big"].startswith("has 3145728 bytes, and 2097151 may still be fetched")


def test_refuses_sparse_files(sandbox):
    result = python(
        sandbox,
        "import os\nwith open('sparse', 'wb') as file: file.truncate(8 << 20)\n"
        "with open('tail', 'wb') as file: file.seek(4 << 20); file.write(b'x')\n"
        "open('whole', 'wb').write(bytes(1 << 20)); open('empty', 'wb')\n"
        "print(sum(os.stat(name).st_blocks for name in ('sparse', 'tail')) * 512)",
        fetch=["sparse", "tail", "whole", "empty", "none"],
    )
    assert result.ok and int(result.stdout) < 1 << 16
    assert result.files == {"whole": bytes(1 << 20), "empty": b""}
    assert result.refused == {
        name: f"is sparse: its {size} bytes have holes; write them out"
        for name, size in (("sparse", 8 << 20), ("tail", (4 << 20) + 1))
    }


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "", ".", "a//b", "a/", "x\0y", "a" * 5000])
def test_refuses_paths_outside_the_sandbox(sandbox, name):
    with pytest.raises(ValueError, match="not a path inside the sandbox"):
        sandbox.run(["true"], {name: b""})
    with pytest.raises(ValueError, match="not a path inside the sandbox"):
        sandbox.run(["true"], fetch=[name])


@pytest.mark.parametrize("command", [[], ["python3", "-c", "\0"], ["echo", "x" * 200_000], ["echo", "\ud800"]])
def test_refuses_invalid_commands(sandbox, command):
    with pytest.raises(ValueError, match="give code in a file|surrogates"):
        sandbox.run(command)


def is_command_running(line):
    return line in os.popen("ps -eo args").read()


def test_kills_daemons(sandbox):
    daemon = (
        "import os, subprocess\nif os.fork() == 0:\n    os.setsid()\n    subprocess.Popen(['sleep', '66.375'])\n"
        "    open('there', 'w').close()\n    while True: os.wait()\nwhile not os.path.exists('there'): pass"
    )
    assert python(sandbox, daemon).ok
    assert not is_command_running("sleep 66.375")


def test_cancellation_kills_the_command(sandbox):
    async def cancelled():
        run = asyncio.ensure_future(sandbox.async_sandbox.run(["sleep", "77.125"]))
        await asyncio.sleep(0.5)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        for _ in range(200):
            if not is_command_running("sleep 77.125"):
                return True
            await asyncio.sleep(0.05)

    assert sandbox.wait(cancelled())


def test_max_boxes_limits_concurrency():
    """The limit holds across two `Sandbox` objects."""
    sandboxes = [SyncSandbox(max_boxes=2), SyncSandbox(max_boxes=2)]
    source = "import time; print(time.time()); time.sleep(0.3); print(time.time())"

    async def run_concurrently():
        runs = [sandbox.async_sandbox.run(["python3", "-c", source]) for sandbox in sandboxes for _ in range(3)]
        return await asyncio.gather(*runs)

    results = sandboxes[0].wait(run_concurrently())
    spans = [tuple(map(float, result.stdout.split())) for result in results]
    for sandbox in sandboxes:
        sandboxes[0].wait(sandbox.async_sandbox.close())
    assert all(sum(a <= start < b for a, b in spans) <= 2 for start, _ in spans)


def patch_runner(monkeypatch, module, assignment):
    """Patch a module in the process that starts sandboxes."""
    name, _, value = assignment.partition(" = ")
    patch = f"import {module}\n{module}.{name} = {value}\nmain("
    monkeypatch.setattr(runner_client, "_START", runner_client._START.replace("main(", patch))


def test_watchdog_replaces_a_missing_memory_cgroup(monkeypatch):
    patch_runner(monkeypatch, "megarl.sandbox.box_memory", "Cgroups.find = lambda: None")
    sandbox = SyncSandbox(max_boxes=3)
    layers = sandbox.probe()
    assert "memory watchdog" in layers.layers and "memory cgroup" not in layers.layers
    fork = "import os, time\nfor _ in range(4): os.fork()\n"
    limits = Limits(seconds=20, memory_mb=120)
    results = sandbox.all(
        {
            "one": sandbox.async_sandbox.run(
                ["python3", "-c", "a = b'x' * (200 << 20)\nwhile True: pass"], limits=limits
            ),
            "many": sandbox.async_sandbox.run(
                ["python3", "-c", fork + "a = b'x' * (12 << 20)\ntime.sleep(30)"], limits=limits
            ),
            "files": sandbox.async_sandbox.run(
                ["python3", "-c", "a = b'x' * (70 << 20)\nopen('a', 'wb').write(a)\nimport time; time.sleep(30)"],
                limits=Limits(seconds=20, memory_mb=120, disk_mb=100),
            ),
            # Pages that processes share, also after vfork, count once.
            "shared": sandbox.async_sandbox.run(
                ["python3", "-c", "a = b'x' * (30 << 20)\n" + fork + "time.sleep(0.5)"], limits=limits
            ),
            "vforked": sandbox.async_sandbox.run(
                [
                    "python3",
                    "-c",
                    "a = b'x' * (80 << 20)\nimport subprocess\nfor _ in range(40): subprocess.run(['true'])",
                ],
                limits=limits,
            ),
        }
    )
    sandbox.close()
    assert {name: result.reason for name, result in results.items()} == {
        "one": "memory",
        "many": "memory",
        "files": "memory",
        "shared": "",
        "vforked": "",
    }


def test_watchdog_counts_processes_on_old_kernels(monkeypatch):
    patch_runner(monkeypatch, "platform", "release = lambda: '5.10.0'")
    sandbox = SyncSandbox()
    fork_bomb = "import os, time\nfor _ in range(300): os.fork() or time.sleep(60)\ntime.sleep(60)"
    try:
        assert "counts" in " ".join(sandbox.probe().missing)
        assert python(sandbox, fork_bomb, limits=Limits(seconds=20)).reason == "processes"
        assert python(sandbox, "import os; [os.fork() for _ in range(3)]").ok
    finally:
        sandbox.close()


def test_restarts_a_killed_runner():
    sandbox = SyncSandbox()
    assert sandbox.run(["true"]).ok
    process = sandbox.async_sandbox._client._process
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with pytest.raises(SandboxError, match="the process that starts boxes exited"):
        sandbox.run(["sleep", "1"])
    assert sandbox.run(["true"]).ok
    sandbox.close()


def test_sandboxes_end_with_their_owner():
    program = """
import asyncio, os
from megarl.sandbox.box import Sandbox
sandbox = Sandbox.from_environment()
async def main():
    run = asyncio.ensure_future(sandbox.run(['sleep', '88.25']))
    await asyncio.sleep(1.5)
    print(os.popen('ps -eo args').read().count('sleep 88.25') > 0, flush=True)
    os.kill(os.getpid(), 9)
asyncio.run(main())
"""
    out = os.popen(f'{sys.executable} -c "{program}"').read()
    assert out == "True\n"
    deadline = time.monotonic() + 20
    while is_command_running("sleep 88.25"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_works_across_event_loops_and_forks():
    sandbox = Sandbox(SandboxConfig())
    for _ in range(2):
        assert asyncio.run(sandbox.run(["true"])).ok
    first_pid = sandbox._client._process.pid
    pid = os.fork()
    if pid == 0:
        try:
            good = asyncio.run(sandbox.run(["true"])).ok and sandbox._client._process.pid != first_pid
        finally:
            os._exit(0 if good else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert asyncio.run(sandbox.run(["true"])).ok and sandbox._client._process.pid == first_pid
    asyncio.run(sandbox.close())


def test_probe_reports_protection_layers(sandbox):
    probe = sandbox.probe()
    assert probe.backend == "bubblewrap" and probe == sandbox.probe()
    assert (
        probe_once(SandboxConfig()) is probe_once(SandboxConfig())
        and probe_once(SandboxConfig()).layers[1:] == probe.layers[1:]
    )
    assert {"seccomp", "resource limits"} <= set(probe.layers) and "bubblewrap" in str(probe)
    if os.getuid() == 0:
        assert any("dropped from root" in layer for layer in probe.layers)


def test_settings_pass_through_the_environment(monkeypatch):
    monkeypatch.setenv(VARIABLE, '{"backend": "none", "memory_mb": 99, "max_boxes": 3}')
    assert Sandbox.from_environment().settings == SandboxConfig("none", 99, 3)
    settings = SandboxConfig("http://sandbox:8080", 77, 5)
    for name, value in to_environment(settings).items():
        monkeypatch.setenv(name, value)
    assert Sandbox.from_environment().settings == settings
    monkeypatch.delenv(VARIABLE)
    assert Sandbox.from_environment().settings == SandboxConfig()
    for text in ("[]", "{", '{"memory": 1}', '{"max_boxes": 0}'):
        monkeypatch.setenv(VARIABLE, text)
        with pytest.raises(ConfigError, match="sandbox|SANDBOX"):
            Sandbox.from_environment()
