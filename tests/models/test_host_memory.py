"""Bytes of a step on a machine's host, by hand; `tools/bench_flow.py` measures them."""

from __future__ import annotations

from typing import Any

from megarl.config import from_dict
from megarl.controllers.registry import declare
from megarl.models.host_memory import column_bytes, step_bytes
from megarl.models.routing import RoutingShape


def of(tokens: int, routing: RoutingShape | None = None, **sections: Any) -> dict[str, int]:
    small = {"train": {"token_budget": 10}, "rollout": {"max_context": 10}, "track": {"rollouts": False}}
    config = from_dict(small | sections)
    return step_bytes(config, declare(config), tokens, routing)


def test_columns_of_each_algorithm() -> None:
    """Ids, mask, two log-probs and advantages; the reference's; values, rewards and returns."""
    kinds = ({"algorithm": "grpo", "kl": {"place": "none"}}, {"algorithm": "grpo"}, {"algorithm": "ppo"})
    assert [column_bytes(declare(from_dict(kind))) for kind in kinds] == [17, 21, 33]


def test_a_step_by_hand() -> None:
    parallel = {"world_size": 2, "ranks_per_node": 2}
    found = of(800, run={"num_update": 4, "epochs": 2}, parallel=parallel)
    assert found == {
        "rollouts": 800 * 8,
        "records of routing": 0,
        "columns of the batch": 800 * 33,
        "mini-batches": 400 * (2 * 37 + 24),
        "buffers of exchanges": 400 * 37,
        "micro-batches at work": 2 * 10 * (37 + 40),
    }
    assert of(800, parallel=parallel)["mini-batches"] == 800 * 4  # the batch itself, with weights


def test_a_machine_has_its_share_and_records_in_a_byte_up_to_256_experts() -> None:
    one, four = (of(8000, parallel={"world_size": 2 * n, "ranks_per_node": 2}) for n in (1, 4))
    assert four["rollouts"] * 4 == one["rollouts"]
    assert four["buffers of exchanges"] == 2000 * 37 * 1.75
    shapes = [RoutingShape(5, (1, 2, 3), 8, experts) for experts in (256, 257)]
    assert [of(800, shape)["records of routing"] for shape in shapes] == [800 * 24, 800 * 48]


def test_a_rank_records_a_part_at_a_time() -> None:
    track = {"track": {"rollouts": True}}
    few, many = (of(tokens, **track)["recording the step before"] for tokens in (1000, 1 << 22))
    assert few == 1000 * (12 + 24) and many == (1 << 22) * 12 + (1 << 20) * 24
