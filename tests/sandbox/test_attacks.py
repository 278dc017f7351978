"""Real sandboxes contain escapes and resource exhaustion."""

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
import cross_sandbox_attacks  # noqa: E402
from idle_sandboxes import COMMAND, find_idle_sandboxes, list_children, wait_until, warm  # noqa: E402
from resource_attacks import RESOURCE_ATTACKS  # noqa: E402
from sync_sandbox import SyncSandbox, needs_bubblewrap  # noqa: E402

pytestmark = [needs_bubblewrap, pytest.mark.alone]
SECRET = "SECRET-OF-THE-TRAINER-1f00"
ATTACK_NAMES = re.findall(r"^def (\w+)", attacks.ATTACKS + cross_sandbox_attacks.ATTACKS, re.M)


@pytest.fixture(scope="module")
def sandbox():
    os.environ["A_SECRET"] = SECRET
    sandbox = SyncSandbox(max_boxes=4, memory_mb=256)
    yield sandbox
    sandbox.close()
    del os.environ["A_SECRET"]


@pytest.fixture(scope="module")
def listeners():
    """Listen on a loopback port and on an abstract socket, and assert that nobody connects."""
    connections = []
    with socket.create_server(("127.0.0.1", 0)) as engine, socket.socket(socket.AF_UNIX) as abstract:
        name = b"\0megarl-" + os.urandom(8).hex().encode()
        abstract.bind(name)
        abstract.listen()

        def accept(server):
            with contextlib.suppress(OSError):
                connections.append(server.accept())

        for server in (engine, abstract):
            threading.Thread(target=accept, args=(server,), daemon=True).start()
        yield engine.getsockname()[1], name, connections
        assert not connections


@pytest.fixture(scope="module", params=["new", "prepared"])
def attack_results(request, sandbox, listeners, tmp_path_factory):
    """What each attack obtained, in a new and in a prewarmed sandbox."""
    checkpoints = tmp_path_factory.mktemp("checkpoints")
    (checkpoints / "weights").write_text("weights")
    port, abstract, _ = listeners
    python = Path(os.path.realpath(sys.base_prefix)).parts[1]
    names = {"PORT": port, "ABSTRACT": abstract, "CHECKPOINTS": str(checkpoints), "PYTHON": [python]}
    script = "".join(f"{name} = {value!r}\n" for name, value in names.items())
    script += f"SECRET = bytes({list(SECRET.encode())}).decode()\n"  # so that a search does not find it in the source
    source = f"{attacks.PRELUDE}\n{script}\nbefore = set(globals()) | {{'before'}}\n{attacks.ATTACKS}"
    source += f"{cross_sandbox_attacks.ATTACKS}\n{attacks.RUN_ATTACKS}"
    limits = Limits(seconds=60, output_bytes=1 << 20, memory_mb=256 if request.param == "prepared" else 300)
    if request.param == "prepared":
        for _ in range(5):
            assert sandbox.run_harness("send(0, 0)", 1, limits=limits).is_complete
        wait_until(lambda: len(find_idle_sandboxes(sandbox)) >= 4)
        time.sleep(2.0)
    result = sandbox.run_harness(source, 1, limits=limits)
    assert result.is_complete, result.run
    assert (result.results[0].pop("age") > 1.5) == (request.param == "prepared")
    return result.results[0]


@pytest.mark.parametrize("name", ATTACK_NAMES)
def test_attacks_obtain_nothing(attack_results, name):
    assert attack_results[name] == "-"


@pytest.fixture(scope="module")
def resource_results():
    """All use one command, so that the first ones get prewarmed sandboxes."""
    sandbox = SyncSandbox(max_boxes=4, memory_mb=256)
    warm(sandbox)
    yield sandbox.all(
        {
            name: sandbox.async_sandbox.run(COMMAND, {"main.py": source.encode()}, limits=limits)
            for name, (source, limits, _) in RESOURCE_ATTACKS.items()
        }
    )
    sandbox.close()


@pytest.mark.parametrize("name", RESOURCE_ATTACKS)
def test_resource_attacks_stay_within_limits(resource_results, name):
    result = resource_results[name]
    assert result.reason in RESOURCE_ATTACKS[name][2], result
    assert result.seconds < RESOURCE_ATTACKS[name][1].seconds + 20
    assert len(result.stdout) <= RESOURCE_ATTACKS[name][1].output_bytes + 100


def test_attacks_do_not_disturb_idle_sandboxes():
    """Idle sandboxes run as the same user, and wait on pipes that look alike."""
    sandbox = SyncSandbox(max_boxes=4)
    try:
        idle = warm(sandbox)
        pids = [sandbox.async_sandbox.runner_pid, *idle, *idle.values()]

        def states():
            fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split() for pid in pids]
            return [(field[16], os.listdir(f"/proc/{pid}/task")) for pid, field in zip(pids, fields, strict=True)]

        before = states()
        disrupted = sandbox.run(
            ["python3", "disrupt.py"], {"disrupt.py": cross_sandbox_attacks.DISRUPT_OTHERS.encode()}
        )
        assert disrupted.reason in ("", "signal")  # depends on whether it finishes before it kills itself
        assert states() == before
        assert not any(list_children(first) for first in idle.values())  # none has started its command
        assert sandbox.run(COMMAND, {"main.py": b"print(4)"}).stdout == b"4\n"
    finally:
        sandbox.close()


def test_file_descriptors_sent_by_a_sandbox_are_not_received():
    sandbox = SyncSandbox(max_boxes=2)
    try:
        for _ in range(3):
            sandbox.run_harness("send(0, 0)", 1)
        wait_until(lambda: len(find_idle_sandboxes(sandbox)) == 2)
        fd_folder = f"/proc/{sandbox.async_sandbox.runner_pid}/fd"
        before = len(os.listdir(fd_folder))
        assert sandbox.run_harness(cross_sandbox_attacks.SEND_FILE_DESCRIPTORS, 1).results == {}
        wait_until(lambda: len(find_idle_sandboxes(sandbox)) == 2)
        assert len(os.listdir(fd_folder)) < before + 20  # of 1000; sandboxes that start and end hold some
        for end in os.listdir(fd_folder):
            with contextlib.suppress(FileNotFoundError):
                assert os.readlink(f"{fd_folder}/{end}") != "/usr"
    finally:
        sandbox.close()
