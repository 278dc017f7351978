"""Plans: every byte where a gather and slice would put it, at the bound, in rounds that nobody waits in for ever."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jointly import least_sent
from random_layouts import Case, apart, random_case
from simulate import simulate, staged

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


def plan_of(case: Case) -> ReshardPlan:
    """With twice the bucket as often as the plan says that it is too small."""
    arguments = list(case.arguments)
    while True:
        try:
            return ReshardPlan(*arguments)
        except ConfigError as error:
            assert "too small" in str(error)
            arguments[4] *= 2


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_byte_arrives_once_where_it_belongs(seed: int) -> None:
    """To repeat one: `random_case(seed)` of random_layouts.py."""
    check(random_case(seed), seed)


@pytest.mark.parametrize("seed", range(SEEDS // 2))
def test_every_byte_arrives_once_on_other_ranks_too(seed: int) -> None:
    """To repeat one: `apart(seed)` of random_layouts.py."""
    check(apart(seed), seed)


def check(case: Case, seed: int) -> None:
    plan = plan_of(case)
    result = simulate(plan, case.hf, case.wire, case.ranks_per_node)
    transfers = plan.list_transfers()
    planned: Counter[tuple[int, int]] = Counter()
    for src, dst, nbytes in zip(*(column.tolist() for column in transfers), strict=True):
        planned[src, dst] += nbytes
    assert +planned == +result.bytes, f"seed {seed}"
    least = compute_bound(case.hf, case.train, case.engine, case.ranks_per_node, case.wire)
    check_bytes_and_bounds(plan, least, f"seed {seed}: ")


def check_bytes_and_bounds(plan: ReshardPlan, least: Bound, where: str) -> dict[str, float]:
    """Bytes as few as can be, and bounds that hold; returns how far each busiest rank is from them. `send_capped` is of
    plans that keep to SLACK over the network."""
    sent, local_items = plan.list_transfers(), plan.assignment.ranks_per_node
    far = sent.src // local_items != sent.dst // local_items
    assert sent.nbytes.sum() == least.cross_bytes, where
    assert sent.nbytes[far].sum() == least.internode_bytes, where
    actual = {}
    for name, ranks, chosen in (
        ("nic_send", sent.src, far),
        ("nic_recv", sent.dst, far),
        ("send", sent.src, far | True),
        ("recv", sent.dst, far | True),
    ):
        busiest = float(np.bincount(ranks[chosen], sent.nbytes[chosen], 1).max())
        bounds = [name, "send_capped"] if name == "send" and actual["nic_send"] <= NETWORK_SLACK else [name]
        for which in bounds:
            actual[which] = busiest / max(getattr(least, which), 1.0)
            assert busiest >= getattr(least, which) * (1 - 1e-9), f"{where}{which} is more than was sent"
    return actual


@pytest.mark.parametrize("seed", range(0, SEEDS, 13))
def test_a_plan_is_the_same_each_time_and_adds_up(seed: int) -> None:
    case = random_case(seed) if seed % 2 else apart(seed)
    plan, again = plan_of(case), plan_of(case)
    for rank in {0, plan.world // 2, plan.world - 1}:
        mine, other = RankPlan(plan, rank), RankPlan(again, rank)
        rounds = [mine.round(number) for number in range(plan.rounds)]
        assert rounds == [other.round(number) for number in range(again.rounds)], f"seed {seed}"
        expected = set()
        for number, now in enumerate(rounds):
            for is_send, messages in ((True, now.sends), (False, now.receives)):
                for m in messages:
                    size = sum(piece.nbytes for piece in m.pieces)
                    forwarded = sum(piece.nbytes for piece in m.forward)
                    expected.add((number, is_send, m.peer, size, forwarded, staged(m.pieces)))
            if now.local:
                size = sum(piece.nbytes for piece in now.local)
                expected.add((number, False, rank, size, 0, staged(now.local)))
        actual = tabulate_messages(mine)
        assert set(zip(*(column.tolist() for column in actual), strict=True)) == expected, f"seed {seed}"


def placed(
    train: TrainLayout, engine: EngineLayout, ranks: tuple[tuple[int, ...], tuple[int, ...]]
) -> tuple[TrainLayout, EngineLayout]:
    return replace(train, ranks=ranks[0]), replace(engine, ranks=ranks[1])


def deepseek(world: int, ep: int, bucket_bytes: int = 1 << 30) -> tuple[Any, ...]:
    train = TrainLayout(world, 8, ep, even_stages(61, 16))
    return DEEPSEEK, train, EngineLayout(32, 32, draft=True), 8, bucket_bytes


def halves(world: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first nodes, and the others."""
    return tuple(range(world // 2)), tuple(range(world // 2, world))


def beside(world: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Half of the ranks of each node."""
    return tuple(r for r in range(world) if r % 8 < 4), tuple(r for r in range(world) if r % 8 >= 4)


def overlapping(world: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first half, and as many from the second quarter on."""
    return tuple(range(world // 2)), tuple(range(world // 4, world // 4 * 3))


@pytest.fixture(scope="module", params=["the same ranks", "other ranks"])
def all_ranks(request: pytest.FixtureRequest) -> tuple[ReshardPlan, list[Messages]]:
    """DeepSeek-V3 on 512 GPUs."""
    arguments = deepseek(512, 32)
    if request.param == "other ranks":
        arguments = (DEEPSEEK, *placed(TrainLayout(256, 8, 32, even_stages(61, 8)), arguments[2], halves(512)), 8)
    plan = ReshardPlan(*arguments)
    return plan, [tabulate_messages(RankPlan(plan, rank)) for rank in range(512)]


def test_the_ends_of_all_messages_agree_and_fit_the_buckets(all_ranks: tuple[ReshardPlan, list[Messages]]) -> None:
    plan, ranks = all_ranks
    ends: dict[bool, list[np.ndarray]] = {True: [], False: []}
    for rank, local in enumerate(ranks):
        other = local.peer != rank
        for sends in (True, False):
            chosen = local.is_send == sends
            room = np.bincount(local.round[chosen], local.staged[chosen], plan.rounds)
            assert room.max() <= plan.bucket_bytes // 2, f"rank {rank}"
            chosen &= other
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
    assert not same_pair.any()  # one message for a pair and round
    # What is forwarded stays in the node, and came in the round before.
    number, src, dst, nbytes, forwarded, _ = sent
    assert (src[forwarded > 0] // 8 == dst[forwarded > 0] // 8).all()
    came, passed = np.zeros((2, plan.rounds, 512))
    np.add.at(came, (number, dst), nbytes - forwarded)
    np.add.at(passed, (number, src), forwarded)
    assert (passed[0] == 0).all()
    assert (passed[1:] <= 7 * came[:-1]).all()


def test_nobody_waits_for_ever(all_ranks: tuple[ReshardPlan, list[Messages]]) -> None:
    """Each rank starts all of a round at once, and the next when its peers of the round have started theirs, and the
    ranks of its engine, who hand over together."""
    plan, ranks = all_ranks
    peers = []
    engines = plan.rank_map.engine.reshape(-1, 32).tolist()
    for rank, local in enumerate(ranks):
        mates = {mate for engine in engines for mate in engine if rank in engine}
        edges = np.searchsorted(local.round, np.arange(plan.rounds + 1))
        peers.append([mates | set(local.peer[a:b].tolist()) for a, b in zip(edges, edges[1:], strict=False)])
    started = [0] * 512  # the round that each is in
    waiting: dict[int, list[int]] = {}  # for this rank to go on
    able = list(range(512))[::-1]
    while able:
        rank = able.pop()
        number = started[rank]
        if number == plan.rounds:
            continue
        late = next((peer for peer in peers[rank][number] if started[peer] < number), None)
        if late is None:
            started[rank] += 1
            able += [rank, *waiting.pop(rank, [])]
        else:
            waiting.setdefault(late, []).append(rank)
    stuck = {rank: number for rank, number in enumerate(started) if number < plan.rounds}
    assert not stuck, f"these ranks wait for ever in these rounds: {stuck}"


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
for name, ranks in (("apart", halves), ("beside", beside), ("overlapping", overlapping)):
    BALANCE |= {
        f"DeepSeek-V3 512 TP32 EP32, {name}": (
            DEEPSEEK,
            *placed(TrainLayout(256, 8, 32, even_stages(61, 8)), EngineLayout(32, 32, draft=True), ranks(512)),
        ),
        f"DeepSeek-V3 512 DP32, {name}": (
            DEEPSEEK,
            *placed(TrainLayout(256, 8, 32, even_stages(61, 8)), EngineLayout(32, 32, 32, 1, 1, 1), ranks(512)),
        ),
        f"Qwen3-235B 64, {name}": (
            QWEN,
            *placed(TrainLayout(32, 4, 8, even_stages(94, 4)), EngineLayout(8, 8), ranks(64)),
        ),
        f"Qwen3-30B 16, {name}": (
            QWEN_30B,
            *placed(TrainLayout(8, 1, 8, even_stages(48, 1)), EngineLayout(2, 2), ranks(16)),
        ),
    }


@pytest.mark.parametrize("row", BALANCE)
def test_bytes_and_balance_of_real_models(row: str) -> None:
    hf, train, engine = BALANCE[row]
    ratios = check_bytes_and_bounds(ReshardPlan(hf, train, engine, 8), compute_bound(hf, train, engine, 8), "")
    assert max(ratios.values()) <= 1.05, ratios


def drawn_layout(seed: int) -> tuple[dict[str, Any], TrainLayout, EngineLayout]:
    """A layout of a real model, as chance will have it."""
    draw = random.Random(seed)
    while True:
        hf, world, pp = draw.choice([DEEPSEEK, QWEN]), draw.choice([64, 128]), draw.choice([1, 2, 4, 8])
        tp, ep = draw.choice([1, 2, 4, 8] if hf is DEEPSEEK else [1, 2, 4]), draw.choice([4, 8, 16, 32])
        width, experts = draw.choice([8, 16, 32, 64]), draw.choice([1, 2, 4, 8, 16, 32])
        if world % (tp * pp) == 0 and (world // pp) % ep == 0 and width % experts == 0:
            stages = even_stages(hf["num_hidden_layers"], pp)
            return hf, TrainLayout(world, tp, ep, stages), EngineLayout(width, experts)


DRAWN = 20
CHOSEN = [
    # The two metrics of the busiest sender exclude each other here: one of both is 1.116 at least.
    (QWEN, TrainLayout(128, 4, 8, even_stages(94, 4)), EngineLayout(16, 4)),
    (QWEN, TrainLayout(256, 4, 8, even_stages(94, 4)), EngineLayout(32, 16)),
    # What is in a node already goes to several ranks of it, which share copying it.
    (QWEN_30B, TrainLayout(16, 1, 8, even_stages(48, 1)), EngineLayout(4, 2)),
    (QWEN_30B, TrainLayout(64, 4, 4, even_stages(48, 2)), EngineLayout(2, 2)),
]


@pytest.mark.parametrize("layout", [*CHOSEN, *map(drawn_layout, range(DRAWN))], ids=range(-len(CHOSEN), DRAWN))
def test_balance_of_layouts_that_nobody_chose(layout: tuple[dict[str, Any], TrainLayout, EngineLayout]) -> None:
    """Each of the busiest ranks; and the bounds of what one sends in all, beside a linear program. Where they differ,
    nobody can meet that of plans that spare the network and the other."""
    least = compute_bound(*layout, 8)
    ratios = check_bytes_and_bounds(ReshardPlan(*layout, 8), least, "")
    assert ratios.pop("send") <= 1.05 * least.send_capped / least.send
    assert len(ratios) == 4 and max(ratios.values()) <= 1.05, ratios
    for value, within in ((least.send_capped, NETWORK_SLACK * least.nic_send), (least.send, np.inf)):
        assert value == pytest.approx(least_sent(*layout, 8, within), rel=1e-3)


def test_fp8_halves_the_bytes() -> None:
    train, engine = TrainLayout(512, 8, 8, even_stages(61, 16)), EngineLayout(16, draft=True)
    half, full = (ReshardPlan(DEEPSEEK, train, engine, 8, wire=wire).list_transfers() for wire in ("fp8", "bf16"))
    assert half.nbytes.sum() == compute_bound(DEEPSEEK, train, engine, 8, "fp8").cross_bytes
    assert half.nbytes.sum() / full.nbytes.sum() == pytest.approx(0.5, abs=0.01)


def test_what_cannot_be_planned_is_said_in_one_line() -> None:
    hf, train, engine, local_items, _ = deepseek(512, 32)
    for ranks, message in (
        ((0, 1, 1, 2), "name rank 1 more than once"),
        ((0, 1, 2, -1), "name rank -1"),
        ((0, 1, 2), "4 trainer ranks cannot be placed on 3"),
    ):
        with pytest.raises(ConfigError, match=message):
            TrainLayout(4, 1, 1, ((0,),), ranks=ranks)
    for arguments, message in (
        ((hf, train, EngineLayout(48), local_items), "tp=48"),
        ((hf, train, engine, 7), "512 ranks"),
        ((hf, train, engine, local_items, 4096), "bucket"),
        ((hf, TrainLayout(576, 1, 36, even_stages(61, 16)), engine, 8), "36"),
        # 18432 rows of a dense MLP over 32 ranks are 576, four and a half blocks
        ((hf, train, engine, local_items, 1 << 30, "fp8"), "mlp.*FP8"),
        ((hf, TrainLayout(512, 8, 32, even_stages(60, 16)), engine, local_items), "layer 60"),
        (
            (hf, train, replace(engine, ranks=tuple(range(500))), local_items),
            "tp=32 does not divide the 500 ranks of the eng",
        ),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            ReshardPlan(*arguments)
        assert "\n" not in str(caught.value)
