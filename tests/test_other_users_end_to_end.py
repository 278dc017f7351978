"""A run while another user of the machine attacks every listening socket.

The run completes, executes nothing it is sent, and listens only where SECURITY.md says.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from other_user import needs_root, start_as_other_user
from training_run import ENVIRONMENT, ROOT, build_command, descendants, make_folder

pytestmark = [needs_root, pytest.mark.nightly]

LISTENS = 0x10000  # the flag of /proc/net/unix
RANK, SERVER, SCHEDULER = "megarl.train", "megarl.engine.engine_host", "sglang::scheduler"
KNOWN = ("megarl.torchrun", SERVER, SCHEDULER, "sglang::detokenizer", "torch_shm_manager", RANK)
# Connects to each address on stdin, `tcp PORT` or `unix NAME`, and sends every payload.
INTRUDER = """
harm = bytes.fromhex(sys.argv[1])
keep = []
def text(content):
    return len(content).to_bytes(8, "little") + content
def attempts(kind):
    # No payload begins with eight bytes of a small number: that takes a rank's place in a gloo group under
    # construction, a known gap (SECURITY.md).
    yield b"garbage\\n" * 20
    yield b"\\xff" * 4096
    yield harm
    magic = b"\\0" + (0x3C85F7CE).to_bytes(4, "little")  # of torch's store, and then: set
    notes = ("megarl/generation/1/back/0", "0//megarl/generation/1/back/0/0", "0//0//cpu//0/rank_1")
    yield magic + b"".join(b"\\1" + text(name.encode()) + text(harm) for name in notes)
    head = "POST %s HTTP/1.1\\r\\nHost: a\\r\\nContent-Length: %d\\r\\nContent-Type: application/json\\r\\n\\r\\n"
    for path in ("/update_weights_from_tensor", "/generate", "/pause_generation", "/release_memory_occupation"):
        body = json.dumps({"serialized_named_tensors": [harm.hex()], "text": "x", "load_format": None})
        yield (head % (path, len(body)) + body).encode()
    if kind == "unix":
        greeting = b"\\xff\\0\\0\\0\\0\\0\\0\\0\\x01\\x7f" + b"\\3\\0NULL" + b"\\0" * 48  # of ZeroMQ
        yield greeting + b"\\0" + bytes([len(harm)]) + harm
def attack(kind, name):
    outcomes = set()
    for content in attempts(kind):
        to = socket.socket(socket.AF_INET if kind == "tcp" else socket.AF_UNIX, socket.SOCK_STREAM)
        to.settimeout(5.0)
        try:
            to.connect(("127.0.0.1", int(name)) if kind == "tcp" else bytes.fromhex(name))
            to.sendall(content)
            outcomes.add("connected")
            if b"HTTP" in content:
                to.settimeout(0.5)
                outcomes.add(to.recv(64).split(b"\\r\\n")[0].decode("latin1"))
        except OSError as error:
            outcomes.add(type(error).__name__)
        keep.append(to)  # open until the end
    print(kind, name, sorted(outcomes), flush=True)
threads = []
for line in sys.stdin:
    threads.append(threading.Thread(target=attack, args=line.split()))
    threads[-1].start()
for thread in threads:
    thread.join()
"""


class Payload:
    """Creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def listening() -> dict[str, tuple[str, str]]:
    """Return {inode: (table, address)} of listening sockets and bound datagram sockets.

    The address of `unix` sockets is their name as hex.
    """
    result = {}
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            # 07: a datagram socket without a peer. One with a peer, such as a name lookup's, accepts nothing else.
            if fields[3] == ("07" if table.startswith("udp") else "0A"):
                result[fields[9]] = table, fields[1]
    for row in Path("/proc/net/unix").read_bytes().split(b"\n")[1:]:
        parts = row.split(maxsplit=7)
        if len(parts) == 8 and (int(parts[3], 16) & LISTENS or parts[4] == b"0002"):
            name = b"\0" + parts[7][1:] if parts[7].startswith(b"@") else parts[7]
            result[parts[6].decode()] = "unix", name.hex()
    return result


