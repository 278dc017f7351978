"""Bytes of a step on a machine's host, by hand; tests/tools/test_planned.py measures them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.algorithms import advantages
from megarl.config import from_dict
from megarl.controllers.controller import load_requirements
from megarl.models.host_memory import GAE_ELEMENTS, BatchSize, bytes_by_phase, column_bytes, recording_bytes, step_bytes
from megarl.models.routing import RoutingShape
from megarl.observe import rollout_log
from megarl.types import Prompt, Rollout, SamplingMask, TrainBatch, Turn

pytestmark = pytest.mark.alone


def of(batch: BatchSize, routing: RoutingShape | None = None, **sections: Any) -> dict[str, dict[str, float]]:
    small = {"train": {"max_tokens_per_gpu": 10}, "rollout": {"max_context": 10}, "track": {"save_rollouts": False}}
    config = from_dict(small | sections)
    return bytes_by_phase(config, load_requirements(config), batch, routing)


def test_columns_of_each_algorithm() -> None:
    """Ids, mask, two log-probs and advantages; the reference's; values, rewards and returns; lags and weights."""
    alone = {"algorithm": "grpo", "kl": {"apply_to": "none"}}
    corrected = {"correction": {"kind": "tis"}}
    kinds = [alone, {"algorithm": "grpo"}, {"algorithm": "ppo"}, alone | corrected]
    kinds.append(alone | corrected | {"rollout": {"oversample": 1.5}})
    configs = [from_dict(kind) for kind in kinds]
    assert [column_bytes(config, load_requirements(config)) for config in configs] == [17, 21, 33, 21, 25]


def test_a_step_by_hand() -> None:
    parallel = {"world_size": 2, "ranks_per_node": 2}
    result = of(BatchSize(800, 100, 10), run={"num_update": 4, "ppo_epochs": 2}, parallel=parallel)
    retained = {"rollouts": 800 * 8, "records of routing": 0}
    batch = {"columns of the batch": 800 * 33}
    assert result["cutting"] == retained | batch | {"mini-batches": 400 * (37 + 33 + 8)}
    assert result["update"] == retained | batch | {
        "mini-batches": 400 * 37,
        "buffers of exchanges": 400 * 37,
        "micro-batches at work": 2 * 10 * (2 * (37 + 40) + 16),
    }
    assert result["forward"] == retained | {
        "columns of the batch": 800 * (9 + 3 * 4),
        "buffers of exchanges": 800 * 4,
        "micro-batches at work": 2 * 10 * (2 * (9 + 40) + 16),
    }
    # A number and a place of each token, and on each rank two rectangles of 50 sequences of 10 tokens.
    assert result["advantages"] == retained | batch | {"functions of tokens": 800 * 12 + 2 * (8 * 500 + 512 * 10)}
    full = of(BatchSize(800, 100, 10), parallel=parallel)
    assert full["cutting"]["mini-batches"] == 800 * 4  # the batch itself, with weights
    assert "advantages" not in of(BatchSize(800, 100, 10), algorithm="grpo")


def test_a_step_needs_what_it_needs_at_its_fullest_while_the_one_before_is_recorded() -> None:
    config = from_dict({"train": {"max_tokens_per_gpu": 10}, "rollout": {"max_context": 10}})
    declared = load_requirements(config)
    of_all = [sum(parts.values()) for parts in bytes_by_phase(config, declared, BatchSize(800, 80, 10)).values()]
    parts = step_bytes(config, declared, BatchSize(800, 80, 10))
    assert parts.pop("recording the step before") == 800 * (12 + 36)
    assert sum(parts.values()) == max(of_all)
    many = step_bytes(config, declared, BatchSize(1 << 22, 80, 10))["recording the step before"]
    assert many == (1 << 22) * 12 + (1 << 20) * 36  # a part at a time


def test_a_machine_has_its_share_and_records_in_a_byte_up_to_256_experts() -> None:
    batch = BatchSize(8000, 800, 10)
    item, four = (of(batch, parallel={"world_size": 2 * n, "ranks_per_node": 2})["update"] for n in (1, 4))
    assert four["rollouts"] * 4 == item["rollouts"]
    assert four["buffers of exchanges"] == 2000 * 37 * 1.75
    shapes = [RoutingShape(5, (1, 2, 3), 8, experts) for experts in (256, 257)]
    assert [of(batch, shape)["update"]["records of routing"] for shape in shapes] == [8000 * 24, 8000 * 48]
    # Of what is sent half of the rows are wanted elsewhere; records are laid together, whoever wants them.
    parallel = {"world_size": 2, "ranks_per_node": 2}
    half = of(BatchSize(8000, 800, 10, moved_share=0.5), shapes[0], parallel=parallel)
    assert half["forward"]["buffers of exchanges"] == 8000 * (0.5 * (4 + 24) + 24)


