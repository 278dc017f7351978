"""The GPUs of an engine's ranks, as SGLang starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_models
from engine_config import make_config

from megarl.engine.sglang import sglang_cuda
from megarl.engine.sglang.sglang_engine import SGLangEngine, gpu_offsets

pytestmark = pytest.mark.alone
ROOT = Path(__file__).resolve().parents[3]


def test_offsets_count_from_the_first_ranks_gpu() -> None:
    assert gpu_offsets(0, 4, 1) == gpu_offsets(4, 4, 1) == [0, 1, 2, 3]
    assert gpu_offsets(2, 4, 2) == [0, 0, 1, 1]
    assert gpu_offsets(1, 2, 2) == [0, 1]  # an engine whose ranks are on two GPUs, both shared with others
    assert gpu_offsets(1, 3, 4) == [0, 0, 0]


@pytest.mark.slow
def test_ranks_start_on_their_gpus(tmp_path: Path) -> None:
    """SGLang accepts the settings, without a GPU except for `device`, and gives the ranks these GPUs."""
    config = make_config(tiny_models.save(tiny_models.qwen3_moe(), tmp_path / "model"), tmp_path / "run", tp=4, ep=4)
    parallel = replace(config.parallel, world_size=8, ranks_per_node=8, ranks_per_gpu=2)
    config = replace(config, parallel=parallel)
    launch = SGLangEngine(config, first_rank=3, threads=1)._make_launch()
    assert launch.environment["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    arguments = launch.settings["server_args"] | sglang_cuda.gpu_args(3, 2)
    process = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("shared_gpus.py")), json.dumps(arguments)]
        + [json.dumps(launch.settings["gpu_offsets"])],
        env={**os.environ, **launch.environment, "PYTHONPATH": f"{launch.environment['PYTHONPATH']}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    assert json.loads(process.stdout.splitlines()[-1]) == [1, 2, 2, 3]
