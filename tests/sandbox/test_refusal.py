"""Without its isolation layers the sandbox refuses to start, with a one-line reason and remedy."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.config import ConfigError, SandboxConfig
from megarl.sandbox import mounts, runner_client
from megarl.sandbox.box import Sandbox
from megarl.sandbox.harness import PROBE_LIMITS, PROBE_SOURCE, list_faults
from megarl.sandbox.results import Limits, Result

sys.path.append(str(Path(__file__).parent))
from sync_sandbox import SyncSandbox, needs_bubblewrap  # noqa: E402

pytestmark = pytest.mark.alone


def read_refusal(sandbox, call="probe"):
    async def use_sandbox():
        try:
            if call == "run":
                await sandbox.run(["true"])
            elif call == "interpreter":
                await (await sandbox.interpreter()).run("1")
            else:
                await sandbox.probe()
        finally:
            await sandbox.close()

    with pytest.raises(ConfigError) as error:
        asyncio.run(use_sandbox())
    message = str(error.value)
    assert "\n" not in message and message.startswith("sandbox.backend")
    return message


@pytest.mark.parametrize("call", ["probe", "run", "interpreter"])
def test_refuses_without_bubblewrap(monkeypatch, call):
    monkeypatch.setattr(runner_client.shutil, "which", lambda *args, **kwargs: None)
    message = read_refusal(Sandbox(SandboxConfig()), call)
    assert "bwrap is not installed" in message and "apt install bubblewrap" in message and "SandboxFusion" in message


@pytest.mark.parametrize("call", ["probe", "run", "interpreter"])
def test_refuses_without_user_namespaces(monkeypatch, tmp_path, call):
    """`unshare` fails in the process that starts sandboxes."""
    monkeypatch.setattr(runner_client.shutil, "which", lambda *args, **kwargs: "/bin/true")
    refuse = """
import ctypes
libc = ctypes.CDLL(None)
class Refusing:
    def __getattr__(self, name):
        return (lambda *given: ctypes.set_errno(1) or -1) if name == "unshare" else getattr(libc, name)
