"""Start a real engine on a tiny model. Fixtures in `conftest.py` share one engine per model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from engine_config import make_config
from transformers import PreTrainedModel

from megarl.config import Config, LoraConfig
from megarl.engine.engine_backends import engine_backend
from megarl.engine.engine_host import HOST_VARIABLE
from megarl.engine.http_engine import HTTPEngine


@dataclass(frozen=True)
class RunningEngine:
    """An engine and the model that it started with."""

    engine: HTTPEngine
    config: Config
    model: PreTrainedModel
    folder: Path


@contextmanager
def start_engine(
    host: str, model: PreTrainedModel, folder: Path, lora: LoraConfig | None = None, **rollout: Any
) -> Iterator[RunningEngine]:
    path = tiny_models.save(model, folder / "model")
    config = make_config(path, folder / "run", **rollout)
    records = replace(
        config.train,
        routing_replay=hasattr(model.config, "num_experts_per_tok"),
        sparse_index_replay=hasattr(model.config, "index_topk"),
    )
    config = replace(config, train=records, lora=lora or config.lora)
    engine = engine_backend(config).make_engine(config, threads=1)
    assert isinstance(engine, HTTPEngine)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv(HOST_VARIABLE, host)
        engine.start()
    try:
        engine.wait_ready()
        yield RunningEngine(engine, config, model, path)
    finally:
        engine.shutdown()
