"""A checkpoint read in another layout and saved again is bitwise the same: weights, masters and moments."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.checkpoint.dist_checkpoint_reader import CheckpointReader

RunRanks = Callable[..., list[dict[str, Any]]]
VOCABULARY = 200  # padded to 256 over one or two tensor parallel ranks, to 512 over four


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors by name, without the padding of the vocabulary."""
    reader = CheckpointReader(folder)
    tensors = {name: reader.read(name) for name in reader}
    return {
        name: tensor[:VOCABULARY] if "word_embeddings" in name or "output_layer" in name else tensor
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize(
    ("family", "role", "settings", "first", "other_names"),
    [
        (
            "qwen3_moe",
            "actor",
            {"layers": 6},
            "",
            ("tp=2", "pp=3,vpp=2", "tp=2,pp=2", "ep=2", "tp=2,etp=2", "cp=2", ""),
        ),
        ("qwen3_moe", "actor", {"layers": 4}, "tp=2,pp=2,ep=2", ("", "ep=2", "tp=2,cp=2,ep=4", "pp=4")),
        ("qwen3_moe", "critic", {"layers": 4}, "tp=2,ep=2", ("", "pp=2")),
        ("qwen3", "actor", {"layers": 4}, "pp=2", ("", "tp=2", "pp=4", "tp=2,pp=2")),
        ("deepseek_v3_mtp", "actor", {"layers": 4, "train": {"mtp_loss_coef": 0.3}}, "tp=2", ("", "pp=2", "ep=2")),
        ("qwen3_moe", "actor", {"layers": 4, "lora": {"rank": 4}}, "tp=2,ep=2", ("", "pp=2", "tp=2,etp=2")),
        ("qwen3_moe", "actor", {"layers": 4, "model": {"dtype": "bfloat16"}}, "pp=2", ("", "tp=2,ep=2")),
        (
            "qwen3_next_mtp",
            "actor",
            {"layers": 4, "train": {"mtp_loss_coef": 0.3}},
            "tp=2",
            ("", "pp=2", "tp=2,cp=2,ep=2"),
        ),
    ],
    ids=["moe from one rank", "moe from four ranks", "critic", "tied", "mtp", "lora", "bf16", "delta nets"],
)
def test_restore_in_another_layout_is_bitwise(
    tmp_path: Path,
    run_ranks: RunRanks,
    family: str,
    role: str,
    settings: dict[str, Any],
    first: str,
    other_names: tuple[str, ...],
) -> None:
    def save_in_layout(layout: str, source: Path | str, target: Path) -> dict[str, Any]:
        sizes = dict(part.split("=") for part in layout.split(",") if part)
        dense = int(sizes.get("tp", 1)) * int(sizes.get("cp", 1))
        experts = int(sizes.get("ep", 1)) * int(sizes.get("etp", 1))
        world = int(sizes.get("pp", 1)) * max(dense, experts)
        arguments = family, role, layout, json.dumps(settings), str(source), str(target)
        results = run_ranks(world, "tests/checkpoint/ranks_dist_checkpoint_reader.py", *arguments)
        assert all(result == results[0] for result in results)
        return results[0]

    summary = save_in_layout(first, "", tmp_path / "first")
    written = read_tensors(tmp_path / "first")
    states = [name for name in written if name.startswith("optimizer.state.exp_avg_sq.")]
    assert summary["updates"] == 2 and states and any(bool(written[name].any()) for name in states)
    for number, layout in enumerate(other_names):
        target = tmp_path / f"other_{number}"
        assert save_in_layout(layout, tmp_path / "first", target) == summary, layout
        converted = read_tensors(target)
        assert converted.keys() == written.keys(), layout
        different = [name for name in written if not torch.equal(written[name], converted[name])]
        assert different == [], layout
        assert {name: tensor.dtype for name, tensor in converted.items()} == {
            name: tensor.dtype for name, tensor in written.items()
        }