class SocketWatcher(threading.Thread):
    """Finds the listening sockets of a run's processes and has the intruder connect to them."""

    def __init__(self, pid: int, intruder: subprocess.Popen[str]) -> None:
        super().__init__(daemon=True)
        self.pid, self.done, self._intruder = pid, False, intruder
        self.sockets: set[tuple[str, str, str]] = set()
        """Command line, table and address of each socket."""
        self.modes: dict[str, tuple[int, int]] = {}
        self.reached: list[str] = []
        self._output_reader = threading.Thread(target=self._collect_output, daemon=True)

    def _collect_output(self) -> None:
        assert self._intruder.stdout is not None
        self.reached += self._intruder.stdout.read().splitlines()

    def run(self) -> None:
        self._output_reader.start()
        assert self._intruder.stdin is not None
        reported: set[str] = set()
        while not self.done:
            table = listening()
            for pid in descendants(self.pid):
                with contextlib.suppress(OSError):
                    process_name = (
                        Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    )
                    if not process_name:
                        continue  # it is ending
                    open_files = [os.readlink(link.path) for link in os.scandir(f"/proc/{pid}/fd")]
                    for inode in {link[8:-1] for link in open_files if link.startswith("socket:[")} & table.keys():
                        kind, socket_address = table[inode]
                        self.sockets.add((process_name, kind, socket_address))
                        if inode not in reported:
                            reported.add(inode)
                            self._attack(kind, socket_address)
            time.sleep(0.02)
        self._intruder.stdin.close()
        self._output_reader.join(60)

    def _attack(self, kind: str, socket_address: str) -> None:
        assert self._intruder.stdin is not None
        if kind == "tcp":
            print("tcp", int(socket_address.partition(":")[2], 16), file=self._intruder.stdin, flush=True)
        elif kind == "unix":
            path = Path(os.fsdecode(bytes.fromhex(socket_address)))
            if "\0" not in str(path):
                self.modes[str(path)] = path.stat().st_mode, path.parent.stat().st_mode
            print("unix", socket_address, file=self._intruder.stdin, flush=True)


@pytest.fixture(scope="module", params=["launcher", "torchrun"])
def run_result(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    workdir = tmp_path_factory.mktemp("others")
    folder = make_folder(workdir / "q", "qwen3_moe")
    (workdir / "scratch").mkdir()
    executed = workdir / "harm"
    intruder = start_as_other_user(INTRUDER, pickle.dumps(Payload(executed)).hex())
    options = (
        "algorithm=grpo",
        "run.num_rollout=3",
        "rollout.tp=2",
        "rollout.tools=[megarl.environments.ready.calculator:calculator]",
    )
    command = build_command(folder, workdir / "run", *options)
    if request.param == "torchrun":
        python, _, program, *args = command
        launcher = ("-m", "megarl.torchrun", "--standalone", "--nproc-per-node", "2")
        command = [python, *launcher, "-m", program, *args]
    environment = ENVIRONMENT | {"TMPDIR": str(workdir / "scratch")}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    watch = SocketWatcher(process.pid, intruder)
    watch.start()
    try:
        output, _ = process.communicate(timeout=500)
    finally:
        process.kill()  # ranks and engines end with it
        watch.done = True
        watch.join(90)
        intruder.kill()
    return {"status": process.returncode, "output": output, "watch": watch, "harm": executed, "by": request.param}


def test_run_completes_and_executes_no_payload(run_result: dict[str, Any]) -> None:
    assert run_result["status"] == 0, run_result["output"][-4000:]
    assert "done: 3 steps" in run_result["output"]
    assert not run_result["harm"].exists()


def test_intruder_reaches_ports_but_no_named_sockets(run_result: dict[str, Any]) -> None:
    """Otherwise the other tests would prove nothing. Engines refuse requests without their key."""
    connections = run_result["watch"].reached
    tcp, abstract_sockets = ([line for line in connections if line.startswith(kind)] for kind in ("tcp", "unix 2f"))
    assert len([line for line in tcp if "connected" in line]) > 10, connections
    assert [line for line in tcp if "401 Unauthorized" in line], tcp
    assert not [line for line in tcp if " 200 " in line], tcp
    assert len(abstract_sockets) > 3 and not [line for line in abstract_sockets if "connected" in line], (
        abstract_sockets
    )


def test_listening_sockets_match_security_md(run_result: dict[str, Any]) -> None:
    """The table of SECURITY.md, by process and address."""
    result: dict[str, set[str]] = {}
    for process_name, kind, socket_address in run_result["watch"].sockets:
        address = (
            socket_address.partition(":")[0]
            if kind != "unix"
            else "abstract"
            if socket_address.startswith("00")
            else "path"
        )
        result.setdefault(f"{kind} {address}", set()).add(
            next((name for name in KNOWN if name in process_name), process_name)
        )
    everywhere = result.pop("tcp 00000000", set()) | result.pop("tcp6 " + "0" * 32, set())
    assert everywhere == ({"megarl.torchrun"} if run_result["by"] == "torchrun" else set())
    inherited = {"torch_shm_manager"}  # forked from a rank, whose ports it does not use
    # A scheduler keeps its host's name if there is no space for its own title.
    assert {RANK, SERVER} <= result.pop("tcp 0100007F") - inherited <= {RANK, SERVER, SCHEDULER}
    assert result.pop("unix path") <= {*KNOWN}
    assert result.pop("unix abstract", {RANK}) - inherited == {RANK}
    assert result == {}
    for path, (mode, parent) in run_result["watch"].modes.items():
        assert parent & 0o077 == 0, (path, oct(mode), oct(parent))
