"""Batches with images for tiny models with a vision tower, and their inputs for transformers."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from megarl.data.images import ImageProcessor
from megarl.types import Image, TrainBatch, pack_images, unpack_images

IMAGE_TOKEN = 190
Places = Mapping[int, Sequence[tuple[int, tuple[int, int]]]]
PLACES: Places = {
    1: [(3, (2, 3)), (12, (2, 2))],
    2: [(2, (2, 3))],
    5: [(1, (3, 2)), (19, (1, 1))],
}
"""Sequence of `tiny.batch()` -> start, and rows and columns of tokens, of its images. A token is 2 x 2 patches."""


@cache
def processor_folder(patch: int) -> str:
    """Return a folder with a preprocessor_config.json for patches of this many pixels."""
    folder = tempfile.mkdtemp(prefix="megarl-images-")
    settings = {"patch_size": patch, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 65536}}
    (Path(folder) / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def picture(height: int, width: int, seed: int = 0) -> bytes:
    """Return a PNG of random pixels."""
    import PIL.Image

    pixels = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(seed)).byte()
    file = io.BytesIO()
    PIL.Image.fromarray(pixels.numpy()).save(file, "PNG")
    return file.getvalue()


def add(batch: TrainBatch, patch: int, places: Places = PLACES) -> TrainBatch:
    """Put images into a batch. Two sequences of `PLACES` share one. Images are outside of the loss mask."""
    from dataclasses import replace

    processor = ImageProcessor.load(processor_folder(patch))
    tokens, mask = batch.tokens.clone(), batch.loss_mask.clone()
    tokens[tokens == IMAGE_TOKEN] += 1
    packed = []
    for number, sequence_start in enumerate(batch.cu_seqlens[:-1].tolist()):
        sequence = []
        for start, size in places.get(number, []):
            rows, columns = size
            data = picture(2 * patch * rows, 2 * patch * columns, seed=rows + 2 * columns)
            image = replace(processor.read(data), start=start)
            span = slice(sequence_start + start, sequence_start + image.stop)
            tokens[span], mask[span] = IMAGE_TOKEN, False
            sequence.append(image)
        packed.append(pack_images(sequence))
    return batch.with_(tokens=tokens, loss_mask=mask, loss_weights=mask / mask.sum(), images=tuple(packed))


def hf_inputs(batch: TrainBatch, number: int, tokens: torch.Tensor, patch: int) -> dict[str, Any]:
    """Return transformers' further inputs of a sequence; none if it has no images."""
    images = () if batch.images is None else unpack_images(batch.images[number])
    return processed(images, tokens, ImageProcessor.load(processor_folder(patch))) if images else {}


def processed(images: Sequence[Image], tokens: torch.Tensor, processor: ImageProcessor) -> dict[str, Any]:
    """Return transformers' further inputs of a sequence with these images."""
    return {
        "pixel_values": torch.cat([processor.pixels(image.data) for image in images]),
        "image_grid_thw": torch.tensor([image.grid for image in images]),
        "mm_token_type_ids": (tokens[None] == IMAGE_TOKEN).int(),
    }
