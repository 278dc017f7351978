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
CHANGE_BYTES = 4  # a position and a value


def encode(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor | None:
    """Return the changes from `old` to `new`, both uint8 [n] on one device with n even, as uint8 [m] with m < n.

    None if they would take n bytes or more.
    """
    words, blocks = new.view(torch.int16), num_blocks(len(new))
    changed = (words != old.view(torch.int16)).nonzero().view(-1)
    if 4 * blocks + CHANGE_BYTES * len(changed) >= len(new):
        return None
    counts = torch.bincount(changed >> 16, minlength=blocks).to(torch.int32)
    positions = (changed & (BLOCK_WORDS - 1)).to(torch.int16)
    return torch.cat([part.view(torch.uint8) for part in (counts, positions, words[changed])])


def apply(encoded: torch.Tensor, buffer: torch.Tensor) -> None:
    """Turn `buffer`, uint8 [n] with the old data, into the new data. encoded: of `encode`."""
    words, blocks = buffer.view(torch.int16), num_blocks(len(buffer))
    counts = encoded[: 4 * blocks].view(torch.int32)
    positions, values = encoded[4 * blocks :].view(torch.int16).chunk(2)
    block = torch.repeat_interleave(torch.arange(blocks, device=buffer.device), counts, output_size=len(positions))
    words[block * BLOCK_WORDS + (positions.to(torch.int64) & (BLOCK_WORDS - 1))] = values


def num_blocks(nbytes: int) -> int:
    return -(-nbytes // (2 * BLOCK_WORDS))
