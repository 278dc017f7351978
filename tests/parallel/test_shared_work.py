"""Work that ranks share out: three ranks in turn, in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megarl.config import ConfigError
from megarl.parallel import ranks

pytestmark = pytest.mark.alone

WORLD = 3


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[int], Any]], list[Any]]:
    """What each rank gets of `split_work`, errors as text: first each says what it has found, then all hear it."""

    def call(count: int, work: Callable[[int], Any]) -> list[Any]:
        said: list[Any] = []

        def gather(value: Any) -> list[Any]:
            if len(said) < WORLD:
                said.append(value)
                raise InterruptedError
            return said

        monkeypatch.setattr(ranks.dist, "get_world_size", lambda: WORLD)
        monkeypatch.setattr(ranks, "all_gather_objects", gather)
        results: list[Any] = []
        for turn in range(2 * WORLD):
            monkeypatch.setattr(ranks.dist, "get_rank", lambda rank=turn % WORLD: rank)
            try:
                results.append(ranks.split_work(count, work))
            except InterruptedError:
                pass
            except ConfigError as error:
                results.append(str(error))
        return results

    return call


@pytest.mark.parametrize("count", [0, 1, 3, 7])
def test_every_rank_has_all_results_in_order(everywhere: Callable[..., list[Any]], count: int) -> None:
    done: list[int] = []

    def square(number: int) -> int:
        done.append(number)
        return number * number

    assert everywhere(count, square) == [[number * number for number in range(count)]] * WORLD
    assert sorted(done) == sorted([*range(count)] * 2)  # once in each of the two turns, by one rank


def test_the_first_mistake_is_raised_on_all(everywhere: Callable[..., list[Any]]) -> None:
    def odd(number: int) -> int:
        if number in (4, 5):
            raise ConfigError(f"row {number}")
        return number

    assert everywhere(7, odd) == ["row 4"] * WORLD
