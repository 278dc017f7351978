"""Speculative decoding changes only the number of decoding steps: functions by hand, the engine by transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import tiny_models
import torch
from compare import PROMPTS, assert_matches_transformers, assert_truncated, candidates
from drafter import Drafter, predictable_policy
from engines import RunningEngine, start_engine
from orders import overwrite_weights

from megarl.chat_format.chat_template import ChatTemplate
from megarl.cpu import sglang_speculative as on_cpu
from megarl.engine.engine_protocol import Generation
from megarl.engine.http_client import HTTPClient, is_truncated_sampling
from megarl.environments.catalog import load_tools
from megarl.observe.metrics import rollout_metrics
from megarl.reshard.plan.layout import EngineLayout
from megarl.rollout.rollout_runner import RolloutRunner
from megarl.types import Prompt, Rollouts

pytestmark = pytest.mark.nightly

DRAFTS = 3
SHORT_PROMPTS = [[first, first + 1] for first in range(20, 420, 40)]
"""Short prompts, where a draft layer that misses a token proposes other drafts."""


def make_outputs(rows: int, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output tensors predicts, accept_index and accept_token_num."""
    return torch.zeros(rows * n, dtype=torch.int32), torch.full((rows, n), -7), torch.zeros(rows, dtype=torch.int32)


def test_verifies_greedy_drafts() -> None:
    """The first token of a window is known. Of its drafts none, one or both match; or only the second."""
    window = torch.tensor([[5, 1, 2], [5, 1, 2], [5, 1, 2], [5, 1, 2]])
    likeliest = torch.tensor([[9, 8, 7], [1, 8, 7], [1, 2, 7], [9, 2, 7]])
    predicts, index, number = make_outputs(4, 3)
    unused = torch.zeros(4, 3)
    on_cpu.verify_tree_greedy_cpu(predicts, index, number, window, unused, unused, unused, likeliest)
    assert number.tolist() == [0, 1, 2, 0]
    assert index.tolist() == [[0, -1, -1], [3, 4, -1], [6, 7, 8], [9, -1, -1]]
    written = [predicts[row[row >= 0]].tolist() for row in index]
    assert written == [[9], [1, 8], [1, 2, 7], [9]]
    last = torch.zeros(4, dtype=torch.int32)
    on_cpu.fill_bonus_tokens_cpu(predicts[index], number + 1, last, 3)
    assert last.tolist() == [9, 8, 7, 9]


def test_sampled_drafts_keep_the_distribution_exactly() -> None:
    """Enumerate all samples of a window, each token as often as its probability says. After each reached prefix the
    next token has the sampler's distribution."""
    p = torch.tensor([[2, 1, 1, 0], [1, 0, 1, 2], [0, 3, 1, 0]]) / 4
    samples = torch.cartesian_prod(*(torch.arange(4).repeat_interleave((4 * row).long()) for row in p))
    window, rows = [3, 1, 2], len(samples)
    predicts, index, number = make_outputs(rows, 3)
    unused = torch.zeros(rows, 3)
    on_cpu.verify_tree_greedy_cpu(
        predicts, index, number, torch.tensor([window] * rows), unused, unused, unused, samples
    )
    texts = [predicts[row[row >= 0]].tolist() for row in index]
    assert [len(text) - 1 for text in texts] == number.tolist()
    for position, prefix in enumerate([[], [1], [1, 2]]):
        after = [text[position] for text in texts if text[:position] == prefix and len(text) > position]
        shares = torch.tensor([after.count(token) for token in range(4)]) / len(after)
        assert torch.equal(shares, p[position]), (prefix, shares)


def test_cache_slots_and_draft_tree_of_a_chain() -> None:
    table = torch.arange(60, dtype=torch.int32).view(3, 20)
    requests, lengths = torch.tensor([2, 0]), torch.tensor([4, 7])
    out = torch.zeros(6, dtype=torch.int64)
    on_cpu.assign_draft_cache_locs_contiguous_cpu(requests, table, lengths, out, 20, 1, 3)
    assert out.tolist() == [44, 45, 46, 7, 8, 9]
    out = torch.zeros(3, dtype=torch.int64)
    on_cpu.assign_extend_cache_locs_cpu(requests, table, lengths, lengths + torch.tensor([2, 1]), out, 20)
    assert out.tolist() == [44, 45, 7]
    positions, (index, following, sibling) = torch.zeros(6, dtype=torch.int64), torch.full((3, 2, 3), -1)
    unused = torch.zeros(0)
    on_cpu.build_tree_kernel_efficient_cpu(
        unused, unused, lengths, unused, positions, index, following, sibling, 1, 2, 3, 1
    )
    assert positions.tolist() == [4, 5, 6, 7, 8, 9]
    assert index.tolist() == [[0, 1, 2], [3, 4, 5]] and following.tolist() == [[1, 2, -1]] * 2
    assert (sibling == -1).all()


