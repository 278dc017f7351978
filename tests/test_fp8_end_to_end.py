"""The job of slurm/ppo_moe.sh at tiny size: PPO of a DeepSeek-V3 from an FP8 folder, with FP8 engines, in conversations
that call a Python session in the sandbox."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from fp8_folder import quantise_folder
from safetensors.torch import load_file
from training_run import make_folder, read_steps, train

from megarl.config import RolloutConfig
from megarl.environments.catalog import load_catalog
from megarl.observe.rollout_log import read_rollouts

sys.path.insert(0, str(Path(__file__).parent / "sandbox"))
from sync_sandbox import needs_bubblewrap

SIZES: dict[str, Any] = {
    # SGLang's FP8 needs merged matrices, and experts, in whole blocks of 128.
    **{"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 2},
    **{"q_lora_rank": 128, "kv_lora_rank": 128, "n_routed_experts": 4, "n_group": 2, "topk_group": 1},
}
PYTHON = "megarl.environments.ready.python:Python"


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.nightly
@needs_bubblewrap
def test_ppo_of_an_fp8_deepseek_with_python(tmp_path: Path, host: str) -> None:
    quickstart = make_folder(tmp_path / "quickstart", "qwen3_moe")  # its data and rewards are not used
    model = tiny_models.save(tiny_models.deepseek_v3(**SIZES), tmp_path / "bf16")
    question = {"role": "user", "content": "What is 61+17?"}
    call = {"type": "function", "function": {"name": "python", "arguments": {"code": "61+17"}}}
    lesson = [
        question,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "78"},
        {"role": "assistant", "content": "The answer is 78."},
    ]
    (environment,) = load_catalog(RolloutConfig(environments=(PYTHON,))).environments.values()
    lessons = write_rows(tmp_path / "sft.jsonl", [{"messages": lesson, "tools": list(environment.schemas)}] * 16)
    prompts = write_rows(tmp_path / "train.jsonl", [{"prompt": [question], "ground_truth": 78}] * 8)
    common = ["run.save_every=0", "model.dtype=bfloat16", "actor_optimizer.schedule=constant"]
    common += ["rollout.max_context=512", "rollout.max_new_tokens=80", "rollout.max_turns=3"]
    single = ["parallel.world_size=1", "parallel.tp=1", "parallel.ep=1", "run.num_update=1", "run.ppo_epochs=1"]
    warm_up = [f"model.path={model}", f"data.train={lessons}", "run.num_rollout=30", "data.prompts_per_step=16"]
    train(quickstart, tmp_path / "sft", "algorithm=sft", *common, *single, *warm_up, "actor_optimizer.lr=0.005")
    before = quantise_folder(tmp_path / "sft" / "export", tmp_path / "fp8")
    ppo = [f"model.path={tmp_path}/fp8", f"data.train={prompts}", "run.num_rollout=2", "rollout.temperature=1.0"]
    ppo += ["rollout.tools=[]", f"rollout.environments=[{PYTHON}]", "rollout.verify_weights_every=1"]
    ppo += ["reward.functions=[megarl.rewards.arithmetic:arithmetic]"]
    ppo += ["loss.entropy_coef=0.1"]  # moves the policy also where all rewards are equal
    # Small steps: rounding to FP8 moves a tiny policy far as soon as its weights leave their grid.
    ppo += ["actor_optimizer.lr=0.0001", "actor_optimizer.warmup_fraction=0"]
    train(quickstart, tmp_path / "run", *common, *ppo, host=host)
    rows = read_steps(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    # Noise of bf16, and after the first update of the rounding to FP8, which the trainer does not do: it moves a few
    # tokens far. Weights themselves are compared by `verify_weights_every`.
    for row, largest in zip(rows, (0.02, 0.5), strict=True):
        assert row["rollout/logprob_diff_mean"] < largest and row["rollout/aborted_frac"] == 0
        assert row["actor/grad_norm"] > 0 and row["critic/grad_norm"] > 0
    rollouts = [rollout for step in (1, 2) for rollout in read_rollouts(tmp_path / "run", step)]
    solved = [rollout for rollout in rollouts if rollout.tool_calls and not rollout.tool_errors]
    results = [item["content"] for rollout in solved for item in rollout.messages if item["role"] == "tool"]
    assert results and "78" in results, "the sandbox has computed"
    after = load_file(tmp_path / "run" / "export" / "model.safetensors")
    assert after.keys() == before.keys()
    matrices = [name for name in before if name.endswith("_proj.weight")]
    moved = [name for name in matrices if not torch.equal(after[name], before[name])]
    assert {name for name in matrices if ".mlp.experts." not in name} <= set(moved)
    assert any(".mlp.experts." in name for name in moved)  # of which some may have had no token
