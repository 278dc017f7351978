"""The public `tinker` SDK and the cookbook's recipe against the server, unmodified.

They are in an environment of their own, whose interpreter MEGARL_TINKER names, as in .ci/run.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_models
from serve_jobs import serve
from training_run import ROOT

PYTHON = os.environ.get("MEGARL_TINKER", "")
KEY = "tml-secret"

pytestmark = pytest.mark.skipif(not PYTHON, reason="MEGARL_TINKER does not name an environment with the tinker SDK")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tiny_models.qwen3_moe(), tmp_path_factory.mktemp("sdk") / "model")


@pytest.fixture(scope="module")
def server(host: str, model: Path) -> Iterator[str]:
    settings = ("parallel.world_size=2", "parallel.ep=2", "lora.rank=4")
    aliases = "options.loss_aliases={stable_reinforce: importance_sampling}"
    with serve(host, model, model.with_name("run"), *settings, aliases, key=KEY) as url:
        yield url


def run(command: list[str], **variables: str) -> str:
    environment = {**os.environ, "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1", **variables}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [PYTHON, "-W", "ignore", *command],
        cwd=ROOT / "tests",
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def test_the_sdk_trains_samples_saves_and_loads(server: str, model: Path) -> None:
    result = json.loads(run(["serve/sdk_script.py", server, str(model), "4"]).splitlines()[-1])
    assert result["models"] == [str(model)] and result["lora_rank"] == 4
    first, second, third = result["losses"]
    assert first > second > third > 0 and result["grad_norm"] > 0
    assert result["custom"] == 3.0
    assert result["gap"] < 1e-4 and result["named"] < 1e-4
    assert result["sampled"] == [[6, 6, "length"]] * 2
    assert result["topk"] == [None, 2, 2] and result["reloaded"] is True
    assert "1000000 is no token id" in result["refused"]
    assert "optim_step without a gradient" in result["failed"]
    assert result["checkpoints"] == ["sampler_weights/named", "weights/first"] and result["left"] == ["weights/first"]
    assert "the API key is wrong" in result["key"]


def test_the_cookbooks_rl_recipe_runs(server: str, model: Path, tmp_path: Path) -> None:
    """Arithmetic by RL, with random weights, so that no answer is right: two steps, a checkpoint and the final one.

    Its loss is the cookbook's default, in place of which the server computes another.
    """
    settings = {
        "env": "arithmetic",
        "model_name": model,
        "lora_rank": 4,
        "renderer_name": "role_colon",
        "group_size": 4,
        "groups_per_batch": 4,
        "learning_rate": 1e-3,
        "max_tokens": 5,
        "log_path": tmp_path / "log",
        "max_steps": 2,
        "eval_every": 0,
        "save_every": 1,
    }
    recipe = ["-m", "tinker_cookbook.recipes.math_rl.train", *(f"{name}={value}" for name, value in settings.items())]
    run(recipe, TINKER_API_KEY=KEY, TINKER_BASE_URL=server)
    lines = [json.loads(line) for line in (tmp_path / "log/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "optim/kl_sample_train_v1" in line]
    assert len(steps) == 2 and all(abs(step["optim/kl_sample_train_v1"]) < 1e-3 for step in steps)
    names = [json.loads(line)["name"] for line in (tmp_path / "log/checkpoints.jsonl").read_text().splitlines()]
    assert names == ["000001", "000002", "final"]
