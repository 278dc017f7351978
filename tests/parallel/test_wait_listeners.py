"""Wait and progress listeners: only the outermost traced function is reported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megarl.parallel import wait_listeners
from megarl.parallel.wait_listeners import set_wait_listener, traced

pytestmark = pytest.mark.alone

events: list[str] = []


@contextmanager
def listener(name: str, kind: str) -> Iterator[None]:
    events.append(f"{name} {kind}")
    yield
    events.append(f"end {name}")


@traced("wait")
def inner(value: int) -> int:
    if value < 0:
        raise ValueError
    return value + 1


@traced("data")
def outer(value: int) -> int:
    return inner(value) * 2


@pytest.fixture(autouse=True)
def reset_listener() -> Iterator[None]:
    events.clear()
    yield
    set_wait_listener(None)


def test_traced_function_runs_without_listener() -> None:
    assert outer(1) == 4 and events == []


def test_reports_only_the_outermost_wait() -> None:
    set_wait_listener(listener)
    assert outer(1) == 4 and inner(1) == 2
    assert events == ["outer data", "end outer", "inner wait", "end inner"]


def test_error_ends_the_reported_wait() -> None:
    set_wait_listener(listener)
    with pytest.raises(ValueError):
        outer(-1)
    events.clear()
    inner(1)
    assert events == ["inner wait", "end inner"]


def test_track_progress_reports_to_listener() -> None:
    events: list[tuple[int, int]] = []
    assert list(wait_listeners.track_progress("ab", 2)) == ["a", "b"], "works without a listener"
    wait_listeners.set_progress_listener(lambda done, total: events.append((done, total)))
    try:
        assert list(wait_listeners.track_progress("ab", 2)) == ["a", "b"]
    finally:
        wait_listeners.set_progress_listener(None)
    assert events == [(0, 2), (1, 2)]
