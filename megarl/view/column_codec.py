"""Columns of numbers as text that a page decodes in milliseconds, and JSON that cannot leave its script element."""

from __future__ import annotations

import base64
import json
import math
import zlib
from typing import Any

import numpy as np


def pack(values: np.ndarray) -> dict[str, Any]:
    """[n] numbers as {kind, size, data}: little-endian, deflated, base64. kind: u8, u16, i32, f32; with `among` the
    numbers are places in that list, whose NaN is None. Whole numbers and floats of up to 65,536 different values come
    back as they are (whole ones within 32 bits), others as float32."""
    values = np.asarray(values)
    found: dict[str, Any] = {"size": len(values)}
    if values.dtype.kind in "fc" or len(values) and (values.max() >= 2**31 or values.min() < -(2**31)):
        numbers = values.astype(np.float64)
        among, places = np.unique(numbers, return_inverse=True) if len(numbers) else (numbers, numbers)
        # A list of nearly all values would cost more than the values.
        if len(among) <= min(1 << 16, max(256, len(values) // 8)):
            found["among"] = [finite_or_none(value) for value in among.tolist()]
            values = places
        else:
            values = numbers.astype(np.float32)
    kind = _kind(values)
    raw = values.astype({"u8": "<u1", "u16": "<u2", "i32": "<i4", "f32": "<f4"}[kind]).tobytes()
    return found | {"kind": kind, "data": base64.b64encode(zlib.compress(raw, 6)).decode()}


def _kind(values: np.ndarray) -> str:
    if values.dtype.kind == "f" and len(values):
        return "f32"
    least, most = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    return "u8" if 0 <= least and most < 256 else "u16" if 0 <= least and most < 1 << 16 else "i32"


def finite_or_none(value: Any) -> Any:
    """A number as JSON has it: None for what is not finite."""
    return value if not isinstance(value, float) or math.isfinite(value) else None


def to_json(value: Any) -> str:
    """ASCII without `<`, `>` or `&`, so that it ends no element, is no comment and, in a script, no line of its own."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
