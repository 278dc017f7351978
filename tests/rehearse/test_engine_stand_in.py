"""Engines in a rehearsal check what a weight sync sends, and the sync's record equals its plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small_configs import DEEPSEEK_V3

from megarl.rehearse.engine_stand_in import EngineRank

ROOT = Path(__file__).resolve().parents[2]
TENSORS = {"w": ("bfloat16", (4, 8)), "experts": ("float8_e4m3fn", (2, 4, 8))}


def write(name: str, dtype: str, index: int, rows: int = 4, offset: int = 0, draft: bool = False) -> dict[str, Any]:
    slices = [[name, index, 0, rows, 0, 8, offset, -1]]
    return {"do": "write", "draft": draft, "tensor_dtype": {name: dtype}, "slices": slices}


@pytest.fixture
def engine() -> EngineRank:
    return EngineRank({False: TENSORS, True: {"w": ("float32", (2, 2))}})


def test_tensors_are_described(engine: EngineRank) -> None:
    answer = engine.execute({"do": "describe", "draft": False}, None)
    assert answer == {"tensors": {name: [dtype, list(shape)] for name, (dtype, shape) in TENSORS.items()}, "odd": []}
    assert engine.execute({"do": "describe", "draft": True}, None)["tensors"] == {"w": ["float32", [2, 2]]}
    assert engine.nbytes == 4 * 8 * 2 + 2 * 4 * 8 + 4 * 4


def test_orders_that_fit_are_counted(engine: EngineRank) -> None:
    bucket = torch.empty(64, dtype=torch.uint8, device="meta")
    assert engine.execute(write("w", "bfloat16", -1), bucket) == {}
    assert engine.execute(write("experts", "float8_e4m3fn", 1), bucket) == {}
    assert engine.written_bytes == 64 + 32 and engine.orders == {"write": 2}


@pytest.mark.parametrize(
    ("order", "error"),
    [
        (write("x", "bfloat16", -1), "no tensor x"),
        (write("w", "float32", -1), "w is bfloat16 in the engine"),
        (write("w", "bfloat16", -1, rows=5), "rows 0:5"),
        (write("w", "bfloat16", -1, offset=16), "outside of the bucket"),
        (write("experts", "float8_e4m3fn", 2), "index 2"),
        (write("experts", "float8_e4m3fn", 0, draft=True), "no tensor experts"),
        ({"do": "merge", "draft": False, "merges": [["w", -1, 1, 0, 0, "a", "b"]]}, "'a'"),
        ({"do": "paint", "draft": False}, "unknown order"),
    ],
)
def test_orders_that_do_not_fit_are_refused(engine: EngineRank, order: dict[str, Any], error: str) -> None:
    bucket = torch.empty(64, dtype=torch.uint8, device="meta")
    assert error in engine.execute(order, bucket)["error"]
    assert not engine.written_bytes


def test_factors_must_fit_what_they_change(engine: EngineRank) -> None:
    factors = {"a": ["bfloat16", [2, 8]], "b": ["bfloat16", [4, 2]]}
    keep = {"do": "keep", "draft": False, "tensors": ["w"], "factors": factors}
    assert engine.execute(keep, None) == {}
    merge = {"do": "merge", "draft": False, "scale": 1.0}
    assert engine.execute(merge | {"merges": [["w", -1, 1, 0, 0, "a", "b"]]}, None) == {}
    assert "error" in engine.execute(merge | {"merges": [["w", -1, 1, 0, 1, "a", "b"]]}, None)


# --- ranks


QUANTISED = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def make_config(file: Path, hf: dict[str, Any], **sections: dict[str, Any]) -> dict[str, Any]:
    """Return a job whose actor is on ranks 0-3, and whose FP8 engine is on ranks 4 and 5."""
    file.write_text(json.dumps(DEEPSEEK_V3 | {"quantization_config": QUANTISED} | hf))
    rollout = {"tp": 2, "ep": 2, "samples_per_prompt": 2, "max_context": 128, "max_new_tokens": 64}
    config: dict[str, Any] = {
        "algorithm": "grpo",
        "run": {"dir": str(file.parent / "run"), "num_rollout": 1, "save_every": 1},
        "model": {"path": str(file), "dtype": "bfloat16"},
        "parallel": {"world_size": 6, "tp": 2, "ep": 2, "ranks_per_node": 2},
        "placement": {"actor": "0-3", "rollout": "4-5"},
        "rollout": rollout | {"weight_sync_bucket_mb": 2},
        "data": {"train": "none.jsonl", "prompts_per_step": 4},
        "train": {"max_tokens_per_gpu": 256},
        "reward": {"functions": ["megarl.rewards.gsm8k:gsm8k"]},
    }
    return config | {section: config.get(section, {}) | keys for section, keys in sections.items()}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Return what three ranks did in a job, then a rank of the engine with adapters, one with a draft model, and a rank
    that the actor shares with an engine."""
    folder = tmp_path_factory.mktemp("played")
    config = make_config(folder / "plain.json", {})
    adapters = {"lora": {"rank": 8}, "rollout": {"sync_adapters_only": True}}
    drafts = {"rollout": {"num_speculative_tokens": 1}, "train": {"mtp_loss_coef": 0.1}}
    colocated = {"placement": {"rollout": "0-3"}, "parallel": {"world_size": 4}, "train": {"offload": True}}
    jobs = [
        *[[config, rank] for rank in (0, 4, 5)],
        [make_config(folder / "adapters.json", {}, **adapters), 4],
        [make_config(folder / "drafts.json", {"num_nextn_predict_layers": 1}, **drafts), 5],
        [make_config(folder / "colocated.json", {}, **colocated), 0],
    ]
    script = Path(__file__).with_name("play_synced_ranks.py")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), json.dumps(jobs)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    records = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert len(records) == len(jobs)
    return records


