"""Reshard plans: every byte arrives once, traffic is close to the bounds, and rounds do not deadlock."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lp_bound import least_sent
from random_layouts import Case, random_case, random_split_case
from seeds import split_seeds
from simulate import simulate, staged_bytes

from megarl.config import ConfigError
from megarl.reshard.plan.bound import NETWORK_SLACK, Bound, compute_bound
from megarl.reshard.plan.cost_report import Messages, tabulate_messages
from megarl.reshard.plan.layout import EngineLayout, TrainLayout, even_stages
from megarl.reshard.plan.planner import RankPlan, ReshardPlan

pytestmark = [pytest.mark.alone, pytest.mark.slow]

MODELS = Path(__file__).resolve().parents[2] / "configs/models"
DEEPSEEK = json.loads((MODELS / "deepseek_v3.json").read_text())
QWEN = json.loads((MODELS / "qwen3_235b.json").read_text())
QWEN_30B = json.loads((MODELS / "qwen3_30b_a3b.json").read_text())
SEEDS = 520


def build_plan(case: Case) -> ReshardPlan:
    """Build a plan, doubling the bucket size until it suffices."""
    arguments = list(case.arguments)
    while True:
        try:
            return ReshardPlan(*arguments)
        except ConfigError as error:
            assert "too small" in str(error)
            arguments[4] *= 2


@pytest.mark.parametrize("seed", split_seeds(range(SEEDS), 60))
def test_plan_delivers_every_byte_once(seed: int) -> None:
    """To reproduce a case: `random_case(seed)` of random_layouts.py."""
    check_case(random_case(seed), seed)


@pytest.mark.parametrize("seed", split_seeds(range(SEEDS // 2), 40))
def test_plan_on_separate_ranks_delivers_every_byte_once(seed: int) -> None:
    """To reproduce a case: `random_split_case(seed)` of random_layouts.py."""
    check_case(random_split_case(seed), seed)


def check_case(case: Case, seed: int) -> None:
    plan = build_plan(case)
    result = simulate(plan, case.hf, case.wire, case.ranks_per_node)
    transfers = plan.list_transfers()
    planned: Counter[tuple[int, int]] = Counter()
    for src, dst, nbytes in zip(*(column.tolist() for column in transfers), strict=True):
        planned[src, dst] += nbytes
    assert +planned == +result.bytes, f"seed {seed}"
    bound = compute_bound(case.hf, case.train, case.engine, case.ranks_per_node, case.wire)
    check_bytes_and_bounds(plan, bound, f"seed {seed}: ")


def check_bytes_and_bounds(plan: ReshardPlan, bound: Bound, description: str) -> dict[str, float]:
    """Check that bytes are minimal and bounds hold; return each busiest rank's ratio to its bound.

    `send_capped` applies to plans within NETWORK_SLACK.
    """
    sent, ranks_per_node = plan.list_transfers(), plan.assignment.ranks_per_node
    is_remote = sent.src // ranks_per_node != sent.dst // ranks_per_node
    assert sent.nbytes.sum() == bound.cross_bytes, description
    assert sent.nbytes[is_remote].sum() == bound.internode_bytes, description
    totals = {}
    for name, ranks, chosen in (
        ("nic_send", sent.src, is_remote),
        ("nic_recv", sent.dst, is_remote),
        ("send", sent.src, is_remote | True),
        ("recv", sent.dst, is_remote | True),
    ):
        busiest = float(np.bincount(ranks[chosen], sent.nbytes[chosen], 1).max())
        bounds = [name, "send_capped"] if name == "send" and totals["nic_send"] <= NETWORK_SLACK else [name]
        for resource in bounds:
            totals[resource] = busiest / max(getattr(bound, resource), 1.0)
            assert busiest >= getattr(bound, resource) * (1 - 1e-9), f"{description}{resource} is more than was sent"
    return totals


@pytest.mark.parametrize("seed", range(0, SEEDS, 13))
def test_plan_is_deterministic_and_messages_match_rounds(seed: int) -> None:
    case = random_case(seed) if seed % 2 else random_split_case(seed)
    plan, second_plan = build_plan(case), build_plan(case)
    for rank in {0, plan.world // 2, plan.world - 1}:
        rank_plan, other_rank = RankPlan(plan, rank), RankPlan(second_plan, rank)
        rounds = [rank_plan.round(number) for number in range(plan.rounds)]
        assert rounds == [other_rank.round(number) for number in range(second_plan.rounds)], f"seed {seed}"
        expected = set()
        for number, current in enumerate(rounds):
            for is_send, messages in ((True, current.sends), (False, current.receives)):
                for m in messages:
                    size = sum(piece.nbytes for piece in m.pieces)
                    forwarded = sum(piece.nbytes for piece in m.forward)
                    expected.add((number, is_send, m.peer, size, forwarded, staged_bytes(m.pieces)))
            if current.local:
                size = sum(piece.nbytes for piece in current.local)
                expected.add((number, False, rank, size, 0, staged_bytes(current.local)))
        actual = tabulate_messages(rank_plan)
        assert set(zip(*(column.tolist() for column in actual), strict=True)) == expected, f"seed {seed}"


def place_on_ranks(
    train: TrainLayout, engine: EngineLayout, ranks: tuple[tuple[int, ...], tuple[int, ...]]
) -> tuple[TrainLayout, EngineLayout]:
    return replace(train, ranks=ranks[0]), replace(engine, ranks=ranks[1])


def deepseek(world: int, ep: int, bucket_bytes: int = 1 << 30) -> tuple[Any, ...]:
    train = TrainLayout(world, 8, ep, even_stages(61, 16))
    return DEEPSEEK, train, EngineLayout(32, 32, draft=True), 8, bucket_bytes


def halves_of_nodes(world: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Trainer on the first nodes, engines on the others."""
    return tuple(range(world // 2)), tuple(range(world // 2, world))


def halves_of_each_node(world: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Trainer and engines on half of the ranks of each node."""
    return tuple(r for r in range(world) if r % 8 < 4), tuple(r for r in range(world) if r % 8 >= 4)


def overlapping(world: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Trainer on the first half, engines on the second and third quarter."""
    return tuple(range(world // 2)), tuple(range(world // 4, world // 4 * 3))


@pytest.fixture(scope="module", params=["colocated", "separate ranks"])
def all_ranks(request: pytest.FixtureRequest) -> tuple[ReshardPlan, list[Messages]]:
    """DeepSeek-V3 on 512 GPUs."""
    arguments = deepseek(512, 32)
    if request.param == "separate ranks":
        arguments = (
            DEEPSEEK,
            *place_on_ranks(TrainLayout(256, 8, 32, even_stages(61, 8)), arguments[2], halves_of_nodes(512)),
            8,
        )
    plan = ReshardPlan(*arguments)
    return plan, [tabulate_messages(RankPlan(plan, rank)) for rank in range(512)]


def test_sends_match_receives_and_fit_the_buckets(all_ranks: tuple[ReshardPlan, list[Messages]]) -> None:
    plan, ranks = all_ranks
    ends: dict[bool, list[np.ndarray]] = {True: [], False: []}
    for rank, local in enumerate(ranks):
        other_rank = local.peer != rank
        for sends in (True, False):
            chosen = local.is_send == sends
            staged = np.bincount(local.round[chosen], local.staged[chosen], plan.rounds)
            assert staged.max() <= plan.bucket_bytes // 2, f"rank {rank}"
            chosen &= other_rank
            pair = [np.full(int(chosen.sum()), rank), local.peer[chosen]]
            src, dst = pair if sends else pair[::-1]
            columns = (
                local.round[chosen],
                src,
                dst,
                local.nbytes[chosen],
                local.forwarded[chosen],
                local.staged[chosen],
            )
            ends[sends].append(np.stack(columns))
    sent, received = (np.concatenate(ends[sends], axis=1) for sends in (True, False))
    sent, received = (end[:, np.lexsort(end[:3][::-1])] for end in (sent, received))
    assert sent.shape[1] > 500_000
    assert np.array_equal(sent, received)
    same_pair = (np.diff(sent[:3], axis=1) == 0).all(0)
    assert not same_pair.any()  # one message per pair and round
    # Forwarded bytes stay in the node and arrived in the round before.
    number, src, dst, nbytes, forwarded, _ = sent
    assert (src[forwarded > 0] // 8 == dst[forwarded > 0] // 8).all()
    received_bytes, forwarded_bytes = np.zeros((2, plan.rounds, 512))
    np.add.at(received_bytes, (number, dst), nbytes - forwarded)
    np.add.at(forwarded_bytes, (number, src), forwarded)
    assert (forwarded_bytes[0] == 0).all()
    assert (forwarded_bytes[1:] <= 7 * received_bytes[:-1]).all()


def test_rounds_do_not_deadlock(all_ranks: tuple[ReshardPlan, list[Messages]]) -> None:
    """A rank starts all messages of a round at once. It starts the next round once its peers of this round, and the
    other ranks of its engine, which write together, have started theirs."""
    plan, ranks = all_ranks
    peers = []
    engines = plan.rank_map.engine.reshape(-1, 32).tolist()
    for rank, local in enumerate(ranks):
        engine_mates = {peer_ for engine in engines for peer_ in engine if rank in engine}
        edges = np.searchsorted(local.round, np.arange(plan.rounds + 1))
        peers.append([engine_mates | set(local.peer[a:b].tolist()) for a, b in zip(edges, edges[1:], strict=False)])
    started = [0] * 512  # the current round of each rank
    waiting: dict[int, list[int]] = {}  # ranks that wait for this one
    ready = list(range(512))[::-1]
    while ready:
        rank = ready.pop()
        number = started[rank]
        if number == plan.rounds:
            continue
        late_peer = next((peer for peer in peers[rank][number] if started[peer] < number), None)
        if late_peer is None:
            started[rank] += 1
            ready += [rank, *waiting.pop(rank, [])]
        else:
            waiting.setdefault(late_peer, []).append(rank)
    stuck_ranks = {rank: number for rank, number in enumerate(started) if number < plan.rounds}
    assert not stuck_ranks, f"these ranks wait for ever in these rounds: {stuck_ranks}"


BALANCE = {
    "DeepSeek-V3 256 TP16": (DEEPSEEK, TrainLayout(256, 8, 16, even_stages(61, 16)), EngineLayout(16, draft=True)),
    "DeepSeek-V3 256 TP32 EP32": (DEEPSEEK, TrainLayout(256, 8, 32, even_stages(61, 8)), EngineLayout(32, 32)),
    "DeepSeek-V3 512 TP16": (DEEPSEEK, TrainLayout(512, 8, 8, even_stages(61, 16)), EngineLayout(16, draft=True)),
    "DeepSeek-V3 512 TP32 EP32": deepseek(512, 32)[:3],
    "DeepSeek-V3 512 DP32": (*deepseek(512, 32)[:2], EngineLayout(32, 32, 32, 1, 1, 1, draft=True)),
    "DeepSeek-V3 2048 TP32 EP32": deepseek(2048, 64)[:3],
    "DeepSeek-V3 512 EP8 TP32 EP32": deepseek(512, 8)[:3],
    "Qwen3-235B 64 EP8": (QWEN, TrainLayout(64, 4, 8, even_stages(94, 4)), EngineLayout(8, 8)),
    "Qwen3-235B 128 DP8": (QWEN, TrainLayout(128, 4, 8, even_stages(94, 8)), EngineLayout(8, 8, 8)),
}
for name, ranks in (
    ("separate nodes", halves_of_nodes),
    ("separate ranks of each node", halves_of_each_node),
    ("overlapping", overlapping),
):
    BALANCE |= {
        f"DeepSeek-V3 512 TP32 EP32, {name}": (
            DEEPSEEK,
            *place_on_ranks(TrainLayout(256, 8, 32, even_stages(61, 8)), EngineLayout(32, 32, draft=True), ranks(512)),
        ),
        f"DeepSeek-V3 512 DP32, {name}": (
            DEEPSEEK,
            *place_on_ranks(TrainLayout(256, 8, 32, even_stages(61, 8)), EngineLayout(32, 32, 32, 1, 1, 1), ranks(512)),
        ),
        f"Qwen3-235B 64, {name}": (
            QWEN,
            *place_on_ranks(TrainLayout(32, 4, 8, even_stages(94, 4)), EngineLayout(8, 8), ranks(64)),
        ),
        f"Qwen3-30B 16, {name}": (
            QWEN_30B,
            *place_on_ranks(TrainLayout(8, 1, 8, even_stages(48, 1)), EngineLayout(2, 2), ranks(16)),
        ),
    }


@pytest.mark.parametrize("row", BALANCE)
def test_bytes_and_balance_of_real_models(row: str) -> None:
    hf, train, engine = BALANCE[row]
    ratios = check_bytes_and_bounds(ReshardPlan(hf, train, engine, 8), compute_bound(hf, train, engine, 8), "")
    assert max(ratios.values()) <= 1.05, ratios


def random_real_layout(seed: int) -> tuple[dict[str, Any], TrainLayout, EngineLayout]:
    """Return a random layout of a real model."""
    draw = random.Random(seed)
    while True:
        hf, world, pp = draw.choice([DEEPSEEK, QWEN]), draw.choice([64, 128]), draw.choice([1, 2, 4, 8])
        tp, ep = draw.choice([1, 2, 4, 8] if hf is DEEPSEEK else [1, 2, 4]), draw.choice([4, 8, 16, 32])
        width, experts = draw.choice([8, 16, 32, 64]), draw.choice([1, 2, 4, 8, 16, 32])
        if world % (tp * pp) == 0 and (world // pp) % ep == 0 and width % experts == 0:
            stages = even_stages(hf["num_hidden_layers"], pp)
            return hf, TrainLayout(world, tp, ep, stages), EngineLayout(width, experts)


NUM_RANDOM = 20
HARD_LAYOUTS = [
    # The busiest sender's two metrics conflict here: one of them is at least 1.116.
    (QWEN, TrainLayout(128, 4, 8, even_stages(94, 4)), EngineLayout(16, 4)),
    (QWEN, TrainLayout(256, 4, 8, even_stages(94, 4)), EngineLayout(32, 16)),
    # Elements already in a node go to several of its ranks, which share the copying.
    (QWEN_30B, TrainLayout(16, 1, 8, even_stages(48, 1)), EngineLayout(4, 2)),
    (QWEN_30B, TrainLayout(64, 4, 4, even_stages(48, 2)), EngineLayout(2, 2)),
]


@pytest.mark.parametrize(
    "layout", [*HARD_LAYOUTS, *map(random_real_layout, range(NUM_RANDOM))], ids=range(-len(HARD_LAYOUTS), NUM_RANDOM)
)
def test_balance_of_random_and_hard_layouts(layout: tuple[dict[str, Any], TrainLayout, EngineLayout]) -> None:
    """Check the busiest ranks, and compare the bounds of total sends with a linear program. Where these differ, no plan
    meets both the network cap and the uncapped bound."""
    bound = compute_bound(*layout, 8)
    ratios = check_bytes_and_bounds(ReshardPlan(*layout, 8), bound, "")
    assert ratios.pop("send") <= 1.05 * bound.send_capped / bound.send
    assert len(ratios) == 4 and max(ratios.values()) <= 1.05, ratios
    for value, within in ((bound.send_capped, NETWORK_SLACK * bound.nic_send), (bound.send, np.inf)):
        assert value == pytest.approx(least_sent(*layout, 8, within), rel=1e-3)


def test_fp8_halves_the_bytes() -> None:
    train, engine = TrainLayout(512, 8, 8, even_stages(61, 16)), EngineLayout(16, draft=True)
    half, full = (ReshardPlan(DEEPSEEK, train, engine, 8, wire=wire).list_transfers() for wire in ("fp8", "bf16"))
    assert half.nbytes.sum() == compute_bound(DEEPSEEK, train, engine, 8, "fp8").cross_bytes
    assert half.nbytes.sum() / full.nbytes.sum() == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    ("ffn", "tp", "ep", "message"),
    [
        (
            768,
            8,
            1,
            "experts.0.gate_proj.weight in 8 parts of 96 rows .* rollout.ep=4 or 8, or set rollout.tp=1 or 2, or",
        ),
        (768, 4, 2, ""),
        (768, 2, 1, ""),
        (384, 2, 1, "in 2 parts of 192 rows cuts blocks of 128: .* rollout.ep=2, or set rollout.tp=1, or use a BF16"),
        (
            192,
            1,
            1,
            "experts.0.up_proj.weight begins at 192 of the engine's tensor, .* SGLang refuses them; use a BF16",
        ),
    ],
)
def test_fp8_blocks_that_the_engine_cuts_are_refused(ffn: int, tp: int, ep: int, message: str) -> None:
    """Every size that the error names works, and no other."""
    hf = {
        **dict(architectures=["Qwen3MoeForCausalLM"], num_hidden_layers=1, hidden_size=2048, head_dim=128),
        **dict(num_attention_heads=32, num_key_value_heads=8, num_experts=8, num_experts_per_tok=2, vocab_size=256),
        **dict(moe_intermediate_size=ffn, intermediate_size=ffn, rms_norm_eps=1e-6, max_position_embeddings=64),
    }

    def plan(tp: int, ep: int) -> ReshardPlan:
        return ReshardPlan(hf, TrainLayout(8, 1, 1, ((0,),)), EngineLayout(tp, ep), 8, wire="fp8")

    if not message:
        plan(tp, ep)
        return
    with pytest.raises(ConfigError, match=message) as error:
        plan(tp, ep)
    assert "\n" not in str(error.value)
    for key, sizes in (("ep", [(tp, size) for size in (1, 2, 4, 8)]), ("tp", [(size, ep) for size in (1, 2, 4, 8)])):
        named = re.search(rf"rollout\.{key}=((?:\d+, )*\d+(?: or \d+)?),", str(error.value))
        works = [] if named is None else list(map(int, re.findall(r"\d+", named[1])))
        for engine_tp, engine_ep in sizes:
            if engine_tp > tp or engine_ep > engine_tp:
                continue
            if (engine_ep if key == "ep" else engine_tp) in works:
                plan(engine_tp, engine_ep)
            else:
                with pytest.raises(ConfigError, match="cannot be sent as FP8"):
                    plan(engine_tp, engine_ep)


def test_invalid_plans_raise_in_one_line() -> None:
    hf, train, engine, ranks_per_node, _ = deepseek(512, 32)
    for ranks, message in (
        ((0, 1, 1, 2), "name rank 1 more than once"),
        ((0, 1, 2, -1), "name rank -1"),
        ((0, 1, 2), "4 trainer ranks cannot be placed on 3"),
    ):
        with pytest.raises(ConfigError, match=message):
            TrainLayout(4, 1, 1, ((0,),), ranks=ranks)
    for arguments, message in (
        ((hf, train, EngineLayout(48), ranks_per_node), "tp=48"),
        ((hf, train, engine, 7), "512 ranks"),
        ((hf, train, engine, ranks_per_node, 4096), "bucket"),
        ((hf, TrainLayout(576, 1, 36, even_stages(61, 16)), engine, 8), "36"),
        # 18432 rows of a dense MLP over 32 ranks are 576, or four and a half blocks
        (
            (hf, train, engine, ranks_per_node, 1 << 30, "fp8"),
            "mlp.gate_proj.weight in 32 parts of 576 rows cuts blocks of 128; .*shared_experts.gate_proj.weight in 32 "
            "parts of 64 rows .* SGLang refuses them; with rollout.tp=32 set rollout.sglang.moe_dense_tp_size=1 and "
            "rollout.sglang.moe_a2a_backend=deepep with rollout.ep=32, or set rollout.tp=1, 2, 4, 8 or 16, or use a BF",
        ),
        ((hf, TrainLayout(512, 8, 32, even_stages(60, 16)), engine, ranks_per_node), "layer 60"),
        (
            (hf, train, replace(engine, ranks=tuple(range(500))), ranks_per_node),
            "tp=32 does not divide the 500 ranks of the eng",
        ),
    ):
        with pytest.raises(ConfigError, match=message) as error:
            ReshardPlan(*arguments)
        assert "\n" not in str(error.value)
