"""Host memory of a step, by hand; tests/tools/test_planned_usage.py measures it."""

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


def phases(batch: BatchSize, routing: RoutingShape | None = None, **sections: Any) -> dict[str, dict[str, float]]:
    small_settings = {
        "train": {"max_tokens_per_gpu": 10},
        "rollout": {"max_context": 10},
        "track": {"save_rollouts": False},
    }
    config = from_dict(small_settings | sections)
    return bytes_by_phase(config, load_requirements(config), batch, routing)


def test_column_bytes_by_algorithm() -> None:
    """Ids, mask, two log-probs, advantages; reference log-probs; values, rewards, returns; staleness and weights."""
    no_kl = {"algorithm": "grpo", "kl": {"apply_to": "none"}}
    corrected = {"correction": {"kind": "tis"}}
    trees = [no_kl, {"algorithm": "grpo"}, {"algorithm": "ppo"}, no_kl | corrected]
    trees.append(no_kl | corrected | {"rollout": {"oversample": 1.5}})
    configs = [from_dict(tree) for tree in trees]
    assert [column_bytes(config, load_requirements(config)) for config in configs] == [17, 21, 33, 21, 25]


def test_phase_bytes_by_hand() -> None:
    parallel = {"world_size": 2, "ranks_per_node": 2}
    result = phases(BatchSize(800, 100, 10), run={"num_update": 4, "ppo_epochs": 2}, parallel=parallel)
    expected_bytes = {"rollouts": 800 * 8, "records of routing": 0}
    batch = {"columns of the batch": 800 * 33}
    assert result["cutting"] == expected_bytes | batch | {"mini-batches": 400 * (37 + 33 + 8)}
    assert result["update"] == expected_bytes | batch | {
        "mini-batches": 400 * 37,
        "buffers of exchanges": 400 * 37,
        "micro-batches at work": 2 * 10 * (2 * (37 + 40) + 16),
    }
    assert result["forward"] == expected_bytes | {
        "columns of the batch": 800 * (9 + 3 * 4),
        "buffers of exchanges": 800 * 4,
        "micro-batches at work": 2 * 10 * (2 * (9 + 40) + 16),
    }
    # A number and an index per token, and on each rank two padded batches of 50 sequences of 10 tokens.
    assert result["advantages"] == expected_bytes | batch | {"functions of tokens": 800 * 12 + 2 * (8 * 500 + 512 * 10)}
    full = phases(BatchSize(800, 100, 10), parallel=parallel)
    assert full["cutting"]["mini-batches"] == 800 * 4  # the batch itself, with weights
    assert "advantages" not in phases(BatchSize(800, 100, 10), algorithm="grpo")


def test_step_bytes_are_the_peak_phase_plus_recording() -> None:
    config = from_dict({"train": {"max_tokens_per_gpu": 10}, "rollout": {"max_context": 10}})
    declared = load_requirements(config)
    totals = [sum(parts.values()) for parts in bytes_by_phase(config, declared, BatchSize(800, 80, 10)).values()]
    parts = step_bytes(config, declared, BatchSize(800, 80, 10))
    assert parts.pop("recording the step before") == 800 * (12 + 36)
    assert sum(parts.values()) == max(totals)
    recording = step_bytes(config, declared, BatchSize(1 << 22, 80, 10))["recording the step before"]
    assert recording == (1 << 22) * 12 + (1 << 20) * 36  # one row group at a time


def test_host_share_and_routing_dtype() -> None:
    batch = BatchSize(8000, 800, 10)
    single_node, four_nodes = (
        phases(batch, parallel={"world_size": 2 * n, "ranks_per_node": 2})["update"] for n in (1, 4)
    )
    assert four_nodes["rollouts"] * 4 == single_node["rollouts"]
    assert four_nodes["buffers of exchanges"] == 2000 * 37 * 1.75
    shapes = [RoutingShape(5, (1, 2, 3), 8, experts) for experts in (256, 257)]
    assert [phases(batch, shape)["update"]["records of routing"] for shape in shapes] == [8000 * 24, 8000 * 48]
    # Half of the rows have to move; routing is concatenated for all readers.
    parallel = {"world_size": 2, "ranks_per_node": 2}
    half_moved = phases(BatchSize(8000, 800, 10, moved_share=0.5), shapes[0], parallel=parallel)
    assert half_moved["forward"]["buffers of exchanges"] == 8000 * (0.5 * (4 + 24) + 24)


