"""Prewarmed sandboxes: limits, single use, cleanup with their owner, and the pool that manages them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megarl.sandbox import namespace as namespace_module
from megarl.sandbox.namespace import MAX_IDLE, MAX_IDLE_PER_SPEC, BoxSpec, WarmPool
from megarl.sandbox.results import Limits
from megarl.sandbox.runner_client import SandboxError

sys.path.append(str(Path(__file__).parent))
from idle_sandboxes import COMMAND, PRINT_AGE, find_idle_sandboxes, is_running, wait_until, warm  # noqa: E402
from sync_sandbox import SyncSandbox, needs_bubblewrap  # noqa: E402

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def sandbox():
    sandbox = SyncSandbox(max_boxes=16)
    yield sandbox
    sandbox.close()


def wait_until_exited(pids):
    wait_until(lambda: not any(is_running(pid) for pid in pids))


@needs_bubblewrap
def test_repeated_commands_get_prewarmed_sandboxes(sandbox):
    warm(sandbox)
    time.sleep(0.5)
    source = PRINT_AGE.format(clock=os.sysconf("SC_CLK_TCK")).encode()
    assert float(sandbox.run(COMMAND, {"main.py": source}).stdout) >= 0.3
    assert float(sandbox.run(["python3", "-B", "main.py"], {"main.py": source}).stdout) < 0.3


@needs_bubblewrap
def test_limits_idle_sandboxes(sandbox):
    for name in ("a", "b", "c"):
        for _ in range(MAX_IDLE_PER_SPEC + 3):
            assert sandbox.run(["sh", "-c", "true", name]).ok
            assert len(find_idle_sandboxes(sandbox)) <= MAX_IDLE + 1  # the last run may still be exiting
        time.sleep(0.3)
        assert len(find_idle_sandboxes(sandbox)) <= MAX_IDLE
    small_sandbox = SyncSandbox(max_boxes=2)
    try:
        warm(small_sandbox, idle=2)
        time.sleep(0.3)
        assert len(find_idle_sandboxes(small_sandbox)) == 2
    finally:
        small_sandbox.close()


@needs_bubblewrap
def test_uses_each_sandbox_once(sandbox):
    """Each run has its own namespaces and empty folders, and leaves nothing to the next."""
    source = b"""
import os
first = open("/proc/1/stat").read().split()[21]  # start time of the first process
print(os.readlink("/proc/self/ns/mnt"), os.readlink("/proc/self/ns/pid"), first, end=":")
print(os.listdir("/tmp"), os.listdir("/dev/shm"))
open("/tmp/left", "w"), open("/dev/shm/left", "w")
os.fork() or os.execlp("sleep", "sleep", "61.0625")
"""
    warm(sandbox)
    runs = {n: sandbox.async_sandbox.run(COMMAND, {"main.py": source}) for n in range(12)}
    output = [result.stdout.decode() for result in sandbox.all(runs).values()]
    assert all(line.endswith(":['main.py'] []\n") for line in output), output
    assert len(set(output)) == len(output)  # the kernel reuses the number of a namespace alone
    assert "sleep 61.0625" not in os.popen("ps -eo args").read()


@needs_bubblewrap
def test_replaces_a_killed_idle_sandbox(sandbox):
    before = warm(sandbox)
    bwrap_pid, first = next(iter(before.items()))
    os.kill(first, signal.SIGKILL)
    wait_until_exited([bwrap_pid, first])
    after = wait_until(lambda: len(idle := find_idle_sandboxes(sandbox)) >= 4 and idle)
    assert bwrap_pid not in after
    assert sandbox.run(COMMAND, {"main.py": b"print(1)"}).stdout == b"1\n"


@needs_bubblewrap
@pytest.mark.parametrize("failure", ["the first process", "bubblewrap"])
def test_runs_after_all_idle_sandboxes_die(sandbox, failure):
    """The runner is stopped meanwhile, so the request arrives together with the exits."""
    idle = warm(sandbox)
    os.kill(sandbox.async_sandbox.runner_pid, signal.SIGSTOP)
    pids = idle.values() if failure == "the first process" else idle
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_until_exited(pids)

    async def run_while_stopped():
        import asyncio

        run = asyncio.ensure_future(sandbox.async_sandbox.run(COMMAND, {"main.py": b"print(2)"}))
        await asyncio.sleep(0.2)
        os.kill(sandbox.async_sandbox.runner_pid, signal.SIGCONT)
        return await run

    assert sandbox.wait(run_while_stopped()).stdout == b"2\n"


@needs_bubblewrap
def test_prewarmed_sandboxes_apply_new_limits(sandbox):
    """Earlier runs had other limits."""
    source = b"""
