"""Encode what has changed in a message since the last weight sync, and apply it.

Most BF16 weights keep their bits in an update with a small learning rate. An encoded message names the 16-bit words
that have changed and their new values, so applying it twice does no harm. Words are counted in blocks of 65,536:

    counts     int32 [blocks]   changed words of each block
    positions  int16 [changed]  of each within its block, as unsigned numbers, ascending
    values     int16 [changed]

A message is sent whole if this is no smaller.
"""

from __future__ import annotations

import torch

BLOCK_WORDS = 1 << 16
CHUNK_WORDS = 64 * BLOCK_WORDS
"""Words that are compared at a time, which bounds the memory for their indices."""
CHANGE_BYTES = 4  # a position and a value


def encode(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor | None:
    """Return the changes from `old` to `new`, both uint8 [n] on one device with n even, as uint8 [m] with m < n.

    None if they would take n bytes or more.
    """
    words, last = new.view(torch.int16), old.view(torch.int16)
    chunks = list(zip(words.split(CHUNK_WORDS), last.split(CHUNK_WORDS), strict=True))
    num_changed = sum(int((chunk != old_chunk).sum()) for chunk, old_chunk in chunks)
    if 4 * num_blocks(len(new)) + CHANGE_BYTES * num_changed >= len(new):
        return None
    parts: list[list[torch.Tensor]] = [[], [], []]
    for chunk, old_chunk in chunks:
        changed = (chunk != old_chunk).nonzero().view(-1)
        parts[0].append(torch.bincount(changed >> 16, minlength=num_blocks(2 * len(chunk))).to(torch.int32))
        parts[1].append((changed & (BLOCK_WORDS - 1)).to(torch.int16))
        parts[2].append(chunk[changed])
    return torch.cat([part.view(torch.uint8) for kind in parts for part in kind])


def apply(encoded: torch.Tensor, buffer: torch.Tensor) -> None:
    """Turn `buffer`, uint8 [n] with the old data, into the new data. encoded: of `encode`."""
    words, blocks = buffer.view(torch.int16), num_blocks(len(buffer))
    counts = encoded[: 4 * blocks].view(torch.int32)
    positions, values = encoded[4 * blocks :].view(torch.int16).chunk(2)
    first = 0
    per_chunk = CHUNK_WORDS // BLOCK_WORDS
    for chunk, chunk_counts in zip(words.split(CHUNK_WORDS), counts.split(per_chunk), strict=True):
        stop = first + int(chunk_counts.sum())
        block = torch.arange(len(chunk_counts), device=buffer.device)
        block = torch.repeat_interleave(block, chunk_counts, output_size=stop - first)
        position = positions[first:stop].to(torch.int64) & (BLOCK_WORDS - 1)
        chunk[block * BLOCK_WORDS + position] = values[first:stop]
        first = stop


def num_blocks(nbytes: int) -> int:
    return -(-nbytes // (2 * BLOCK_WORDS))
