"""The tensor hash: against a pure Python one, and which tensors it distinguishes."""

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
    """splitmix64's finaliser in Python integers."""

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


def random_bits(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Return random bits, including NaN and negative zero."""
    size = torch.Size(shape).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    return torch.randint(high, (size,), generator=generator).to(torch.uint8).view(dtype).view(shape)


@pytest.fixture(params=[1, 3, 1 << 16])
def words_at_a_time(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vary how many words are hashed at a time, which must not change the hash."""
    monkeypatch.setitem(checksum.WORDS, "cpu", request.param)


@pytest.mark.usefixtures("words_at_a_time")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (5, 3), (2, 3, 9), (64, 16)], ids=str)
def test_hash_matches_pure_python(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = random_bits(*shape, dtype=dtype)
    assert slice_hash(tensor) == slow_hash(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


@pytest.mark.usefixtures("words_at_a_time")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32], ids=str)
def test_hash_ignores_strides_and_offset(dtype: torch.dtype) -> None:
    stack = random_bits(3, 10, 14, dtype=dtype)
    views = [
        stack[1, 2:7, 3:12],
        stack[2].t(),
        stack[:, 1:, 1::2],
        stack[:, :, 5],
        stack[1:2, 0, 0],
        stack.view(-1)[1:],
    ]
    for box in views:
        assert slice_hash(box) == slice_hash(box.clone(memory_format=torch.contiguous_format))


def test_flipped_bits_change_the_hash() -> None:
    tensor = random_bits(5, 3)
    flat = tensor.view(torch.uint8).view(-1)
    hashes = {slice_hash(tensor)}
    for byte in range(flat.numel()):
        for bit in range(8):
            flat[byte] ^= 1 << bit
            hashes.add(slice_hash(tensor))
            flat[byte] ^= 1 << bit
    assert len(hashes) == 1 + 8 * flat.numel()


@given(st.integers(0, 199), st.integers(0, 199))
@settings(max_examples=100)
def test_swapped_elements_change_the_hash(a: int, b: int) -> None:
    tensor = torch.arange(200, dtype=torch.float32)
    swapped = tensor.clone()
    swapped[a], swapped[b] = tensor[b], tensor[a]
    assert (slice_hash(tensor) == slice_hash(swapped)) == (a == b)


def test_hash_depends_on_order_length_and_sign() -> None:
    tensor = random_bits(8, 4)
    assert slice_hash(tensor) != slice_hash(tensor.t())
    assert slice_hash(torch.zeros(3)) != slice_hash(torch.zeros(4))
    assert slice_hash(torch.tensor(0.0)) != slice_hash(torch.tensor(-0.0))


def test_hash_is_a_signed_64_bit_integer() -> None:
    hashes = [slice_hash(random_bits(4, seed=seed)) for seed in range(64)]
    assert min(hashes) < 0 < max(hashes)
    assert torch.tensor(hashes).tolist() == hashes
    assert device_hash(random_bits(4)).dtype == torch.int64


@pytest.mark.gpu
def test_gpu_hash_equals_cpu_hash() -> None:
    for tensor in [
        random_bits(1000, 300),
        random_bits(77, dtype=torch.uint8),
        random_bits(3, 10, 14, dtype=torch.float32)[:, 1:, 1::2],
    ]:
        assert slice_hash(tensor.cuda()) == slice_hash(tensor)


def test_device_hashes_match_single_hashes() -> None:
    several = [random_bits(5, 3), random_bits(64, 16, dtype=torch.float32)[3:7, 2:5], random_bits(0)]
    assert device_hashes(several).tolist() == [slice_hash(item) for item in several]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernel_hashes_equal_cpu_hashes(dtype: torch.dtype) -> None:
    """`triton_interpreter.py` tests more cases under Triton's interpreter."""
    full = random_bits(3, 700, 130, dtype=dtype)
    several = [full, full[1], full[1, 5:600, 3:99], full[0, :, 1:2], full[2].t(), full[:0]]
    on_device = full.cuda()
    on_gpu = [on_device, on_device[1], on_device[1, 5:600, 3:99], on_device[0, :, 1:2], on_device[2].t(), on_device[:0]]
    assert device_hashes(on_gpu).tolist() == [slice_hash(item) for item in several]