import os, resource
room = os.statvfs("/tmp")
print(room.f_blocks * room.f_frsize >> 20, room.f_files, resource.getrlimit(resource.RLIMIT_NOFILE)[1],
      resource.getrlimit(resource.RLIMIT_FSIZE)[1] >> 20, os.path.exists("/proc/self/fd/3"))
"""
    for disk, files in ((64, 4096), (8, 100), (200, 9000)):
        warm(sandbox)
        limits = Limits(disk_mb=disk, files=files, open_files=50 + disk)
        output = sandbox.run(COMMAND, {"main.py": source}, limits=limits).stdout.split()
        assert output == [str(n).encode() for n in (disk, files + 8, 50 + disk, disk, False)]
    full = b"x" * (1 << 20)
    with pytest.raises(SandboxError, match="No space left"):
        sandbox.run(COMMAND, {"main.py": b"", **{f"f{n}": full for n in range(5)}}, limits=Limits(disk_mb=2))
    assert sandbox.run(COMMAND, {"main.py": b"print(3)"}).stdout == b"3\n"


@needs_bubblewrap
def test_idle_sandboxes_hold_both_ends_of_their_gate(sandbox):
    """Bubblewrap treats end of file like a start signal, so the first process keeps the write end open."""

    def is_gate_held(first):
        try:
            gate_pipes = [os.readlink(f"/proc/{first}/fd/{end}") for end in (9, 13)]
        except FileNotFoundError:  # the last sandbox is exiting
            return False
        return gate_pipes[0] == gate_pipes[1] and gate_pipes[0].startswith("pipe:")

    warm(sandbox)
    assert wait_until(lambda: len(idle := find_idle_sandboxes(sandbox)) >= 4 and all(map(is_gate_held, idle.values())))


@needs_bubblewrap
def test_closing_ends_idle_sandboxes():
    sandbox = SyncSandbox()
    idle = warm(sandbox)
    runner = sandbox.async_sandbox.runner_pid
    sandbox.close()
    wait_until_exited([*idle, *idle.values(), runner])


OWNER = """
import os, sys
sys.path.append("tests/sandbox")
from sync_sandbox import SyncSandbox
from idle_sandboxes import warm
sandbox = SyncSandbox()
idle = warm(sandbox)
print(sandbox.async_sandbox.runner_pid, sandbox.async_sandbox._client._process.pid, *idle, *idle.values(), flush=True)
if sys.argv[1] == "exit":
    sys.exit()
