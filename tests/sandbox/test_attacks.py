"""What tries to get out of a box, or to take more than it may, is contained: each attack in a real one."""

import contextlib
import os
import re
import socket
import sys
import threading
from pathlib import Path

import pytest

from megarl.sandbox.results import Limits

sys.path.append(str(Path(__file__).parent))
import attacks  # noqa: E402
from heavy import HEAVY  # noqa: E402
from real_boxes import Boxes, needs_boxes  # noqa: E402

pytestmark = needs_boxes
SECRET = "SECRET-OF-THE-TRAINER-1f00"
QUICK = re.findall(r"^def (\w+)", attacks.QUICK, re.M)


@pytest.fixture(scope="module")
def box():
    os.environ["A_SECRET"] = SECRET
    boxes = Boxes(processes=4, memory_mb=256)
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


@pytest.fixture(scope="module")
def quick(box, listening, tmp_path_factory):
    checkpoints = tmp_path_factory.mktemp("checkpoints")
    (checkpoints / "weights").write_text("weights")
    port, abstract, _ = listening
    python = Path(os.path.realpath(sys.base_prefix)).parts[1]
    names = {"PORT": port, "ABSTRACT": abstract, "CHECKPOINTS": str(checkpoints), "PYTHON": [python]}
    given = "".join(f"{name} = {value!r}\n" for name, value in names.items())
    given += f"SECRET = bytes({list(SECRET.encode())}).decode()\n"  # not to be found by a search for it
    source = f"{attacks.PRELUDE}\n{given}\nbefore = set(globals()) | {{'before'}}\n{attacks.QUICK}\n{attacks.RUN_QUICK}"
    found = box.collect(source, 1, limits=Limits(seconds=60, output_bytes=1 << 20))
    assert found.complete, found.run
    return found.results[0]


@pytest.mark.parametrize("name", QUICK)
def test_it_gets_nothing(quick, name):
    assert quick[name] == "-"


@pytest.fixture(scope="module")
def heavy(box):
    runs = {
        name: box.sandbox.run(["python3", "-c", source], limits=limits) for name, (source, limits, _) in HEAVY.items()
    }
    return box.all(runs)


@pytest.mark.parametrize("name", HEAVY)
def test_it_takes_no_more_than_it_may(heavy, name):
    result = heavy[name]
    assert result.reason in HEAVY[name][2], result
    assert result.seconds < HEAVY[name][1].seconds + 20
    assert len(result.stdout) <= HEAVY[name][1].output_bytes + 100
