"""A whole run of a tiny gpt-oss: from an MXFP4 folder, in the harmony format, with real Megatron and SGLang."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from mxfp4_folder import quantise_folder
from reasoning_templates import OTHER_FORMATS
from safetensors.torch import load_file
from training_run import make_folder, read_steps, train


@pytest.mark.nightly
def test_grpo_from_an_mxfp4_folder(tmp_path: Path, host: str) -> None:
    """The entropy bonus moves the policy whatever the rewards. The trainer is tensor and expert parallel, the engine
    tensor parallel. The calculator's calls are parsed by SGLang's parser, which the run checks when it starts."""
    import tiny_models

    folder = make_folder(tmp_path / "quickstart", "qwen3_moe")
    model = tiny_models.save(tiny_models.gpt_oss(), tmp_path / "model")
    meaning = quantise_folder(model)
    tokenizer = OTHER_FORMATS["harmony"].tokenizer()
    tokenizer.save_pretrained(model)
    eos = tokenizer.convert_tokens_to_ids(["<|return|>", "<|call|>"])
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    overrides = [
        f"model.path={model}",
        *("algorithm=grpo", "kl.apply_to=none", "loss.entropy_coef=0.1"),
        *("run.num_rollout=2", "run.save_every=0", "run.export=true"),
        *("rollout.tp=2", "rollout.tool_call_parser=", "rollout.max_new_tokens=24", "train.routing_replay=true"),
        *("actor_optimizer.lr=0.01", "actor_optimizer.schedule=constant"),
    ]
    train(folder, tmp_path / "run", *overrides, host=host)
    rows = read_steps(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    assert max(row["rollout/logprob_diff"] for row in rows) <= 1e-4  # the maximum: replayed experts cannot tie
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    exported = load_file(tmp_path / "run" / "export" / "model.safetensors")
    assert exported.keys() == meaning.keys()
    assert all(exported[name].shape == tensor.shape for name, tensor in meaning.items())
    moved = {name for name, tensor in meaning.items() if not torch.equal(exported[name].float(), tensor.float())}
    assert moved == meaning.keys()
    assert "quantization_config" not in json.loads((tmp_path / "run" / "export" / "config.json").read_text())
