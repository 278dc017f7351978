"""Orders to the weight loader in the real SGLang: in every layout its tensors match the tables of `models`."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny
import tiny_models
import torch
import transformers
from compare import assert_matches_transformers, generate
from engines import RunningEngine, start_engine
from orders import check_orders, overwrite_weights
from safetensors.torch import load_file
from transformers import PreTrainedModel

from megarl.engine.engine_protocol import EngineError
from megarl.engine.sglang.sglang_backend import SGLangBackend
from megarl.engine.sglang.sglang_engine import SGLangEngine
from megarl.engine.weight_sender import OrderBuffer, WeightSender
from megarl.models.registry import family_of, load_hf_config
from megarl.parallel import shared_memory
from megarl.parallel.device import allocate_shared
from megarl.reshard.plan.expert_placement import initial_placement
from megarl.reshard.plan.layout import EngineLayout


def test_qwen3_moe_on_two_expert_parallel_ranks(qwen3_moe_split: RunningEngine, tmp_path: Path) -> None:
    assert_matches_transformers(qwen3_moe_split.engine, qwen3_moe_split.model, 0)
    check_orders(qwen3_moe_split, EngineLayout(2, ep=2), tiny_models.qwen3_moe(seed=6), tmp_path)


def test_qwen3_moe_on_one_rank(qwen3_moe: RunningEngine, tmp_path: Path) -> None:
    check_orders(qwen3_moe, EngineLayout(1), tiny_models.qwen3_moe(seed=6), tmp_path)


def test_deepseek_v3_on_one_rank(deepseek_v3: RunningEngine, tmp_path: Path) -> None:
    check_orders(deepseek_v3, EngineLayout(1), tiny_models.deepseek_v3(seed=6), tmp_path)


def qwen2_tied(seed: int) -> PreTrainedModel:
    """With a vocabulary that is no multiple of 64."""
    return tiny_models.qwen2(seed, tie_word_embeddings=True, vocab_size=500)


def qwen3_moe_one_key_head(seed: int) -> PreTrainedModel:
    """Two ranks share a key-value head; the vocabulary is no multiple of 64."""
    return tiny_models.qwen3_moe(seed, num_key_value_heads=1, vocab_size=500)


def glm4_moe_with_mtp(seed: int) -> PreTrainedModel:
    """With its multi-token-prediction layer, which drafts."""
    return tiny_models.glm4_moe(seed, num_nextn_predict_layers=1)


def deepseek_v32_with_mtp(seed: int) -> PreTrainedModel:
    """With its multi-token-prediction layer, which has an indexer and drafts."""
    return tiny_models.deepseek_v32(seed, num_nextn_predict_layers=1)


def qwen3_next_with_mtp(seed: int) -> PreTrainedModel:
    """With its multi-token-prediction layer, which has attention; the last decoder layer has a delta net."""
    return tiny_models.qwen3_next(seed, num_hidden_layers=3, num_nextn_predict_layers=1)


def qwen3_5_moe_with_mtp(seed: int) -> PreTrainedModel:
    return tiny_models.qwen3_5_moe(seed, mtp_num_hidden_layers=1)


def make_case(family: str) -> Any:
    """Return the arguments for a family without its own builder, with a draft model if it has MTP layers."""
    has_mtp = f"{family}_mtp" in tiny.HF
    build, layout = partial(tiny_models.of_family, family + "_mtp" * has_mtp), EngineLayout(2, ep=2, draft=has_mtp)
    return pytest.param(build, layout, id=f"{family}-tp2-ep2" + "-draft" * has_mtp, marks=pytest.mark.nightly)


@pytest.mark.parametrize(
    ("build", "layout"),
    [
        (qwen2_tied, EngineLayout(2)),
        (tiny_models.qwen3, EngineLayout(2)),
        (tiny_models.llama, EngineLayout(2)),
        (qwen3_moe_one_key_head, EngineLayout(2)),
        (tiny_models.gemma2, EngineLayout(2)),
        (tiny_models.deepseek_v2, EngineLayout(2)),
        (glm4_moe_with_mtp, EngineLayout(2, ep=2, draft=True)),
        (tiny_models.kimi_k2, EngineLayout(2, ep=2)),
        pytest.param(tiny_models.kimi_k25, EngineLayout(2, ep=2), marks=pytest.mark.nightly),
        pytest.param(tiny_models.gpt_oss, EngineLayout(2), marks=pytest.mark.nightly),
        pytest.param(qwen3_next_with_mtp, EngineLayout(2, draft=True), marks=pytest.mark.nightly),
        pytest.param(qwen3_5_moe_with_mtp, EngineLayout(2, ep=2, draft=True), marks=pytest.mark.nightly),
        pytest.param(deepseek_v32_with_mtp, EngineLayout(2, draft=True), marks=pytest.mark.nightly),
        pytest.param(tiny_models.glm_moe_dsa, EngineLayout(2, ep=2), marks=pytest.mark.nightly),
        *map(make_case, tiny_models.families_without_builder()),
    ],
    ids=[
        "qwen2-tp2",
        "qwen3-tp2",
        "llama-tp2",
        "qwen3_moe-tp2",
        "gemma2-tp2",
        "deepseek_v2-tp2",
        "glm4_moe-tp2-ep2-draft",
        "kimi_k2-tp2-ep2",
        "kimi_k25-tp2-ep2",
        "gpt_oss-tp2",
        "qwen3_next-tp2-draft",
        "qwen3_5_moe-tp2-ep2-draft",
        "deepseek_v32-tp2-draft",
        "glm_moe_dsa-tp2-ep2",
        *[None] * len(tiny_models.families_without_builder()),
    ],
)
def test_families_on_two_ranks(
    build: Callable[[int], PreTrainedModel], layout: EngineLayout, host: str, tmp_path: Path
) -> None:
    model = build(0)
    settings: dict[str, Any] = {"tp": layout.tp, "ep": layout.ep, "num_speculative_tokens": 2 if layout.draft else 0}
    if not hasattr(transformers, type(model).__name__):
        settings["sglang"] = {"trust_remote_code": True}  # the class of config.json is in the folder
    with start_engine(host, model, tmp_path, **settings) as running:
        assert_matches_transformers(running.engine, running.model, 0)
        check_orders(running, layout, build(6), tmp_path)


@pytest.mark.parametrize(
    ("build", "copies"),
    [
        (tiny_models.qwen3_moe, 2),
        (tiny_models.deepseek_v3, 2),
        (tiny_models.qwen3_moe, 0),
        pytest.param(tiny_models.deepseek_v2, 4, marks=pytest.mark.nightly),
        pytest.param(tiny_models.kimi_k2, 2, marks=pytest.mark.nightly),
        pytest.param(tiny_models.kimi_k25, 2, marks=pytest.mark.nightly),
        pytest.param(tiny_models.gpt_oss, 2, marks=pytest.mark.nightly),
        pytest.param(tiny_models.glm4_moe, 0, marks=pytest.mark.nightly),
        pytest.param(tiny_models.qwen3_next, 2, marks=pytest.mark.nightly),
        pytest.param(tiny_models.qwen3_5_moe, 2, marks=pytest.mark.nightly),
        pytest.param(tiny_models.glm_moe_dsa, 2, marks=pytest.mark.nightly),
        pytest.param(tiny_models.deepseek_v32, 2, marks=pytest.mark.nightly),
        pytest.param(glm4_moe_with_mtp, 0, marks=pytest.mark.nightly),
        pytest.param(deepseek_v32_with_mtp, 2, marks=pytest.mark.nightly),
        pytest.param(qwen3_5_moe_with_mtp, 2, marks=pytest.mark.nightly),
        pytest.param(partial(tiny_models.of_family, "minimax_m2"), 2, marks=pytest.mark.nightly),
        pytest.param(partial(tiny_models.of_family, "glm4_moe_lite"), 2, marks=pytest.mark.nightly),
        pytest.param(partial(tiny_models.of_family, "ling2"), 0, marks=pytest.mark.nightly),
    ],
)
def test_experts_and_copies_of_them_are_moved(
    build: Callable[..., PreTrainedModel], copies: int, host: str, tmp_path: Path
) -> None:
    """The engine starts with the experts in order. Each update gives them other places, in every layer of the decoder;
    those of a draft model stay in order."""
    model, rng = build(seed=0), random.Random(0)
    drafts = tiny_models.has_mtp(model)
    settings: dict[str, Any] = {"num_redundant_experts": copies, "rebalance_experts_every": 1}
    settings["num_speculative_tokens"] = 2 if drafts else 0
    if not hasattr(transformers, type(model).__name__):
        settings["sglang"] = {"trust_remote_code": True}
    with start_engine(host, model, tmp_path, tp=2, ep=2, **settings) as running:
        assert_matches_transformers(running.engine, running.model, 0)
        hf = load_hf_config(running.folder)
        experts = family_of(hf).num_experts(hf)
        for seed in (6, 7):
            slots = [*range(experts), *rng.choices(range(experts), k=copies)]
            placement: dict[int | None, tuple[int, ...]] = {None: initial_placement(experts, len(slots))}
            placement |= {layer: tuple(rng.sample(slots, len(slots))) for layer in range(hf["num_hidden_layers"])}
            layout = EngineLayout(2, ep=2, experts=placement, draft=drafts)
            overwrite_weights(running.engine, layout, tiny_models.save(build(seed=seed), tmp_path / str(seed)), seed)
            assert_matches_transformers(running.engine, build(seed=seed), seed)


def test_attention_dp_redundant_and_fused_shared_experts(host: str, tmp_path: Path) -> None:
    """Overwrite the weights and restore them; compare SGLang's checksums with those after its own loader, because its
    CPU attention cannot generate with replicas. "describe" reports the moved experts."""
    expert_placement = [[0, 1, 2, 3, 4, 5, 6, 7, 0, 1], [3, 0, 1, 2, 5, 7, 6, 4, 1, 0]]
    layout = EngineLayout(2, ep=2, dp=2, mlp_tp=1, experts={1: tuple(expert_placement[1])}, fuse_shared=True)
    settings = {
        "attn_dp_size": 2,
        "moe_dense_tp_size": 1,
        "ep_num_redundant_experts": 2,
        "init_expert_location": json.dumps({"physical_to_logical_map": expert_placement}),
        "enforce_shared_experts_fusion": True,
    }
    new = tiny_models.save(tiny_models.deepseek_v3(seed=6), tmp_path / "new")
    with start_engine(host, tiny_models.deepseek_v3(), tmp_path, tp=2, ep=2, sglang=settings) as running:
        message = "the engine's experts are not at their index (init_expert_location)"
        assert [rank["odd"] for rank in describe_ranks(running.engine, 2)] == [[message], [message]]
        before = checksums(running.engine)
        overwrite_weights(running.engine, layout, new, 1)
        changed = checksums(running.engine)
        assert all(
            before_rank.items().isdisjoint(changed_rank.items())
            for before_rank, changed_rank in zip(before, changed, strict=True)
        )
        overwrite_weights(running.engine, layout, running.folder, 2)
        assert checksums(running.engine) == before


def describe_ranks(engine: SGLangEngine, ranks: int = 1) -> list[dict[str, Any]]:
    """Return the descriptions of the engine's ranks, from an update that writes nothing."""
    buffers = [OrderBuffer(SGLangBackend()) for _ in range(ranks)]
    engine.begin_update()
    engine.call_loader([buffer.make_payload({"do": "describe"}) for buffer in buffers])
    engine.end_update(0)
    return [buffer.read_answer() for buffer in buffers]


