"""Reading a checkpoint never executes code from it."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from megarl.checkpoint import dist_checkpoint_reader

pytestmark = pytest.mark.alone


class CreatesFolder:
    """Creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def save(folder: Path, state: dict[str, Any]) -> Path:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def test_loads_plain_checkpoint(tmp_path: Path) -> None:
    state = {"weight": torch.arange(6.0).view(2, 3), "half": torch.ones(2, dtype=torch.bfloat16), "counts": [None, 3]}
    folder = save(tmp_path / "c", state)
    result = {"weight": torch.zeros(2, 3), "half": torch.zeros(2, dtype=torch.bfloat16), "counts": [None, 0]}
    dcp.load(result, checkpoint_id=folder, no_dist=True)
    assert torch.equal(result["weight"], state["weight"]) and torch.equal(result["half"], state["half"])
    assert result["counts"] == [None, 3]


def test_refuses_metadata_that_executes_code(tmp_path: Path) -> None:
    folder, executed = save(tmp_path / "c", {"weight": torch.zeros(2)}), tmp_path / "trap"
    (folder / ".metadata").write_bytes(pickle.dumps(CreatesFolder(executed)))
    with pytest.raises(CheckpointException) as refused:
        dcp.load({"weight": torch.zeros(2)}, checkpoint_id=folder, no_dist=True)
    assert "it requests posix.mkdir, which no checkpoint table" in str(refused.value.failures)
    assert not executed.exists()


@pytest.mark.parametrize("name", ["load", "_utils._rebuild_tensor", "serialization.load", "os.system", "nn.Linear"])
def test_refuses_metadata_that_calls_torch_functions(name: str) -> None:
    data = b"\x80\x04" + b"\x8c\x05torch" + b"\x8c" + bytes([len(name)]) + name.encode() + b"\x93."
    with pytest.raises(pickle.UnpicklingError, match="it requests torch"):
        dist_checkpoint_reader.load_metadata(io.BytesIO(data))


def test_reads_enum_members_pickled_by_any_python() -> None:
    """Python 3.11.0 to 3.11.3 pickle them as `getattr(class, name)`, which is allowed on enums only."""

    class CallsGetattr:
        def __init__(self, owner: Any, name: str) -> None:
            self.call = (getattr, (owner, name))

        def __reduce__(self) -> tuple[Any, ...]:
            return self.call

    member = dcp.planner.WriteItemType.SHARD
    for data in (pickle.dumps(member), pickle.dumps(CallsGetattr(type(member), "SHARD"))):
        assert dist_checkpoint_reader.load_metadata(io.BytesIO(data)) is member
    with pytest.raises(pickle.UnpicklingError, match="which is not an enum"):
        dist_checkpoint_reader.load_metadata(io.BytesIO(pickle.dumps(CallsGetattr(torch.Size, "__init__"))))


def test_refuses_objects_that_are_no_plain_values(tmp_path: Path) -> None:
    executed = tmp_path / "trap"
    folder = save(tmp_path / "c", {"counts": CreatesFolder(executed)})
    with pytest.raises(CheckpointException) as refused:
        dcp.load({"counts": 0}, checkpoint_id=folder, no_dist=True)
    assert "Weights only load failed" in str(refused.value.failures)
    assert not executed.exists()


def test_environment_variable_cannot_disable_weights_only(tmp_path: Path) -> None:
    executed, file = tmp_path / "trap", tmp_path / "common.pt"
    torch.save(CreatesFolder(executed), file)
    program = f"import torch, megarl.checkpoint.dist_checkpoint_reader; torch.load({str(file)!r})"
    environment = dict(os.environ, TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="1")
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode and "weights_only" in done.stderr and not executed.exists()
