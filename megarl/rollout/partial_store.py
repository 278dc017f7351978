"""Conversations that are gone on with in a later step, in a file: of one engine, a part of a checkpoint.

A line of JSON, then the arrays that it numbers, one after the other, as they are in memory. Routing makes these large,
so they are never all in memory a second time, and what samples of a prompt share is written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megarl.checkpoint.manifest import Entry, HashingFile, write_hashed
from megarl.config import ConfigError
from megarl.rollout.partial_rollouts import from_record, to_record
from megarl.rollout.scheduler import Group
from megarl.utils import exact_json


def write_groups(file: Path, groups: Sequence[Group]) -> Entry:
    """Raises OSError where the file system does not take it."""
    arrays: list[npt.NDArray[Any]] = []
    places: dict[int, int] = {}

    def put(array: npt.NDArray[Any]) -> int:
        if id(array) not in places:
            places[id(array)] = len(arrays)
            arrays.append(array)
        return places[id(array)]

    def write(stream: HashingFile) -> None:
        records = [[to_record(one, put) for one in group] for group in groups]
        shapes = [[str(array.dtype), array.shape] for array in arrays]
        stream.write(exact_json.dumps({"groups": records, "arrays": shapes}).encode() + b"\n")
        for array in arrays:
            stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    file.parent.mkdir(parents=True, exist_ok=True)
    return write_hashed(file, write)[1]


def read_groups(file: Path) -> list[Group]:
    """What was written. Raises ConfigError where the file is not of this program."""
    try:
        with file.open("rb") as stream:
            tree = exact_json.loads(stream.readline().decode())
            arrays = [_read_array(stream, dtype, shape) for dtype, shape in tree["arrays"]]
        return [tuple(from_record(record, arrays.__getitem__) for record in group) for group in tree["groups"]]
    except (OSError, ValueError, LookupError, TypeError, ConfigError) as error:
        raise ConfigError(f"{file} does not hold conversations of this program: {error}") from None


def assign_groups(files: Sequence[Path], engine: int, engines: int) -> list[Group]:
    """What an engine goes on with: where there are as many engines as there were, what it had; else every group goes to
    one of them in turn. files: of the engines that there were, in their order."""
    if len(files) == engines:
        return read_groups(files[engine])
    mine: list[Group] = []
    seen = 0
    for file in files:
        groups = read_groups(file)
        mine += groups[(engine - seen) % engines :: engines]
        seen += len(groups)
    return mine


def _read_array(stream: Any, dtype: str, shape: list[int]) -> npt.NDArray[Any]:
    count = int(np.prod(shape, dtype=np.int64))
    values = np.fromfile(stream, np.dtype(dtype), count)
    if len(values) != count:
        raise ValueError("it ends too early")
    return values.reshape(shape)