def test_describe_leaves_generation_unchanged(qwen3_moe: RunningEngine, deepseek_v3: RunningEngine) -> None:
    """And the description reports no unusual weight layout."""
    for running in (qwen3_moe, deepseek_v3):
        before = generate(running.engine)
        (answer,) = describe_ranks(running.engine)
        assert answer["odd"] == [] and any(name.endswith("w13_weight") for name in answer["tensors"])
        running.engine.check_running()
        assert running.engine.is_usable
        for out, expected in zip(generate(running.engine), before, strict=True):
            assert out.token_ids.tolist() == expected.token_ids.tolist()
            assert out.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def checksums(engine: SGLangEngine) -> list[dict[str, str]]:
    return [rank["checksums"] for rank in engine._call("/weights_checker", {"action": "checksum"})["ranks"]]


def test_invalid_order_writes_nothing_but_makes_the_engine_unusable(qwen3_moe: RunningEngine) -> None:
    engine, buffer, bucket = qwen3_moe.engine, OrderBuffer(SGLangBackend()), allocate_shared(16)
    before = [out.token_ids.tolist() for out in generate(engine)]
    engine.begin_update()
    order = {"do": "write", "version": 1, "tensor_dtype": {}, "slices": [["no.such.tensor", -1, 0, 1, 0, 1, 0, -1]]}
    engine.call_loader([buffer.make_payload(order, bucket)])
    with pytest.raises(EngineError, match="the engine has no tensor no.such.tensor"):
        buffer.read_answer()
    engine.end_update(None)
    assert not engine.is_usable
    engine.begin_update()
    engine.end_update(3)
    engine.check_running()
    assert engine.is_usable
    assert [out.token_ids.tolist() for out in generate(engine)] == before


