"""`comm_recorder` records communication and detects access to buffers in flight."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megarl.rehearse import nccl_order
from megarl.rehearse.comm_recorder import COLLECTIVES, SILENT, UNRECORDED


@pytest.mark.parametrize(
    ("access", "message"),
    [
        ("read", "has read a buffer whose receive nobody has waited for"),
        ("written", "has written a buffer whose send nobody has waited for"),
        ("neither", ""),
    ],
)
def test_detects_buffer_access_before_wait(
    run_ranks: Callable[..., list[dict[str, Any]]], access: str, message: str
) -> None:
    for rank, result in enumerate(run_ranks(2, "tests/rehearse/ranks_comm_recorder.py", access)):
        assert (message in result["error"]) and bool(message) == bool(result["error"])
        assert access == "written" or result["received"] == [2.0 - rank] * 4


def test_knows_all_methods_of_a_process_group() -> None:
    """A method that torch adds may communicate, which would be missing in every record."""
    methods = {name for name in dir(dist.ProcessGroup) if not name.startswith("_") and not name.isupper()}
    recorded = {name for name in COLLECTIVES if not name.startswith("_")} | {"send", "recv"}
    assert methods - {"BackendType"} == recorded | SILENT | set(UNRECORDED)


def test_records_coalesced_collectives(run_ranks: Any) -> None:
    """Megatron's distributed optimizer reduces gradients and gathers parameters by these."""
    run_ranks(2, "tests/rehearse/ranks_comm_recorder.py", "coalesced")
    files = sorted(run_ranks.folder.glob(f"{run_ranks.launches}_*.record"))
    kinds = nccl_order.check([nccl_order.read(file) for file in files])
    expected = ("all_gather_single_coalesced", "all_reduce_coalesced", "reduce_scatter_single_coalesced")
    assert [kinds[kind] for kind in expected] == [2, 2, 2] and kinds["all_to_all_single"] == 2


def test_records_communication(run_ranks: Any) -> None:
    """Two ranks meet, create a host group, and send each other 16 bytes."""
    run_ranks(2, "tests/rehearse/ranks_comm_recorder.py", "neither")
    files = sorted(run_ranks.folder.glob(f"{run_ranks.launches}_*.record"))
    records = [nccl_order.read(file) for file in files]
    assert len(records) == 2 and nccl_order.check(records) == {"all_reduce": 2, "send": 2, "receive": 2}
    for rank, record in enumerate(records):
        batch = [event for event in record if event["do"] == "post" and event["batch"] is not None]
        assert [(item["kind"], item["peer"], item["bytes"]) for item in batch] == [
            ("send", 1 - rank, 16),
            ("receive", 1 - rank, 16),
        ]
        script = (Path(__file__).parent / "ranks_comm_recorder.py").read_text().splitlines()
        for event in batch:
            file, _, line = event["calls"].partition(" < ")[0].partition(":")
            assert file == "tests/rehearse/ranks_comm_recorder.py" and "batch_isend_irecv" in script[int(line) - 1]
