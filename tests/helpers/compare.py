"""An engine's tokens, log-probs and chosen experts against those of `transformers` with the same weights."""

from __future__ import annotations

import asyncio

import tiny_models
import torch
from transformers import PreTrainedModel

from megarl.engine.client import Client
from megarl.engine.engine_protocol import Generation
from megarl.engine.sglang_engine import Engine
from megarl.models.registry import load_hf_config
from megarl.models.routing import RoutingShape, routing_shape

PROMPTS = [list(range(20, 20 + length)) for length in (3, 17, 40)]
TOKENS = 8


def recorded(engine: Engine) -> RoutingShape | None:
    """The shape of the engine's record of its routing, where it keeps one."""
    config = engine.config
    return routing_shape(load_hf_config(config.model.path), {}) if config.train.routing_replay else None


def generate(engine: Engine, temperature: float = 0.0) -> list[Generation]:
    params = {"temperature": temperature, "max_new_tokens": TOKENS, "ignore_eos": True}

    async def all_of_them() -> list[Generation]:
        async with Client(engine.url, engine.api_key, 300.0, recorded(engine)) as client:
            return list(await asyncio.gather(*(client.generate(prompt, params) for prompt in PROMPTS)))

    return asyncio.run(all_of_them())


def assert_equals(engine: Engine, model: PreTrainedModel, version: int) -> None:
    """Greedy tokens, and log-probs and experts of greedy and of sampled tokens, are those of transformers. The prompts
    begin alike, so that the experts of most of their tokens come from another request's cached keys and values."""
    greedy, sampled = generate(engine), generate(engine, temperature=1.0)
    for prompt, out in zip(PROMPTS, greedy, strict=True):
        assert list(out.token_ids) == tiny_models.greedy(model, prompt, TOKENS)
    for prompt, out in zip(PROMPTS * 2, greedy + sampled, strict=True):
        assert out.finish_reason == "length" and out.weight_version == version
        with tiny_models.watched_experts(model) as experts:
            expected = tiny_models.logprobs(model, [*prompt, *out.token_ids])[len(prompt) - 1 : -1]
        if recorded(engine) is not None:
            assert out.routing is not None
            chosen_experts = torch.stack(experts, dim=1)[:-1]
            assert torch.equal(out.routing.sort(-1).values, chosen_experts.sort(-1).values.byte())
        chosen = expected.gather(1, torch.tensor(out.token_ids.tolist())[:, None])[:, 0]
        assert (torch.tensor(out.logprobs) - chosen).abs().max() < 1e-5
