"""Safetensors files compared byte by byte with those of the library's own writer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.models.hf_folder import _DTYPE_NAMES, LazyTensor, ShardWriter, write_file

pytestmark = pytest.mark.alone

DTYPES = list(_DTYPE_NAMES)


def make_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    numbers = torch.arange(max(1, int(torch.Size(shape).numel())), dtype=torch.float32).remainder(7)
    return numbers[: torch.Size(shape).numel()].reshape(shape).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_written_file_equals_safetensors_bytewise(tmp_path: Path, dtype: torch.dtype) -> None:
    """Mix dtypes, by which the library orders tensors, with odd and empty sizes and names beyond ASCII."""
    tensors = {
        "b.weight": make_tensor(torch.float32, 3, 5),
        "ä": make_tensor(torch.bfloat16, 7),
        "a": make_tensor(torch.uint8, 3),
    }
    tensors |= {
        "none": make_tensor(torch.float32, 0, 4),
        "one": make_tensor(torch.int64),
        "x": make_tensor(dtype, 5, 3),
    }
    save_file(tensors, tmp_path / "expected", metadata={"format": "pt"})
    write_file(tensors, tmp_path / "eager")
    assert (tmp_path / "eager").read_bytes() == (tmp_path / "expected").read_bytes()
    lazy = {
        name: LazyTensor(tuple(tensor.shape), tensor.dtype, lambda tensor=tensor: tensor)  # type: ignore[misc]
        for name, tensor in tensors.items()
    }
    write_file(lazy, tmp_path / "lazy")
    assert (tmp_path / "lazy").read_bytes() == (tmp_path / "expected").read_bytes()


def test_writes_noncontiguous_tensors(tmp_path: Path) -> None:
    tensor = torch.arange(12.0).reshape(3, 4)
    write_file({"t": tensor.T, "part": tensor[:, 1:3]}, tmp_path / "file")
    result = load_file(tmp_path / "file")
    assert torch.equal(result["t"], tensor.T) and torch.equal(result["part"], tensor[:, 1:3])


def test_shard_writer_reads_each_lazy_tensor_once(tmp_path: Path) -> None:
    read_names: list[str] = []

    def entry(name: str) -> LazyTensor:
        def read() -> torch.Tensor:
            read_names.append(name)
            return torch.full((4,), float(len(name)))

        return LazyTensor((4,), torch.float32, read)

    files = ShardWriter(tmp_path, max_bytes=40)
    for name in ("a", "bb", "ccc", "dddd", "eeeee"):
        files.add(name, entry(name))
    assert read_names == ["a", "bb", "ccc", "dddd"]
    files.finish()
    assert read_names == ["a", "bb", "ccc", "dddd", "eeeee"]
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert [list(load_file(tmp_path / name)) for name in names] == [["a", "bb"], ["ccc", "dddd"], ["eeeee"]]


def test_refuses_tensor_that_differs_from_its_declaration(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"x was declared as torch.float32 \(3,\) and is torch.float32 \(2,\)"):
        write_file({"x": LazyTensor((3,), torch.float32, lambda: torch.zeros(2))}, tmp_path / "file")
