"""Several ranks on a GPU: which one each has, and what is refused. GPUs and NCCL are numbers here."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from megarl.config import ConfigError
from megarl.parallel import device

pytestmark = pytest.mark.alone
NEW, OLD = (2, 30, 7), (2, 27, 5)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Two GPUs of 80 and 60 bytes with a new NCCL. Return the devices to which this process is bound."""
    bound: list[torch.device] = []
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(device, "_HAS_CUDA", True)
    monkeypatch.setattr(device, "_ranks_per_gpu", 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", bound.append)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: NEW)
    sizes = SimpleNamespace(total_memory=80), SimpleNamespace(total_memory=60)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: sizes[number])
    return bound


def start(local_rank: int, world: int) -> None:
    os.environ |= {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(world)}


def test_consecutive_ranks_share_a_gpu(gpus: list[torch.device]) -> None:
    for rank in range(4):
        start(rank, 4)
        device.set_device(2)
        assert device.device() == gpus[-1]
    assert [gpu.index for gpu in gpus] == [0, 0, 1, 1]
    assert os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"


def test_each_rank_has_a_gpu_by_default(gpus: list[torch.device]) -> None:
    start(1, 2)
    device.set_device()
    assert gpus == [torch.device("cuda", 1)] == [device.device()]
    assert "NCCL_MULTI_RANK_GPU_ENABLE" not in os.environ


def test_memory_is_divided(gpus: list[torch.device]) -> None:
    assert device.memory_bytes(1) == 80 and device.memory_bytes(2) == 60
    assert device.memory_bytes(2, 2) == 40 and device.memory_bytes(3, 2) == 30
    assert device.memory_bytes(16, 2) == 30  # a plan for more GPUs than this machine has


@pytest.mark.parametrize("ranks_per_gpu", [1, 2, 3])
def test_too_few_gpus_are_one_line(gpus: list[torch.device], ranks_per_gpu: int) -> None:
    """Every rank says so, not only those without a GPU, for which the others would wait."""
    start(0, 8)
    with pytest.raises(ConfigError, match=rf"8 ranks .*\.ranks_per_gpu={ranks_per_gpu}, and it has 2: .*=4$"):
        device.set_device(ranks_per_gpu)
    assert not gpus


def test_old_nccl_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ranks_per_gpu=2 needs NCCL 2.30, and this is 2.27.5, .*constraints-cuda"):
        device.check_sharing(2, 1, 2, OLD)
    device.check_sharing(2, 1, 2, NEW)
    device.check_sharing(2, 2, 1, ())  # not asked
    with pytest.raises(ConfigError, match="and it has 0"):
        device.check_sharing(1, 0, 1, ())
