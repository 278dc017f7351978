"""Encode numeric columns as compact text for the page, and JSON that is safe inside a script element."""

from __future__ import annotations

import base64
import json
import math
import zlib
from typing import Any

import numpy as np


def pack(values: np.ndarray) -> dict[str, Any]:
    """Pack [n] numbers as {dtype, size, data}: little-endian, deflated, base64.

    dtype is u8, u16, i32 or f32. With `dictionary` the packed numbers are indices into that list, in which None is NaN.
    Integers within 32 bits are exact, and so are floats if they have few distinct values (at most 65,536, and at most
    the larger of 256 and n / 8); other numbers become float32.
    """
    values = np.asarray(values)
    packed: dict[str, Any] = {"size": len(values)}
    if values.dtype.kind in "fc" or len(values) and (values.max() >= 2**31 or values.min() < -(2**31)):
        numbers = values.astype(np.float64)
        distinct, indices = np.unique(numbers, return_inverse=True) if len(numbers) else (numbers, numbers)
        # A lookup table with nearly all values would be larger than the values.
        if len(distinct) <= min(1 << 16, max(256, len(values) // 8)):
            packed["dictionary"] = [finite_or_none(value) for value in distinct.tolist()]
            values = indices
        else:
            values = numbers.astype(np.float32)
    if values.dtype.kind == "f" and len(values):
        dtype = "f32"
    else:
        low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
        dtype = "u8" if low >= 0 and high < 256 else "u16" if low >= 0 and high < 1 << 16 else "i32"
    raw = values.astype({"u8": "<u1", "u16": "<u2", "i32": "<i4", "f32": "<f4"}[dtype]).tobytes()
    return packed | {"dtype": dtype, "data": base64.b64encode(zlib.compress(raw, 6)).decode()}


def finite_or_none(value: Any) -> Any:
    """Return the value, or None for a non-finite float, which JSON lacks."""
    return value if not isinstance(value, float) or math.isfinite(value) else None


def to_json(value: Any) -> str:
    """Serialize to one line of ASCII JSON without `<`, `>` or `&`, which cannot end an element or open a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
