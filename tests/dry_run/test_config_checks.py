"""Configuration checks, called directly."""

from __future__ import annotations

import base64
import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE

from megarl.config import Config, ConfigError, from_dict
from megarl.controllers.controller import load_requirements
from megarl.dry_run import config_checks
from megarl.dry_run.config_checks import (
    check_data,
    check_drafts,
    check_fsdp,
    check_muon,
    check_registered_buffers,
    check_schedule,
    check_training_layout,
    mean_image_bytes,
)
from megarl.dry_run.model_folders import check_same_tokenizer
from megarl.engine.sglang.sglang_backend import SGLangBackend

pytestmark = pytest.mark.alone

HF = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 512,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 1024,
}


def speculative_config(folder: Path | None = None, number: int = 3, **rollout: Any) -> Config:
    model = {"path": str(folder)} if folder else {}
    return from_dict({"model": model, "rollout": {"num_speculative_tokens": number, "max_context": 1020, **rollout}})


def test_drafts_need_an_mtp_layer_and_its_tensors(tmp_path: Path) -> None:
    check_drafts(HF, speculative_config())
    check_drafts(HF | {"num_nextn_predict_layers": 0}, speculative_config(number=0))
    (tmp_path / "config.json").write_text(json.dumps(HF))
    save_file({"model.layers.2.mlp.gate.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"but {re.escape(str(tmp_path))} has no tensors model\.layers\.3\."):
        check_drafts(HF, speculative_config(tmp_path))
    save_file({"model.layers.3.eh_proj.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    check_drafts(HF, speculative_config(tmp_path))


@pytest.mark.parametrize(
    ("changes", "rollout", "message"),
    [
        ({"num_nextn_predict_layers": 2}, {}, "this DeepseekV3ForCausalLM has 2; set it to 0"),
        (
            {},
            {"max_context": 1021},
            "rollout.num_speculative_tokens=3 needs 1025 positions.* the model has 1024; lower",
        ),
    ],
)
def test_invalid_drafts_raise(changes: dict[str, Any], rollout: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_drafts(HF | changes, speculative_config(**rollout))


def test_drafts_with_attention_data_parallelism_raise() -> None:
    config = speculative_config(sglang={"attn_dp_size": 2})
    with pytest.raises(ConfigError, match=r"num_speculative_tokens=3 with rollout.sglang.attn_dp_size: not tested"):
        SGLangBackend().check(HF, config)


def check_and_warn(algorithm: str, train: Path, held_out: Path, **data: Any) -> list[str]:
    files = {"train": str(train), "eval": str(held_out), **data}
    tree = {"algorithm": algorithm, "run": {"eval_every": 1}, "data": files}
    config, warnings = from_dict(tree), list[str]()
    check_data(config, load_requirements(config), True, warnings)
    return warnings


@pytest.mark.parametrize(
    ("algorithm", "row", "other_row"),
    [
        ("grpo", {"prompt": "1+1?", "ground_truth": 2}, {"prompt": "2+2?", "ground_truth": 4}),
        ("sft", {"prompt": "x", "response": "y"}, {"prompt": "x", "response": "z"}),
        (
            "reward_model",
            {"prompt": "x", "chosen": "y", "rejected": "n"},
            {"prompt": "x", "chosen": "z", "rejected": "n"},
        ),
    ],
)
def test_warns_of_evaluation_on_training_data(
    algorithm: str, row: dict[str, Any], other_row: dict[str, Any], tmp_path: Path
) -> None:
    train, same_file, new_file = tmp_path / "train.jsonl", tmp_path / "same.jsonl", tmp_path / "new.jsonl"
    train.write_text(json.dumps({**row, "id": "a"}) + "\n")
    same_file.write_text(json.dumps({**other_row, "id": "b"}) + "\n" + json.dumps({**row, "id": "c"}) + "\n")
    new_file.write_text(json.dumps({**other_row, "id": "a"}) + "\n")
    link = tmp_path / "link.jsonl"
    link.symlink_to(train)
    for held_out in (train, link):
        (line,) = check_and_warn(algorithm, train, held_out)
        assert line.startswith(f"data.eval={held_out} is data.train={train}: evaluating on training data")
    (line,) = check_and_warn(algorithm, train, same_file)
    assert line.startswith("data.eval: 1 of the first 2 rows are also in data.train, such as ")
    assert check_and_warn(algorithm, train, new_file) == []


def test_warns_of_an_environment_column_without_environments(tmp_path: Path) -> None:
    file, other_row = tmp_path / "train.jsonl", tmp_path / "eval.jsonl"
    file.write_text('{"prompt": "x", "ground_truth": 1}\n{"prompt": "y", "ground_truth": 1, "environment": "Guess"}\n')
    other_row.write_text('{"prompt": "z", "ground_truth": 1}\n')
    (line,) = check_and_warn("grpo", file, other_row)
    assert line == (
        f"{file}, train-1: the column 'environment' is 'Guess', but rollout.environments is empty, so no environment "
        "is used; set it, or omit the column"
    )


def test_registered_buffers_need_all_ranks_of_trained_roles_only() -> None:
    """Only gradient buffers are registered, at whose creation Megatron waits for the whole job."""

    def check(**placement: str) -> None:
        tree = {"algorithm": "ppo", "parallel": {"world_size": 4}, "train": {"ddp": {"nccl_ub": True}}}
        config = from_dict({**tree, "placement": placement})
        check_registered_buffers(config, load_requirements(config))

    check(reference="0-1", rollout="2-3")
    for trained in ("actor", "critic"):
        with pytest.raises(ConfigError, match=rf"nccl_ub: Megatron waits .*, but placement has the {trained} on 0-1"):
            check(**{"critic": "all", trained: "0-1"})


def write_tokenizer(folder: Path, merges: list[tuple[str, str]]) -> str:
    vocabulary = {text: number for number, text in enumerate(("a", "b", "c", "ab", "bc", "abc"))}
    folder.mkdir()
    Tokenizer(BPE(vocabulary, merges)).save(str(folder / "tokenizer.json"))
    return str(folder)


def test_models_of_the_policys_tokens_merge_as_it_does(tmp_path: Path) -> None:
    """With equal tokens, `abc` is `ab c` or `a bc` before it is `abc`, so that `abb` or `bbc` are written otherwise."""
    merges = [("a", "b"), ("b", "c"), ("ab", "c")]
    config = from_dict({"model": {"path": write_tokenizer(tmp_path / "policy", merges)}})
    check_same_tokenizer(config, "source", write_tokenizer(tmp_path / "equal", merges), "it must")
    other = write_tokenizer(tmp_path / "other", [("a", "b"), ("b", "c"), ("a", "bc")])
    message = r"source has .* tokens are equal, but merge 2 is 'a bc', the policy's 'ab c'; it must"
    with pytest.raises(ConfigError, match=message):
        check_same_tokenizer(config, "source", other, "it must")
    with pytest.raises(ConfigError, match=r"equal, but merge 2 is missing, the policy's 'ab c'; it must"):
        check_same_tokenizer(config, "source", write_tokenizer(tmp_path / "fewer", merges[:2]), "it must")
    (tmp_path / "text").mkdir()
    (tmp_path / "text/vocab.json").write_text(json.dumps({"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4, "abc": 5}))
    (tmp_path / "text/merges.txt").write_text("#version: 0.2\na b\nb c\nab c\n")
    check_same_tokenizer(config, "source", str(tmp_path / "text"), "it must")
    (tmp_path / "text/merges.txt").write_text("#version: 0.2\na b\nbc\nab c\n")
    with pytest.raises(ConfigError, match=r"text: the merge 'bc' is not a pair; restore its tokenizer"):
        check_same_tokenizer(config, "source", str(tmp_path / "text"), "it must")


def test_mean_size_of_images(tmp_path: Path) -> None:
    """Two images of 3 and 5 bytes in a row, none in the other."""
    images = [{"bytes": base64.b64encode(data).decode()} for data in (b"abc", b"abcde")]
    rows = [{"prompt": "<image><image>", "images": images, "label": 1}, {"prompt": "x", "label": 1}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert mean_image_bytes(from_dict({"data": {"train": [str(tmp_path / "a.jsonl"), "no.jsonl"]}})) == 4
    assert mean_image_bytes(from_dict({})) == 0


def test_nan_in_the_curriculum_column_raises(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text(
        '{"prompt": "x", "ground_truth": 1, "level": NaN}\n{"prompt": "y", "ground_truth": 1, "level": 1}\n'
    )
    with pytest.raises(ConfigError, match="train.jsonl:1: 'level' is NaN"):
        check_and_warn("grpo", file, file, curriculum_key="level")


def test_muon_is_refused_for_experts_with_biases() -> None:
    """Of both roles, with the role's key; adapters have no biases."""
    model = {**tiny.HF["gpt_oss"]}
    muon: dict[str, Any] = {"type": "muon"}
    with pytest.raises(ConfigError, match=r"^actor_optimizer.type=muon, but the model's experts have biases"):
        check_muon(model, from_dict({"actor_optimizer": muon}), "actor")
    with pytest.raises(ConfigError, match=r"^critic.optimizer.type=muon, but"):
        check_muon(model, from_dict({"critic": {"optimizer": muon}}), "critic")
    check_muon(model, from_dict({"critic": {"optimizer": muon}}), "actor")
    check_muon(model, from_dict({"actor_optimizer": muon, "lora": {"rank": 4}}), "actor")
    check_muon(tiny.HF["qwen3_moe"], from_dict({"actor_optimizer": muon}), "actor")


def test_fsdp_is_refused_where_stages_share_the_embedding() -> None:
    tree: dict[str, Any] = {"train": {"fsdp": True}, "parallel": {"world_size": 4, "pp": 2}}
    with pytest.raises(ConfigError, match=r"^train.fsdp with parallel.pp=2 of the actor, whose output layer uses"):
        check_fsdp(tiny.HF["qwen2"], from_dict(tree), "actor")
    check_fsdp(tiny.HF["qwen2"], from_dict(tree), "critic")  # which has a value head instead
    check_fsdp(tiny.HF["llama"], from_dict(tree), "actor")
    check_fsdp(tiny.HF["qwen2"], from_dict(tree | {"parallel": {"world_size": 4}}), "actor")


def test_muon_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_checks, "find_spec", lambda name: None)
    model, adapters = tiny.HF["qwen3_moe"], {"lora": {"rank": 4}}
    with pytest.raises(ConfigError, match=r"^actor_optimizer.type=muon: the package .* run launch/install.sh"):
        check_muon(model, from_dict({"actor_optimizer": {"type": "muon"}, **adapters}), "actor")
    check_muon(model, from_dict({}), "actor")


def test_settings_of_muon_need_muon() -> None:
    """Of each role, by its own key; a role may change the type that it inherits."""
    algorithm = "megarl.controllers.policies:PPOAndReMaxController"
    muon: dict[str, Any] = {"muon": {"momentum": 0.9}}
    cases: list[tuple[str, dict[str, Any]]] = [
        ("actor_optimizer", {"actor_optimizer": muon}),
        ("critic.optimizer", {"critic": {"optimizer": muon}}),
        ("roles.actor_b.optimizer", {"roles": {"actor_b": {"optimizer": muon}}}),
        ("", {"actor_optimizer": muon | {"type": "muon"}, "roles": {"actor_b": {"optimizer": {"type": "adam"}}}}),
    ]
    for key, tree in cases:
        config = from_dict({"algorithm": algorithm, **tree})
        message = f"^{key}.muon with {key}.type=adam: .* set the second to muon"
        with pytest.raises(ConfigError, match=message) if key else nullcontext():
            check_schedule(config, load_requirements(config))


@pytest.mark.parametrize(
    "megatron, message",
    [
        ({"cp_comm_type": "a2a+p2p"}, r"cp_comm_type=a2a\+p2p divides context parallel groups in two levels"),
        ({"overlap_moe_expert_parallel_comm": True}, "layers of two micro-batches in turn, whose sizes differ"),
        ({"hybrid_context_parallel": True}, "hybrid_context_parallel has its own key: set parallel.dynamic_cp"),
    ],
)
def test_settings_that_fix_the_context_parallel_size_are_refused(megatron: dict[str, Any], message: str) -> None:
    parallel = {"world_size": 4, "cp": 4, "dynamic_cp": True}
    check_training_layout(tiny.HF["qwen3_moe"], from_dict({"parallel": parallel}))
    with pytest.raises(ConfigError, match=message):
        check_training_layout(tiny.HF["qwen3_moe"], from_dict({"parallel": parallel, "model": {"megatron": megatron}}))


def test_warns_of_dynamic_sizes_without_context_parallelism() -> None:
    warnings: list[str] = []
    config = from_dict({"parallel": {"dynamic_cp": True}, "train": {"max_tokens_per_gpu": 4096}})
    config_checks.check_lengths(tiny.HF["qwen3_moe"] | {"max_position_embeddings": 32_768}, config, warnings)
    assert any("parallel.dynamic_cp=true has no effect, as parallel.cp=1" in line for line in warnings)
