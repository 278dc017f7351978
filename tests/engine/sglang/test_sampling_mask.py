"""Truncated sampling: the engine returns the tokens it could have sampled, and log-probs over these."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import tiny_models
import torch
from compare import PROMPTS, assert_truncated
from engines import RunningEngine, start_engine

from megarl.engine.engine_protocol import Generation, RequestFailed
from megarl.engine.http_client import HTTPClient

TRUNCATED: dict[str, Any] = {"temperature": 0.7, "top_p": 0.6, "top_k": 20, "min_p": 0.15}
TOKENS = 12


@pytest.fixture(scope="module")
def truncating_engine(host: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    model = tiny_models.llama()
    with torch.no_grad():
        model.lm_head.weight.mul_(2)  # sharpen the distribution
    with start_engine(host, model, tmp_path_factory.mktemp("truncated"), max_context=1000, **TRUNCATED) as running:
        yield running


def generate(running: RunningEngine, *requests: dict[str, Any], stop_engine: bool = False) -> list[Generation]:
    async def run() -> list[Generation]:
        async with HTTPClient(running.engine.url, running.engine.api_key, 300.0) as client:
            begun = [asyncio.Event() for _ in requests for _ in PROMPTS]
            tasks = [
                asyncio.create_task(
                    client.generate(
                        prompt,
                        {"max_new_tokens": TOKENS, "ignore_eos": True} | settings,
                        on_tokens=(lambda ids, event=event: event.set()) if stop_engine else None,  # type: ignore[misc]
                    )
                )
                for event, (settings, prompt) in zip(begun, product(requests, PROMPTS), strict=True)
            ]
            if stop_engine:  # when each request has tokens
                await asyncio.gather(*(event.wait() for event in begun))
                await client.stop()
            return list(await asyncio.gather(*tasks))

    return asyncio.run(run())


def assert_truncated_distribution(
    running: RunningEngine, prompt: list[int], out: Generation, params: dict[str, Any]
) -> None:
    with torch.no_grad():
        logits = running.model(torch.tensor([[*prompt, *out.token_ids.tolist()]])).logits[0].double()
    assert_truncated((logits[len(prompt) - 1 : -1] / params["temperature"]).softmax(-1), out, params)


@pytest.mark.parametrize(
    "params",
    [TRUNCATED, {"temperature": 0.7, "top_p": 0.6, "top_k": 20}, {"temperature": 1.3, "top_k": 5}],
    ids=["all", "top_p and top_k", "top_k"],
)
def test_sampling_masks_and_log_probs(truncating_engine: RunningEngine, params: dict[str, Any]) -> None:
    outs = generate(truncating_engine, params, params, params)
    for prompt, out in zip(PROMPTS * 3, outs, strict=True):
        assert out.finish_reason == "length" and len(out.token_ids) == TOKENS
        assert_truncated_distribution(truncating_engine, prompt, out, params)
    counts = torch.cat([out.sampling_mask.counts for out in outs if out.sampling_mask is not None])
    assert 1 <= int(counts.min()) < int(counts.max()) or params.keys() == {"temperature", "top_k"}
    assert int(counts.max()) <= params["top_k"]


def test_truncated_requests_beside_full_and_greedy_ones(truncating_engine: RunningEngine) -> None:
    truncated, untruncated, greedy = generate(
        truncating_engine, TRUNCATED, {"temperature": 0.7}, TRUNCATED | {"temperature": 0.0}
    )[:: len(PROMPTS)]
    assert_truncated_distribution(truncating_engine, PROMPTS[0], truncated, TRUNCATED)
    assert untruncated.sampling_mask is None and greedy.sampling_mask is None
    assert list(greedy.token_ids) == tiny_models.greedy(truncating_engine.model, PROMPTS[0], TOKENS)
    logprobs = tiny_models.logprobs(truncating_engine.model, [*PROMPTS[0], *greedy.token_ids])[len(PROMPTS[0]) - 1 : -1]
    chosen = logprobs.gather(1, torch.tensor(greedy.token_ids.tolist())[:, None])[:, 0]
    assert (torch.tensor(greedy.logprobs) - chosen).abs().max() < 1e-4


def test_stopped_response_keeps_its_masks(truncating_engine: RunningEngine) -> None:
    for prompt, out in zip(
        PROMPTS, generate(truncating_engine, TRUNCATED | {"max_new_tokens": 900}, stop_engine=True), strict=True
    ):
        assert out.finish_reason == "abort" and 0 < len(out.token_ids) < 900
        assert_truncated_distribution(truncating_engine, prompt, out, TRUNCATED)


def test_rejects_masks_larger_than_the_engines_limit(truncating_engine: RunningEngine) -> None:
    with pytest.raises(RequestFailed, match="refused to generate.*top_k <= 256"):  # the limit that its settings imply
        generate(truncating_engine, {"top_k": 4096})
