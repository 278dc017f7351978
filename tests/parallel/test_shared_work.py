"""`ranks.split_work`, with three ranks simulated in turn in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megarl.config import ConfigError
from megarl.parallel import ranks

pytestmark = pytest.mark.alone

WORLD = 3


@pytest.fixture
def split_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[int], Any]], list[Any]]:
    """Return each rank's result of `split_work`, errors as text. Ranks contribute in one pass and gather in another."""

    def call(count: int, work: Callable[[int], Any]) -> list[Any]:
        contributions: list[Any] = []

        def gather(value: Any) -> list[Any]:
            if len(contributions) < WORLD:
                contributions.append(value)
                raise InterruptedError
            return contributions

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
def test_every_rank_gets_all_results_in_order(split_on_all_ranks: Callable[..., list[Any]], count: int) -> None:
    done: list[int] = []

    def square(number: int) -> int:
        done.append(number)
        return number * number

    assert split_on_all_ranks(count, square) == [[number * number for number in range(count)]] * WORLD
    assert sorted(done) == sorted([*range(count)] * 2)  # by one rank in each of the two passes


def test_first_error_is_raised_on_all_ranks(split_on_all_ranks: Callable[..., list[Any]]) -> None:
    def is_odd(number: int) -> int:
        if number in (4, 5):
            raise ConfigError(f"row {number}")
        return number

    assert split_on_all_ranks(7, is_odd) == ["row 4"] * WORLD
