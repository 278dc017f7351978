"""Save one engine's partial rollouts to a file, which is part of a checkpoint.

The file is a line of JSON followed by the arrays it numbers, in their in-memory format. Arrays are streamed, because
routing creates them too large for a second copy in memory, and arrays shared by samples of a prompt are written once.
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
    """Write the groups to a file. Raises OSError if the file system fails."""
    arrays: list[npt.NDArray[Any]] = []
    index_by_id: dict[int, int] = {}

    def put(array: npt.NDArray[Any]) -> int:
        if id(array) not in index_by_id:
            index_by_id[id(array)] = len(arrays)
            arrays.append(array)
        return index_by_id[id(array)]

    def write(stream: HashingFile) -> None:
        records = [[to_record(partial, put) for partial in group] for group in groups]
        shapes = [[str(array.dtype), array.shape] for array in arrays]
        stream.write(exact_json.dumps({"groups": records, "arrays": shapes}).encode() + b"\n")
        for array in arrays:
            stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    file.parent.mkdir(parents=True, exist_ok=True)
    return write_hashed(file, write)[1]


def read_groups(file: Path) -> list[Group]:
    """Read groups from a file. Raises ConfigError if it is not in this format."""
    try:
        with file.open("rb") as stream:
            tree = exact_json.loads(stream.readline().decode())
            arrays = [_read_array(stream, dtype, shape) for dtype, shape in tree["arrays"]]
        return [tuple(from_record(record, arrays.__getitem__) for record in group) for group in tree["groups"]]
    except (OSError, ValueError, LookupError, TypeError, ConfigError) as error:
        raise ConfigError(f"{file} does not hold conversations of this program: {error}") from None


def assign_groups(files: Sequence[Path], engine: int, num_engines: int) -> list[Group]:
    """Return the groups that an engine continues.

    If the number of engines is unchanged, each engine gets its previous groups; otherwise groups are dealt out
    round-robin. `files` belong to the previous engines, in order.
    """
    if len(files) == num_engines:
        return read_groups(files[engine])
    local_groups: list[Group] = []
    num_seen = 0
    for file in files:
        groups = read_groups(file)
        local_groups += groups[(engine - num_seen) % num_engines :: num_engines]
        num_seen += len(groups)
    return local_groups


def _read_array(stream: Any, dtype: str, shape: list[int]) -> npt.NDArray[Any]:
    count = int(np.prod(shape, dtype=np.int64))
    values = np.fromfile(stream, np.dtype(dtype), count)
    if len(values) != count:
        raise ValueError("it is truncated")
    return values.reshape(shape)
