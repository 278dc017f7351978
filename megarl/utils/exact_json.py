"""JSON that round-trips every float and stays readable for any other JSON parser.

Python writes the shortest decimal that parses to the same double, so finite floats are exact already. JSON has no NaN
or infinity: they are written as `{"float": "nan"}`, `"inf"` or `"-inf"`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

_NOT_FINITE = ("nan", "inf", "-inf")


def dumps(value: Any) -> str:
    """Serialize to one line of ASCII. Tuples and arrays become lists; unsupported values become their `str`.

    ASCII, because a model may write lone surrogates, which cannot be encoded, and unusual line separators.
    """
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):  # only the rare cases pay for the conversion
        return json.dumps(_plain(value), allow_nan=False)


def loads(text: str) -> Any:
    return json.loads(text, object_hook=_restore)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy and torch, arrays and scalars
        return _plain(value.tolist())
    return str(value)


def _restore(value: dict[str, Any]) -> Any:
    if len(value) == 1 and value.get("float") in _NOT_FINITE:
        return float(value["float"])
    return value
