"""Boxes that were prepared: few, each used once, gone with who has made them; and which of them there are."""

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
from real_boxes import Boxes, needs_boxes  # noqa: E402
from waiting import AGED, COMMAND, there, until, waiting, warm  # noqa: E402

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def box():
    boxes = Boxes(max_boxes=16)
    yield boxes
    boxes.end()


def gone(pids):
    until(lambda: not any(there(pid) for pid in pids))


@needs_boxes
def test_a_box_that_was_asked_for_again_waits_for_the_next(box):
    warm(box)
    time.sleep(0.5)
    source = AGED.format(clock=os.sysconf("SC_CLK_TCK")).encode()
    assert float(box.run(COMMAND, {"main.py": source}).stdout) >= 0.3
    assert float(box.run(["python3", "-B", "main.py"], {"main.py": source}).stdout) < 0.3


@needs_boxes
def test_few_wait_of_one_form_and_of_all(box):
    for name in ("a", "b", "c"):
        for _ in range(MAX_IDLE_PER_SPEC + 3):
            assert box.run(["sh", "-c", "true", name]).ok
            assert len(waiting(box)) <= MAX_IDLE + 1  # the one that has just run may not be gone
        time.sleep(0.3)
        assert len(waiting(box)) <= MAX_IDLE
    few = Boxes(max_boxes=2)
    try:
        warm(few, nests=2)
        time.sleep(0.3)
        assert len(waiting(few)) == 2
    finally:
        few.end()


@needs_boxes
def test_no_nest_has_two_boxes(box):
    """Each box has namespaces of its own, empty folders, and leaves nothing to the next."""
    source = b"""
import os
first = open("/proc/1/stat").read().split()[21]  # when its first process began
print(os.readlink("/proc/self/ns/mnt"), os.readlink("/proc/self/ns/pid"), first, end=":")
print(os.listdir("/tmp"), os.listdir("/dev/shm"))
open("/tmp/left", "w"), open("/dev/shm/left", "w")
os.fork() or os.execlp("sleep", "sleep", "61.0625")
"""
    warm(box)
    runs = {n: box.sandbox.run(COMMAND, {"main.py": source}) for n in range(12)}
    said = [result.stdout.decode() for result in box.all(runs).values()]
    assert all(line.endswith(":['main.py'] []\n") for line in said), said
    assert len(set(said)) == len(said)  # the number alone of a namespace that is gone is given to another
    assert "sleep 61.0625" not in os.popen("ps -eo args").read()


@needs_boxes
def test_one_that_was_killed_while_it_waited_is_replaced(box):
    before = warm(box)
    outer, first = next(iter(before.items()))
    os.kill(first, signal.SIGKILL)
    gone([outer, first])
    after = until(lambda: len(actual := waiting(box)) >= 4 and actual)
    assert outer not in after
    assert box.run(COMMAND, {"main.py": b"print(1)"}).stdout == b"1\n"


@needs_boxes
@pytest.mark.parametrize("which", ["the first process", "bubblewrap"])
def test_those_that_died_while_they_waited_have_no_box(box, which):
    """All at once, so that the order comes together with the news."""
    actual = warm(box)
    os.kill(box.sandbox.runner_pid, signal.SIGSTOP)
    pids = actual.values() if which == "the first process" else actual
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    gone(pids)

    async def asked():
        import asyncio

        run = asyncio.ensure_future(box.sandbox.run(COMMAND, {"main.py": b"print(2)"}))
        await asyncio.sleep(0.2)
        os.kill(box.sandbox.runner_pid, signal.SIGCONT)
        return await run

    assert box.wait(asked()).stdout == b"2\n"