sys.stdin.read()
"""


@needs_bubblewrap
@pytest.mark.parametrize("victim", ["exit", "owner", "runner", "its parent"])
def test_idle_sandboxes_end_with_their_owner(victim):
    command = [sys.executable, "-c", OWNER, victim]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        runner, parent, *idle_pids = map(int, owner.stdout.readline().split())
        assert len(idle_pids) >= 8
        if victim != "exit":
            os.kill({"owner": owner.pid, "runner": runner, "its parent": parent}[victim], signal.SIGKILL)
        wait_until_exited([runner, parent, *idle_pids])
        owner.kill()


@needs_bubblewrap
def test_starting_sandboxes_end_with_the_runner():
    """Kills the runner at several stages of startup, also before the first process is bound to its bubblewrap."""
    sandbox = SyncSandbox()
    try:
        for delay in (0.0, 0.001, 0.002, 0.004, 0.008):

            async def kill_during_startup(delay=delay):
                import asyncio

                await sandbox.async_sandbox.run(["true"])
                runner = sandbox.async_sandbox.runner_pid
                runs = [asyncio.ensure_future(sandbox.async_sandbox.run(["sleep", "62.0625"])) for _ in range(4)]
                await asyncio.sleep(delay)
                os.kill(runner, signal.SIGKILL)
                await asyncio.gather(*runs, return_exceptions=True)

            sandbox.wait(kill_during_startup())
            wait_until(lambda: "62.0625" not in os.popen("ps -eo args").read())
    finally:
        sandbox.close()


class FakeNamespace:
    """A sandbox namespace that starts no process."""

    def __init__(self, runner, number, form, disk_mb, files):
        self.spec, self.init_pid, self.disk_limits = form, number, (disk_mb, files)
        self.is_finished = False
        runner.namespaces.append(self)

    def start(self):
        if self.spec.command[0] == "refused":
            raise OSError("refused")

    def is_alive(self):
        return not self.is_finished

    def resize(self, disk_mb, files):
        if disk_mb < 2:
            raise OSError("too small")
        self.disk_limits = disk_mb, files

    def kill(self):
        self.is_finished = True
        self.on_exited()

    def remove(self):
        self.is_finished = True


class FakeSpawner:
    is_boxed = True


class FakeRunner:
    def __init__(self, boxed=True):
        self.namespaces = []
        self.spawner = FakeSpawner()
        self.spawner.is_boxed = boxed


@pytest.fixture()
def pool(monkeypatch):
    monkeypatch.setattr(namespace_module, "BoxNamespace", FakeNamespace)
    clock = [100.0]
    monkeypatch.setattr(namespace_module.time, "monotonic", lambda: clock[0])
    runner = FakeRunner()
    pool = WarmPool(runner, 16)
    pool.runner, pool.now = runner, clock

    def fill():
        for _ in range(50):
            if pool.refill(clock[0]) > clock[0]:
                break
        return [item.spec.command[0] for item in pool._idle]

    pool.fill = fill
    pool.take_named = lambda name, disk=64: pool.take(BoxSpec((name,), False, 1), disk, 100)
    return pool


def test_does_not_prewarm_one_time_commands(pool):
    for n in range(40):
        pool.take_named(str(n))
        assert pool.fill() == []
    pool.take_named("39")
    assert pool.fill() == ["39"]
    pool.take_named("0")  # the first request was forgotten
    assert pool.fill() == ["39"]


def test_takes_each_namespace_once_with_its_limits(pool):
    taken_namespaces = [pool.take_named("a") for _ in range(20) if pool.fill() is not None]
    assert len({id(item) for item in taken_namespaces}) == 20 and not any(item.is_finished for item in taken_namespaces)
    assert pool.fill() == ["a"] * MAX_IDLE_PER_SPEC
    assert pool.take_named("a", 7).disk_limits == (7, 100)
    assert pool.take_named("a", 1).disk_limits == (1, 100) and pool._idle == []  # no idle namespace fits


def test_evicts_the_oldest_idle_namespaces(pool):
    for name in "abc":
        for _ in range(9):
            pool.take_named(name)
    assert pool.fill() == ["c"] * MAX_IDLE_PER_SPEC + ["b"] * MAX_IDLE_PER_SPEC and MAX_IDLE == 2 * MAX_IDLE_PER_SPEC
    pool.now[0] += 6
    pool.take_named("a")
    assert sorted(pool.fill()) == ["a"] * MAX_IDLE_PER_SPEC + ["c"] * MAX_IDLE_PER_SPEC
    assert sum(not item.is_finished for item in pool.runner.namespaces) == 28 + MAX_IDLE


def test_ends_unused_namespaces_after_a_while(pool):
    for _ in range(5):
        pool.take_named("a")
    assert len(pool.fill()) == MAX_IDLE_PER_SPEC
    pool.now[0] += namespace_module.IDLE_S - 1
    assert pool.refill(pool.now[0]) == pool.now[0] + 1 and len(pool._idle) == MAX_IDLE_PER_SPEC
    pool.now[0] += 1
    assert pool.fill() == [] and sum(not item.is_finished for item in pool.runner.namespaces) == 5


def test_replaces_a_lost_namespace_after_a_delay(pool):
    for _ in range(5):
        pool.take_named("a")
    pool.fill()
    lost_namespace = pool._idle[1]
    lost_namespace.on_exited()
    assert pool.fill() == ["a"] * 3 and lost_namespace.is_finished
    assert pool.refill(pool.now[0]) == pool.now[0] + namespace_module.AGAIN_S
    pool.now[0] += namespace_module.AGAIN_S
    assert pool.fill() == ["a"] * 4


def test_does_not_retry_failing_specs(pool):
    for _ in range(3):
        with pytest.raises(OSError, match="refused"):
            pool.take_named("refused")
    num_created = len(pool.runner.namespaces)
    assert pool.fill() == [] and len(pool.runner.namespaces) == num_created + 1
    for _ in range(3):
        pool.take_named("a")
    pool.now[0] += namespace_module.AGAIN_S
    pool.fill()
    pool._idle[0].init_pid = 0  # bubblewrap never started a process
    pool._idle[0].on_exited()
    pool.now[0] += namespace_module.AGAIN_S
    assert "a" not in pool.fill()


def test_prewarms_nothing_without_isolation(monkeypatch):
    monkeypatch.setattr(namespace_module, "BoxNamespace", FakeNamespace)
    pool = WarmPool(FakeRunner(boxed=False), 16)
    for _ in range(5):
        pool.take(BoxSpec(("a",), False, 1), 64, 100)
    pool.refill(time.monotonic())
    assert pool._idle == []
