"""Files of safetensors against the library's own writer, byte by byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.models.hf_folder import _DTYPE_NAMES, LazyTensor, ShardWriter, write_file

pytestmark = pytest.mark.alone

KINDS = list(_DTYPE_NAMES)


def some(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    numbers = torch.arange(max(1, int(torch.Size(shape).numel())), dtype=torch.float32).remainder(7)
    return numbers[: torch.Size(shape).numel()].reshape(shape).to(dtype)


@pytest.mark.parametrize("later", KINDS, ids=str)
def test_a_file_is_the_librarys_byte_for_byte(tmp_path: Path, later: torch.dtype) -> None:
    """Types in pairs, whose order within a file is the library's business; odd sizes, none, and names beyond ASCII."""
    tensors = {"b.weight": some(torch.float32, 3, 5), "ä": some(torch.bfloat16, 7), "a": some(torch.uint8, 3)}
    tensors |= {"none": some(torch.float32, 0, 4), "one": some(torch.int64), "x": some(later, 5, 3)}
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    write_file(tensors, tmp_path / "ours")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    unread = {
        name: LazyTensor(tuple(tensor.shape), tensor.dtype, lambda tensor=tensor: tensor)  # type: ignore[misc]
        for name, tensor in tensors.items()
    }
    write_file(unread, tmp_path / "later")
    assert (tmp_path / "later").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_what_does_not_lie_in_one_piece_is_written_as_it_reads(tmp_path: Path) -> None:
    tensor = torch.arange(12.0).reshape(3, 4)
    write_file({"t": tensor.T, "part": tensor[:, 1:3]}, tmp_path / "file")
    result = load_file(tmp_path / "file")
    assert torch.equal(result["t"], tensor.T) and torch.equal(result["part"], tensor[:, 1:3])


def test_one_tensor_is_read_at_a_time_and_each_once(tmp_path: Path) -> None:
    retained: list[str] = []

    def entry(name: str) -> LazyTensor:
        def read() -> torch.Tensor:
            retained.append(name)
            return torch.full((4,), float(len(name)))

        return LazyTensor((4,), torch.float32, read)

    files = ShardWriter(tmp_path, max_bytes=40)
    for name in ("a", "bb", "ccc", "dddd", "eeeee"):
        files.add(name, entry(name))
    assert retained == ["a", "bb", "ccc", "dddd"]
    files.finish()
    assert retained == ["a", "bb", "ccc", "dddd", "eeeee"]
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert [list(load_file(tmp_path / name)) for name in names] == [["a", "bb"], ["ccc", "dddd"], ["eeeee"]]


def test_a_tensor_that_is_not_what_was_said_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"x was declared as torch.float32 \(3,\) and is torch.float32 \(2,\)"):
        write_file({"x": LazyTensor((3,), torch.float32, lambda: torch.zeros(2))}, tmp_path / "file")
