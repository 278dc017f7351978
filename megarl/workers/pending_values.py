"""What a role's call returns where the role is not: handles, whose values travel when they are read.

Every rank runs the same controller, so all of them read in the same order, and a rank that need not wait goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch

from megarl.parallel import ranks
from megarl.types import ModelOutput


class Awaited(ModelOutput):
    """Numbers per token that are on their way: read is called once, when a field is first looked at."""

    def __init__(self, read: Callable[[], dict[str, torch.Tensor]]) -> None:
        object.__setattr__(self, "_read", read)

    def __getattribute__(self, name: str) -> Any:
        if name not in _FIELDS:
            return super().__getattribute__(name)
        own = vars(self)
        if "_found" not in own:
            own["_found"] = own.pop("_read")()
        return own["_found"].get(name)


_FIELDS = frozenset(item.name for item in fields(ModelOutput))


class Reported(Mapping[str, float]):
    """Figures that the rank `source` has, and all when they are first looked at, which all ranks do alike.

    unread: those of the same source that nobody has looked at; they come with the first that somebody does.
    """

    def __init__(self, source: int, mine: Mapping[str, float] | None, unread: list[Reported]) -> None:
        self._source, self._found, self._unread = source, mine, unread
        self._unread.append(self)

    def _read(self) -> Mapping[str, float]:
        if any(one is self for one in self._unread):
            coming = self._unread.copy()
            self._unread.clear()
            every = ranks.broadcast_object([one._found for one in coming], self._source)
            for one, found in zip(coming, every, strict=True):
                one._found = dict(found)
        assert self._found is not None
        return self._found

    def __getitem__(self, name: str) -> float:
        return self._read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())
