"""Hash to check that two processes hold the same bits, independent of device and strides."""

from __future__ import annotations

from collections.abc import Iterator

import torch

STEP = -7046029254386353131  # 0x9E3779B97F4A7C15, 2^64 / golden ratio: no two positions in range get the same offset
MIX = ((30, -4658895280553007687), (27, -7723592293110705685))  # splitmix64: 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
WORDS = {"cpu": 1 << 16, "cuda": 1 << 22}
"""Words hashed at a time: on a CPU as many as fit its cache, elsewhere enough to need few launches. Bounds temporary
memory."""


def device_hash(tensor: torch.Tensor) -> torch.Tensor:
    """Return a hash of a tensor's bytes in row-major order: [] int64, for any dtype, shape and strides.

    The bytes are read as little-endian 64-bit words, the last one zero-padded. The hash is the sum over all words,
    modulo 2^64, of splitmix64's finaliser of (word + step x (position + 1)), plus the finaliser of the length. So a
    flipped bit or two exchanged elements change it. The position is added before mixing: a sum of words mixed alone
    would not depend on their order.
    """
    total = _mix(torch.full((), tensor.numel() * tensor.element_size(), dtype=torch.int64, device=tensor.device))
    position = 0
    remainder = torch.empty(0, dtype=torch.uint8, device=tensor.device)  # incomplete word, continued in the next part
    limit = WORDS.get(tensor.device.type, WORDS["cuda"]) * 8 // tensor.element_size()
    for part in _parts(tensor.detach(), limit):
        data = torch.cat([remainder, part.view(torch.uint8)]) if remainder.numel() else part.view(torch.uint8)
        num_whole = data.numel() // 8 * 8
        total += _sum(data[:num_whole], position)
        position += num_whole // 8
        remainder = data[num_whole:]
    if remainder.numel():
        total += _sum(torch.cat([remainder, remainder.new_zeros(8 - remainder.numel())]), position)
    return total


def _parts(tensor: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    """Yield the elements in row-major order, as contiguous [n] of at most `limit`; copies no more than that at once."""
    if tensor.is_contiguous():
        yield from tensor.as_strided((tensor.numel(),), (1,)).split(
            limit
        )  # a tensor of one element may have any stride
    elif tensor.numel() <= limit:
        yield tensor.reshape(-1).contiguous()
    elif len(tensor) == 1:
        yield from _parts(tensor[0], limit)
    else:
        rows = max(1, limit * len(tensor) // tensor.numel())
        for block in tensor.split(rows):
            yield from _parts(block, limit)


def _sum(data: torch.Tensor, position: int) -> torch.Tensor:
    """Return []: the hash contribution of bytes [8 n], whose first word is at `position`."""
    if data.storage_offset() % 8:
        data = data.clone()  # a view as int64 must be aligned
    positions = torch.arange(position + 1, position + 1 + data.numel() // 8, device=data.device)
    return _mix(positions.mul_(STEP).add_(data.view(torch.int64))).sum()


def _mix(z: torch.Tensor) -> torch.Tensor:
    """Apply splitmix64's finaliser to each int64, in place; products wrap around modulo 2^64."""
    for shift, factor in MIX:
        z.bitwise_xor_(_shifted(z, shift)).mul_(factor)
    return z.bitwise_xor_(_shifted(z, 31))


def _shifted(z: torch.Tensor, by: int) -> torch.Tensor:
    """Return z >> by for unsigned numbers: the signed shift copies the sign into bits that must become 0."""
    return (z >> by).bitwise_and_((1 << (64 - by)) - 1)
