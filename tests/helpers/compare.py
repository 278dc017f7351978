"""Compare an engine's tokens, log-probs and chosen experts and keys with `transformers` on the same weights."""

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
from megarl.models.sparse_indices import index_shape, positions

PROMPTS = [list(range(20, 20 + length)) for length in (3, 17, 40)]
TOKENS = 8


def engine_routing_shape(engine: Engine) -> RoutingShape | None:
    """Return the shape of the engine's routing record, or None if it keeps none."""
    config = engine.config
    return routing_shape(load_hf_config(config.model.path), {}) if config.train.routing_replay else None


def generate(engine: Engine, temperature: float = 0.0) -> list[Generation]:
    params = {"temperature": temperature, "max_new_tokens": TOKENS, "ignore_eos": True}

    async def run() -> list[Generation]:
        indices = index_shape(load_hf_config(engine.config.model.path), engine.config)
        async with Client(engine.url, engine.api_key, 300.0, engine_routing_shape(engine), indices=indices) as client:
            return list(await asyncio.gather(*(client.generate(prompt, params) for prompt in PROMPTS)))

    return asyncio.run(run())


def assert_matches_transformers(engine: Engine, model: PreTrainedModel, version: int) -> None:
    """Check greedy tokens, and log-probs and experts of greedy and sampled tokens, against transformers. The prompts
    share a prefix, so most of their tokens reuse keys, values and routing that another request cached."""
    greedy, sampled = generate(engine), generate(engine, temperature=1.0)
    for prompt, out in zip(PROMPTS, greedy, strict=True):
        assert list(out.token_ids) == tiny_models.greedy(model, prompt, TOKENS)
    for prompt, out in zip(PROMPTS * 2, greedy + sampled, strict=True):
        assert out.finish_reason == "length" and out.weight_version == version
        with tiny_models.record_experts(model) as experts, tiny_models.record_keys(model) as keys:
            expected = tiny_models.logprobs(model, [*prompt, *out.token_ids])[len(prompt) - 1 : -1]
        if engine_routing_shape(engine) is not None:
            assert out.routing is not None
            chosen_experts = torch.stack(experts, dim=1)[:-1]
            assert torch.equal(out.routing.sort(-1).values, chosen_experts.sort(-1).values.byte())
        if keys:
            assert out.sparse_indices is not None
            recorded = positions(out.sparse_indices).sort(-1).values
            first = recorded.shape[2] if len(recorded) else len(prompt) + TOKENS
            chosen_keys = torch.stack(keys, dim=1)[first:-1].sort(-1).values
            assert recorded.tolist() == chosen_keys.tolist()
        chosen = expected.gather(1, torch.tensor(out.token_ids.tolist())[:, None])[:, 0]
        gap = float((torch.tensor(out.logprobs) - chosen).abs().max())
        assert gap < 1e-5, gap
