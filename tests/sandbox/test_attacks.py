"""What tries to get out of a box, or to take more than it may, is contained: each attack in a real one."""

import contextlib
import os
import re
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from megarl.sandbox.results import Limits

sys.path.append(str(Path(__file__).parent))
import attacks  # noqa: E402
import own_attacks  # noqa: E402
from heavy import HEAVY  # noqa: E402
from real_boxes import Boxes, needs_boxes  # noqa: E402
from waiting import COMMAND, children, until, waiting, warm  # noqa: E402

pytestmark = [needs_boxes, pytest.mark.alone]
SECRET = "SECRET-OF-THE-TRAINER-1f00"
QUICK = re.findall(r"^def (\w+)", attacks.QUICK + own_attacks.QUICK, re.M)


@pytest.fixture(scope="module")
def box():
    os.environ["A_SECRET"] = SECRET
    boxes = Boxes(max_boxes=4, memory_mb=256)
    yield boxes
    boxes.end()
    del os.environ["A_SECRET"]


@pytest.fixture(scope="module")
def listening():
    """An engine's port on the loopback device and a socket without a file, and who came."""
    came = []
    with socket.create_server(("127.0.0.1", 0)) as engine, socket.socket(socket.AF_UNIX) as abstract:
        name = b"\0megarl-" + os.urandom(8).hex().encode()
        abstract.bind(name)
        abstract.listen()

        def accept(server):
            with contextlib.suppress(OSError):
                came.append(server.accept())

        for server in (engine, abstract):
            threading.Thread(target=accept, args=(server,), daemon=True).start()
        yield engine.getsockname()[1], name, came
        assert not came


@pytest.fixture(scope="module", params=["new", "prepared"])
def quick(request, box, listening, tmp_path_factory):
    """What each got: in a box that was made for it, and in one that had waited."""
    checkpoints = tmp_path_factory.mktemp("checkpoints")
    (checkpoints / "weights").write_text("weights")
    port, abstract, _ = listening
    python = Path(os.path.realpath(sys.base_prefix)).parts[1]
    names = {"PORT": port, "ABSTRACT": abstract, "CHECKPOINTS": str(checkpoints), "PYTHON": [python]}
    argument = "".join(f"{name} = {value!r}\n" for name, value in names.items())
    argument += f"SECRET = bytes({list(SECRET.encode())}).decode()\n"  # not to be found by a search for it
    source = f"{attacks.PRELUDE}\n{argument}\nbefore = set(globals()) | {{'before'}}\n{attacks.QUICK}"
    source += f"{own_attacks.QUICK}\n{attacks.RUN_QUICK}"
    limits = Limits(seconds=60, output_bytes=1 << 20, memory_mb=256 if request.param == "prepared" else 300)
    if request.param == "prepared":
        for _ in range(5):
            assert box.run_harness("send(0, 0)", 1, limits=limits).is_complete
        until(lambda: len(waiting(box)) >= 4)
        time.sleep(2.0)
    actual = box.run_harness(source, 1, limits=limits)
    assert actual.is_complete, actual.run
    assert (actual.results[0].pop("age") > 1.5) == (request.param == "prepared")
    return actual.results[0]


@pytest.mark.parametrize("name", QUICK)
def test_it_gets_nothing(quick, name):
    assert quick[name] == "-"


@pytest.fixture(scope="module")
def heavy():
    """Of one command, so that the first ones have boxes that waited."""
    boxes = Boxes(max_boxes=4, memory_mb=256)
    warm(boxes)
    yield boxes.all(
        {
            name: boxes.sandbox.run(COMMAND, {"main.py": source.encode()}, limits=limits)
            for name, (source, limits, _) in HEAVY.items()
        }
    )
    boxes.end()


@pytest.mark.parametrize("name", HEAVY)
def test_it_takes_no_more_than_it_may(heavy, name):
    result = heavy[name]
    assert result.reason in HEAVY[name][2], result
    assert result.seconds < HEAVY[name][1].seconds + 20
    assert len(result.stdout) <= HEAVY[name][1].output_bytes + 100


def test_boxes_that_wait_take_no_notice_of_another():
    """They are the same user as it is, and their gates are pipes as it has them, too."""
    boxes = Boxes(max_boxes=4)
    try:
        actual = warm(boxes)
        pids = [boxes.sandbox.runner_pid, *actual, *actual.values()]

        def states():
            fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split() for pid in pids]
            return [(field[16], os.listdir(f"/proc/{pid}/task")) for pid, field in zip(pids, fields, strict=True)]

        before = states()
        spoilt = boxes.run(["python3", "spoiling.py"], {"spoiling.py": own_attacks.SPOILING.encode()})
        assert spoilt.reason in ("", "signal")  # whether it is done before it has killed itself
        assert states() == before
        assert not any(children(first) for first in actual.values())  # none has begun
        assert boxes.run(COMMAND, {"main.py": b"print(4)"}).stdout == b"4\n"
    finally:
        boxes.end()


def test_open_files_that_a_box_hands_out_are_taken_by_nobody():
    boxes = Boxes(max_boxes=2)
    try:
        for _ in range(3):
            boxes.run_harness("send(0, 0)", 1)
        until(lambda: len(waiting(boxes)) == 2)
        ends = f"/proc/{boxes.sandbox.runner_pid}/fd"
        before = len(os.listdir(ends))
        assert boxes.run_harness(own_attacks.GIVING, 1).results == {}
        until(lambda: len(waiting(boxes)) == 2)
        assert len(os.listdir(ends)) < before + 20  # of a thousand; nests that come and go have some
        for end in os.listdir(ends):
            with contextlib.suppress(FileNotFoundError):
                assert os.readlink(f"{ends}/{end}") != "/usr"
    finally:
        boxes.end()
