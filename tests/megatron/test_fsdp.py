"""Megatron-FSDP: its updates are DistributedDataParallel's, and all that plans, keeps or moves weights and states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CASES = ("untied", "MoE, EP 2", "LoRA, MoE, EP 2")
MORE_CASES = (
    *(
        "tied",
        "bf16",
        "MoE, CP 2, recompute",
        "MoE, CP 2, dynamic",
        "MLA, EP 2",
        "critic",
        "TP 2",
        "PP 2",
        "vision",
        "MTP",
    ),
    *("LoRA, tied, PP 2", "LoRA, bf16", "LoRA, critic, CP 2, recompute"),
    "LoRA, critic, CP 2, dynamic, recompute",
)
OF_FOUR_RANKS = ("TP 2, DP 2, EP 2", "PP 2, DP 2", "LoRA, TP 2, DP 2, EP 2")


def check(case: str, numbers: dict[str, Any]) -> None:
    """Check that metrics are those of DistributedDataParallel up to rounding, that weights are within 1e-3 of a
    learning rate (in bf16, where weights are rounded, within one), that all states return, and that no more memory was
    planned or needed, up to the padding of small buckets."""
    scale = 1000 if "bf16" in case else 1
    assert {"planned weights", "planned gradients", "planned optimizer"} & numbers.keys() or "loaded" in numbers
    for name, value in numbers.items():
        if name.startswith("planned"):
            assert abs(value) < 0.15, name
        elif name.startswith(("weights", "exported", "step ")):
            assert value < 1e-3 * scale, name
        elif not isinstance(value, bool):
            assert value < 1e-5 * scale, name
        else:
            assert value, name


def run(run_ranks: Callable[..., list[dict[str, Any]]], folder: Path, cases: tuple[str, ...], world: int = 2) -> None:
    results = run_ranks(world, "tests/megatron/ranks_fsdp.py", str(folder), ";".join(cases))
    for result in results:
        assert result.keys() == set(cases)
        for case, numbers in result.items():
            check(case, numbers)


def test_updates_and_states(run_ranks: Callable[..., list[dict[str, Any]]], tmp_path: Path) -> None:
    run(run_ranks, tmp_path, CASES)


def test_rank_without_the_model_takes_no_part(run_ranks: Callable[..., list[dict[str, Any]]]) -> None:
    other, first, second = run_ranks(3, "tests/megatron/ranks_fsdp.py", "beside")
    assert first == second and first["actor/grad_norm"] > 1 and first["actor/skipped"] == 0.0
    assert other == {}


@pytest.mark.nightly
def test_updates_and_states_in_more_layouts(run_ranks: Callable[..., list[dict[str, Any]]], tmp_path: Path) -> None:
    run(run_ranks, tmp_path, MORE_CASES)
    run(run_ranks, tmp_path, OF_FOUR_RANKS, world=4)