def test_orders_outside_of_an_update_are_rejected(qwen3_moe: RunningEngine) -> None:
    with pytest.raises(EngineError, match="must run between"):
        qwen3_moe.engine.call_loader([OrderBuffer(SGLangBackend()).make_payload({"do": "describe"})])


def test_orders_leak_no_shared_memory(qwen3_moe: RunningEngine) -> None:
    """Neither files in shared memory nor mappings in the engine's processes remain."""
    engine, buffer, bucket = qwen3_moe.engine, OrderBuffer(SGLangBackend()), allocate_shared(1 << 20)
    order = {"do": "write", "version": 1, "tensor_dtype": {}, "slices": []}

    def send(times: int) -> tuple[int, int]:
        for _ in range(times):
            engine.call_loader([buffer.make_payload(order, bucket)])
            assert buffer.read_answer() == {"wrong": []}
        return shared_memory_use(engine)

    engine.begin_update()
    after_one, after_many = send(1), send(10)
    engine.end_update(4)
    assert after_many == after_one


def test_sender_session_writes_buckets_and_leaks_no_memory(qwen3_moe: RunningEngine) -> None:
    """The buckets exist before and after the session; the engine maps each once and takes any number of orders in one
    request."""
    engine, buckets = qwen3_moe.engine, [allocate_shared(1 << 10) for _ in range(2)]
    dtype, (size,) = describe_ranks(engine)[0]["tensors"]["model.norm.weight"]
    order = {"do": "write", "version": 1, "sync_id": "a", "tensor_dtype": {"model.norm.weight": dtype}}
    order["slices"] = [["model.norm.weight", -1, 0, size, 0, 1, 0, -1]]

    weights = load_file(qwen3_moe.folder / "model.safetensors")["model.norm.weight"]
    flipped = weights.flip(0)

    def send(values: list[torch.Tensor]) -> tuple[int, int]:
        sender = WeightSender(SGLangBackend(), engine, lambda payload: [payload])
        engine.begin_update()
        sender.open(buckets)
        for number, value in enumerate(values):
            data = value.to(getattr(torch, dtype)).view(torch.uint8)
            buckets[number % 2][: len(data)].copy_(data)
            sender(buckets[number % 2], order)
            assert sender.wait_pending() == {"wrong": []}
        sender.close()
        engine.end_update(5)
        assert sender.errors == [] and sender.failure is None
        return shared_memory_use(engine)

    send([weights])  # an earlier test may have written other weights
    before = generate(engine)
    assert send([flipped]) == send([weights, flipped] * 10)
    changed = generate(engine)
    assert any(out.logprobs != pytest.approx(old.logprobs) for out, old in zip(changed, before, strict=True))
    send([flipped, weights])
    for out, expected in zip(generate(engine), before, strict=True):
        assert out.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def shared_memory_use(engine: SGLangEngine) -> tuple[int, int]:
    """Return the bytes that this process shares and the number of such mappings in its children, the engine's processes
    included."""
    children, mapped = psutil.Process().children(recursive=True), 0
    assert len(children) > 2  # whatever their names
    for process in children:
        with contextlib.suppress(OSError):  # a process of another test has just ended
            mapped += Path(f"/proc/{process.pid}/maps").read_text().count("/memfd:megarl")
    return shared_memory.allocated_bytes(), mapped
