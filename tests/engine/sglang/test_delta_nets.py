"""Gated delta nets in the real SGLang: a request's states outlive it and serve the next turn of its conversation."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import tiny_models
import torch
from compare import assert_matches_transformers
from drafter import predictable_policy
from engines import RunningEngine, start_engine
from orders import check_orders
from transformers import PreTrainedModel

from megarl.engine.engine_protocol import Generation
from megarl.engine.http_client import HTTPClient
from megarl.reshard.plan.layout import EngineLayout


def test_qwen3_next_goes_on_from_kept_states_and_takes_new_weights(host: str, tmp_path: Path) -> None:
    with start_engine(host, tiny_models.qwen3_next(), tmp_path) as running:
        assert_matches_transformers(running.engine, running.model, 0)
        check_conversations(running, running.model)
        new = tiny_models.qwen3_next(seed=6)
        check_orders(running, EngineLayout(1), new, tmp_path)
        check_conversations(running, new)


@pytest.mark.nightly
def test_states_that_drafts_leave_serve_the_next_turn(host: str, tmp_path: Path) -> None:
    """Answers end within and after windows of drafts, some of which are accepted."""
    policy = predictable_policy(build=tiny_models.qwen3_next)
    with start_engine(host, policy, tmp_path, num_speculative_tokens=2) as running:
        assert check_conversations(running, policy) > 0


def check_conversations(running: RunningEngine, model: PreTrainedModel) -> int:
    """Compare three turns of conversations with transformers, which computes each from the beginning.

    Chunks of the delta rule have 64 tokens: turns begin before, at and after the end of one. Returns the number of
    accepted drafts.
    """
    generator, accepted = torch.Generator().manual_seed(3), 0
    for first, answer, between in ((70, 6, 9), (5, 20, 70), (64, 1, 1)):
        tokens = torch.randint(3, 400, (first,), generator=generator).tolist()
        for turn in range(3):
            out = generate(running, tokens, answer)
            assert (out.cached > 0) == (turn > 0)
            expected = tiny_models.logprobs(model, [*tokens, *out.token_ids])[len(tokens) - 1 : -1]
            chosen = expected.gather(1, torch.tensor(out.token_ids.tolist())[:, None])[:, 0]
            gap = float((torch.tensor(out.logprobs) - chosen).abs().max())
            assert gap < 1e-5, gap
            accepted += out.accepted
            tokens += [*out.token_ids.tolist(), *torch.randint(3, 400, (between,), generator=generator).tolist()]
    return accepted


def generate(running: RunningEngine, tokens: list[int], answer: int) -> Generation:
    params = {"temperature": 1.0, "max_new_tokens": answer, "ignore_eos": True}

    async def run() -> Generation:
        async with HTTPClient(running.engine.url, running.engine.api_key, 300.0, None) as client:
            return await client.generate(tokens, params)

    return asyncio.run(run())