def test_sampling_settings_of_each_token_of_a_window() -> None:
    @dataclass
    class Info:
        """The fields of SGLang's SamplingBatchInfo that differ between requests."""

        temperatures: torch.Tensor
        top_ps: torch.Tensor
        top_ks: torch.Tensor
        min_ps: torch.Tensor
        sampling_seed: torch.Tensor | None = None
        sampling_mask_batch_indices: torch.Tensor | None = None

    two = Info(torch.tensor([[0.5], [1.0]]), torch.tensor([0.9, 1.0]), torch.tensor([4, 9]), torch.tensor([0.0, 0.1]))
    wide = on_cpu.expand_sampling_info(two, 2)
    assert wide.temperatures.tolist() == [[0.5], [0.5], [1.0], [1.0]] and wide.top_ks.tolist() == [4, 4, 9, 9]
    assert torch.equal(wide.top_ps, two.top_ps[[0, 0, 1, 1]]) and torch.equal(wide.min_ps, two.min_ps[[0, 0, 1, 1]])
    assert wide.sampling_seed is None and wide.sampling_mask_batch_indices is None
    three = replace(wide, sampling_seed=torch.tensor([6, 7, 8, 9]), sampling_mask_batch_indices=torch.tensor([1, 3]))
    widest = on_cpu.expand_sampling_info(three, 3)
    assert widest.sampling_mask_batch_indices.tolist() == [3, 4, 5, 9, 10, 11]
    assert widest.sampling_seed.tolist() == [6] * 3 + [7] * 3 + [8] * 3 + [9] * 3


@pytest.fixture(scope="module", params=["deepseek_v3", "qwen3_next", "qwen3_5_moe"])
def drafting_engine(
    request: pytest.FixtureRequest, host: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningEngine]:
    """The last two have delta nets, whose states after rejected drafts must not count."""
    policy, folder = predictable_policy(build=getattr(tiny_models, request.param)), tmp_path_factory.mktemp("drafting")
    with start_engine(host, policy, folder, num_speculative_tokens=DRAFTS) as running:
        yield running


def generate(running: RunningEngine, prompts: list[list[int]], params: list[dict[str, object]]) -> list[Generation]:
    async def run() -> list[Generation]:
        async with HTTPClient(running.engine.url, running.engine.api_key, 300.0) as client:
            pairs = zip(prompts, params, strict=True)
            return list(await asyncio.gather(*(client.generate(prompt, dict(value)) for prompt, value in pairs)))

    return asyncio.run(run())


def assert_drafts(running: RunningEngine, drafter: Drafter) -> None:
    """Check greedy tokens against the policy, and the numbers of drafted and accepted tokens against the drafter."""
    params: dict[str, object] = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
    prompts = PROMPTS + SHORT_PROMPTS
    outs = generate(running, prompts, [params] * len(prompts))
    for prompt, out in zip(prompts, outs, strict=True):
        assert list(out.token_ids) == tiny_models.greedy(drafter.policy, prompt, 12)
        assert (out.drafted, out.accepted) == drafter.count_drafts(prompt, 12, DRAFTS)
    drafted, accepted = sum(out.drafted for out in outs), sum(out.accepted for out in outs)
    assert 0.1 < accepted / drafted < 0.9


def test_drafting_engine_matches_transformers(drafting_engine: RunningEngine) -> None:
    assert_matches_transformers(drafting_engine.engine, drafting_engine.model, 0)


