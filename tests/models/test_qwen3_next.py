"""Tables of Qwen3-Next and Qwen3.5: refused options, rows of the input projection, and stacked experts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.config import ConfigError
from megarl.models.hf_folder import open_hf, save_hf
from megarl.models.layout_algebra import shard, split_with
from megarl.models.registry import family_of

sys.path.insert(0, str(Path(__file__).parents[1] / "megatron"))

import tiny  # noqa: E402

pytestmark = pytest.mark.alone


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3_next", {"attn_output_gate": False}, "attn_output_gate=False is not implemented"),
        ("qwen3_next", {"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid' is not implemented"),
        ("qwen3_next", {"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not implemented"),
        ("qwen3_next", {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\] is not implemented"),
        ("qwen3_next", {"norm_topk_prob": False}, "norm_topk_prob=False is not implemented"),
        ("qwen3_next", {"num_experts_per_tok": 1}, "num_experts_per_tok=1 is not implemented"),
        ("qwen3_next", {"n_shared_experts": 2}, "n_shared_experts=2 is not implemented"),
        ("qwen3_next", {"layer_types": ["full_attention", "linear_attention"]}, "layer_types=.* it would be"),
        (
            "qwen3_next",
            {"linear_num_value_heads": 6},
            "linear_num_key_heads=4 does not divide linear_num_value_heads=6",
        ),
        ("qwen3_next", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config is not implemented"),
        ("qwen3_next", {"rope_parameters": {"mrope_section": [2, 1, 1]}}, "mrope_section is not implemented"),
        ("qwen3_5_moe", {"rope_parameters": {"mrope_section": [2, 2, 2]}}, "three numbers with the sum 4"),
        ("qwen3_5", {"is_causal": False}, "is_causal=False is not implemented"),
        ("qwen3_next", {"num_nextn_predict_layers": 2}, r"num_nextn_predict_layers=2 .* \(implemented: 0, 1\)"),
        ("qwen3_5_moe", {"mtp_num_hidden_layers": 2}, r"mtp_num_hidden_layers=2 .* \(implemented: 0, 1\)"),
        ("qwen3_5", {"mtp_num_hidden_layers": True}, "mtp_num_hidden_layers"),
        (
            "qwen3_5_moe",
            {"mtp_num_hidden_layers": 1, "num_nextn_predict_layers": 0},
            "mtp_num_hidden_layers=1 and num_nextn_predict_layers=0 are two names of an option; remove one",
        ),
        ("qwen3_5_mtp", {"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings=True is not implemented"),
    ],
)
def test_refuses(name: str, changes: dict[str, Any], message: str) -> None:
    hf = tiny.HF[name] | changes
    if "rope_parameters" in changes:
        hf["rope_parameters"] = {"rope_theta": 10000.0, "partial_rotary_factor": 0.5} | changes["rope_parameters"]
    with pytest.raises(ConfigError, match=message) as error:
        family_of(hf).params(hf, 1)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe"])
def test_input_projection_has_the_rows_of_a_ranks_heads(name: str, tp: int) -> None:
    """Numbers in place of rows: transformers' splits of them give each rank's queries, keys and so on."""
    hf = tiny.HF[name]
    keys, values, key, value = 4, 8, 16, 24
    (param,) = [p for p in family_of(hf).layer(hf, 0, ()) if p.megatron.endswith("in_proj.weight")]
    sizes = [tensor.shape[0] for tensor in param.hf]
    numbers = torch.arange(sum(sizes), dtype=torch.float64)[:, None].expand(-1, 32)
    full = dict(zip([tensor.name for tensor in param.hf], numbers.split(sizes), strict=True))
    rows = [tensor[:, 0] for tensor in full.values()]
    if name == "qwen3_next":
        grouped = rows[0].view(keys, -1).split([key, key, 2 * value, 2 * value], dim=1)
        q, k, v, z = (part.reshape(-1) for part in grouped)
        b, a = (part.reshape(-1) for part in rows[1].view(keys, -1).split([2, 2], dim=1))
    else:
        q, k, v = rows[0].split([keys * key, keys * key, values * value])
        z, b, a = rows[1:]
    for rank in range(tp):
        expected = torch.cat([part.chunk(tp)[rank] for part in (q, k, v, z, b, a)])
        assert torch.equal(shard(param, full, tp, rank)[:, 0], expected)
        slots = [(row, row.slot) for row in param.by_slot()]
        assert [slot.name.rpartition("linear_attn.")[2] for _, slot in slots if slot] == [
            "in_proj_qkvz.weight",
            "in_proj_ba.weight",
        ]
        held = [
            piece.stop - piece.start
            for row, slot in slots
            if slot
            for piece in split_with(row, slot.sharding, tp, rank).slices
        ]
        assert sum(held) == len(expected)


def test_mtp_layer_has_attention_and_its_own_names() -> None:
    for name in ("qwen3_next", "qwen3_5_moe", "qwen3_5"):
        hf, key = tiny.HF[name], "num_nextn_predict_layers" if name == "qwen3_next" else "mtp_num_hidden_layers"
        family = family_of(hf)
        assert family.num_mtp_layers(hf) == family.num_mtp_layers(hf | {key: 0}) == 0
        assert family.params(hf, 1, mtp=True) == family.params(hf, 1)
        for other in ("num_nextn_predict_layers", "mtp_num_hidden_layers"):
            assert family.num_mtp_layers(hf | {other: 1}) == 1
        for layers in (2, 3):  # the last has attention, or a delta net
            changed = hf | {key: 1, "num_hidden_layers": layers, "mtp_use_dedicated_embeddings": False}
            base = {row.megatron for row in family.params(changed, 1)}
            rows = [row for row in family.params(changed, 1, mtp=True) if row.megatron not in base]
            assert {
                "mtp.layers.0.eh_proj.weight",
                "mtp.layers.0.transformer_layer.self_attention.linear_qkv.weight",
            } <= {row.megatron for row in rows}
            assert all(
                tensor.name.startswith("mtp.") and "linear_attn" not in tensor.name for row in rows for tensor in row.hf
            )
            assert all(row.slot and row.slot.is_draft and not row.more_slots for row in rows)


def test_exports_the_form_of_the_checkpoint(tmp_path: Path) -> None:
    """Bit for bit, with stacks of experts in decoder and MTP layer, trained or copied."""
    model, hf = tiny.hf_model("qwen3_5_moe_mtp"), tiny.HF["qwen3_5_moe_mtp"]
    stored = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert "mtp.layers.0.mlp.experts.gate_up_proj" in stored and "mtp.fc.weight" in stored
    (tmp_path / "source").mkdir()
    save_file(stored, tmp_path / "source" / "model.safetensors")
    (tmp_path / "source" / "config.json").write_text(json.dumps(hf))
    source, family = open_hf(tmp_path / "source"), family_of(hf)
    source.check(hf, mtp=True)
    for mtp in (True, False):
        table = family.params(hf, 1, mtp=mtp)
        trained = [(tensor.name, source.get(tensor.name)) for row in table for tensor in row.hf]
        assert any(name.startswith("mtp.") for name, _ in trained) == mtp
        save_hf(folder := tmp_path / f"out_{mtp}", trained, tmp_path / "source", table=table)
        written = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
        assert written.keys() == stored.keys()
        for name, tensor in stored.items():
            assert torch.equal(written[name], tensor), name


def test_reads_experts_that_published_checkpoints_stack(tmp_path: Path) -> None:
    model, hf = tiny.hf_model("qwen3_5_moe_mtp"), tiny.HF["qwen3_5_moe_mtp"]
    stacked = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert "model.layers.0.mlp.experts.gate_up_proj" in stacked
    save_file(stacked, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(hf))
    weights, expected = open_hf(tmp_path), tiny.split_experts(stacked)
    for row in family_of(hf).params(hf, 1, mtp=True):
        for tensor in row.hf:
            assert torch.equal(weights.get(tensor.name), expected[tensor.name]), tensor.name
