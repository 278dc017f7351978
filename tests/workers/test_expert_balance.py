"""The measured load of experts, when they are placed anew, and the state that a checkpoint keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config import Config, ConfigError, ModelConfig, RolloutConfig
from megarl.models.routing import RoutingShape
from megarl.types import Prompt, Rollout, Turn
from megarl.types.comm import LOCAL, Comm
from megarl.workers.expert_balance import ExpertBalance, count_tokens

ROOT = Path(__file__).resolve().parent.parent.parent
pytestmark = pytest.mark.alone

HF = json.loads((ROOT / "configs/models/deepseek_v3.json").read_text()) | {
    **dict(num_hidden_layers=3, first_k_dense_replace=1, num_nextn_predict_layers=0),
    **dict(n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1),
}


def make_balance(ep: int = 2, copies: int = 2, every: int = 1, policy: str = "", comm: Comm = LOCAL) -> ExpertBalance:
    rollout = RolloutConfig(tp=ep, ep=ep, num_redundant_experts=copies, rebalance_experts_every=every)
    return ExpertBalance(HF, Config(model=ModelConfig(path="m"), rollout=rollout), comm, policy)


def make_rollout(*tokens: tuple[list[int], list[int]]) -> Rollout:
    """Return a rollout of a prompt of two tokens and these sampled ones, which the experts (layer 1, layer 2) process.
    The last one has no record; the prompt is processed by experts 0 and 1."""
    turns = Turn((1, 2)), Turn((3,) * (len(tokens) + 1), (-1.0,) * (len(tokens) + 1), True, 0)
    record = torch.tensor([[[0, 1]] * 2] * 2 + [list(experts) for experts in tokens], dtype=torch.uint8)
    return Rollout(Prompt("p", ()), turns, routing=record)


def test_sampled_tokens_are_counted_by_layer_and_expert() -> None:
    shape = RoutingShape(num_layers=3, moe_layers=(1, 2), topk=2, num_experts=4)
    rollout = make_rollout(([0, 3], [1, 2]), ([3, 2], [1, 2]))
    assert count_tokens(rollout, shape).tolist() == [[1, 0, 1, 2], [0, 2, 2, 0]]


def test_busy_experts_get_copies_in_the_layers_where_that_helps() -> None:
    balance = make_balance()
    start = (0, 1, 2, 3, 0, 1)
    assert balance.placements == {0: start, 1: start, 2: start}
    balance.count([make_rollout(*[([3, 2], [0, 2])] * 10), make_rollout(*[([3, 1], [0, 3])] * 10)])
    balance.rebalance(1)
    # Layer 1 has loads (0, 10, 10, 20): in order, its ranks have 15 and 25. Layer 2, (20, 0, 10, 10): 20 and 20.
    assert balance.placements == {0: start, 1: (0, 2, 3, 1, 1, 3), 2: start}
    assert balance.metrics["rollout/expert_imbalance"] == pytest.approx((25 / 20 + 1) / 2)
    assert balance.metrics["rollout/expert_imbalance_placed"] == pytest.approx(1.0)
    before = dict(balance.placements)
    balance.rebalance(2)  # nothing was generated
    assert balance.placements == before and balance.metrics == {}


def test_load_of_several_steps_decides() -> None:
    balance = make_balance(copies=0, every=2)
    balance.count([make_rollout(*[([0, 1], [0, 1])] * 10)])
    balance.rebalance(1)
    assert balance.placements[1] == (0, 1, 2, 3) and "rollout/expert_imbalance_placed" not in balance.metrics
    assert balance.metrics["rollout/expert_imbalance"] == 2.0
    balance.rebalance(2)
    assert [set(balance.placements[1][:2]) & {0, 1}, set(balance.placements[1][2:]) & {0, 1}] == [{0}, {1}]


def test_checkpoint_keeps_placement_and_load(tmp_path: Path) -> None:
    balance = make_balance(every=2)
    balance.count([make_rollout(*[([3, 1], [3, 1])] * 10)])
    balance.rebalance(2)
    balance.count([make_rollout(*[([1, 2], [1, 2])] * 10)])
    balance.rebalance(3)
    files = balance.save()(tmp_path)
    assert [path.name for path in files] == ["expert_placement.json"]
    resumed = make_balance(every=2)
    resumed.restore(tmp_path)
    assert resumed.placements == balance.placements != make_balance(every=2).placements
    resumed.rebalance(4)
    balance.rebalance(4)
    assert resumed.placements == balance.placements


def test_noise_of_sampling_moves_no_expert() -> None:
    """Loads of 20,000 tokens per layer and step, from the same skewed distribution, for 20 steps."""
    generator, balance = torch.Generator().manual_seed(1), make_balance(copies=0)
    shares = torch.tensor([0.45, 0.45, 0.05, 0.05]).expand(2, 4)
    placements = []
    for step in range(1, 21):
        chosen = torch.multinomial(shares, 20_000, replacement=True, generator=generator)
        balance._local_load = torch.stack([torch.bincount(row, minlength=4) for row in chosen])
        balance.rebalance(step)
        placements.append(dict(balance.placements))
    assert placements[0] != make_balance(copies=0).placements
    assert all(placement == placements[0] for placement in placements)


class Rank1:
    """The second of two ranks, to which rank 0 says `values`."""

    rank = 1

    def __init__(self, *values: Any) -> None:
        self.values = list(values)

    def all_reduce(self, local: torch.Tensor) -> torch.Tensor:
        return 2 * local

    def all_gather_rows(self, local: torch.Tensor) -> torch.Tensor:
        return local

    def all_gather_objects(self, local: Any) -> list[Any]:
        assert local is None
        return [self.values.pop(0), local]


def test_rank_0_places_experts_and_reads_the_file(tmp_path: Path) -> None:
    """Another rank follows, even if it would compute other placements or does not see the checkpoint."""
    placements = {0: (0, 1, 2, 3), 1: (3, 2, 1, 0), 2: (2, 3, 0, 1)}
    comm = Rank1(placements, (2, placements, torch.ones(2, 4, dtype=torch.int64)), None, "bad file")
    balance = make_balance(copies=0, comm=comm)
    balance.count([make_rollout(*[([0, 1], [0, 1])] * 10)])
    balance.rebalance(1)
    assert balance.placements == placements
    fresh = make_balance(copies=0, comm=comm)
    fresh.restore(tmp_path / "not here")
    assert fresh.placements == placements
    fresh.restore(tmp_path)
    assert fresh.placements == placements
    with pytest.raises(ConfigError, match="^bad file$"):
        fresh.restore(tmp_path)


@pytest.mark.parametrize("changes", [{"ep": 1}, {"copies": 0}])
def test_placement_of_other_engines_is_not_restored(tmp_path: Path, changes: dict[str, Any]) -> None:
    balance = make_balance()
    balance.count([make_rollout(*[([3, 1], [3, 1])] * 10)])
    balance.rebalance(1)
    balance.save()(tmp_path)
    other = make_balance(**changes)
    other.restore(tmp_path)
    assert other.placements == make_balance(**changes).placements


def test_policies_have_files_of_their_own_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    make_balance(policy="b").save()(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["expert_placement_b.json"]
    make_balance().restore(tmp_path)  # there is none of this policy
    (tmp_path / "expert_placement.json").write_text(json.dumps({"ep": 2}))
    with pytest.raises(ConfigError, match="expert_placement.json is not of this program"):
        make_balance().restore(tmp_path)
