"""Lower bounds of transfers: by hand, against brute force, and the published table of DeepSeek-V3."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_layouts import Case, random_case, random_split_case
from seeds import split_seeds

from megarl.config import ConfigError
from megarl.models import blocks
from megarl.models.fp8 import is_quantised
from megarl.models.layout_algebra import PADDING, Param, Sharding, split_with
from megarl.models.registry import family_of
from megarl.reshard.plan.bound import BLOCK, NETWORK_SLACK, Bound, TransferJobs, compute_bound
from megarl.reshard.plan.layout import EngineLayout, TrainLayout, even_stages

pytestmark = pytest.mark.alone

Element = tuple[str, int, int]
MODELS = Path(__file__).resolve().parents[2] / "configs/models"
DEEPSEEK = json.loads((MODELS / "deepseek_v3.json").read_text())

# One layer with 4 heads of 2 and hidden size 4, tied vocabulary of 8. Elements of the sharded parameters:
# embedding 8 x 4, qkv 3 x 8 x 4 with 3 biases of 8, o 4 x 8, gate, up and down 8 x 4 each.
TINY = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 2,
    "intermediate_size": 8,
    "tie_word_embeddings": True,
}
CUT, NORMS = 8 * 4 + 3 * (8 * 4 + 8) + 4 * 8 + 3 * 8 * 4, 3 * 4


def test_equal_shards_need_no_transfer() -> None:
    # Megatron pads the vocabulary to 256 rows and SGLang to 64, so rank 0 has all of it in both. Nothing moves.
    result = compute_bound(TINY, TrainLayout(2, 2, 1, ((0,),)), EngineLayout(2), ranks_per_node=2)
    assert result.needed.tolist() == [2 * (32 + (CUT - 32) // 2 + NORMS), 2 * ((CUT - 32) // 2 + NORMS)]
    assert result.cross_bytes == result.internode_bytes == result.send == result.recv == result.nic_send == 0


def test_engines_of_one_rank_by_hand() -> None:
    # Two stages of two ranks, unsharded: the layer on stage 0, the final norm (16 bytes in fp32) on stage 1.
    result = compute_bound(TINY, TrainLayout(4, 1, 1, ((0,), ())), EngineLayout(1), ranks_per_node=2, wire="fp32")
    model, layers = 4 * (CUT + NORMS), 16
    assert result.needed.tolist() == [model] * 4
    assert result.local.tolist() == [model - layers] * 2 + [layers] * 2
    assert result.cross.tolist() == [layers] * 2 + [model - layers] * 2
    assert result.internode.tolist() == [layers, model - layers]
    assert result.recv == model - layers
    # The ranks of stage 0 each send half of it to node 1, whose ranks exchange the halves. The norm comes back the same
    # way, so four ranks send the whole model twice.
    assert result.nic_send == result.nic_recv == (model - layers) / 2
    assert result.send == model / 2


def test_bound_busiest_by_hand() -> None:
    jobs = TransferJobs()
    eligible = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]], bool)
    jobs.add(np.zeros(3, np.int64), eligible, np.array([6, 6, 4]), network=True)
    classes = [np.arange(4), np.zeros(4, np.int64)]
    lowest, result, ranks, _ = jobs.bound_busiest(4, classes)
    assert (
        ranks == (0,) and lowest == 6 and result == pytest.approx(6, rel=0.01)
    )  # rank 0 alone 6, ranks 0 and 1 together 12, all 16
    jobs.add(np.array([1]), np.array([[1, 1]], bool), np.array([8]), network=True)  # on ranks 1 and 2
    lowest, result, ranks, _ = jobs.bound_busiest(4, classes)
    assert (
        ranks == (0, 1, 2) and lowest == pytest.approx(20 / 3) and result == pytest.approx(20 / 3, rel=0.01)
    )  # ranks 0, 1, 2: no class


def test_bound_busiest_with_a_network_cap_by_hand() -> None:
    """Ranks 0 and 1 can both send 12 bytes over the network; only rank 0 can send 6 inside its node."""
    network, all_links = TransferJobs(), TransferJobs()
    for jobs in (network, all_links):
        jobs.add(np.array([0]), np.array([[1, 1]], bool), np.array([12]), network=True)
    all_links.add(np.array([0]), np.array([[1, 0]], bool), np.array([6]), network=False)
    classes = [np.arange(2), np.zeros(2, np.int64)]
    over_network = network.bound_busiest(2, classes)
    assert over_network.lower_bound == 6
    assert (
        all_links.bound_busiest(2, classes).lower_bound == 9
    )  # 9 and 9: rank 0 sends 3 over the network, rank 1 does 9
    within = all_links.bound_busiest(2, classes, over_network)
    assert NETWORK_SLACK == 1.05  # of 6: rank 1 sends 6.3 and rank 0 the rest, 5.7 and 6
    assert within.lower_bound == pytest.approx(11.7)
    assert within.attainable == pytest.approx(11.7, rel=0.01)


def test_fp8_counts_blocks_and_scales() -> None:
    hf = TINY | {"hidden_size": 192, "intermediate_size": 256, "head_dim": 64}
    result = compute_bound(hf, TrainLayout(2, 1, 1, ((), (0,))), EngineLayout(1), ranks_per_node=1, wire="fp8")
    weights, grids = 4 * 256 * 192 + 3 * 256 * 192, 7 * 2 * 2  # q, k, v, o, gate, up, down; 256 x 192 is 2 x 2 blocks
    num_bytes = 8 * 192 + 3 * 256 + 3 * 192  # the embedding is on stage 0 and goes to rank 1
    assert result.needed.tolist() == [weights + 4 * grids + 2 * num_bytes] * 2
    assert result.cross.tolist() == [weights + 4 * grids + 2 * (num_bytes - 8 * 192), 2 * 8 * 192]


TABLE = {
    # train world, pp, ep; engine -> needed, local, cross, between nodes, GB per GPU
    "256 TP16": (256, 16, 16, EngineLayout(16, draft=True), (87.5, 0.5, 87.0, 82.7)),
    # Published as 5.4 and, below, 2.8 and 42.1, with `eh_proj` replicated on every trainer rank; Megatron shards it by
    # rows, which is 11 MB per GPU less local data: 5.346 for 5.357, 2.739 for 2.750 and 42.155 for 42.144.
    "256 TP16 EP16": (256, 16, 16, EngineLayout(16, 16, draft=True), (87.5, 5.3, 82.1, 80.1)),
    "256 TP32 EP32": (256, 8, 32, EngineLayout(32, 32, draft=True), (44.9, 5.5, 39.4, 37.5)),
    "512 TP16": (512, 16, 8, EngineLayout(16, draft=True), (87.5, 0.8, 86.7, 80.1)),
    "512 TP32 EP32": (512, 16, 32, EngineLayout(32, 32, draft=True), (44.9, 2.7, 42.2, 40.2)),
    # Dense MLPs, shared experts and head are replicated like the attention.
    "512 DP": (512, 16, 32, EngineLayout(32, 32, 32, 1, 1, 1, draft=True), (76.5, 3.0, 73.5, 43.1)),
    "2048 TP32 EP32": (2048, 16, 64, EngineLayout(32, 32, draft=True), (44.9, 0.2, 44.7, 42.5)),
}


@pytest.mark.parametrize("row", TABLE)
def test_published_bytes_of_deepseek_v3(row: str) -> None:
    world, pp, ep, engine, published = TABLE[row]
    result = compute_bound(DEEPSEEK, TrainLayout(world, 8, ep, even_stages(61, pp)), engine, ranks_per_node=8)
    totals = (result.needed_bytes, result.local_bytes, result.cross_bytes, result.internode_bytes)
    assert tuple(round(total / world / 1e9, 1) for total in totals) == published
    check_tight(result)


@pytest.mark.parametrize(("world", "ep", "sends", "receives"), [(512, 32, 1.109, 1.062), (2048, 64, 1.108, 1.008)])
def test_published_balance_of_deepseek_v3(world: int, ep: int, sends: float, receives: float) -> None:
    """61 layers over 16 stages, three on the first and the last two, plus the MTP layer."""
    train = TrainLayout(world, 8, ep, even_stages(61, 16, [3] + [4] * 13 + [3] * 2))
    result = compute_bound(DEEPSEEK, train, EngineLayout(32, 32, draft=True), ranks_per_node=8)
    mean = result.internode_bytes / world
    assert result.nic_send / mean == pytest.approx(sends, abs=5e-4)
    assert result.nic_recv / mean == pytest.approx(receives, abs=5e-4)
    assert result.nic_send / 1e9 == pytest.approx({512: 44.6, 2048: 47.1}[world], abs=0.05)


def test_single_rank_has_the_whole_model() -> None:
    bound = compute_bound(
        DEEPSEEK, TrainLayout(1, 1, 1, even_stages(61, 1)), EngineLayout(1, draft=True), ranks_per_node=8
    )
    assert bound.needed_bytes / 1e9 == pytest.approx(1365, abs=0.5)
    assert bound.local_bytes == bound.needed_bytes


def check_tight(result: Bound) -> None:
    """Check that the bound is attainable, so that no other set of ranks gives a higher one."""
    for name, attainable in result.attainable.items():
        assert attainable <= 1.01 * getattr(result, name), name


def list_params(hf: dict[str, Any]) -> list[Param]:
    family = family_of(hf)
    layers = range(hf["num_hidden_layers"] + family.num_mtp_layers(hf))
    rows = [row for layer in layers for row in family.layer(hf, layer, range(family.num_experts(hf)))]
    return blocks.embedding(hf) + rows + blocks.final_params(hf)


def small_case(seed: int) -> Case:
    return random_case(seed, worlds=(1, 2, 3, 4, 6, 8))


def count_elements(case: Case) -> int:
    return case.train.world * sum(param.size for param in list_params(case.hf))


# Cases small enough for brute force.
SEEDS = [seed for seed in range(150) if count_elements(small_case(seed)) < 30_000]


@pytest.mark.parametrize("seed", split_seeds(SEEDS, 50))
def test_bound_matches_brute_force(seed: int) -> None:
    case = small_case(seed)
    result = compute_bound(case.hf, case.train, case.engine, case.ranks_per_node, case.wire)
    brute_force(case, list_params(case.hf), result)
    check_tight(result)


SPLIT_SEEDS = [seed for seed in range(300) if count_elements(random_split_case(seed, (1, 2, 3, 4), 7)) < 8_000]


@pytest.mark.parametrize("seed", split_seeds(SPLIT_SEEDS, 50))
def test_bound_matches_brute_force_on_separate_ranks(seed: int) -> None:
    case = random_split_case(seed, (1, 2, 3, 4), 7)
    result = compute_bound(case.hf, case.train, case.engine, case.ranks_per_node, case.wire)
    brute_force(case, list_params(case.hf), result)
    check_tight(result)


def brute_force(case: Case, table: list[Param], result: Bound) -> None:
    train, engine, ranks_per_node = case.train, case.engine, case.ranks_per_node
    train_ranks = train.ranks or tuple(range(train.world))
    engines = {rank: number % engine.tp for number, rank in enumerate(engine.ranks or train_ranks)}
    world = max(*train_ranks, *engines) + 1
    ranks_per_node = min(ranks_per_node, world)
    world = -(-world // ranks_per_node) * ranks_per_node
    experts = family_of(case.hf).num_experts(case.hf)
    holds: list[set[Element]] = [set() for _ in range(world)]
    needed_elements: list[set[Element]] = [set() for _ in range(world)]
    size: dict[Element, int] = {}
    for param in table:
        slot = engine.slot_of(param)
        if slot is None:
            continue
        expert = param.expert is not None
        shards = [
            elements(param, param.sharding, train.num_shards(expert), part, case.wire)
            for part in range(train.num_shards(expert))
        ]
        parts = engine.num_shards(slot.grid)
        sharded = [elements(param, slot.sharding, parts, part, case.wire) for part in range(parts)]
        for shard in shards:
            size |= shard
        for number, rank in enumerate(train_ranks):
            if train.has_param(number, param, experts):
                holds[rank].update(shards[train.shard_index(number, expert)])
        for rank, position in engines.items():
            if engine.expert_indices(position, param, experts):
                needed_elements[rank].update(sharded[engine.shard_index(position, slot.grid)])
    cross = [sum(size[e] for e in needed_elements[rank] - holds[rank]) for rank in range(world)]
    assert result.cross.tolist() == cross
    assert result.needed.tolist() == [sum(size[e] for e in wanted) for wanted in needed_elements]
    nodes = [range(first, first + ranks_per_node) for first in range(0, world, ranks_per_node)]
    entering = [
        set().union(*(needed_elements[r] for r in node)) - set().union(*(holds[r] for r in node)) for node in nodes
    ]
    assert result.internode.tolist() == [sum(size[e] for e in elements_) for elements_ in entering]

    bytes_by_ranks: Counter[tuple[tuple[bool, ...], tuple[bool, ...]]] = Counter()
    for element, bytes_ in size.items():
        bytes_by_ranks[tuple(element in h for h in holds), tuple(element in n for n in needed_elements)] += bytes_
    jobs: dict[str, Counter[frozenset[int]]] = {name: Counter() for name in ("send", "nic_send", "nic_recv")}
    for (retained_by, needed), bytes_ in bytes_by_ranks.items():
        owners = frozenset(rank for rank in range(world) if retained_by[rank])
        for node in nodes:
            missing = frozenset(rank for rank in node if needed[rank] and not retained_by[rank])
            local_owners = owners & set(node)
            if not missing:
                continue
            jobs["send"][local_owners or owners] += bytes_
            jobs["send"][missing | local_owners] += bytes_ * (len(missing) - 1)
            if not local_owners:
                jobs["nic_send"][owners] += bytes_
                jobs["nic_recv"][missing] += bytes_
    assert result.recv == max(cross)
    for name, expected in (("nic_send", result.nic_send), ("nic_recv", result.nic_recv), ("send", result.send)):
        check_best_set(expected, jobs[name], Counter(), 0.0, world, name)
    inside = jobs["send"] - jobs["nic_send"]  # `send` includes jobs over the network
    check_best_set(result.send_capped, inside, jobs["nic_send"], NETWORK_SLACK * result.nic_send, world, "send")


def check_best_set(
    result: float, local: Counter[frozenset[int]], capped: Counter[frozenset[int]], cap: float, world: int, name: str
) -> None:
    """Try every set U, and every set V if jobs are capped, as defined in `megarl/reshard/README.md`."""
    best = 0.0
    for part in itertools.product((0, 1, 2) if capped else (0, 1), repeat=world):
        u = frozenset(rank for rank in range(world) if part[rank] == 1)
        v = frozenset(rank for rank in range(world) if part[rank] == 2)
        if u:
            sent = sum(b for eligible, b in local.items() if eligible <= u) + sum(
                b for eligible, b in capped.items() if eligible <= u | v
            )
            best = max(best, (sent - cap * len(v)) / len(u))
    assert 0.99 * best <= result <= best * (1 + 1e-9), name


def elements(param: Param, cut: Sharding, parts: int, part: int, wire: str) -> dict[Element, int]:
    """Return a shard's elements with their bytes."""
    quantised, packed = wire == "fp8" and is_quantised(param), wire == "int4" and param.expert is not None
    bytes_ = 1 if quantised else 4 if wire == "fp32" or param.is_sent_as_fp32 else 2
    dim, slices = split_with(param, cut, parts, part)
    result: dict[Element, int] = {}
    for source, start, stop in slices:
        if source == PADDING:
            continue
        name, shape = param.hf[source].name, (param.hf[source].shape + (1,))[:2]
        ranges = [range(n) for n in shape]
        ranges[dim] = range(start, stop)
        cells = list(itertools.product(*ranges))
        if packed:
            result |= {(name + " packed", row, column // 2): 1 for row, column in cells}
            result |= {(name + " scale", row, column // 32): 2 for row, column in cells}
            continue
        result |= dict.fromkeys(((name, row, column) for row, column in cells), bytes_)
        if quantised:
            result |= {(name + " scale", row // BLOCK, column // BLOCK): 4 for row, column in cells}
    return result


def test_indivisible_layouts_raise() -> None:
    with pytest.raises(ConfigError, match="engine's tp=3 does not divide the 4 ranks"):
        compute_bound(TINY, TrainLayout(4, 2, 1, ((0,),)), EngineLayout(3), 4)
    with pytest.raises(ConfigError, match="4 ranks are not whole nodes of 3"):
        compute_bound(TINY, TrainLayout(4, 2, 1, ((0,),)), EngineLayout(2), 3)
    with pytest.raises(ConfigError, match="ep=3 does not divide the 256 experts of a layer; sizes that do: 1, 2, 4"):
        compute_bound(DEEPSEEK, TrainLayout(96, 1, 3, even_stages(61, 16)), EngineLayout(32), 8)
