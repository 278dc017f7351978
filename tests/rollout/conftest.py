"""One real engine per model, shared by all tests of a session."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import tiny_models  # noqa: E402
from engine_config import make_config  # noqa: E402
from transformers import PreTrainedModel  # noqa: E402

from megarl.config import Config  # noqa: E402
from megarl.engine.engine_host import HOST_VARIABLE  # noqa: E402
from megarl.engine.sglang_engine import Engine  # noqa: E402


@dataclass(frozen=True)
class Running:
    """An engine and the model that it started with."""

    engine: Engine
    config: Config
    model: PreTrainedModel
    folder: Path


@contextmanager
def start(host: str, model: PreTrainedModel, folder: Path, **rollout: Any) -> Iterator[Running]:
    path = tiny_models.save(model, folder / "model")
    config = make_config(path, folder / "run", **rollout)
    records = replace(config.train, routing_replay=hasattr(model.config, "num_experts_per_tok"))
    config = replace(config, train=records)
    engine = Engine(config, threads=1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(HOST_VARIABLE, host)
        engine.start()
    try:
        engine.wait_ready()
        yield Running(engine, config, model, path)
    finally:
        engine.shutdown()


@pytest.fixture(scope="session")
def qwen3_moe(host: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with start(host, tiny_models.qwen3_moe(), tmp_path_factory.mktemp("qwen3_moe")) as running:
        yield running


@pytest.fixture(scope="session")
def deepseek_v3(host: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with start(host, tiny_models.deepseek_v3(), tmp_path_factory.mktemp("deepseek_v3")) as running:
        yield running


@pytest.fixture
def qwen3_moe_split(host: str, tmp_path: Path) -> Iterator[Running]:
    """Two tensor parallel ranks, each with half of the experts."""
    with start(host, tiny_models.qwen3_moe(), tmp_path, tp=2, ep=2) as running:
        yield running
