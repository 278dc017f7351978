"""Ling 2's config.json: transformers has no class for it, so each key that matters is required, honoured or refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config import ConfigError
from megarl.models.layout_algebra import local_shape, shard, unshard
from megarl.models.registry import family_of, load_hf_config

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/megatron"))

import tiny  # noqa: E402

pytestmark = pytest.mark.alone

PUBLISHED = load_hf_config(ROOT / "configs/models/ling_flash_2.0.json")
INERT = {"eos_token_id", "pad_token_id", "torch_dtype", "model_type", "num_nextn_predict_layers", "use_cache"}
OPTIONAL = {
    *("attention_dropout", "embedding_dropout", "output_dropout", "head_dim", "hidden_act", "initializer_range"),
    *("moe_shared_expert_intermediate_size", "norm_topk_prob", "rope_scaling", "router_dtype", "score_function"),
    *("tie_word_embeddings", "use_rmsnorm", "architectures"),
}
"""Keys that may be absent: the published class has the same values as the family then."""


def read(hf: dict[str, Any]) -> tuple[Any, ...]:
    family = family_of(hf)
    return family.params(hf, 1, max_experts=2), family.megatron_config(hf), family.gpt_kwargs(hf), family.extras(hf)


def test_reads_the_published_config() -> None:
    settings = family_of(PUBLISHED).megatron_config(PUBLISHED)
    assert settings["moe_layer_freq"] == [0] + [1] * 31 and settings["moe_shared_expert_intermediate_size"] == 1024
    assert (settings["moe_router_num_groups"], settings["moe_router_group_topk"]) == (8, 4)
    assert settings["moe_router_topk"] // settings["moe_router_group_topk"] == 2  # groups rank by their best two
    assert family_of(PUBLISHED).gpt_kwargs(PUBLISHED)["rotary_percent"] == 0.5


@pytest.mark.parametrize("key", sorted(PUBLISHED.keys() - INERT - OPTIONAL))
def test_key_is_required(key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        read({name: value for name, value in PUBLISHED.items() if name != key})


@pytest.mark.parametrize("key", sorted(PUBLISHED.keys() - INERT - {"architectures"}))
def test_changed_key_is_honoured_or_refused(key: str) -> None:
    value = PUBLISHED[key]
    if isinstance(value, bool):
        changed: Any = not value
    elif isinstance(value, int | float):
        changed = 2 * value + 2
    else:
        changed = {"type": "yarn", "factor": 2.0} if value is None else "another"
    try:
        assert read(PUBLISHED | {key: changed}) != read(PUBLISHED)
    except ConfigError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_qk_norm": False}, "use_qk_norm=False is not implemented"),
        ({"norm_head": True}, "norm_head=True is not implemented"),
        ({"score_function": "softmax"}, "score_function='softmax' is not implemented"),
        ({"moe_router_enable_expert_bias": False}, "moe_router_enable_expert_bias=False is not implemented"),
        ({"router_type": "MultiRouter"}, "router_type='MultiRouter' is not implemented"),
        ({"router_dtype": "bf16"}, "router_dtype='bf16' is not implemented"),
        ({"moe_shared_expert_intermediate_size": 512}, "moe_shared_expert_intermediate_size=512 is not implemented"),
        ({"n_group": 7}, "num_experts=256 in n_group=7 groups"),
    ],
)
def test_refuses_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(PUBLISHED | changes)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_table_lists_the_tensors_of_the_reference() -> None:
    hf = tiny.HF["ling2"]
    table = {tensor.name: tensor.shape for param in family_of(hf).params(hf, 2) for tensor in param.hf}
    assert table == {name: tuple(t.shape) for name, t in tiny.hf_class(hf)(tiny.hf_config(hf)).state_dict().items()}


def test_fused_query_key_value_is_sharded_by_groups() -> None:
    """Megatron's ranks hold [q q k v] of each of their groups, the engine's [q q | k | v]."""
    hf = tiny.HF["ling2"]
    (param,) = [
        p for p in family_of(hf).params(hf, 2) if p.megatron == "decoder.layers.1.self_attention.linear_qkv.weight"
    ]
    (tensor,) = param.hf
    assert tensor.shape == (8 * 16, 32)
    full = {tensor.name: torch.arange(8 * 16 * 32).view(8 * 16, 32)}
    heads = full[tensor.name].unflatten(0, (8, 16))  # q0 q1 q2 q3 k0 k1 v0 v1
    shards = [shard(param, full, 2, rank) for rank in (0, 1)]
    assert torch.equal(shards[1], heads[[2, 3, 5, 7]].flatten(0, 1)) and local_shape(param, 2, 1) == (4 * 16, 32)
    assert torch.equal(unshard(param, shards)[tensor.name], full[tensor.name])
    assert param.slot is not None
    dim, slices = param.slot.sharding.split([tensor.shape], 4, 1)  # two ranks share a head of keys and values
    assert dim == 0 and [(s.start, s.stop) for s in slices] == [(16, 32), (64, 80), (96, 112)]
