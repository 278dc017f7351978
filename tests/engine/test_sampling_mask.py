"""Sampling that is cut off: the engine says which tokens it could have drawn, and its log-probs are over these."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import tiny_models
import torch
from compare import PROMPTS
from engines import Running, start

from megarl.engine.client import Client
from megarl.engine.engine_protocol import Generation, RequestFailed

CUT: dict[str, Any] = {"temperature": 0.7, "top_p": 0.6, "top_k": 20, "min_p": 0.15}
TOKENS = 12


@pytest.fixture(scope="module")
def cutting(host: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    model = tiny_models.llama()
    with torch.no_grad():
        model.lm_head.weight.mul_(2)  # so that some tokens are much likelier than others
    with start(host, model, tmp_path_factory.mktemp("cutting"), max_context=1000, **CUT) as running:
        yield running


def ask(running: Running, *params: dict[str, Any], stopping: bool = False) -> list[Generation]:
    async def all_of_them() -> list[Generation]:
        async with Client(running.engine.url, running.engine.api_key, 300.0) as client:
            requested = [
                asyncio.create_task(client.generate(prompt, {"max_new_tokens": TOKENS, "ignore_eos": True} | settings))
                for settings in params
                for prompt in PROMPTS
            ]
            if stopping:  # when a shorter one is done, which was asked later
                await client.generate(PROMPTS[0], {"max_new_tokens": 4, "ignore_eos": True})
                await client.stop()
            return list(await asyncio.gather(*requested))

    return asyncio.run(all_of_them())


def assert_of_the_cut_distribution(running: Running, prompt: list[int], out: Generation, cut: dict[str, Any]) -> None:
    """By transformers, in fp64: the sets are those that the settings ask for, but where a token is as good as on the
    boundary, and the log-probs are over them."""
    assert out.sampling_mask is not None and len(out.sampling_mask) == len(out.token_ids)
    with torch.no_grad():
        logits = running.model(torch.tensor([[*prompt, *out.token_ids.tolist()]])).logits[0].double()
    probs = (logits[len(prompt) - 1 : -1] / cut["temperature"]).softmax(-1)
    ordered, ids = probs.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    sets = out.sampling_mask.ids.split(out.sampling_mask.counts.tolist())
    for place, (local, token) in enumerate(zip(sets, out.token_ids.tolist(), strict=True)):
        p = ordered[place]
        retained = (torch.arange(len(p)) < cut.get("top_k", len(p))) & (before[place] <= cut.get("top_p", 1.0))
        retained &= p >= cut.get("min_p", 0.0) * p[0]
        margins = torch.stack([before[place] - cut.get("top_p", 1.0), p - cut.get("min_p", 0.0) * p[0]]).abs()
        if float(margins.min()) > 1e-6:
            assert set(local.tolist()) == set(ids[place][retained].tolist())
        mine = probs[place][local.long()]
        expected = (probs[place, token] / mine.sum()).log()
        assert abs(float(expected) - float(out.logprobs[place])) < 1e-5


@pytest.mark.parametrize(
    "cut",
    [CUT, {"temperature": 0.7, "top_p": 0.6, "top_k": 20}, {"temperature": 1.3, "top_k": 5}],
    ids=["all", "top_p and top_k", "top_k"],
)
def test_what_could_have_been_drawn_and_its_log_probs(cutting: Running, cut: dict[str, Any]) -> None:
    outs = ask(cutting, cut, cut, cut)
    for prompt, out in zip(PROMPTS * 3, outs, strict=True):
        assert out.finish_reason == "length" and len(out.token_ids) == TOKENS
        assert_of_the_cut_distribution(cutting, prompt, out, cut)
    counts = torch.cat([out.sampling_mask.counts for out in outs if out.sampling_mask is not None])
    assert 1 <= int(counts.min()) < int(counts.max()) or cut.keys() == {"temperature", "top_k"}
    assert int(counts.max()) <= cut["top_k"]


def test_beside_answers_of_the_whole_distribution_and_greedy_ones(cutting: Running) -> None:
    cut, free, greedy = ask(cutting, CUT, {"temperature": 0.7}, CUT | {"temperature": 0.0})[:: len(PROMPTS)]
    assert_of_the_cut_distribution(cutting, PROMPTS[0], cut, CUT)
    assert free.sampling_mask is None and greedy.sampling_mask is None
    assert list(greedy.token_ids) == tiny_models.greedy(cutting.model, PROMPTS[0], TOKENS)
    logprobs = tiny_models.logprobs(cutting.model, [*PROMPTS[0], *greedy.token_ids])[len(PROMPTS[0]) - 1 : -1]
    chosen = logprobs.gather(1, torch.tensor(greedy.token_ids.tolist())[:, None])[:, 0]
    assert (torch.tensor(greedy.logprobs) - chosen).abs().max() < 1e-5


def test_of_an_answer_that_is_stopped_all_is_kept(cutting: Running) -> None:
    for prompt, out in zip(PROMPTS, ask(cutting, CUT | {"max_new_tokens": 900}, stopping=True), strict=True):
        assert out.finish_reason == "abort" and 0 < len(out.token_ids) < 900
        assert_of_the_cut_distribution(cutting, prompt, out, CUT)


def test_what_the_engine_has_no_room_to_say_is_named(cutting: Running) -> None:
    with pytest.raises(RequestFailed, match="refused to generate.*top_k <= 256"):  # which its settings leave room for
        ask(cutting, {"top_k": 4096})
