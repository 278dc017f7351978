"""A hash by which two processes know that they hold the same bits, whatever device and strides they hold them with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from megarl.reshard.run.kernel_inputs import MIX, STEP

WORDS = {"cpu": 1 << 16, "cuda": 1 << 22}
"""Words hashed at a time: on a CPU what its cache holds, elsewhere few launches; it bounds the temporary memory."""


def slice_hash(tensor: torch.Tensor) -> int:
    """`device_hash` as a number; waits for the device."""
    return int(device_hash(tensor))


def device_hash(tensor: torch.Tensor) -> torch.Tensor:
    """[] int64: a hash of a tensor's bytes in row-major order, of any dtype, shape and strides.

    The bytes are taken as little-endian words of 64 bits, the last filled up with zeros; the hash is the sum over all
    words, modulo 2^64, of splitmix64's finaliser of (word + step x (position + 1)), and of the same of the length. So
    a flipped bit or two exchanged elements change it. The finaliser sees each word with its position added: sums of
    words that were mixed alone would not know their order.
    """
    total = _mix(torch.full((), tensor.numel() * tensor.element_size(), dtype=torch.int64, device=tensor.device))
    position = 0
    left = torch.empty(0, dtype=torch.uint8, device=tensor.device)  # bytes of a word that the next part completes
    limit = WORDS.get(tensor.device.type, WORDS["cuda"]) * 8 // tensor.element_size()
    for part in _parts(tensor.detach(), limit):
        data = torch.cat([left, part.view(torch.uint8)]) if left.numel() else part.view(torch.uint8)
        whole = data.numel() // 8 * 8
        total += _sum(data[:whole], position)
        position += whole // 8
        left = data[whole:]
    if left.numel():
        total += _sum(torch.cat([left, left.new_zeros(8 - left.numel())]), position)
    return total


def device_hashes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """[n] int64: `device_hash` of each, at least one, all on one device. On CUDA one launch of a kernel
    (`megarl.reshard.run.hash_kernel`) does those that are rows of adjacent elements, however many they are:
    `device_hash` takes some 30 launches for each. It is the definition."""
    if not tensors[0].is_cuda:
        return torch.stack([device_hash(tensor) for tensor in tensors])
    # Triton is imported only where there is a GPU: it needs a compiler and a driver, and is slow to import.
    from megarl.reshard.run import hash_kernel

    found, left = hash_kernel.hashes(tensors)
    for number in left:
        found[number] = device_hash(tensors[number])
    return found


def _parts(tensor: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    """The elements in row-major order, as contiguous tensors [n] of at most `limit`; copies no more at once."""
    if tensor.is_contiguous():
        yield from tensor.as_strided((tensor.numel(),), (1,)).split(limit)  # one element may have any stride
    elif tensor.numel() <= limit:
        yield tensor.reshape(-1).contiguous()
    elif len(tensor) == 1:
        yield from _parts(tensor[0], limit)
    else:
        rows = max(1, limit * len(tensor) // tensor.numel())
        for block in tensor.split(rows):
            yield from _parts(block, limit)


def _sum(data: torch.Tensor, position: int) -> torch.Tensor:
    """[]: what the bytes [8 n] contribute, the first word of which is at `position`."""
    if data.storage_offset() % 8:
        data = data.clone()  # words can only be seen where they are aligned
    positions = torch.arange(position + 1, position + 1 + data.numel() // 8, device=data.device)
    return _mix(positions.mul_(STEP).add_(data.view(torch.int64))).sum()


def _mix(z: torch.Tensor) -> torch.Tensor:
    """splitmix64's finaliser of each int64, in place; products wrap around modulo 2^64."""
    for shift, factor in MIX:
        z.bitwise_xor_(_shifted(z, shift)).mul_(factor)
    return z.bitwise_xor_(_shifted(z, 31))


def _shifted(z: torch.Tensor, by: int) -> torch.Tensor:
    """z >> by as of unsigned numbers: the signed shift copies the sign into the bits that must become 0."""
    return (z >> by).bitwise_and_((1 << (64 - by)) - 1)