def test_ranks_transfer_what_is_planned(played: list[Any]) -> None:
    for record in played:
        assert record["faults"] == []
        sizes = record["nbytes"]
        assert sizes["sync_sent"] == record["planned_sends"] and sizes["sync_received"] == record["planned_receives"]
        assert (sizes["sync_sent"] + sizes["sync_received"] > 0) == (record is not played[5])  # to its own engine


def test_engines_accept_what_they_get(played: list[Any]) -> None:
    assert not [order for record in played for order in record["orders"] if "failed" in order]


def test_a_rank_of_the_actor_sends_from_counted_buffers(played: list[Any]) -> None:
    actor, sizes = played[0], played[0]["nbytes"]
    assert sizes["sync_received"] == 0 and not actor["orders"]
    assert 0 < sizes["sync_send_buffers"] <= 2 << 20
    assert actor["phases"]["weight_sync"] >= actor["phases"]["load"] + sizes["sync_send_buffers"]


def test_a_rank_of_the_actor_saves_its_weights_and_states(played: list[Any]) -> None:
    """Each of the four ranks writes some 14 bytes per parameter of its own, and reads no more than these."""
    sizes = played[0]["nbytes"]
    assert 0 < sizes["checkpoint"] <= min(sizes["snapshot"], sizes["resume"])
    assert sizes["resume"] < 1.01 * sizes["checkpoint"]
    assert played[0]["phases"].keys() >= {"save", "resume"}


def test_every_byte_of_an_engine_is_written(played: list[Any]) -> None:
    for record in played[1:3]:
        assert record["nbytes"]["written"] == record["nbytes"]["engine_weights"] > 0
        assert record["orders"]["write"] > 1 and record["orders"]["finish"] == 1


def test_engines_get_adapters_alone(played: list[Any]) -> None:
    """The first sync also compares what the engine has merged, by hashes alone."""
    adapted = played[3]
    assert {"keep", "write", "merge", "compare"} <= adapted["orders"].keys()
    assert 0 < adapted["nbytes"]["written"] < adapted["nbytes"]["engine_weights"]


def test_engines_get_drafts(played: list[Any]) -> None:
    drafting = played[4]
    assert {"draft describe", "draft join", "draft write", "draft finish"} <= drafting["orders"].keys()
    assert drafting["nbytes"]["written"] == drafting["nbytes"]["engine_weights"]


def test_a_rank_that_offloads_leaves_its_memory_to_the_engine(played: list[Any]) -> None:
    """All storages of a rehearsal have the address 0; each of them must be freed."""
    phases = played[5]["phases"]
    assert phases["generate"] < 0.01 * phases["load"] < phases["actor_update"]
