"""Orders to the loader in the real SGLang: what it holds is what the tables of `models` say, in every layout."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny_models
import torch
from compare import assert_equals, generate
from engines import Running, start
from orders import check_orders, overwrite
from safetensors.torch import load_file
from transformers import PreTrainedModel

from megarl.engine.sglang_engine import Engine, EngineError, allocate
from megarl.engine.weight_sender import OrderBuffer, WeightSender
from megarl.parallel import shared_memory
from megarl.reshard.plan.layout import EngineLayout


def test_two_ranks_with_half_of_the_experts_each(qwen3_moe_split: Running, tmp_path: Path) -> None:
    assert_equals(qwen3_moe_split.engine, qwen3_moe_split.model, 0)
    check_orders(qwen3_moe_split, EngineLayout(2, ep=2), tiny_models.qwen3_moe(seed=6), tmp_path)


def test_qwen3_moe_on_one_rank(qwen3_moe: Running, tmp_path: Path) -> None:
    check_orders(qwen3_moe, EngineLayout(1), tiny_models.qwen3_moe(seed=6), tmp_path)


def test_deepseek_v3_on_one_rank(deepseek_v3: Running, tmp_path: Path) -> None:
    check_orders(deepseek_v3, EngineLayout(1), tiny_models.deepseek_v3(seed=6), tmp_path)


def qwen2_tied(seed: int) -> PreTrainedModel:
    """The vocabulary is no multiple of 64."""
    return tiny_models.qwen2(seed, tie_word_embeddings=True, vocab_size=500)


def qwen3_moe_one_key_head(seed: int) -> PreTrainedModel:
    """Two ranks have the same key-value head; the vocabulary is no multiple of 64."""
    return tiny_models.qwen3_moe(seed, num_key_value_heads=1, vocab_size=500)


def glm4_moe_drafting(seed: int) -> PreTrainedModel:
    """With its layer of multi-token prediction, which drafts."""
    return tiny_models.glm4_moe(seed, num_nextn_predict_layers=1)


@pytest.mark.parametrize(
    ("build", "layout"),
    [
        (qwen2_tied, EngineLayout(2)),
        (tiny_models.qwen3, EngineLayout(2)),
        (tiny_models.llama, EngineLayout(2)),
        (qwen3_moe_one_key_head, EngineLayout(2)),
        (tiny_models.gemma2, EngineLayout(2)),
        (tiny_models.deepseek_v2, EngineLayout(2)),
        (glm4_moe_drafting, EngineLayout(2, ep=2, draft=True)),
        (tiny_models.kimi_k2, EngineLayout(2, ep=2)),
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
    ],
)
def test_two_ranks(build: Callable[[int], PreTrainedModel], layout: EngineLayout, host: str, tmp_path: Path) -> None:
    drafts = 2 if layout.draft else 0
    with start(host, build(0), tmp_path, tp=layout.tp, ep=layout.ep, num_speculative_tokens=drafts) as running:
        assert_equals(running.engine, running.model, 0)
        check_orders(running, layout, build(6), tmp_path)


def test_replicated_attention_redundant_experts_and_a_fused_shared_one(host: str, tmp_path: Path) -> None:
    """Written over and back, each tensor has the bytes that SGLang's own loader gave it, by SGLang's own checksums:
    on a CPU its attention cannot generate with replicas. That experts are elsewhere it says itself."""
    places = [[0, 1, 2, 3, 4, 5, 6, 7, 0, 1], [3, 0, 1, 2, 5, 7, 6, 4, 1, 0]]
    layout = EngineLayout(2, ep=2, dp=2, mlp_tp=1, experts={1: tuple(places[1])}, fuse_shared=True)
    settings = {
        "attn_dp_size": 2,
        "moe_dense_tp_size": 1,
        "ep_num_redundant_experts": 2,
        "init_expert_location": json.dumps({"physical_to_logical_map": places}),
        "enforce_shared_experts_fusion": True,
    }
    new = tiny_models.save(tiny_models.deepseek_v3(seed=6), tmp_path / "new")
    with start(host, tiny_models.deepseek_v3(), tmp_path, tp=2, ep=2, sglang=settings) as running:
        moved = "the engine's experts are not at their index (init_expert_location)"
        assert [rank["odd"] for rank in looked_at(running.engine, 2)] == [[moved], [moved]]
        before = checksums(running.engine)
        overwrite(running.engine, layout, new, 1)
        changed = checksums(running.engine)
        assert all(
            there.items().isdisjoint(local_items.items()) for there, local_items in zip(before, changed, strict=True)
        )
        overwrite(running.engine, layout, running.folder, 2)
        assert checksums(running.engine) == before


def looked_at(engine: Engine, ranks: int = 1) -> list[dict[str, Any]]:
    """What the engine's ranks say of themselves, in an update in which nothing is written."""
    boxes = [OrderBuffer() for _ in range(ranks)]
    engine.begin_update()
    engine.call_loader([box.make_payload({"do": "describe"}) for box in boxes])
    engine.end_update(0)
    return [box.read_answer() for box in boxes]