def test_records_while_they_are_sent_and_while_they_are_replayed() -> None:
    """Two stages: all layers laid together, then each stage's; with little at work the first is more."""
    shape, parallel = RoutingShape(4, (0, 1, 2, 3), 8, 256), {"world_size": 2, "ranks_per_node": 2, "pp": 2}
    result = of(BatchSize(8000, 800, 10, moved_share=0.5), shape, parallel=parallel)["forward"]
    assert result["buffers of exchanges"] == 8000 * (0.5 * 36 + 32 + 16) and not result["micro-batches at work"]
    large = of(BatchSize(8000, 800, 10, moved_share=0.5), shape, parallel=parallel, train={"max_tokens_per_gpu": 4000})[
        "forward"
    ]
    assert large["buffers of exchanges"] == 8000 * (0.5 * 36 + 16)
    assert large["micro-batches at work"] == 2 * 4000 * (2 * (9 + 40) + 16 + 2 * 8 * 8)


def test_constants_are_those_of_the_code_that_they_are_about() -> None:
    assert GAE_ELEMENTS == advantages.MAX_BLOCK_STEPS and rollout_log.ROW_GROUP_TOKENS == 1 << 20


CUT_OFF: dict[str, Any] = {"rollout": {"max_context": 10, "top_k": 5}}


def test_what_tokens_could_have_been_by_hand() -> None:
    """Of each token a count and five ids, 24 bytes: with the rollouts, and with the batch of them; laid together and
    sent of the rows that leave their home; of a micro-batch laid together and picked, while the one at work has its
    own. The critic reads none."""
    parallel = {"world_size": 2, "ranks_per_node": 2}
    result = of(BatchSize(800, 100, 10, moved_share=0.5), parallel=parallel, **CUT_OFF)
    assert {name: parts["records of sampling"] for name, parts in result.items()} == dict.fromkeys(result, 2 * 800 * 24)
    work = 2 * 10 * (2 * (9 + 40) + 16 + 3 * 24 + 16 * 5)
    assert result["forward"]["buffers of exchanges"] == 800 * (0.5 * (4 + 24) + 24)
    assert result["forward"]["micro-batches at work"] == 0 < work < 800 * 24
    large = of(
        BatchSize(800, 100, 10, moved_share=0.5), parallel=parallel, train={"max_tokens_per_gpu": 400}, **CUT_OFF
    )["forward"]
    assert large["micro-batches at work"] == work * 40 and large["buffers of exchanges"] == 800 * 0.5 * 28
    assert not any("records of sampling" in parts for parts in of(BatchSize(800, 100, 10)).values())


def test_a_batch_holds_the_records_of_sampling_that_are_planned() -> None:
    """The tensors of a real batch of answers without a prompt, all of whose tokens could have been any of five."""
    support = SamplingMask(torch.full((10,), 5, dtype=torch.int32), torch.arange(50, dtype=torch.int32))
    turns = Turn(()), Turn(range(0, 50, 5), np.zeros(10, np.float32), is_action=True)
    rollouts = [Rollout(Prompt("p", ()), turns, sampling_mask=replace(support)) for _ in range(80)]
    batch = TrainBatch.from_rollouts(rollouts)
    retained = [rollout.sampling_mask for rollout in rollouts] + list(batch.sampling_mask or ())
    measured = sum(item.counts.nbytes + item.ids.nbytes for item in retained if item is not None)
    assert measured == of(BatchSize(800, 80, 10), **CUT_OFF)["forward"]["records of sampling"]


def test_a_run_that_trains_nothing_holds_its_rollouts() -> None:
    result = of(BatchSize(800, 80, 10), RoutingShape(5, (1, 2, 3), 8, 256), algorithm="generate")
    assert result == {"generating": {"rollouts": 6400, "records of routing": 800 * 24, "columns of the batch": 0}}


def test_records_are_recorded_unless_they_are_left_out() -> None:
    config = from_dict({"algorithm": "grpo"})
    shape = RoutingShape(5, (1, 2, 3), 4, 256)
    assert recording_bytes(config, BatchSize(800, 80, 10), shape) == 36 * 800 * 2  # 12 bytes of routing beside 12
    assert recording_bytes(config, BatchSize(1 << 20, 80, 10), shape) == 36 * (1 << 20)
    without = from_dict({"algorithm": "grpo", "track": {"save_replay_data": False}})
    assert recording_bytes(without, BatchSize(800, 80, 10), shape) == 36 * 800
