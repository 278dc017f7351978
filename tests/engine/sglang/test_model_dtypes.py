"""The dtypes of SGLang's tensors in bfloat16, for each family, with a config.json that says float32.

SGLang's models take some dtypes from config.json and others from the engine; the layout tables know one of each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_models
from engine_config import make_config

from megarl.engine.sglang.sglang_engine import SGLangEngine
from megarl.models.registry import family_of, load_hf_config
from megarl.reshard.plan.layout import EngineLayout, find_engine_problems, is_shared_expert

ROOT = Path(__file__).resolve().parents[3]
FAMILIES = [name for name in tiny.HF if f"{name}_mtp" not in tiny.HF and name not in ("kimi_k2", "qwen3_yarn")]
"""Without those whose tensors another one has, too."""


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[dict[str, Any]]]]:
    """Each family's folder, and the tensors of SGLang's model and draft model, see `model_dtypes.py`."""
    folder, orders, environment = tmp_path_factory.mktemp("dtypes"), [], {}
    for name in FAMILIES:
        model = tiny_models.of_family(name)
        path = tiny_models.save(model, folder / name)
        assert json.loads((path / "config.json").read_text())["dtype"] == "float32"
        drafts = int(tiny_models.has_mtp(model))
        sglang = {"trust_remote_code": True} if name == "ling2" else {}  # the class of config.json is in the folder
        config = make_config(path, folder / "run", num_speculative_tokens=drafts, sglang=sglang)
        launch = SGLangEngine(replace(config, model=replace(config.model, dtype="bfloat16")), threads=1)._make_launch()
        orders.append([name, launch.settings["server_args"]])
        environment = launch.environment
    done = subprocess.run(
        [sys.executable, "-W", "ignore", Path(__file__).with_name("model_dtypes.py")],
        input=json.dumps(orders),
        env={**os.environ, **environment, "PYTHONPATH": f"{environment['PYTHONPATH']}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    built = dict(map(json.loads, lines))
    assert built.keys() == set(FAMILIES), done.stderr[-5000:]
    return {name: (folder / name, found) for name, found in built.items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_engine_has_the_dtypes_that_are_sent(name: str, tensors: dict[str, tuple[Path, list[dict[str, Any]]]]) -> None:
    folder, models = tensors[name]
    hf = load_hf_config(folder)
    family, has_draft = family_of(hf), len(models) > 1
    table = [param for param in family.params(hf, 1, mtp=has_draft) if param.slot]
    has_shared_experts = any(is_shared_expert(param.slot.name) for param in table if param.slot)
    fuses = has_shared_experts and not any(map(is_shared_expert, models[0]))
    layout = EngineLayout(1, fuse_shared=fuses, draft=has_draft)
    for is_draft, found in enumerate(models):
        rows = [param for param in table if param.slot and param.slot.is_draft == is_draft]
        problems = find_engine_problems(found, rows, layout, 0, family.num_experts(hf), "bf16")
        assert rows and problems == []
