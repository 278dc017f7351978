"""Extension of Griffe that shows doctests in docstrings as code."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension

_DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


def fence_doctests(text: str) -> str:
    """Put each doctest, up to the next empty line, into a block of code."""
    return _DOCTEST.sub(lambda match: f"```pycon\n{match[0]}\n```", text)


class Doctests(Extension):
    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = fence_doctests(obj.docstring.value)
