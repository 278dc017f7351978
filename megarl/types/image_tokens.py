"""Images of a sequence: their encoded files, and where their tokens are.

A processor cuts an image into patches, a grid of rows and columns, and the vision tower merges squares of patches into
one feature for each image token. Files travel between ranks, and pixels are computed where they are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

IMAGE_PLACEHOLDER = "<image>"
"""Stands for an image in the text of a message whose prompt or tool result has images, as in verl's data sets."""


class Grid(NamedTuple):
    """Patches of an image: times (1), rows and columns."""

    t: int
    h: int
    w: int


@dataclass(frozen=True)
class Image:
    """An image of a turn or of a sequence."""

    data: bytes
    """The encoded file, such as PNG or JPEG."""
    grid: Grid = Grid(0, 0, 0)  # zeros until a processor has read it
    num_tokens: int = 0
    """Number of consecutive image tokens in the sequence."""
    start: int = 0
    """Index of the first of them in the turn, or in the sequence."""

    def __repr__(self) -> str:
        return f"Image({len(self.data)} bytes, {self.grid.h} x {self.grid.w} patches, start={self.start})"

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens


def mrope_positions(num_tokens: int, images: Sequence[Image], merge: int) -> torch.Tensor:
    """Return the time, row and column of each token of a sequence, [3, num_tokens] int64.

    Text counts up in all three. Rows and columns of an image count up from the position before it, and the text after
    it continues behind its longest side.

    merge: patches along a side of the square that one image token stands for.
    """
    parts, position, stop = [], 0, 0
    for image in images:
        text = torch.arange(image.start - stop) + position
        position += len(text)
        t, h, w = image.grid.t, image.grid.h // merge, image.grid.w // merge
        if t * h * w != image.num_tokens:
            raise ValueError(f"an image of {t} x {h} x {w} features has {image.num_tokens} tokens")
        axes = torch.meshgrid(torch.arange(t), torch.arange(h), torch.arange(w), indexing="ij")
        parts += [text.expand(3, -1), torch.stack(axes).flatten(1) + position]
        position += max(h, w)
        stop = image.stop
    parts.append((torch.arange(num_tokens - stop) + position).expand(3, -1))
    return torch.cat(parts, dim=1)


_WORDS = 6  # of 8 bytes, for each image


def pack_images(images: Sequence[Image]) -> torch.Tensor:
    """Pack the images of a sequence into [bytes] uint8; empty without images."""
    if not images:
        return torch.zeros(0, dtype=torch.uint8)
    rows = [(image.start, image.num_tokens, *image.grid, len(image.data)) for image in images]
    header = np.array([len(images), *(word for row in rows for word in row)], dtype="<i8").tobytes()
    return torch.frombuffer(bytearray(header + b"".join(image.data for image in images)), dtype=torch.uint8)


def packed_size(images: Sequence[Image]) -> int:
    """Return the number of bytes that `pack_images` needs."""
    return 8 * (1 + _WORDS * len(images)) + sum(len(image.data) for image in images) if images else 0


def unpack_images(packed: torch.Tensor) -> tuple[Image, ...]:
    """Return the images that `pack_images` packed."""
    if not len(packed):
        return ()
    data = packed.numpy().tobytes()
    count = int(np.frombuffer(data, dtype="<i8", count=1)[0])
    rows = np.frombuffer(data, dtype="<i8", count=count * _WORDS, offset=8).reshape(count, _WORDS).tolist()
    images, offset = [], 8 * (1 + count * _WORDS)
    for start, tokens, t, h, w, size in rows:
        images.append(Image(data[offset : offset + size], Grid(t, h, w), tokens, start))
        offset += size
    if offset != len(data):
        raise ValueError(f"images of {offset} bytes in a record of {len(data)}")
    return tuple(images)
