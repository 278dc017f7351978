"""Models with a vision tower in the real SGLang, on two ranks: images in several turns, and new weights."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from compare import assert_matches_transformers, engine_routing_shape
from engines import RunningEngine, start_engine
from orders import check_orders
from transformers import PreTrainedModel

from megarl.data.images import ImageProcessor
from megarl.engine.engine_protocol import Generation
from megarl.engine.http_client import HTTPClient
from megarl.reshard.plan.layout import EngineLayout
from megarl.types import Image

sys.path.insert(0, str(Path(__file__).parents[2] / "megatron"))

import images  # noqa: E402

TURNS = ((5, (2, 3)), (9, (1, 2)), (70, (3, 2)))
"""Tokens of text before the image of each turn, and its rows and columns of tokens."""


@pytest.mark.nightly
@pytest.mark.parametrize(("family", "layout"), [("qwen2_5_vl", {"tp": 2}), ("qwen3_vl_moe", {"tp": 2, "ep": 2})])
def test_images_of_several_turns_and_new_weights(
    family: str, layout: dict[str, int], host: str, tmp_path: Path
) -> None:
    # With these seeds no model generates the image token, for which transformers would want an image.
    model, new = (tiny_models.of_family(family, seed) for seed in (2, 5))
    with start_engine(host, model, tmp_path, **layout) as running:
        assert_matches_transformers(running.engine, model, 0)
        check_conversation(running, model, 0)
        check_orders(running, EngineLayout(**layout), new, tmp_path)
        check_conversation(running, new, 7)  # without features of the old tower


def check_conversation(running: RunningEngine, model: PreTrainedModel, version: int) -> None:
    """Compare turns that each bring an image with transformers, which computes each from the beginning."""
    processor = ImageProcessor.load(str(running.folder))
    patch, generator = model.config.vision_config.patch_size, torch.Generator().manual_seed(3)
    tokens: list[int] = []
    placed: list[Image] = []
    for number, (length, (rows, columns)) in enumerate(TURNS):
        tokens += torch.randint(200, 400, (length,), generator=generator).tolist()
        data = images.picture(2 * patch * rows, 2 * patch * columns, seed=number)
        placed.append(replace(processor.read(data), start=len(tokens) + 1))
        assert placed[-1].num_tokens == rows * columns
        vision_start, vision_end = model.config.vision_start_token_id, model.config.vision_end_token_id
        tokens += [vision_start, *[images.IMAGE_TOKEN] * rows * columns, vision_end, 7]
        out = generate(running, tokens, placed, version)
        assert (out.cached > 0) == (number > 0)
        sequence = torch.tensor([*tokens, *out.token_ids.tolist()])
        with torch.no_grad():
            inputs = images.processed(placed, sequence, processor)
            expected = model(sequence[None], **inputs).logits[0].log_softmax(-1)[len(tokens) - 1 : -1]
        chosen = expected.gather(1, torch.tensor(out.token_ids.tolist())[:, None])[:, 0]
        gap = float((torch.tensor(out.logprobs) - chosen).abs().max())
        assert gap < 1e-5, (number, gap)
        tokens += out.token_ids.tolist()


def generate(running: RunningEngine, tokens: list[int], placed: list[Image], version: int) -> Generation:
    params: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}
    routing = engine_routing_shape(running.engine)

    async def run() -> Generation:
        async with HTTPClient(running.engine.url, running.engine.api_key, 300.0, routing) as client:
            client.weight_version = version
            return await client.generate(tokens, params, images=placed)

    return asyncio.run(run())