def test_drafts_equal_those_of_the_mtp_layer(drafting_engine: RunningEngine) -> None:
    assert_drafts(drafting_engine, Drafter(drafting_engine.model, drafting_engine.folder))


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.6, "top_k": 200}, {"top_p": 0.9, "top_k": 50, "min_p": 0.05}],
    ids=["full", "temperature", "top_k", "top_p", "all"],
)
def test_sampled_tokens_follow_the_policys_distribution(drafting_engine: RunningEngine, params: dict[str, Any]) -> None:
    """A random point in each token's interval of the cumulative distribution is uniform (Kolmogorov-Smirnov test).
    Tokens are ordered by likelihood, so a bias towards drafts or likely tokens would show. With truncated sampling the
    distribution is that over the policy's own set, which the sampling mask must name."""
    prompt, samples, tokens = PROMPTS[1], 500, 6
    params = {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True} | params
    outs = generate(drafting_engine, [prompt] * samples, [params] * samples)
    assert 0.05 < sum(out.accepted for out in outs) / sum(out.drafted for out in outs) < 0.8
    texts = torch.tensor([[*prompt, *out.token_ids] for out in outs])
    with torch.no_grad():
        logits = drafting_engine.model(texts).logits[:, len(prompt) - 1 : -1].double()
    probs = (logits / params["temperature"]).softmax(-1)
    if is_truncated_sampling(params):
        for out, row in zip(outs, probs, strict=True):
            assert_truncated(row, out, params)
        masks = [out.sampling_mask for out in outs if out.sampling_mask is not None]
        kept = torch.stack([candidates(mask, probs.shape[-1]) for mask in masks])
        assert 1 <= int(kept.sum(2).min()) and float((kept * probs).sum(2).mean()) < 0.99
        probs = kept * probs / (kept * probs).sum(2, keepdim=True)
    chosen_probs = probs.gather(2, texts[:, len(prompt) :, None])
    reported = torch.tensor([out.logprobs.tolist() for out in outs], dtype=torch.float64)
    assert (reported - chosen_probs[..., 0].log()).abs().max() < 2e-5
    before = (probs * (probs > chosen_probs)).sum(2)
    random = torch.rand(before.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    hits = (before + random * chosen_probs[..., 0]).flatten().sort().values
    count = len(hits)
    gap = torch.maximum(torch.arange(1, count + 1) / count - hits, hits - torch.arange(count) / count).max()
    assert gap < 2.4 / count**0.5, "by chance once in 50,000 runs"


@pytest.mark.parametrize(
    "plain", [{"temperature": 0.0}, {"temperature": 0.001, "top_p": 0.9, "top_k": 20}], ids=["greedy", "truncated"]
)
def test_turns_end_as_without_drafts(drafting_engine: RunningEngine, plain: dict[str, Any]) -> None:
    """At the token limit or an end token, drafted or not, first or last in its window. The client checks that there are
    as many sampling masks as tokens."""
    prompt = PROMPTS[0]
    text = tiny_models.greedy(drafting_engine.model, prompt, 12)
    assert len(set(text)) == len(text)
    limits = [plain | {"max_new_tokens": length, "ignore_eos": True} for length in range(1, 12)]
    ends = [plain | {"max_new_tokens": 30, "stop_token_ids": [token]} for token in text]
    outs = generate(drafting_engine, [prompt] * (len(limits) + len(ends)), limits + ends)
    expected = [(text[:length], "length") for length in range(1, 12)]
    expected += [(text[: position + 1], "stop") for position in range(len(text))]
    assert [(list(out.token_ids), out.finish_reason) for out in outs] == expected


def test_truncated_requests_beside_full_and_greedy_ones(drafting_engine: RunningEngine) -> None:
    settings = [{"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9, "top_k": 20}, {"temperature": 0.0}]
    prompts = [prompt for prompt in PROMPTS for _ in settings]
    params = [{"max_new_tokens": 12, "ignore_eos": True} | setting for _ in PROMPTS for setting in settings]
    for prompt, value, out in zip(prompts, params, generate(drafting_engine, prompts, params), strict=True):
        with torch.no_grad():
            logits = drafting_engine.model(torch.tensor([[*prompt, *out.token_ids]])).logits[0, len(prompt) - 1 : -1]
        if is_truncated_sampling(value):
            assert_truncated(logits.double().softmax(-1), out, value)
        else:
            assert out.sampling_mask is None
            reference = logits.log_softmax(-1).gather(1, torch.tensor(out.token_ids.tolist())[:, None])[:, 0]
            assert (torch.tensor(out.logprobs) - reference).abs().max() < 1e-4
        if not value["temperature"]:
            assert list(out.token_ids) == tiny_models.greedy(drafting_engine.model, prompt, 12)


def test_rollouts_count_drafted_and_accepted_tokens(drafting_engine: RunningEngine) -> None:
    config = replace(drafting_engine.config.rollout, max_new_tokens=24)
    chat = ChatTemplate.load(str(drafting_engine.folder), load_tools(config.tools))
    runner = RolloutRunner(drafting_engine.engine, chat, config)
    rollouts = runner.generate(
        [Prompt(id="0", messages=({"role": "user", "content": "1 + 1"},))], samples=8, seed=3
    ).rollouts
    runner.close()
    assert all(1 <= rollout.num_actions <= 24 for rollout in rollouts)
    drafted, accepted = (sum(getattr(rollout, name) for rollout in rollouts) for name in ("drafted", "accepted"))
    assert 0 < accepted < drafted
    assert rollout_metrics(Rollouts.gather(rollouts))["rollout/spec_accept_rate"] == accepted / drafted


def test_orders_write_the_policy_and_its_draft_model(
    drafting_engine: RunningEngine, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Write other weights, MLA's derived ones included, then restore both models."""
    engine, layout = drafting_engine.engine, EngineLayout(1, draft=True)
    name = drafting_engine.model.config.model_type.removesuffix("_text")
    new = predictable_policy(seed=6, build=getattr(tiny_models, name))
    folder = tiny_models.save(new, tmp_path_factory.mktemp("ordered"))
    overwrite_weights(engine, layout, folder, 7)
    assert_matches_transformers(engine, new, 7)
    assert_drafts(drafting_engine, Drafter(new, folder))
    overwrite_weights(engine, layout, drafting_engine.folder, 8)
    assert_drafts(drafting_engine, Drafter(drafting_engine.model, drafting_engine.folder))
