"""What a role on other ranks reports travels once, when the first of it is read."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.parallel import ranks
from megarl.workers.pending_values import Reported


def test_what_is_unread_comes_with_the_first_that_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[Any, int]] = []

    def broadcast(value: Any, source: int) -> Any:
        said.append((value, source))
        return [{"loss": 1.0}, {"loss": 2.0}] if len(said) == 1 else [{"loss": 3.0}]

    monkeypatch.setattr(ranks, "broadcast_object", broadcast)
    unread: list[Reported] = []
    first, second = Reported(4, None, unread), Reported(4, None, unread)
    assert dict(second) == {"loss": 2.0} and dict(first) == {"loss": 1.0} and len(first) == 1
    third = Reported(4, {"loss": 3.0}, unread)  # as on the rank that has it, which tells the others
    assert third["loss"] == 3.0 and third["loss"] == 3.0
    assert said == [([None, None], 4), ([{"loss": 3.0}], 4)]
