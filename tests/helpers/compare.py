"""Compare an engine's tokens, log-probs and chosen experts and keys with `transformers` on the same weights."""

from __future__ import annotations

import asyncio
from typing import Any

import tiny_models
import torch
from transformers import PreTrainedModel

from megarl.engine.engine_protocol import Generation
from megarl.engine.http_engine import HTTPEngine
from megarl.models.registry import load_hf_config
from megarl.models.routing import RoutingShape, routing_shape
from megarl.models.sparse_indices import index_shape, positions
from megarl.types import SamplingMask

PROMPTS = [list(range(20, 20 + length)) for length in (3, 17, 40)]
TOKENS = 8


def engine_routing_shape(engine: HTTPEngine) -> RoutingShape | None:
    """Return the shape of the engine's routing record, or None if it keeps none."""
    config = engine.config
    return routing_shape(load_hf_config(config.model.path), {}) if config.train.routing_replay else None


def generate(engine: HTTPEngine, temperature: float = 0.0) -> list[Generation]:
    params = {"temperature": temperature, "max_new_tokens": TOKENS, "ignore_eos": True}

    async def run() -> list[Generation]:
        indices = index_shape(load_hf_config(engine.config.model.path), engine.config)
        async with engine.connect(300.0, engine_routing_shape(engine), indices) as client:
            return list(await asyncio.gather(*(client.generate(prompt, params) for prompt in PROMPTS)))

    return asyncio.run(run())


def assert_matches_transformers(engine: HTTPEngine, model: PreTrainedModel, version: int) -> None:
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


def assert_truncated(probs: torch.Tensor, out: Generation, params: dict[str, Any]) -> None:
    """Check masks and log-probs against `probs` [tokens, vocabulary], fp64, before truncation.

    Masks are not compared where a token is within 1e-6 of the boundary. Log-probs differ by the rounding of two fp32
    models, about 1e-5.
    """
    assert out.sampling_mask is not None and len(out.sampling_mask) == len(out.token_ids)
    ordered, ids = probs.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    sets = out.sampling_mask.ids.split(out.sampling_mask.counts.tolist())
    for position, (mask, token) in enumerate(zip(sets, out.token_ids.tolist(), strict=True)):
        p = ordered[position]
        is_candidate = (torch.arange(len(p)) < params.get("top_k", len(p))) & (
            before[position] <= params.get("top_p", 1.0)
        )
        is_candidate &= p >= params.get("min_p", 0.0) * p[0]
        margins = torch.stack([before[position] - params.get("top_p", 1.0), p - params.get("min_p", 0.0) * p[0]]).abs()
        if float(margins.min()) > 1e-6:
            assert set(mask.tolist()) == set(ids[position][is_candidate].tolist())
        allowed = probs[position][mask.long()]
        expected = (probs[position, token] / allowed.sum()).log()
        assert abs(float(expected) - float(out.logprobs[position])) < 1e-4


def candidates(mask: SamplingMask, vocabulary: int) -> torch.Tensor:
    """Return whether each token could be drawn, bool [tokens, vocabulary]."""
    kept = torch.zeros(len(mask), vocabulary, dtype=torch.bool)
    kept[torch.repeat_interleave(torch.arange(len(mask)), mask.counts), mask.ids.long()] = True
    return kept