def test_routing_bytes_while_sent_and_replayed() -> None:
    """With two stages, layers are concatenated and then split; with small micro-batches concatenation takes more."""
    shape, parallel = RoutingShape(4, (0, 1, 2, 3), 8, 256), {"world_size": 2, "ranks_per_node": 2, "pp": 2}
    result = phases(BatchSize(8000, 800, 10, moved_share=0.5), shape, parallel=parallel)["forward"]
    assert result["buffers of exchanges"] == 8000 * (0.5 * 36 + 32 + 16) and not result["micro-batches at work"]
    large_batch = phases(
        BatchSize(8000, 800, 10, moved_share=0.5), shape, parallel=parallel, train={"max_tokens_per_gpu": 4000}
    )["forward"]
    assert large_batch["buffers of exchanges"] == 8000 * (0.5 * 36 + 16)
    assert large_batch["micro-batches at work"] == 2 * 4000 * (2 * (9 + 40) + 16 + 2 * 8 * 8)


def test_constants_match_the_modelled_code() -> None:
    assert GAE_ELEMENTS == advantages.MAX_BLOCK_STEPS and rollout_log.ROW_GROUP_TOKENS == 1 << 20


TOP_K: dict[str, Any] = {"rollout": {"max_context": 10, "top_k": 5}}


def test_sampling_mask_bytes_by_hand() -> None:
    """A mask takes 24 bytes a token: a count and five ids.

    Rollouts and batch each hold it. Rows that move are concatenated and sent, and a micro-batch is assembled while the
    current one still has its mask. The critic reads none."""
    parallel = {"world_size": 2, "ranks_per_node": 2}
    result = phases(BatchSize(800, 100, 10, moved_share=0.5), parallel=parallel, **TOP_K)
    assert {name: parts["records of sampling"] for name, parts in result.items()} == dict.fromkeys(result, 2 * 800 * 24)
    work = 2 * 10 * (2 * (9 + 40) + 16 + 3 * 24 + 16 * 5)
    assert result["forward"]["buffers of exchanges"] == 800 * (0.5 * (4 + 24) + 24)
    assert result["forward"]["micro-batches at work"] == 0 < work < 800 * 24
    large_batch = phases(
        BatchSize(800, 100, 10, moved_share=0.5), parallel=parallel, train={"max_tokens_per_gpu": 400}, **TOP_K
    )["forward"]
    assert large_batch["micro-batches at work"] == work * 40 and large_batch["buffers of exchanges"] == 800 * 0.5 * 28
    assert not any("records of sampling" in parts for parts in phases(BatchSize(800, 100, 10)).values())


def test_sampling_mask_bytes_match_a_real_batch() -> None:
    """Measure a real batch of responses without prompts and with five candidates per token."""
    support = SamplingMask(torch.full((10,), 5, dtype=torch.int32), torch.arange(50, dtype=torch.int32))
    turns = Turn(()), Turn(range(0, 50, 5), np.zeros(10, np.float32), is_action=True)
    rollouts = [Rollout(Prompt("p", ()), turns, sampling_mask=replace(support)) for _ in range(80)]
    batch = TrainBatch.from_rollouts(rollouts)
    masks = [rollout.sampling_mask for rollout in rollouts] + list(batch.sampling_mask or ())
    measured = sum(mask.counts.nbytes + mask.ids.nbytes for mask in masks if mask is not None)
    assert measured == phases(BatchSize(800, 80, 10), **TOP_K)["forward"]["records of sampling"]


def test_generate_only_run_holds_its_rollouts() -> None:
    result = phases(BatchSize(800, 80, 10), RoutingShape(5, (1, 2, 3), 8, 256), algorithm="generate")
    assert result == {"generating": {"rollouts": 6400, "records of routing": 800 * 24, "columns of the batch": 0}}


def test_recording_bytes_include_replay_data_unless_disabled() -> None:
    config = from_dict({"algorithm": "grpo"})
    shape = RoutingShape(5, (1, 2, 3), 4, 256)
    assert recording_bytes(config, BatchSize(800, 80, 10), shape) == 36 * 800 * 2  # 12 bytes of routing beside 12
    assert recording_bytes(config, BatchSize(1 << 20, 80, 10), shape) == 36 * (1 << 20)
    without = from_dict({"algorithm": "grpo", "track": {"save_replay_data": False}})
    assert recording_bytes(without, BatchSize(800, 80, 10), shape) == 36 * 800
