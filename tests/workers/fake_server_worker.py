"""A rollout worker on one rank with a fake server: the weight loader itself, on a correct or a modified model."""

from __future__ import annotations

import base64
import dataclasses
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megarl.config import ConfigError
from megarl.engine.sglang import sglang_loader
from megarl.environments.catalog import EnvironmentCatalog
from megarl.models.registry import family_of
from megarl.observe.clock import Clock
from megarl.parallel.ranks import Ranks
from megarl.reshard.plan.layout import EngineLayout, engine_shapes
from megarl.workers.context import Context
from megarl.workers.rollout import RolloutWorker

W13 = "model.layers.0.mlp.experts.w13_weight"


class FakeEngineModel(torch.nn.Module):
    """A module tree with an engine's tensors, by SGLang's names."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            module: torch.nn.Module = self
            *path, leaf = name.split(".")
            for step in path:
                if step not in module._modules:
                    module.add_module(step, torch.nn.Module())
                module = module.get_submodule(step)
            module.register_parameter(leaf, torch.nn.Parameter(tensor, requires_grad=False))


def correct(model: FakeEngineModel) -> None:
    pass


def halved(model: FakeEngineModel) -> None:
    """Halve w13, as with another tensor parallel size."""
    experts = model.get_submodule(W13.rpartition(".")[0])
    experts.w13_weight.data = experts.w13_weight.data[:, ::2]


def swapped(model: FakeEngineModel) -> None:
    """Swap gate and up: the shapes match, but the runner wants the rows of up first."""
    method = type("FlashInferCutlass", (), {"load_up_proj_weight_first": True})()
    model.get_submodule(W13.rpartition(".")[0]).quant_method = method


class FakeRolloutWorker(RolloutWorker):
    def __init__(self, context: Context, model: FakeEngineModel, facts: Path) -> None:
        super().__init__(context)
        facts.write_text('{"tool_call_marker": ""}')
        engine = self.engines.engine
        assert engine is not None
        self.model, self.calls = model, list[str]()
        engine._server = SimpleNamespace(poll=lambda: None)  # type: ignore[assignment]
        engine._facts = facts
        engine._call = self.call  # type: ignore[assignment, method-assign]

    def call(self, path: str, body: dict[str, Any] | None = None, **options: Any) -> None:
        self.calls.append(" ".join([path.partition("?")[0], *((body or {}).get("new_version", ""))]))
        if path == "/update_weights_from_tensor":
            (payload,) = (body or {})["serialized_named_tensors"]
            sglang_loader.load(self.model, pickle.loads(base64.b64decode(payload)))


def check_weights(config: Any, hf: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Return the startup error of each model, and whether its engine is still usable."""
    chat: Any = SimpleNamespace(select_schemas=lambda prompt: [], tools={}, catalog=EnvironmentCatalog())
    config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, tool_call_parser=""))
    shapes = engine_shapes(family_of(hf).params(hf, 1), EngineLayout(1), 0, hf["num_experts"])
    results = {}
    modifications: tuple[Callable[[FakeEngineModel], None], ...] = (correct, halved, swapped)
    for modify in modifications:
        model = FakeEngineModel({name: torch.zeros(shape) for name, shape in shapes.items()})
        modify(model)
        context = Context(config, ranks.job, hf, chat, Clock(), Path("."), {"actor": 1})
        problem = ""
        with tempfile.TemporaryDirectory() as folder:
            worker = FakeRolloutWorker(context, model, Path(folder, "facts.json"))
            try:
                worker.wait_ready()
            except ConfigError as error:
                problem = str(error)
        assert worker.engines.engine is not None
        is_usable = worker.engines.engine.is_usable
        results[modify.__name__] = {"problem": problem, "usable": is_usable, "calls": worker.calls}
    return results
