"""An engine's tokens and log-probs against those of `transformers` with the same weights."""

from __future__ import annotations

import asyncio

import tiny_models
import torch
from transformers import PreTrainedModel

from megarl.rollout.client import Client, Generation
from megarl.rollout.engine import Engine

PROMPTS = [list(range(20, 20 + length)) for length in (3, 17, 40)]
TOKENS = 8


def generate(engine: Engine, temperature: float = 0.0) -> list[Generation]:
    params = {"temperature": temperature, "max_new_tokens": TOKENS, "ignore_eos": True}

    async def all_of_them() -> list[Generation]:
        async with Client(engine.url, engine.api_key, 300.0, 16) as client:
            return list(await asyncio.gather(*(client.generate(prompt, params) for prompt in PROMPTS)))

    return asyncio.run(all_of_them())


def assert_equals(engine: Engine, model: PreTrainedModel, version: int) -> None:
    """Greedy tokens, and the log-probs of greedy and of sampled tokens, are those of transformers."""
    greedy, sampled = generate(engine), generate(engine, temperature=1.0)
    for prompt, out in zip(PROMPTS, greedy, strict=True):
        assert list(out.token_ids) == tiny_models.greedy(model, prompt, TOKENS)
    for prompt, out in zip(PROMPTS * 2, greedy + sampled, strict=True):
        assert out.finish == "length" and out.weight_version == version
        expected = tiny_models.logprobs(model, [*prompt, *out.token_ids])[len(prompt) - 1 : -1]
        chosen = expected.gather(1, torch.tensor(out.token_ids)[:, None])[:, 0]
        assert (torch.tensor(out.logprobs) - chosen).abs().max() < 1e-5