@needs_boxes
def test_a_nest_takes_the_limits_of_its_box(box):
    """Those of the boxes before it were others."""
    source = b"""
import os, resource
room = os.statvfs("/tmp")
print(room.f_blocks * room.f_frsize >> 20, room.f_files, resource.getrlimit(resource.RLIMIT_NOFILE)[1],
      resource.getrlimit(resource.RLIMIT_FSIZE)[1] >> 20, os.path.exists("/proc/self/fd/3"))
"""
    for disk, files in ((64, 4096), (8, 100), (200, 9000)):
        warm(box)
        limits = Limits(disk_mb=disk, files=files, open_files=50 + disk)
        said = box.run(COMMAND, {"main.py": source}, limits=limits).stdout.split()
        assert said == [str(n).encode() for n in (disk, files + 8, 50 + disk, disk, False)]
    full = b"x" * (1 << 20)
    with pytest.raises(SandboxError, match="No space left"):
        box.run(COMMAND, {"main.py": b"", **{f"f{n}": full for n in range(5)}}, limits=Limits(disk_mb=2))
    assert box.run(COMMAND, {"main.py": b"print(3)"}).stdout == b"3\n"


@needs_boxes
def test_a_gate_stays_shut_when_who_could_open_it_is_gone(box):
    """To bubblewrap the end of a pipe is a line as good as any: the first process itself has the other end."""

    def shut(first):
        try:
            ends = [os.readlink(f"/proc/{first}/fd/{end}") for end in (9, 13)]
        except FileNotFoundError:  # the last box is on its way out
            return False
        return ends[0] == ends[1] and ends[0].startswith("pipe:")

    warm(box)
    assert until(lambda: len(actual := waiting(box)) >= 4 and all(map(shut, actual.values())))


@needs_boxes
def test_what_waits_ends_when_the_sandbox_is_closed():
    boxes = Boxes()
    actual = warm(boxes)
    runner = boxes.sandbox.runner_pid
    boxes.end()
    gone([*actual, *actual.values(), runner])


OWNER = """
import os, sys
sys.path.append("tests/sandbox")
from real_boxes import Boxes
from waiting import warm
boxes = Boxes()
found = warm(boxes)
print(boxes.sandbox.runner_pid, boxes.sandbox._client._process.pid, *found, *found.values(), flush=True)
if sys.argv[1] == "exit":
    sys.exit()
sys.stdin.read()
"""


@needs_boxes
@pytest.mark.parametrize("whom", ["exit", "owner", "runner", "its parent"])
def test_nothing_waits_for_an_owner_that_has_ended(whom):
    command = [sys.executable, "-c", OWNER, whom]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        runner, parent, *remaining = map(int, owner.stdout.readline().split())
        assert len(remaining) >= 8
        if whom != "exit":
            os.kill({"owner": owner.pid, "runner": runner, "its parent": parent}[whom], signal.SIGKILL)
        gone([runner, parent, *remaining])
        owner.kill()


@needs_boxes
def test_what_has_just_begun_ends_with_its_owner():
    """Boxes at each stage of being made: the first process of one is not yet bound to its bubblewrap."""
    boxes = Boxes()
    try:
        for delay in (0.0, 0.001, 0.002, 0.004, 0.008):

            async def cut(delay=delay):
                import asyncio

                await boxes.sandbox.run(["true"])
                runner = boxes.sandbox.runner_pid
                runs = [asyncio.ensure_future(boxes.sandbox.run(["sleep", "62.0625"])) for _ in range(4)]
                await asyncio.sleep(delay)
                os.kill(runner, signal.SIGKILL)
                await asyncio.gather(*runs, return_exceptions=True)

            boxes.wait(cut())
            until(lambda: "62.0625" not in os.popen("ps -eo args").read())
    finally:
        boxes.end()


class Made:
    """A nest of which nothing is ever started."""

    def __init__(self, home, number, form, disk_mb, files):
        self.spec, self.init_pid, self.disk_limits = form, number, (disk_mb, files)
        self.is_finished = False
        home.made.append(self)

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


class Spawner:
    is_boxed = True


class Home:
    def __init__(self, boxed=True):
        self.made = []
        self.spawner = Spawner()
        self.spawner.is_boxed = boxed


