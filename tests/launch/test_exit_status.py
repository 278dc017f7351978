"""Classify the exception that ends a run, and format its error line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megarl.config import ConfigError
from megarl.launch.exit_status import GracefulExit, SignalExit, classify_error
from megarl.reshard.run.executor import WeightSyncError

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4711"


def raise_and_catch(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as failure:  # noqa: B036  keeps the traceback
        return failure


@pytest.fixture(autouse=True)
def rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")


def test_connection_errors_are_lost_ranks() -> None:
    """The line quotes torch.distributed without its source location."""
    error = raise_and_catch(RuntimeError(GLOO))
    error.add_note("the full traceback is in runs/x/logs/rank_3.log")
    assert classify_error(error) == (
        "lost",
        1,
        "error: rank 3 lost another rank: Connection closed by peer [127.0.0.1]:4711; "
        "the full traceback is in runs/x/logs/rank_3.log",
    )
    broken = WeightSyncError("round 2 failed between ranks 3 and 1")
    result = classify_error(raise_and_catch(ConfigError(str(broken)), broken))
    assert result == ("lost", 1, f"error: rank 3 lost another rank: {broken}")
    result = classify_error(raise_and_catch(ConnectionError("rank 1 disconnected: Connection reset by peer")))
    assert result == ("lost", 1, "error: rank 3 lost another rank: rank 1 disconnected: Connection reset by peer")
    assert (
        classify_error(raise_and_catch(ConnectionError("the service disconnected: Connection reset by peer")))[0]
        == "fault"
    )


def test_a_lost_engine_is_a_fault() -> None:
    assert (
        classify_error(raise_and_catch(RuntimeError("the engine cannot be reached: Connection reset by peer")))[0]
        == "fault"
    )


def test_config_errors_are_one_line() -> None:
    result = classify_error(raise_and_catch(ConfigError("a.yaml:\n  line 3\n\n  wrong")))
    assert result == ("mistake", 2, "error: a.yaml: line 3 wrong")


def test_faults_without_a_log_print_the_traceback() -> None:
    kind, status, text = classify_error(raise_and_catch(KeyError("x")))
    lines = text.splitlines()
    assert (kind, status) == ("fault", 1) and lines[0].startswith("Traceback")
    assert lines[-1].startswith("error: rank 3 failed: KeyError: 'x' (") and lines[-1].endswith(", in raise_and_catch)")
    error = raise_and_catch(KeyError("x"))
    error.add_note("the full traceback is in a.log")
    assert classify_error(error)[2].count("\n") == 0 and classify_error(error)[2].endswith(
        "; the full traceback is in a.log"
    )
    assert classify_error(raise_and_catch(SystemExit(0)))[:2] == ("fault", 1)


def test_classifies_stops_and_signals() -> None:
    assert classify_error(GracefulExit("saved step 3")) == ("stopped", 85, "saved step 3")
    assert classify_error(SignalExit(15)) == ("ended", 143, "ended by SIGTERM")
    assert classify_error(KeyboardInterrupt()) == ("ended", 130, "ended by Ctrl-C (SIGINT)")


@pytest.mark.parametrize(
    "program, status",
    [
        ("run_and_exit(main)", 3),
        ("with exit_on_error():\n    main()\n    raise ConfigError('bad')", 2),
        ("with exit_on_error():\n    main()\n    raise SignalExit(15)", 143),
    ],
)
def test_native_teardown_cannot_change_the_exit_status(program: str, status: int) -> None:
    """A native library that aborts in its teardown; exit handlers of Python run, and buffered output is written."""
    lines = """
import atexit, ctypes
from megarl.config import ConfigError
from megarl.launch.exit_status import SignalExit, exit_on_error, run_and_exit

def main():
    libc = ctypes.CDLL(None)
    libc.on_exit(libc.abort, None)
    atexit.register(print, "handler", end="")
    return 3

"""
    process = subprocess.run([sys.executable, "-c", lines + program], stdout=subprocess.PIPE, text=True)
    assert (process.returncode, process.stdout) == (status, "handler")
