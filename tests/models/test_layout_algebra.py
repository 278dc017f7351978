"""Tensor parallel sharding rules on numbers written out by hand, then inverses and coverage over random sizes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config import ConfigError
from megarl.models.layout_algebra import (
    PADDING,
    Dim0Sharding,
    Dim1Sharding,
    HFTensor,
    Param,
    QKVSharding,
    Replicated,
    Sharding,
    ShardSpec,
    Slice,
    VocabSharding,
    local_shape,
    padded_vocab,
    shard,
    split_param,
    unshard,
)

pytestmark = pytest.mark.alone


def param(sharding: Sharding, **tensors: tuple[int, ...]) -> Param:
    return Param("megatron.name", tuple(HFTensor(name, shape) for name, shape in tensors.items()), sharding)


def column_weight(*values: float) -> torch.Tensor:
    """Return a [n, 1] weight with one distinct number per row."""
    return torch.tensor(values).unsqueeze(1)


def test_replicated_is_whole_on_every_rank() -> None:
    norm, values = param(Replicated(), a=(3,)), {"a": torch.tensor([1.0, 2.0, 3.0])}
    assert [shard(norm, values, 2, r).tolist() for r in (0, 1)] == [[1, 2, 3], [1, 2, 3]]


def test_dim0_sharding_takes_blocks_of_rows() -> None:
    # 2 heads of 3 rows each
    heads, values = param(Dim0Sharding(2, "heads"), a=(6, 1)), {"a": column_weight(0, 1, 2, 3, 4, 5)}
    assert shard(heads, values, 2, 0).flatten().tolist() == [0, 1, 2]
    assert shard(heads, values, 2, 1).flatten().tolist() == [3, 4, 5]


def test_dim1_sharding_takes_blocks_of_columns() -> None:
    output, values = param(Dim1Sharding(4, "heads"), a=(2, 4)), {"a": torch.tensor([[0, 1, 2, 3], [10, 11, 12, 13]])}
    assert shard(output, values, 2, 0).tolist() == [[0, 1], [10, 11]]
    assert shard(output, values, 2, 1).tolist() == [[2, 3], [12, 13]]


def test_qkv_interleaves_by_query_group() -> None:
    # 2 groups; each has 2 query heads, one key and one value head, all of size 1
    qkv = param(QKVSharding(2), q=(4, 1), k=(2, 1), v=(2, 1))
    values = {"q": column_weight(0, 1, 2, 3), "k": column_weight(10, 11), "v": column_weight(20, 21)}
    assert shard(qkv, values, 1, 0).flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert shard(qkv, values, 2, 0).flatten().tolist() == [0, 1, 10, 20]
    assert shard(qkv, values, 2, 1).flatten().tolist() == [2, 3, 11, 21]
    biases = param(QKVSharding(2), q=(4,), k=(2,), v=(2,))
    assert shard(biases, {name: x.flatten() for name, x in values.items()}, 2, 1).tolist() == [2, 3, 11, 21]


def test_gate_and_up_are_stacked_per_rank() -> None:
    fc1 = param(Dim0Sharding(4, "ffn"), gate=(4, 1), up=(4, 1))
    values = {"gate": column_weight(0, 1, 2, 3), "up": column_weight(10, 11, 12, 13)}
    assert shard(fc1, values, 1, 0).flatten().tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    assert shard(fc1, values, 2, 1).flatten().tolist() == [2, 3, 12, 13]


def test_vocabulary_is_padded_with_zeros() -> None:
    embedding, values = param(VocabSharding(), a=(130, 1)), {"a": column_weight(*range(1, 131))}
    # padded to 256 over 2 ranks: 128 rows, then 2 rows and 126 of padding
    assert shard(embedding, values, 2, 0).flatten().tolist() == list(range(1, 129))
    assert shard(embedding, values, 2, 1).flatten().tolist() == [129, 130] + [0] * 126
    # padded to 512 over 4 ranks: the last two ranks hold nothing else
    assert split_param(embedding, 4, 1) == ShardSpec(0, (Slice(0, 128, 130), Slice(PADDING, 0, 126)))
    assert split_param(embedding, 4, 3) == ShardSpec(0, (Slice(PADDING, 0, 128),))
    assert padded_vocab(129280, 8) == 130048  # DeepSeek-V3
    assert padded_vocab(256, 2) == 256


def test_experts_shard_by_their_own_tensor_parallel_size() -> None:
    fc2 = Param("e", (HFTensor("down", (2, 4)),), Dim1Sharding(4, "ffn"), expert=0)
    assert local_shape(fc2, 1, 0) == (2, 4)
    assert split_param(fc2, 4, 3) == ShardSpec(1, (Slice(0, 3, 4),))


@pytest.mark.parametrize(
    ("sharding", "shapes", "message"),
    [
        (Dim0Sharding(6, "num_attention_heads"), {"q_b": (12, 1)}, "q_b cannot be cut: num_attention_heads=6"),
        (Dim1Sharding(6, "num_attention_heads"), {"o": (1, 12)}, "o cannot be cut: num_attention_heads=6"),
        (
            Dim0Sharding(6, "intermediate_size"),
            {"g": (6, 1), "u": (6, 1)},
            "g + u cannot be cut: intermediate_size=6",
        ),
        (QKVSharding(6), {"q": (12, 1), "k": (6, 1), "v": (6, 1)}, "q + k + v cannot be cut: num_key_value_heads=6"),
    ],
)
def test_indivisible_size_error_lists_divisors(
    sharding: Sharding, shapes: dict[str, tuple[int, ...]], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        split_param(param(sharding, **shapes), 4, 0)
    assert str(error.value) == f"{message} does not divide by tensor parallel size 4; sizes that do: 1, 2, 3, 6"


def test_unshard_refuses_shards_of_another_layout() -> None:
    rows = param(Dim0Sharding(4, "heads"), a=(4, 1))
    with pytest.raises(ValueError, match=r"megatron.name: the shard of rank 1 has shape \(1, 1\), not \(2, 1\)"):
        unshard(rows, [torch.zeros(2, 1), torch.zeros(1, 1)])
    with pytest.raises(ValueError, match="rank 2 of 2"):
        split_param(rows, 2, 2)


@st.composite
def sharded_params(draw: st.DrawFn) -> tuple[Param, int]:
    tp, units, size, hidden = (draw(st.integers(1, high)) for high in (4, 3, 3, 5))
    count = tp * units
    sharding, shapes = draw(
        st.sampled_from(
            [
                (Replicated(), [(size, hidden)]),
                (Dim0Sharding(count, "units"), [(count * size, hidden)]),
                (Dim1Sharding(count, "units"), [(hidden, count * size)]),
                (Dim0Sharding(count, "units"), [(count * size, hidden)] * 2),
                (QKVSharding(count), [(count * size * hidden, 2), (count * size, 2), (count * size, 2)]),
                (QKVSharding(count), [(count * size * hidden,), (count * size,), (count * size,)]),
                (VocabSharding(), [(draw(st.integers(1, 700)), hidden)]),
            ]
        )
    )
    return Param("p", tuple(HFTensor(f"hf{i}", shape) for i, shape in enumerate(shapes)), sharding), tp


@given(sharded_params())
@settings(max_examples=200)
def test_unshard_inverts_shard_without_overlap(case: tuple[Param, int]) -> None:
    weight, tp = case
    total = sum(torch.Size(tensor.shape).numel() for tensor in weight.hf)
    numbers, full = iter(range(1, total + 1)), {}
    for name, shape in weight.hf:  # all elements differ, and none is the zero of padding
        full[name] = torch.tensor([next(numbers) for _ in range(torch.Size(shape).numel())]).view(shape)
    shards = [shard(weight, full, tp, rank) for rank in range(tp)]
    assert [tuple(s.shape) for s in shards] == [local_shape(weight, tp, rank) for rank in range(tp)]
    assert len({s.shape for s in shards}) == 1
    restored = unshard(weight, shards)
    assert list(restored) == [tensor.name for tensor in weight.hf]
    assert all(torch.equal(restored[name], full[name]) for name in full)
    values = sorted(x for s in shards for x in s.flatten().tolist() if x)
    copies = tp if isinstance(weight.sharding, Replicated) else 1
    assert values == sorted(list(range(1, total + 1)) * copies)
