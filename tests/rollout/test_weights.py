from pathlib import Path

import torch
from safetensors.torch import save_file

from megarl.rollout import weights

Q, KV = "model.layers.{}.self_attn.q_a_proj.weight", "model.layers.{}.self_attn.kv_a_proj_with_mqa.weight"


def buckets_of(*names: list[str]) -> list[list[tuple[str, torch.Tensor]]]:
    return [[(name, torch.zeros(1)) for name in bucket] for bucket in names]


def test_halves_of_a_fused_pair_come_in_one_call() -> None:
    sent = list(weights.with_partners(buckets_of(["a", Q.format(0)], [KV.format(1), "b"], [Q.format(1), KV.format(0)])))
    assert [[name for name, _ in bucket] for bucket in sent] == [
        ["a"],
        ["b"],
        [KV.format(1), Q.format(1), Q.format(0), KV.format(0)],
    ]


def test_a_model_without_the_other_half_loses_nothing() -> None:
    sent = list(weights.with_partners(buckets_of(["a"], [KV.format(0)], [KV.format(1)])))
    assert sorted(name for bucket in sent for name, _ in bucket) == sorted(["a", KV.format(0), KV.format(1)])


def test_flatten_keeps_names_values_and_dtypes_in_one_buffer_each() -> None:
    tensors = [("a", torch.randn(2, 3)), ("b", torch.randn(4).bfloat16()), ("c", torch.randn(3, 2).t())]
    flat = dict(weights.flatten(tensors))
    assert set(flat) == {"a", "b", "c"}
    assert all(torch.equal(flat[name], tensor) and flat[name].dtype == tensor.dtype for name, tensor in tensors)
    assert flat["a"].untyped_storage().data_ptr() == flat["c"].untyped_storage().data_ptr()


def test_checkpoint_shapes_of_a_sharded_folder(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "model-00001-of-00002.safetensors", {"format": "pt"})
    save_file({"b": torch.zeros(2, 3)}, tmp_path / "model-00002-of-00002.safetensors")
    assert weights.checkpoint_shapes(tmp_path) == {"a": (2,), "b": (2, 3)}
    assert weights.checkpoint_shapes(tmp_path / "nowhere") == {}


HELD: weights.Shapes = {"a": (2,), "model.layers.0.w": (1,), "model.layers.1.w": (1,), "a_scale_inv": (1,)}


def test_misfit() -> None:
    assert weights.misfit([("a", torch.zeros(2)), ("lm_head.weight", torch.zeros(5))], HELD) == ""
    assert weights.misfit([("a", torch.zeros(2)), ("b", torch.zeros(2))], HELD) == "tensor b is unknown"
    assert weights.misfit([("a", torch.zeros(3))], HELD) == "tensor a has the shape (3,), not (2,)"


def test_missing() -> None:
    """Layer 1 is past the model's layers, as those for multi-token prediction are."""
    assert weights.missing({"a", "model.layers.0.w"}, HELD, num_layers=1) == ""
    assert weights.missing({"a"}, HELD, num_layers=1) == "1 tensors are missing, such as model.layers.0.w"
    assert "model.layers.1.w" in weights.missing({"a", "model.layers.0.w"}, HELD, num_layers=2)
