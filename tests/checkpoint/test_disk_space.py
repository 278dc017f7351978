"""Disk space and host memory that checkpoints need, chiefly for partial rollouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.checkpoint.disk_space import check_copy_memory, free_memory, partial_rollout_bytes
from megarl.config import Config, from_dict
from megarl.rollout.partial_rollouts import PartialRollout, write_groups
from megarl.types import Prompt, Turn

pytestmark = pytest.mark.alone

HF: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 300,
    "num_experts_per_tok": 2,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "norm_topk_prob": True,
}


def test_copy_memory_sums_all_ranks_of_a_host() -> None:
    ranks = [("a", 3 * 10**9, 7 * 10**9), ("b", 3 * 10**9, 5 * 10**9)] * 2
    assert check_copy_memory(ranks[:2]) == []
    (line,) = check_copy_memory(ranks)
    assert "copies up to 6.0 GB on b, where 5.0 GB of memory are free: set run.save_async=false" in line
    assert 0 < free_memory() < 1 << 50


def config(oversample: float = 1.5, replays: bool = False, **rollout: Any) -> Config:
    sizes = {"oversample": oversample, "samples_per_prompt": 4, "max_context": 1000, "max_new_tokens": 500}
    tree = {"data": {"prompts_per_step": 5}, "rollout": {**sizes, **rollout}, "train": {"routing_replay": replays}}
    return from_dict(tree)


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (config(1.0), 0),
        (config(), 3 * 4 * 1000 * 20),  # starts 7.5 groups and trains on 5
        (config(oversample=2), 5 * 4 * 1000 * 20),
        (config(replays=True), 3 * 4 * 1000 * (20 + 3 * 2 * 2)),  # two of 300 experts in each of three layers
        (config(top_k=10, top_p=0.9), 3 * 4 * 1000 * (20 + 4 + 10 * 4)),
        (config(replay="runs/other"), 0),
    ],
)
def test_partial_rollout_bytes_by_hand(chosen: Config, expected: int) -> None:
    assert partial_rollout_bytes(HF, chosen) == expected


@pytest.mark.parametrize("replays", [False, True])
def test_partial_rollout_bytes_cover_written_groups(tmp_path: Path, replays: bool) -> None:
    """Every conversation has the maximum length, half of it prompt, with five letters a token."""
    question = {"role": "user", "content": "words" * 500}
    prompt = Prompt("train-1", (question,), range(500))
    routing = (torch.zeros(1000, 3, 2, dtype=torch.int16),) if replays else ()
    groups = [
        tuple(
            replace(
                PartialRollout.begin(prompt, seed),
                turns=(Turn(range(500)), Turn([seed] * 500, [-1.0] * 500, is_action=True, weight_version=3)),
                messages=(question, {"role": "assistant", "content": f"{seed:05}" * 500}),
                routing=tuple(map(torch.clone, routing)),
            )
            for seed in range(4 * group, 4 * group + 4)
        )
        for group in range(3)
    ]
    size = write_groups(tmp_path / "engine", groups).bytes
    planned = partial_rollout_bytes(HF, config(replays=replays))
    assert 0.4 * planned < size < planned  # most words are shorter than the bound assumes
