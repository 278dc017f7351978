"""Long lists of nightly cases, of which each night runs a part."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import date
from typing import TypeVar

Case = TypeVar("Case")


def cases_of_this_night(cases: Sequence[Case], nights: int) -> list[Case]:
    """Return every `nights`-th case, beginning with another one each day; all with MEGARL_ALL_CASES=1."""
    if os.environ.get("MEGARL_ALL_CASES") == "1":
        return list(cases)
    return list(cases)[date.today().toordinal() % nights :: nights]