def test_an_engine_that_was_only_looked_at_generates_as_before(qwen3_moe: Running, deepseek_v3: Running) -> None:
    """Nor is there anything odd in how it keeps its weights."""
    for running in (qwen3_moe, deepseek_v3):
        before = generate(running.engine)
        (answer,) = looked_at(running.engine)
        assert answer["odd"] == [] and any(name.endswith("w13_weight") for name in answer["tensors"])
        running.engine.check_running()
        assert running.engine.is_usable
        for out, as_before in zip(generate(running.engine), before, strict=True):
            assert out.token_ids.tolist() == as_before.token_ids.tolist()
            assert out.logprobs == pytest.approx(as_before.logprobs, abs=1e-5)


def checksums(engine: Engine) -> list[dict[str, str]]:
    return [rank["checksums"] for rank in engine._call("/weights_checker", {"action": "checksum"})["ranks"]]


def test_an_order_that_does_not_fit_harms_nothing_but_the_engine_waits_for_a_whole_set(qwen3_moe: Running) -> None:
    engine, box, bucket = qwen3_moe.engine, OrderBuffer(), allocate(16)
    before = [out.token_ids.tolist() for out in generate(engine)]
    engine.begin_update()
    order = {"do": "write", "version": 1, "tensor_dtype": {}, "slices": [["no.such.tensor", -1, 0, 1, 0, 1, 0, -1]]}
    engine.call_loader([box.make_payload(order, bucket)])
    with pytest.raises(EngineError, match="the engine has no tensor no.such.tensor"):
        box.read_answer()
    engine.end_update(None)
    assert not engine.is_usable
    engine.begin_update()
    engine.end_update(3)
    engine.check_running()
    assert engine.is_usable
    assert [out.token_ids.tolist() for out in generate(engine)] == before


def test_orders_belong_into_an_update(qwen3_moe: Running) -> None:
    with pytest.raises(EngineError, match="must run between"):
        qwen3_moe.engine.call_loader([OrderBuffer().make_payload({"do": "describe"})])


def test_orders_leave_nothing_behind(qwen3_moe: Running) -> None:
    """Neither files in shared memory nor mappings in the engine's processes."""
    engine, box, bucket = qwen3_moe.engine, OrderBuffer(), allocate(1 << 20)
    order = {"do": "write", "version": 1, "tensor_dtype": {}, "slices": []}

    def give(times: int) -> tuple[int, int]:
        for _ in range(times):
            engine.call_loader([box.make_payload(order, bucket)])
            assert box.read_answer() == {"wrong": []}
        return shared(engine)

    engine.begin_update()
    after_one, after_many = give(1), give(10)
    engine.end_update(4)
    assert after_many == after_one


def test_a_session_writes_what_it_is_given_and_leaves_nothing_behind(qwen3_moe: Running) -> None:
    """Its buckets are there before and after it; while it lasts the engine has them once, and it takes any number of
    orders by one request."""
    engine, buckets = qwen3_moe.engine, [allocate(1 << 10) for _ in range(2)]
    dtype, (size,) = looked_at(engine)[0]["tensors"]["model.norm.weight"]
    order = {"do": "write", "version": 1, "push": "a", "tensor_dtype": {"model.norm.weight": dtype}}
    order["slices"] = [["model.norm.weight", -1, 0, size, 0, 1, 0, -1]]

    weights = load_file(qwen3_moe.folder / "model.safetensors")["model.norm.weight"]
    other = weights.flip(0)

    def give(values: list[torch.Tensor]) -> tuple[int, int]:
        hand_over = WeightSender(engine, lambda payload: [payload])
        engine.begin_update()
        hand_over.open(buckets)
        for number, value in enumerate(values):
            data = value.to(getattr(torch, dtype)).view(torch.uint8)
            buckets[number % 2][: len(data)].copy_(data)
            hand_over(buckets[number % 2], order)
            assert hand_over.wait_pending() == {"wrong": []}
        hand_over.close()
        engine.end_update(5)
        assert hand_over.errors == [] and hand_over.failure is None
        return shared(engine)

    give([weights])  # an earlier test may have left others
    before = generate(engine)
    assert give([other]) == give([weights, other] * 10)
    changed = generate(engine)
    assert any(out.logprobs != pytest.approx(old.logprobs) for out, old in zip(changed, before, strict=True))
    give([other, weights])
    for out, as_before in zip(generate(engine), before, strict=True):
        assert out.logprobs == pytest.approx(as_before.logprobs, abs=1e-5)


def shared(engine: Engine) -> tuple[int, int]:
    """Bytes of memory that this process shares, and how often its children, the engine's processes among them, have
    mapped such memory."""
    children, mapped = psutil.Process().children(recursive=True), 0
    assert len(children) > 2  # by whatever names
    for process in children:
        with contextlib.suppress(OSError):  # of another test's, that has just ended
            mapped += Path(f"/proc/{process.pid}/maps").read_text().count("/memfd:megarl")
    return shared_memory.allocated_bytes(), mapped