from megarl.sandbox import mounts
mounts._libc = Refusing()
from megarl.sandbox.runner import main
"""
    monkeypatch.setattr(
        runner_client, "_START", runner_client._START.replace("from megarl.sandbox.runner import main\n", refuse)
    )
    message = read_refusal(Sandbox(SandboxConfig()), call)
    assert "namespace is refused (unshare: " in message and "kernel.unprivileged_userns_clone=1" in message


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (
            "#!/bin/sh\necho 'bwrap: Creating new namespace failed: Operation not permitted' >&2\nexit 1\n",
            "Creating new namespace",
        ),
        ("#!/bin/sh\nexit 0\n", "without an error message"),
    ],
)
@needs_bubblewrap
def test_refuses_with_a_broken_bubblewrap(monkeypatch, script, reason):
    path = Path("/tmp") / f"bwrap-{os.getpid()}"
    path.write_text(script)
    path.chmod(0o755)
    monkeypatch.setattr(runner_client.shutil, "which", lambda *args, **kwargs: str(path))
    try:
        assert reason in read_refusal(Sandbox(SandboxConfig()))
    finally:
        path.unlink()


def test_lists_faults_of_the_probe():
    run = Result(True, 0, b"", b"", 0.1)
    assert list_faults({"it is root": False, "it has a network": True}, run) == ["it has a network"]
    assert list_faults(None, Result(False, 1, b"", b"Traceback\nImportError: x\n", 0.1, "exit")) == [
        "Python does not run in a box (exit: ImportError: x)"
    ]


@needs_bubblewrap
def test_probe_detects_missing_isolation():
    """Without a sandbox, nearly every check reports a fault."""
    sandbox = SyncSandbox(backend="none")
    actual = sandbox.run_harness(PROBE_SOURCE, 1, limits=PROBE_LIMITS)
    sandbox.close()
    faults = list_faults(actual.results[0], actual.run)
    assert {"it sees users of this machine", "it can make network sockets", "it sees other processes"} <= set(faults)
    if os.getuid() == 0:
        assert {"it is root", "it has capabilities", "it can write outside of its own folders"} <= set(faults)


def test_backend_none_warns_and_runs_unprotected():
    sandbox = SyncSandbox(backend="none")
    try:
        probe = sandbox.probe()
        assert probe.layers == () and "NOTHING protects" in str(probe)
        result = sandbox.run(
            ["python3", "-c", "print(open('a').read()); open('b', 'w').write('c')"], {"a": b"x"}, fetch=["b"]
        )
        assert result.ok and result.stdout == b"x\n" and result.files == {"b": b"c"}
        assert sandbox.run(["sleep", "30"], limits=Limits(seconds=0.5)).reason == "time"
        assert sandbox.run(["sh", "-c", "exit 4"]).status == 4
        assert sandbox.run_harness("send(0, 1)", 1).results == {0: 1}
        session = sandbox.interpreter()
        assert sandbox.wait(session.run("1 + 1")).stdout == "2\n"
        assert "MEGARL" not in sandbox.run(["env"]).stdout.decode()
    finally:
        sandbox.close()


@pytest.mark.parametrize("backend", ["docker", "ftp://x", "", "HTTP"])
def test_refuses_unknown_backends(backend):
    with pytest.raises(ConfigError, match=r"^sandbox.backend must be bubblewrap, http"):
        Sandbox(SandboxConfig(backend=backend))


def test_refuses_folders_of_other_users(tmp_path):
    folder = tmp_path / "place"
    mounts.make_private_folder(str(folder))
    mounts.make_private_folder(str(folder))
    folder.chmod(0o755)
    with pytest.raises(PermissionError, match="not a private folder of this user"):
        mounts.make_private_folder(str(folder))
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(PermissionError):
        mounts.make_private_folder(str(folder))


AS_NOBODY = """
import os, socket, subprocess, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sys.path.insert(0, sys.argv[1])
from megarl.sandbox.harness import HARNESS_COMMAND, encode_preamble
from megarl.processes.messages import FrameDecoder, encode_frame
a, b = socket.socketpair()
command = [sys.executable, "-I", "-S", "-c", sys.argv[2], str(b.fileno()), str(os.getpid()), sys.argv[1]]
subprocess.Popen(command, env={}, pass_fds=[b.fileno()])
b.close()
setup = {"root": "/tmp/megarl-sandbox-65534", "processes": 2, "bwrap": "/usr/bin/bwrap", "python": "/usr"}
a.sendall(encode_frame({**setup, "packages": [], "cgroups": True, "old": False}))
limits = {"seconds": 30, "memory_mb": 256, "disk_mb": 16, "files": 100, "processes": 8, "open_files": 64}
order = {"number": 1, "kind": "run", "session": False, "channel": True, "command": HARNESS_COMMAND}
order |= {"files": [], "fetch": [], "limits": {**limits, "output_bytes": 65536}}
a.sendall(encode_frame(order, [b"", encode_preamble("n", sys.argv[3])]))
decoder, frames = FrameDecoder(), []
while len(frames) < 2 and (piece := a.recv(65536)):
    frames += decoder.feed(piece)
print(frames)
"""


@needs_bubblewrap
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_works_for_unprivileged_users(tmp_path):
    """Uses the system's Python, which every user can read."""
    if not Path("/usr/bin/python3").exists():
        pytest.skip("there is no Python of the system here")
    root = Path(__file__).resolve().parents[2]
    copied = Path("/tmp") / f"megarl-as-nobody-{os.getpid()}"
    copied.mkdir()
    subprocess.run(["cp", "-r", str(root / "megarl"), f"{copied}/"], check=True)
    try:
        done = subprocess.run(
            ["/usr/bin/python3", "-I", "-c", AS_NOBODY, str(copied), runner_client._START, PROBE_SOURCE],
            capture_output=True,
            text=True,
            timeout=100,
        )
    finally:
        subprocess.run(["rm", "-r", str(copied)], check=True)
    assert "'layers': ['runs as user 65534'" in done.stdout, done.stdout + done.stderr
    assert '"it is root": false' in done.stdout and "true" not in done.stdout.split("it is root")[1].split("}")[0]
