"""What is said of an exception that ends a run."""

from __future__ import annotations

import pytest

from megarl.config import ConfigError
from megarl.launch.exit_status import GracefulExit, SignalExit, classify_error
from megarl.reshard.run.executor import WeightSyncError

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4711"


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as failure:  # noqa: B036  as it was raised
        return failure


@pytest.fixture(autouse=True)
def rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")


def test_a_lost_rank() -> None:
    """What torch.distributed says of it, without where in its source."""
    error = raised(RuntimeError(GLOO))
    error.add_note("the full traceback is in runs/x/logs/rank_3.log")
    assert classify_error(error) == (
        "lost",
        1,
        "error: rank 3 lost another rank: Connection closed by peer [127.0.0.1]:4711; "
        "the full traceback is in runs/x/logs/rank_3.log",
    )
    broken = WeightSyncError("round 2 failed between ranks 3 and 1")
    said = classify_error(raised(ConfigError(str(broken)), broken))
    assert said == ("lost", 1, f"error: rank 3 lost another rank: {broken}")
    said = classify_error(raised(ConnectionError("rank 1 disconnected: Connection reset by peer")))
    assert said == ("lost", 1, "error: rank 3 lost another rank: rank 1 disconnected: Connection reset by peer")
    assert classify_error(raised(ConnectionError("the service disconnected: Connection reset by peer")))[0] == "fault"


def test_an_engine_that_is_gone_is_no_lost_rank() -> None:
    assert classify_error(raised(RuntimeError("the engine cannot be reached: Connection reset by peer")))[0] == "fault"


def test_a_mistake_is_one_line_whatever_it_says() -> None:
    said = classify_error(raised(ConfigError("a.yaml:\n  line 3\n\n  wrong")))
    assert said == ("mistake", 2, "error: a.yaml: line 3 wrong")


def test_a_fault_without_a_log_has_its_traceback() -> None:
    kind, status, text = classify_error(raised(KeyError("x")))
    lines = text.splitlines()
    assert (kind, status) == ("fault", 1) and lines[0].startswith("Traceback")
    assert lines[-1].startswith("error: rank 3 failed: KeyError: 'x' (") and lines[-1].endswith(", in raised)")
    error = raised(KeyError("x"))
    error.add_note("the full traceback is in a.log")
    assert classify_error(error)[2].count("\n") == 0 and classify_error(error)[2].endswith(
        "; the full traceback is in a.log"
    )
    assert classify_error(raised(SystemExit(0)))[:2] == ("fault", 1)


def test_orderly_ends() -> None:
    assert classify_error(GracefulExit("saved step 3")) == ("stopped", 85, "saved step 3")
    assert classify_error(SignalExit(15)) == ("ended", 143, "ended by SIGTERM")
    assert classify_error(KeyboardInterrupt()) == ("ended", 130, "ended by Ctrl-C (SIGINT)")