@pytest.fixture()
def pool(monkeypatch):
    monkeypatch.setattr(namespace_module, "BoxNamespace", Made)
    now = [100.0]
    monkeypatch.setattr(namespace_module.time, "monotonic", lambda: now[0])
    home = Home()
    actual = WarmPool(home, 16)
    actual.home, actual.now = home, now

    def filled():
        for _ in range(50):
            if actual.refill(now[0]) > now[0]:
                break
        return [item.spec.command[0] for item in actual._idle]

    actual.filled = filled
    actual.asked = lambda name, disk=64: actual.take(BoxSpec((name,), False, 1), disk, 100)
    return actual


def test_what_was_asked_for_once_is_not_prepared(pool):
    for n in range(40):
        pool.asked(str(n))
        assert pool.filled() == []
    pool.asked("39")
    assert pool.filled() == ["39"]
    pool.asked("0")  # which is forgotten
    assert pool.filled() == ["39"]


def test_each_is_given_once_and_as_it_is_asked_for(pool):
    had = [pool.asked("a") for _ in range(20) if pool.filled() is not None]
    assert len({id(item) for item in had}) == 20 and not any(item.is_finished for item in had)
    assert pool.filled() == ["a"] * MAX_IDLE_PER_SPEC
    assert pool.asked("a", 7).disk_limits == (7, 100)
    assert pool.asked("a", 1).disk_limits == (1, 100) and pool._idle == []  # none that waits would do


def test_the_pool_is_bounded_and_what_is_old_makes_room(pool):
    for name in "abc":
        for _ in range(9):
            pool.asked(name)
    assert pool.filled() == ["c"] * MAX_IDLE_PER_SPEC + ["b"] * MAX_IDLE_PER_SPEC and MAX_IDLE == 2 * MAX_IDLE_PER_SPEC
    pool.now[0] += 6
    pool.asked("a")
    assert sorted(pool.filled()) == ["a"] * MAX_IDLE_PER_SPEC + ["c"] * MAX_IDLE_PER_SPEC
    assert sum(not item.is_finished for item in pool.home.made) == 28 + MAX_IDLE


def test_what_nobody_asks_for_any_more_is_ended(pool):
    for _ in range(5):
        pool.asked("a")
    assert len(pool.filled()) == MAX_IDLE_PER_SPEC
    pool.now[0] += namespace_module.IDLE_S - 1
    assert pool.refill(pool.now[0]) == pool.now[0] + 1 and len(pool._idle) == MAX_IDLE_PER_SPEC
    pool.now[0] += 1
    assert pool.filled() == [] and sum(not item.is_finished for item in pool.home.made) == 5


def test_one_that_is_lost_is_replaced_a_little_later(pool):
    for _ in range(5):
        pool.asked("a")
    pool.filled()
    lost = pool._idle[1]
    lost.on_exited()
    assert pool.filled() == ["a"] * 3 and lost.is_finished
    assert pool.refill(pool.now[0]) == pool.now[0] + namespace_module.AGAIN_S
    pool.now[0] += namespace_module.AGAIN_S
    assert pool.filled() == ["a"] * 4


def test_what_cannot_be_made_is_not_tried_again_and_again(pool):
    for _ in range(3):
        with pytest.raises(OSError, match="refused"):
            pool.asked("refused")
    created = len(pool.home.made)
    assert pool.filled() == [] and len(pool.home.made) == created + 1
    for _ in range(3):
        pool.asked("a")
    pool.now[0] += namespace_module.AGAIN_S
    pool.filled()
    pool._idle[0].init_pid = 0  # bubblewrap has never come so far
    pool._idle[0].on_exited()
    pool.now[0] += namespace_module.AGAIN_S
    assert "a" not in pool.filled()


def test_without_boxes_nothing_waits(monkeypatch):
    monkeypatch.setattr(namespace_module, "BoxNamespace", Made)
    pool = WarmPool(Home(boxed=False), 16)
    for _ in range(5):
        pool.take(BoxSpec(("a",), False, 1), 64, 100)
    pool.refill(time.monotonic())
    assert pool._idle == []
