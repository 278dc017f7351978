"""The hash against a slow one in whole numbers of Python, and what it must and must not tell apart."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.reshard.run import checksum
from megarl.reshard.run.checksum import device_hash
from megarl.reshard.run.copies import device_hashes

pytestmark = pytest.mark.alone

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.bool, torch.float64, torch.int64]


def slice_hash(tensor: torch.Tensor) -> int:
    return int(device_hash(tensor))


def slow_hash(data: bytes) -> int:
    """splitmix64's finaliser written out with numbers that do not wrap."""

    def mix(z: int) -> int:
        z %= 1 << 64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
        z = (z ^ z >> 27) * 0x94D049BB133111EB % (1 << 64)
        return z ^ z >> 31

    padded = data + bytes(-len(data) % 8)
    words = [int.from_bytes(padded[i : i + 8], "little") for i in range(0, len(padded), 8)]
    total = mix(len(data)) + sum(mix(word + 0x9E3779B97F4A7C15 * (i + 1)) for i, word in enumerate(words))
    total %= 1 << 64
    return total - (1 << 64) if total >> 63 else total


def bits(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Random bits, NaNs and negative zeros among them."""
    size = torch.Size(shape).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    return torch.randint(high, (size,), generator=generator).to(torch.uint8).view(dtype).view(shape)


@pytest.fixture(params=[1, 3, 1 << 16])
def words(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few words are hashed at a time, the hash is the same."""
    monkeypatch.setitem(checksum.WORDS, "cpu", request.param)


@pytest.mark.usefixtures("words")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (5, 3), (2, 3, 9), (64, 16)], ids=str)
def test_it_is_the_slow_hash_of_the_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = bits(*shape, dtype=dtype)
    assert slice_hash(tensor) == slow_hash(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


@pytest.mark.usefixtures("words")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32], ids=str)
def test_strides_and_place_do_not_matter(dtype: torch.dtype) -> None:
    stack = bits(3, 10, 14, dtype=dtype)
    boxes = [
        stack[1, 2:7, 3:12],
        stack[2].t(),
        stack[:, 1:, 1::2],
        stack[:, :, 5],
        stack[1:2, 0, 0],
        stack.view(-1)[1:],
    ]
    for box in boxes:
        assert slice_hash(box) == slice_hash(box.clone(memory_format=torch.contiguous_format))


def test_any_flipped_bit_changes_it() -> None:
    tensor = bits(5, 3)
    flat = tensor.view(torch.uint8).view(-1)
    seen = {slice_hash(tensor)}
    for byte in range(flat.numel()):
        for bit in range(8):
            flat[byte] ^= 1 << bit
            seen.add(slice_hash(tensor))
            flat[byte] ^= 1 << bit
    assert len(seen) == 1 + 8 * flat.numel()


@given(st.integers(0, 199), st.integers(0, 199))
@settings(max_examples=100)
def test_two_exchanged_elements_change_it(a: int, b: int) -> None:
    tensor = torch.arange(200, dtype=torch.float32)
    exchanged = tensor.clone()
    exchanged[a], exchanged[b] = tensor[b], tensor[a]
    assert (slice_hash(tensor) == slice_hash(exchanged)) == (a == b)


def test_what_else_it_tells_apart() -> None:
    tensor = bits(8, 4)
    assert slice_hash(tensor) != slice_hash(tensor.t())
    assert slice_hash(torch.zeros(3)) != slice_hash(torch.zeros(4))
    assert slice_hash(torch.tensor(0.0)) != slice_hash(torch.tensor(-0.0))


def test_it_is_a_signed_number_of_64_bits() -> None:
    hashes = [slice_hash(bits(4, seed=seed)) for seed in range(64)]
    assert min(hashes) < 0 < max(hashes)
    assert torch.tensor(hashes).tolist() == hashes
    assert device_hash(bits(4)).dtype == torch.int64


@pytest.mark.gpu
def test_a_gpu_has_the_same() -> None:
    for tensor in [bits(1000, 300), bits(77, dtype=torch.uint8), bits(3, 10, 14, dtype=torch.float32)[:, 1:, 1::2]]:
        assert slice_hash(tensor.cuda()) == slice_hash(tensor)


def test_hashes_of_several_are_those_of_each() -> None:
    several = [bits(5, 3), bits(64, 16, dtype=torch.float32)[3:7, 2:5], bits(0)]
    assert device_hashes(several).tolist() == [slice_hash(item) for item in several]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_gives_the_same_on_a_gpu(dtype: torch.dtype) -> None:
    """`interpret.py` has more of them, under Triton's interpreter."""
    full = bits(3, 700, 130, dtype=dtype)
    several = [full, full[1], full[1, 5:600, 3:99], full[0, :, 1:2], full[2].t(), full[:0]]
    theirs = full.cuda()
    on_gpu = [theirs, theirs[1], theirs[1, 5:600, 3:99], theirs[0, :, 1:2], theirs[2].t(), theirs[:0]]
    assert device_hashes(on_gpu).tolist() == [slice_hash(item) for item in several]
