"""Read images as the trainer and the engine see them: one function computes the pixels of both.

`ImageProcessor` applies preprocessor_config.json of the model folder with transformers' processor on PIL and numpy,
which gives the same bits on every machine. The engine's plug-in calls it too (`cpu/sglang_images.py`), so the engine
does not use its own processor.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.config import ConfigError
from megarl.config.strict import read_json
from megarl.types import Ids
from megarl.types.image_tokens import IMAGE_PLACEHOLDER, Grid, Image

PROCESSOR_FILE = "preprocessor_config.json"
_CACHED_IMAGES = 16  # samples of a group, and the passes of a step, read the same images


class ImageProcessor:
    """Computes the patch grid and the pixels of an encoded image."""

    def __init__(self, folder: str, settings: Mapping[str, Any], merge: int) -> None:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        self._processor = Qwen2VLImageProcessorPil(**settings)
        self.merge = int(self._processor.merge_size)
        if merge and self.merge != merge:
            raise ConfigError(
                f"{folder}/{PROCESSOR_FILE} has merge_size={self.merge}, but vision_config.spatial_merge_size={merge}"
            )
        self._cached_pixels = lru_cache(_CACHED_IMAGES)(self._compute_pixels)

    @staticmethod
    @cache
    def load(folder: str, merge: int = 0) -> ImageProcessor:
        """Read the settings of a model folder. merge: the model's, to be checked. Raises ConfigError."""
        file = Path(folder) / PROCESSOR_FILE
        if not file.is_file():
            raise ConfigError(f"{folder} has no {PROCESSOR_FILE}, by which images are scaled; copy the model's")
        ignored = ("image_processor_type", "processor_class", "feature_extractor_type")
        return ImageProcessor(folder, {k: v for k, v in read_json(file).items() if k not in ignored}, merge)

    def read(self, data: bytes) -> Image:
        """Return an image with its grid, of which only the header is decoded. Raises ValueError if it is none."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        width, height = _open(data).size
        processor = self._processor
        rows, columns = (height, width)
        if processor.do_resize:
            rows, columns = smart_resize(
                height,
                width,
                processor.patch_size * processor.merge_size,
                processor.size["shortest_edge"],
                processor.size["longest_edge"],
            )
        grid = Grid(1, rows // processor.patch_size, columns // processor.patch_size)
        return Image(data, grid, grid.t * grid.h * grid.w // self.merge**2)

    def pixels(self, data: bytes) -> torch.Tensor:
        """Return the normalised patches, [patches, values] fp32; cached, so not to be changed."""
        return self._cached_pixels(data)

    def _compute_pixels(self, data: bytes) -> torch.Tensor:
        output = self._processor(images=[_to_rgb(_open(data))], return_tensors="pt")
        pixels: torch.Tensor = output["pixel_values"]
        return pixels.float()


class ImageFormat:
    """How a model with a vision tower reads images: the tokens that stand for one, and its processor.

    An image is written as the model's own chat template writes it: a start, its tokens, and an end.
    """

    def __init__(self, start: str, token: str, end: str, token_id: int, processor: ImageProcessor) -> None:
        self._start, self._token, self._end, self.token_id, self.processor = start, token, end, token_id, processor

    def insert(self, text: str, images: Sequence[Image], subject: str) -> str:
        """Replace each `IMAGE_PLACEHOLDER` of a rendered text by the tokens of an image. Raises ConfigError."""
        parts = text.split(IMAGE_PLACEHOLDER)
        if len(parts) != len(images) + 1:
            raise ConfigError(
                f"{subject} has {len(images)} images, but the chat template writes {IMAGE_PLACEHOLDER} "
                f"{len(parts) - 1} times"
            )
        result = parts[0]
        for image, part in zip(images, parts[1:], strict=True):
            count = self._read(image, subject).num_tokens
            result += self._start + self._token * count + self._end + part
        return result

    def place(self, ids: Ids | Sequence[int], images: Sequence[Image], subject: str) -> tuple[Image, ...]:
        """Return the images with their grids and with the starts of their tokens in `ids`. Raises ConfigError."""
        indices = np.flatnonzero(np.asarray(ids) == self.token_id)
        placed, stop = [], 0
        for image in images:
            read = self._read(image, subject)
            span = indices[stop : stop + read.num_tokens]
            if len(span) < read.num_tokens or span[-1] - span[0] != len(span) - 1:
                break
            placed.append(replace(read, start=int(span[0])))
            stop += read.num_tokens
        if len(placed) < len(images) or stop != len(indices):
            raise ConfigError(f"{subject} spells the image token {self._token}, which stands for an image; remove it")
        return tuple(placed)

    def _read(self, image: Image, subject: str) -> Image:
        try:
            return self.processor.read(image.data)
        except ValueError as error:
            raise ConfigError(f"{subject}: {error}") from None


def _open(data: bytes) -> Any:
    """Open an image, turned as its EXIF orientation says. Raises ValueError."""
    import PIL.Image
    import PIL.ImageOps

    try:
        image = PIL.Image.open(io.BytesIO(data))
        return PIL.ImageOps.exif_transpose(image) if image.getexif().get(0x0112, 1) != 1 else image
    except (OSError, SyntaxError, ValueError, PIL.Image.DecompressionBombError) as error:
        raise ValueError(f"no image that Pillow reads: {' '.join(str(error).split())[:200]}") from None


def _to_rgb(image: Any) -> Any:
    """Convert to RGB; what is transparent becomes white."""
    import PIL.Image

    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        layer = image.convert("RGBA")
        background = PIL.Image.new("RGB", layer.size, (255, 255, 255))
        background.paste(layer, mask=layer.getchannel("A"))
        return background
    return image.convert("RGB")
