"""Of a function that waits within another only the outer one is told of; without an observer nobody is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megarl.parallel import wait_listeners
from megarl.parallel.wait_listeners import set_wait_listener, traced

pytestmark = pytest.mark.alone

told: list[str] = []


@contextmanager
def observer(name: str, what: str) -> Iterator[None]:
    told.append(f"{name} {what}")
    yield
    told.append(f"end {name}")


@traced("wait")
def inner(value: int) -> int:
    if value < 0:
        raise ValueError
    return value + 1


@traced("data")
def outer(value: int) -> int:
    return inner(value) * 2


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    told.clear()
    yield
    set_wait_listener(None)


def test_nobody_is_told_without_an_observer() -> None:
    assert outer(1) == 4 and told == []


def test_the_outer_one_only() -> None:
    set_wait_listener(observer)
    assert outer(1) == 4 and inner(1) == 2
    assert told == ["outer data", "end outer", "inner wait", "end inner"]


def test_an_error_ends_it() -> None:
    set_wait_listener(observer)
    with pytest.raises(ValueError):
        outer(-1)
    told.clear()
    inner(1)
    assert told == ["inner wait", "end inner"]


def test_how_far_work_is_goes_to_whoever_is_told() -> None:
    told: list[tuple[int, int]] = []
    assert list(wait_listeners.track_progress("ab", 2)) == ["a", "b"], "nobody is told"
    wait_listeners.set_progress_listener(lambda done, total: told.append((done, total)))
    try:
        assert list(wait_listeners.track_progress("ab", 2)) == ["a", "b"]
    finally:
        wait_listeners.set_progress_listener(None)
    assert told == [(0, 2), (1, 2)]
