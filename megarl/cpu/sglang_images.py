"""Give SGLang's Qwen-VL processor the token ids and pixels of the trainer, in every engine process.

A request names the encoded images and the index of each one's first token. SGLang's own way would decode the ids, run
the Hugging Face processor on the text, and tokenize again, which can change tokens that the policy has sampled; and
its pixels may differ in the last bits from the trainer's.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pybase64
import torch

from megarl.data.images import ImageProcessor
from megarl.types import Ids, Image, mrope_positions

SCHEME = "megarl"
"""Begins the text that stands for an image in a request. SGLang's server takes texts and objects of its own only."""
_PROCESSOR = "QwenVLImageProcessor"


def request_images(images: Sequence[Image], version: int | None) -> list[str]:
    """Return `image_data` of a request. version: of the weights, by which the engine may cache features."""
    head = f"{SCHEME}:{-1 if version is None else version}"
    return [f"{head}:{image.start}:{pybase64.b64encode_as_string(image.data)}" for image in images]


def install() -> None:
    """Patch SGLang's processor where it is constructed; a text model has none."""
    from sglang.srt.multimodal.processors.base_processor import BaseMultimodalProcessor

    construct = BaseMultimodalProcessor.__init__

    def wrapped(self: Any, hf_config: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, hf_config, server_args, *args, **kwargs)
        if type(self).__name__ != _PROCESSOR:
            return
        process = self.process_mm_data_async

        async def process_images(image_data: Any, input_text: Any, **options: Any) -> Any:
            first = image_data[0] if image_data else None
            if not isinstance(first, str) or not first.startswith(f"{SCHEME}:"):
                return await process(image_data=image_data, input_text=input_text, **options)
            return await asyncio.to_thread(make_inputs, self, server_args.model_path, image_data, input_text)

        self.process_mm_data_async = process_images

    BaseMultimodalProcessor.__init__ = wrapped


def make_inputs(processor: Any, folder: str, image_data: Sequence[str], ids: Sequence[int] | Ids) -> Any:
    """Return SGLang's MultimodalProcessorOutput of a request with the result of `request_images`.

    Raises ValueError, which becomes status 400.
    """
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput

    reader, ids = ImageProcessor.load(folder), list(ids)
    images, items = [], []
    for text in image_data:
        _, version, start, encoded = text.split(":")
        data = pybase64.b64decode(encoded, validate=True)
        image = replace(reader.read(data), start=int(start))
        if set(ids[image.start : image.stop]) != {processor.IM_TOKEN_ID} or image.stop > len(ids):
            raise ValueError(f"tokens {image.start} to {image.stop} are not those of an image: {image!r}")
        grid = torch.tensor([image.grid])
        item = MultimodalDataItem(
            modality=Modality.IMAGE,
            feature=reader.pixels(data),
            offsets=[(image.start, image.stop - 1)],
            model_specific_data={"image_grid_thw": grid},
        )
        digest = hashlib.sha256(f"{version} {folder} ".encode() + data).digest()
        item.set_hash(int.from_bytes(digest[:8], "big"))
        images.append(image)
        items.append(item)
    positions = mrope_positions(len(ids), images, reader.merge)
    return MultimodalProcessorOutput(
        input_ids=ids,
        padded_input_ids=MultimodalProcessorOutput.build_padded_input_ids(ids, items),
        mm_items=items,
        im_start_id=processor.vision_start_token_id,
        im_end_id=processor.vision_end_token_id,
        im_token_id=processor.IM_TOKEN_ID,
        video_token_id=processor.VIDEO_TOKEN_ID,
        mrope_positions=positions,
        mrope_position_delta=(positions.max() + 1 - len(ids)).reshape(1, 1),
    )
