"""One real engine per model, shared by all tests of a session; starting one takes most of their time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import tiny_models  # noqa: E402
from transformers import PreTrainedModel  # noqa: E402

from megarl.config import Config, from_dict  # noqa: E402
from megarl.rollout.engine import Engine  # noqa: E402


def make_config(model: Path, run: Path, **rollout: Any) -> Config:
    return from_dict(
        {
            "run": {"dir": str(run)},
            "model": {"path": str(model), "dtype": "float32"},
            "rollout": {
                "max_context": 256,
                "max_new_tokens": 12,
                "concurrency": 16,
                "start_timeout": 600,
                "tools": ["megarl.rollout.tools:calculator"],
                **rollout,
            },
        }
    )


@dataclass(frozen=True)
class Running:
    """An engine and the model that it started with."""

    engine: Engine
    config: Config
    model: PreTrainedModel
    folder: Path


@contextmanager
def start(model: PreTrainedModel, folder: Path, **rollout: Any) -> Iterator[Running]:
    path = tiny_models.save(model, folder / "model")
    config = make_config(path, folder / "run", **rollout)
    engine = Engine(config, threads=1)
    engine.start()
    try:
        engine.wait_ready()
        yield Running(engine, config, model, path)
    finally:
        engine.shutdown()


@pytest.fixture(scope="session")
def qwen3_moe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with start(tiny_models.qwen3_moe(), tmp_path_factory.mktemp("qwen3_moe")) as running:
        yield running


@pytest.fixture(scope="session")
def deepseek_v3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with start(tiny_models.deepseek_v3(), tmp_path_factory.mktemp("deepseek_v3")) as running:
        yield running


@pytest.fixture
def qwen3_moe_split(tmp_path: Path) -> Iterator[Running]:
    """Two tensor parallel ranks, each with half of the experts."""
    with start(tiny_models.qwen3_moe(), tmp_path, tp=2, ep=2) as running:
        yield running
