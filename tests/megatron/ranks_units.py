"""Run checks of single modules of `megarl.megatron` and `megarl.workers` in one process and print the results.

`test_*.py` assert the results.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "workers")]
torch.set_num_threads(1)

import reference  # noqa: E402
import sampling_masks  # noqa: E402
import tiny  # noqa: E402

from megarl.config import ConfigError  # noqa: E402
from megarl.cpu import megatron_platform  # noqa: E402
from megarl.models.layout_algebra import shard  # noqa: E402
from megarl.parallel import ranks as parallel_ranks  # noqa: E402
from megarl.types import ModelOutput, TokenLoss, TrainBatch  # noqa: E402


def platform() -> dict[str, Any]:
    before = torch.zeros
    second_install = megatron_platform.install()
    return {"patched": megatron_platform.PATCHED, "second_install": second_install, "unchanged": torch.zeros is before}


def names() -> dict[str, str]:
    from megarl.megatron.parameter_names import canonical_name

    layer = "decoder.layers.1."
    local = [
        "embedding.word_embeddings.weight",
        "output_layer.weight",
        "decoder.final_layernorm.weight",
        layer + "input_layernorm.weight",
        layer + "self_attention.linear_qkv.layer_norm_weight",
        layer + "self_attention.linear_qkv.bias",
        layer + "self_attention.linear_q_up_proj.layer_norm_weight",
        layer + "self_attention.linear_kv_up_proj.layer_norm_weight",
        layer + "mlp.linear_fc1.layer_norm_weight",
        layer + "mlp.experts.local_experts.3.linear_fc2.weight",
        layer + "mlp.experts.linear_fc1.weight3",
        layer + "mlp.experts.linear_fc1.bias3",
        layer + "mlp.shared_experts.linear_fc1.weight",
        layer + "mlp.router.expert_bias",
        "mtp.layers.0.enorm.weight",
        "mtp.layers.0.mtp_model_layer.mlp.experts.linear_fc1.weight3",
        "mtp.layers.0.mtp_model_layer.self_attention.linear_q_up_proj.layer_norm_weight",
    ]
    return {name: canonical_name(name, first_layer=4, first_expert=8) for name in local}


def logprobs() -> dict[str, dict[str, float]]:
    return {"plain": logprobs_with_cap(0.0), "capped": logprobs_with_cap(3.0)}


def logprobs_with_cap(cap: float) -> dict[str, float]:
    """Compare with log_softmax in fp64: gradients of both outputs, more rows than one slice, and padded columns."""
    from megarl.megatron import logprobs as module

    generator = torch.Generator().manual_seed(0)
    rows, real, padded, temperature = 11, 13, 16, 0.7
    hidden = torch.randn(rows, 6, generator=generator).requires_grad_()
    head = (2 * torch.randn(padded, 6, generator=generator)).requires_grad_()
    targets = torch.randint(0, real, (rows,), generator=generator)
    weight = torch.randn(2, rows, generator=generator)
    peak = 0
    make = module.make_logits

    def watched(states: torch.Tensor, *args: Any) -> torch.Tensor:
        nonlocal peak
        peak = max(peak, len(states))
        return make(states, *args)

    module.make_logits = watched
    actual = module.vocab_parallel_logprobs(hidden, head, targets, real, None, temperature, chunk_tokens=4, cap=cap)
    (weight[0] * actual[0] + weight[1] * actual[1]).sum().backward()
    module.make_logits = make
    options = targets, real, None, temperature, 4, cap
    pairs = [
        module.vocab_parallel_logprobs(hidden, head, *options, with_entropy=with_entropy_)
        for with_entropy_ in (True, False)
    ]
    results = [(out, *torch.autograd.grad((weight[0] * out).sum(), (hidden, head))) for out, _ in pairs]
    is_same = all(torch.equal(a, b) for a, b in zip(*results, strict=True)) and pairs[1][1] is None
    exact = hidden.detach().double().requires_grad_(), head.detach().double().requires_grad_()
    logits = (exact[0] @ exact[1].T)[:, :real]
    if cap:
        assert logits.abs().max() > 2 * cap
        logits = cap * torch.tanh(logits / cap)
    log_p = (logits / temperature).log_softmax(-1)
    expected = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    (weight[0] * expected[0] + weight[1] * expected[1]).sum().backward()
    assert hidden.grad is not None and head.grad is not None
    gaps = [
        float((leaf.grad - exact_leaf.grad).abs().max()) for leaf, exact_leaf in zip((hidden, head), exact, strict=True)
    ]
    return {
        "logprobs": float((actual[0] - expected[0]).abs().max()),
        "entropy": float((actual[1] - expected[1]).abs().max()),
        "gradient": max(gaps),
        "rows at once": float(peak),
        "same without entropy": float(is_same),
        "padding": float(head.grad[real:].abs().max()),
    }


def context_parallel_shards(batch: TrainBatch) -> dict[str, Any]:
    """Split two sequences over two context parallel ranks, each of which has a multiple of 10 tokens."""
    from megarl.megatron.micro_batch import make_micro_batch

    micros = [
        make_micro_batch(batch.select([0, 2]), [0, 2], torch.device("cpu"), tp=10, cp=2, cp_rank=rank)
        for rank in (0, 1)
    ]
    full = torch.arange(10.0, 30.0)
    return {
        "tokens": [micro.tokens.tolist() for micro in micros],
        "positions": [micro.positions.tolist() for micro in micros],
        "next_tokens": [micro.next_tokens.tolist() for micro in micros],
        "cu_seqlens": micros[0].packed.cu_seqlens_q.tolist(),
        "aligned": micros[0].align(full).tolist(),
    }


def micro_batch() -> dict[str, Any]:
    """Select the first and last of the sequences [1 2 3], [4], [5 6], padded to a multiple of 4."""
    from megarl.megatron.micro_batch import make_micro_batch
    from megarl.megatron.routing_replay import ReplayShard

    batch = tiny.batch((3, 1, 2)).with_(tokens=torch.tensor([1, 2, 3, 4, 5, 6]))
    recorded = batch.with_(routing=tiny.routing_records(batch, torch.arange(12).view(6, 1, 2)))
    micro = make_micro_batch(
        recorded.select([0, 2]), [0, 2], torch.device("cpu"), tp=4, replayed=ReplayShard((0,), 1, 0)
    )
    emitted = torch.tensor([10.0, 20, 30, 50, 60, -1, -1, -1])
    empty = make_micro_batch(batch.select([]), [], torch.device("cpu"), tp=4)
    further = make_micro_batch(batch.select([0, 2]), [0, 2], torch.device("cpu"), tp=4, mtp_layers=1)
    return {
        "next_two_tokens": further.next_tokens.tolist(),
        "aligned by two": further.align(emitted, 2).tolist(),
        "tokens": micro.tokens.tolist(),
        "positions": micro.positions.tolist(),
        "next_tokens": micro.next_tokens.tolist(),
        "cu_seqlens": micro.packed.cu_seqlens_q.tolist(),
        "aligned": micro.align(emitted).tolist(),
        "cp": context_parallel_shards(batch),
        "routing": micro.routing.flatten(1).tolist(),  # type: ignore[union-attr]
        "routing shards": routing_shards(batch),
        "device_copies": device_copies(recorded),
        "empty": [empty.tokens.tolist(), empty.packed.cu_seqlens_q.tolist(), empty.align(torch.ones(4)).tolist()],
    }


def shared_micro_batch() -> dict[str, Any]:
    """Pack [1 .. 12] and [1 .. 10, 31, 32], whose first ten tokens are common, alone and on two ranks."""
    from megarl.megatron.micro_batch import make_micro_batch

    tokens = torch.tensor([*range(1, 13), *range(1, 11), 31, 32])
    batch = tiny.batch((12, 12)).with_(tokens=tokens).with_prefixes()
    options: dict[str, Any] = {"shares_prefixes": True}
    micro = make_micro_batch(batch, [0, 1], torch.device("cpu"), tp=4, **options)
    with_mtp = make_micro_batch(batch, [0, 1], torch.device("cpu"), mtp_layers=1, repeated=2, **options)
    parts = [make_micro_batch(batch, [0, 1], torch.device("cpu"), cp=2, cp_rank=rank, **options) for rank in (0, 1)]
    return {
        "tokens": micro.tokens.tolist(),
        "positions": micro.positions.tolist(),
        "next_tokens": micro.next_tokens.tolist(),
        "next_two_tokens": with_mtp.next_tokens.tolist(),
        "cu_seqlens": micro.packed.cu_seqlens_q.tolist(),
        "aligned": micro.align(torch.arange(0.0, 160, 10)).tolist(),
        "keys": [visible_keys(item) for item in (micro, *parts)],
        "cp tokens": [part.tokens.tolist() for part in parts],
        "whole": make_micro_batch(batch, [0, 1], torch.device("cpu")).tokens.tolist(),
    }


def visible_keys(micro: Any) -> list[list[int]]:
    """Return the rows of the keys that the last query of each piece sees, by the calls and by the flat form."""
    shared = micro.packed.shared_prefixes
    keys = shared.key_rows.split(shared.cu_keys.diff().tolist())
    last_queries = (shared.cu_queries[1:] - 1).tolist()
    by_query = {}
    for call in shared.calls:
        before = call.keys.shape[1] - call.queries.shape[1]
        for row in range(len(call.queries)):
            size = int((call.outputs // call.queries.shape[1] == row).sum())
            by_query[int(call.queries[row, size - 1])] = call.keys[row, : before + size].tolist()
    assert [by_query[query] for query in last_queries] == [rows.tolist() for rows in keys]
    return [rows.tolist() for rows in keys]


def routing_shards(batch: TrainBatch) -> dict[str, Any]:
    """Split the routing of three layers, of which a chunk has the first and the last, over two ranks.

    With sequence parallelism, with context parallelism, and for a model that does not replay."""
    from megarl.megatron.micro_batch import make_micro_batch
    from megarl.megatron.routing_replay import ReplayShard

    recorded = batch.with_(routing=tiny.routing_records(batch, torch.arange(18).view(6, 3, 1)))

    def routing_of(replayed: Any, **layout: int) -> Any:
        routing = make_micro_batch(
            recorded.select([0, 2]), [0, 2], torch.device("cpu"), replayed=replayed, **layout
        ).routing
        return None if routing is None else routing.flatten(1).tolist()

    return {
        "tp": [routing_of(ReplayShard((0, 2), 2, rank), tp=4) for rank in (0, 1)],
        "cp": [routing_of(ReplayShard((1,), 1, 0), cp=2, cp_rank=rank) for rank in (0, 1)],
        "none": routing_of(None),
        "no layers": routing_of(ReplayShard((), 1, 0)),
    }


def device_copies(recorded: TrainBatch) -> dict[str, list[str]]:
    """Return the tensors of a micro-batch that are on the device: initially, after a middle stage, and for a loss."""
    from megarl.megatron.micro_batch import make_micro_batch
    from megarl.megatron.routing_replay import ReplayShard
    from megarl.types import reads

    micro = make_micro_batch(recorded.select([0, 2]), [0, 2], torch.device("meta"), replayed=ReplayShard((0,), 1, 0))
    copied = {"initial": sorted(micro._copies)}
    assert micro.on_device("routing").is_meta
    copied["middle"] = sorted(micro._copies)
    micro.align(torch.empty(5, device="meta"))
    copied["loss"] = sorted(micro._copies)
    part = micro.loss_batch(reads("advantages")(lambda output, part: None))
    copied["columns"] = [name for name in part.columns() if getattr(part, name).is_meta]
    assert not any(tensor.is_meta for tensor in vars(micro.batch).values() if isinstance(tensor, torch.Tensor))
    return copied


def loss_columns() -> dict[str, Any]:
    """Return the columns that a loss receives that declares `advantages`, and the error of one that reads more."""
    from megarl.megatron.micro_batch import make_micro_batch
    from megarl.types import reads

    def negative(output: ModelOutput, part: TrainBatch) -> TokenLoss:
        assert output.logprobs is not None and part.advantages is not None
        return TokenLoss(-output.logprobs * part.advantages)

    @reads("advantages")
    def undeclared_loss(output: ModelOutput, part: TrainBatch) -> TokenLoss:
        return TokenLoss(negative(output, part).loss * part.returns)

    def error_of(call: Callable[[], Any]) -> str:
        try:
            call()
        except ConfigError as failure:
            return str(failure)
        return "no error"

    batch = tiny.batch((5, 6))
    micro = make_micro_batch(batch, [0, 1], torch.device("cpu"))
    part = micro.loss_batch(undeclared_loss)
    result: dict[str, Any] = {
        "everything": micro.loss_batch(negative).columns(),
        "columns": part.columns(),
        "selected": part.select([1]).columns(),
    }
    assert torch.equal(part.select([1]).advantages, batch.advantages[5:])  # type: ignore[arg-type, index]
    result["trained"] = [
        build("qwen2").train_step(batch, loss)
        for loss in (lambda *args: negative(*args), reads("advantages")(negative))
    ]
    result["while training"] = error_of(lambda: build("qwen2").train_step(batch, undeclared_loss))
    return result


def attention() -> dict[str, float]:
    """Compare a call per sequence with one call under a block-diagonal mask, and time a typical micro-batch."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    from megarl.cpu.megatron_modules import PackedAttention
    from megarl.megatron.build import transformer_config

    settings = transformer_config(tiny.HF["qwen3_moe"], tiny.config())
    core = PackedAttention(settings, 1, AttnMaskType.causal, "self")
    generator = torch.Generator().manual_seed(0)

    def packed(lengths: list[int]) -> PackedSeqParams:
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        return PackedSeqParams(qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts)

    def run(lengths: list[int]) -> tuple[torch.Tensor, ...]:
        total = sum(lengths)
        q, k, v = (torch.randn(total, heads, 16, generator=generator).requires_grad_() for heads in (4, 2, 2))
        return q, k, v, core(q, k, v, packed_seq_params=packed(lengths))

    lengths = [5, 40, 1, 9, 70, 33, 64, 32]  # several have the same length when rounded up
    q, k, v, actual = run(lengths)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    allowed = (owner[:, None] == owner[None]) & torch.ones(len(owner), len(owner)).tril().bool()
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    scores = torch.einsum("qhd,khd->hqk", exact[0], exact[1].repeat_interleave(2, 1)) / 4
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", weights, exact[2].repeat_interleave(2, 1)).flatten(1)
    direction = torch.randn(expected.shape, generator=generator)
    for output in (actual, expected):
        (output * direction).sum().backward()
    gaps = [x.grad - y.grad for x, y in zip((q, k, v), exact, strict=True) if x.grad is not None and y.grad is not None]
    assert len(gaps) == 3
    per_sequence = [
        core(*part, packed_seq_params=packed([len(part[0])]))
        for part in zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    ]
    started = time.perf_counter()
    run([80] * 37)
    return {
        "difference": float((actual - expected).abs().max()),
        "gradient": max(float(gap.abs().max()) for gap in gaps),
        "per sequence": float((actual - torch.cat(per_sequence)).abs().max()),
        "seconds": time.perf_counter() - started,
    }


def capped_attention() -> dict[str, float]:
    """Compare output and gradients with fp64, with and without a window, for all queries and for the last ones."""
    from megatron.core.transformer.enums import AttnMaskType

    from megarl.cpu import megatron_modules
    from megarl.megatron.build import transformer_config

    settings = transformer_config(tiny.HF["gemma2"], tiny.config())
    megatron_modules.QUERIES_AT_ONCE, all_at_once = 4, megatron_modules.QUERIES_AT_ONCE
    generator, keys, result = torch.Generator().manual_seed(0), 19, {}
    for layer, queries in ((1, 19), (2, 19), (1, 7), (2, 7)):
        core = megatron_modules.PackedAttention(
            settings, layer, AttnMaskType.causal, "self", softmax_scale=12**-0.5, cap=1.5
        )
        inputs = [
            torch.randn(n, 2, heads, 16, generator=generator) for n, heads in ((queries, 4), (keys, 2), (keys, 2))
        ]
        exact = [x.double() for x in inputs]
        for x in (*inputs, *exact):
            x.requires_grad_()
        q, k, v = exact[0], *(x.repeat_interleave(2, 2) for x in exact[1:])
        logits = 1.5 * torch.tanh(torch.einsum("qbhd,kbhd->bhqk", q, k) * 12**-0.5 / 1.5)
        distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
        is_visible = (distance >= 0) & ((distance < 6) | (layer == 2))
        expected = torch.einsum("bhqk,kbhd->qbhd", logits.masked_fill(~is_visible, -torch.inf).softmax(-1), v).flatten(
            2
        )
        actual = core._attend(*inputs)
        direction = torch.randn(expected.shape, generator=generator)
        (actual * direction).sum().backward()
        (expected * direction).sum().backward()
        gaps = [actual - expected, *(x.grad - y.grad for x, y in zip(inputs, exact, strict=True))]  # type: ignore[operator]
        result[f"layer {layer}, {queries} queries"] = max(float(gap.detach().abs().max()) for gap in gaps)
    megatron_modules.QUERIES_AT_ONCE = all_at_once
    return result


def sink_attention() -> dict[str, float]:
    """Compare output and gradients, also the sink's, with fp64, with and without a window, and for the last queries."""
    from megatron.core.transformer.enums import AttnMaskType

    from megarl.cpu import megatron_modules
    from megarl.megatron.build import transformer_config

    settings = transformer_config(tiny.HF["gpt_oss"], tiny.config())
    megatron_modules.QUERIES_AT_ONCE, all_at_once = 4, megatron_modules.QUERIES_AT_ONCE
    generator, keys, result = torch.Generator().manual_seed(0), 19, {}
    for layer, queries in ((1, 19), (2, 19), (1, 7), (2, 7)):
        core = megatron_modules.PackedAttention(settings, layer, AttnMaskType.causal, "self")
        sink = torch.randn(4, generator=generator)
        inputs = [
            torch.randn(n, 2, heads, 16, generator=generator) for n, heads in ((queries, 4), (keys, 2), (keys, 2))
        ]
        core.softmax_offset.data.copy_(sink)
        exact = [x.double() for x in (*inputs, sink)]
        for x in (*inputs, *exact):
            x.requires_grad_()
        q, k, v = exact[0], *(x.repeat_interleave(2, 2) for x in exact[1:3])
        distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
        is_visible = (distance >= 0) & ((distance < 6) | (layer == 2))
        terms = (torch.einsum("qbhd,kbhd->bhqk", q, k) / 4).exp() * is_visible
        weights = terms / (terms.sum(-1, keepdim=True) + exact[3].exp()[:, None, None])
        expected = torch.einsum("bhqk,kbhd->qbhd", weights, v).flatten(2)
        actual = core._attend(*inputs)
        direction = torch.randn(expected.shape, generator=generator)
        (actual * direction).sum().backward()
        (expected * direction).sum().backward()
        pairs = zip([*inputs, core.softmax_offset], exact, strict=True)
        gaps = [actual - expected, *(x.grad - y.grad for x, y in pairs)]  # type: ignore[operator]
        result[f"layer {layer}, {queries} queries"] = max(float(gap.detach().abs().max()) for gap in gaps)
    megatron_modules.QUERIES_AT_ONCE = all_at_once
    return result


def scaled_embedding() -> float:
    """Return the difference from a scale rounded to bf16 first, as in HF and SGLang: sqrt(32) becomes 5.65625."""
    model = build("gemma2", model={"dtype": "bfloat16"})
    embedding = unwrapped(model).embedding
    tokens = torch.tensor([[3, 4, 5]])
    expected = embedding.word_embeddings.weight[tokens[0]].float() * 5.65625
    return float((embedding(tokens, tokens)[:, 0] - expected.bfloat16()).abs().max())


def recomputed_output() -> dict[str, Any]:
    """Compare gradients with a discarded and recomputed output, of which later layers keep views, with plain ones."""
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    generator = torch.Generator().manual_seed(5)
    values = [torch.randn(*shape, generator=generator) for shape in ((6, 8), (3, 8), (3, 4), (6, 7))]

    def activation(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * x

    def run(discard: bool) -> tuple[list[torch.Tensor], list[int], torch.Tensor]:
        x, first, second, pull = (value.clone().requires_grad_() for value in values)
        checkpoint = CheckpointWithoutOutput()
        hidden = checkpoint.checkpoint(activation, x) if discard else activation(x)
        top, bottom = hidden.view(2, 3, 8).unbind()
        halves = torch.nn.functional.linear(top.reshape(6, 4), second)  # keeps a view of the output
        whole = torch.nn.functional.linear(torch.cat([top, bottom]), first)  # keeps a copy
        product = hidden[:, 1:] * pull  # keeps a view with an offset
        result = halves.sum() + whole.square().sum() + product.square().sum()
        sizes = [hidden.untyped_storage().size()]
        if discard:
            checkpoint.discard_output_and_register_recompute(result)
            sizes.append(hidden.untyped_storage().size())
        result.backward()
        sizes.append(hidden.untyped_storage().size())
        gradients = [leaf.grad for leaf in (x, first, second, pull) if leaf.grad is not None]
        return gradients, sizes, hidden.detach()

    plain, _, expected = run(False)
    gradients, sizes, hidden = run(True)
    return {
        "sizes": sizes,
        "values": torch.equal(hidden, expected),
        "gradients": [torch.equal(a, b) for a, b in zip(gradients, plain, strict=True)],
    }


def unwrapped(model: Any) -> Any:
    from megarl.megatron.parameter_names import unwrap

    return unwrap(model.chunks[0])


def config_errors() -> dict[str, str]:
    from megarl.megatron.build import transformer_config

    def error(family: str, **arguments: Any) -> str:
        try:
            transformer_config(tiny.HF[family], tiny.config(**arguments))
        except ConfigError as failure:
            return str(failure)
        return "no error"

    return {
        "unknown": error("qwen3_moe", model={"megatron": {"moe_z_loss_coef": 0.1}}),
        "ours": error("qwen3_moe", model={"megatron": {"tensor_model_parallel_size": 2}}),
        "fixed": error("qwen3_moe", model={"megatron": {"sequence_parallel": True}}),
        "half": error("qwen3_moe", model={"megatron": {"recompute_granularity": "half"}}),
        "refused": error(
            "qwen3_moe",
            model={"megatron": {"moe_expert_capacity_factor": 1.0, "moe_router_load_balancing_type": "sinkhorn"}},
        ),
        "fp8": error("qwen3_moe", model={"megatron": {"fp8": "hybrid"}}),
        "experts": error("qwen3_moe", ep=3, world=3),
        "dense": error("qwen2", ep=2, world=2),
        "layers": error("qwen2", pp=3, world=3),
        "window": error("qwen2", model={"megatron": {"window_size": [8, 0]}}),
        "fused router": error("deepseek_v2", model={"megatron": {"moe_router_fusion": True}}),
        "dropout": error("gemma2", model={"megatron": {"attention_dropout": 0.1}}),
        "fused biases": error("gpt_oss", model={"megatron": {"bias_activation_fusion": True}}),
        "accepted": error("qwen3_moe", model={"megatron": {"moe_z_loss_coeff": 0.1}}),
    }


def build(family: str, role: str = "actor", updates: int = 10, **sections: Any) -> Any:
    from megarl.megatron.trainer_model import MegatronModel

    weights = tiny.hf_tensors(tiny.hf_model(family))
    model = MegatronModel(tiny.HF[family], tiny.config(**sections), RANKS, role, updates)  # type: ignore[arg-type]

    def get(param: Any, tp: int, rank: int) -> torch.Tensor:
        if param.hf[0].name == "score.weight":
            return torch.zeros(param.hf[0].shape)
        return shard(param, weights, tp, rank)

    model.load_shards(get)
    return model


def packed_rope() -> dict[str, bool]:
    """Return whether every context parallel rank's rotation of a pack equals that of its sequences, one by one."""
    from megatron.core.models.common.embeddings import rope_utils

    options = dict(rotary_interleaved=False, mla_rotary_interleaved=True, mscale=1.3)
    result = {}
    for cp in (1, 2, 4):
        lengths = [8 * cp, 0, 16 * cp, 2 * cp]
        total, starts = sum(lengths), torch.tensor([0, *lengths]).cumsum(0)
        x = torch.randn(total, 3, 8)
        for angles in (torch.randn(max(lengths) + 5, 1, 1, 6), torch.randn(total, 1, 1, 6)):
            by_token = len(angles) == total
            parts: list[list[torch.Tensor]] = [[] for _ in range(2 * cp)]
            raw: list[list[torch.Tensor]] = [[] for _ in range(2 * cp)]
            for start, length in zip(starts.tolist(), lengths, strict=False):
                own = angles[start : start + length] if by_token else angles[:length]
                sequence = x[start : start + length]
                rotated = rope_utils._apply_rotary_pos_emb_bshd(sequence[:, None], own, **options)[:, 0]
                for part, (a, b) in enumerate(
                    zip(rotated.tensor_split(2 * cp), sequence.tensor_split(2 * cp), strict=True)
                ):
                    parts[part].append(a)
                    raw[part].append(b)
            is_equal = True
            for rank in range(cp):
                local, expected = (
                    torch.cat([half for pair in zip(p[rank], p[2 * cp - 1 - rank], strict=True) for half in pair])
                    for p in (raw, parts)
                )
                group = SimpleNamespace(size=lambda cp=cp: cp, rank=lambda rank=rank: rank)
                actual = rope_utils._apply_rotary_pos_emb_thd(local, starts, angles, **options, cp_group=group)
                is_equal &= torch.equal(actual, expected)
            result[f"cp={cp}, {'tokens' if by_token else 'positions'}"] = is_equal
    return result


def replayed_routing() -> dict[str, Any]:
    """Compare Megatron's weights of replayed experts and their gradient with fp64; every second token is replayed."""
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    from megarl.megatron.routing_replay import ReplayedTopK, check, check_shape
    from megarl.models.routing import RoutingShape

    generator = torch.Generator().manual_seed(4)
    tokens, experts, k = 10, 8, 2
    logits = torch.randn(tokens, experts, generator=generator)
    bias = 0.1 * torch.randn(experts, generator=generator)
    pull = torch.randn(tokens, experts, generator=generator)
    recorded = torch.rand(tokens, experts, generator=generator).topk(k).indices
    recorded[::2] = -1
    router_options: dict[str, dict[str, Any]] = {
        "softmax after": {},
        "softmax before": dict(use_pre_softmax=True, scaling_factor=1.5),
        "sigmoid, bias, groups": dict(score_function="sigmoid", expert_bias=bias, num_groups=4, group_topk=1),
    }
    result: dict[str, Any] = {}
    for name, options in router_options.items():
        replay = ReplayedTopK(0)
        replay.set_recorded(recorded, training=True)
        leaf = logits.clone().requires_grad_()
        probs, chosen = topk_routing_with_score_function(leaf, k, router_replay=replay, **options)  # type: ignore[arg-type]
        (probs * pull).sum().backward()
        model_choice = topk_routing_with_score_function(logits, k, **options)[1]
        expected_mask = torch.where(
            recorded[:, :1] < 0, model_choice, torch.zeros_like(model_choice).scatter(1, recorded.clamp(min=0), True)
        )
        exact = logits.double().requires_grad_()
        scores = exact.sigmoid() if "sigmoid" in name else exact.softmax(-1)
        weights = scores * expected_mask
        if name != "softmax before":
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * options.get("scaling_factor", 1.0)
        (weights * pull).sum().backward()
        assert leaf.grad is not None and exact.grad is not None
        result[name] = {
            "chosen": torch.equal(chosen, expected_mask),
            "others": int((expected_mask != model_choice).any(-1).sum()),
            "weights": float((probs - weights).detach().abs().max()),
            "gradient": float((leaf.grad - exact.grad).abs().max()),
        }

    def refused(record: list[list[int]]) -> str:
        try:
            chosen, shape = torch.tensor(record, dtype=torch.int16)[:, None], RoutingShape(2, (1,), k, experts)
            check_shape(chosen, shape)
            check(chosen, shape, (0,))
        except ConfigError as error:
            return str(error)
        return ""

    records = {"valid": [[7, 0], [-1, -1]], "zeros": [[1, 2], [0, 0]], "foreign": [[8, 1]], "half": [[-1, 3]]}
    return result | {"refused": {name: refused(record) for name, record in (records | {"topk": [[1, 2, 3]]}).items()}}


def routing_by_role() -> dict[str, list[Any]]:
    """Return the shapes of routing in micro-batches by role, with train.routing_replay and a recorded batch."""
    from megarl.megatron import trainer_model as module
    from megarl.models.routing import routing_shape

    shape, batch, make = routing_shape(tiny.HF["deepseek_v3"], {}), tiny.batch(), module.make_micro_batch
    record = torch.arange(shape.topk).expand(len(batch.tokens), len(shape.moe_layers), shape.topk)
    recorded = batch.with_(routing=tiny.routing_records(batch, record))
    result: dict[str, list[Any]] = {}
    for role in ("actor", "critic", "reward_model"):
        model, shapes = build("deepseek_v3", role, train={"routing_replay": True}), []

        def watch(*args: Any, shapes: list[Any] = shapes, **options: Any) -> Any:
            micro = make(*args, **options)
            shapes.append(None if micro.routing is None else list(micro.routing.shape[1:]))
            return micro

        module.make_micro_batch = watch
        model.forward(recorded)
        module.make_micro_batch = make
        result[role] = shapes
    return result | {"shape": [len(shape.moe_layers), shape.topk]}


def nll(output: ModelOutput, batch: TrainBatch) -> TokenLoss:
    return TokenLoss(-output.logprobs, {})  # type: ignore[operator]


def hf_folders() -> dict[str, Any]:
    """Load folders written by transformers for each family, and a critic's with and without a head.

    Except those with a vision tower, for which `test_qwen_vl.py` writes folders as published.
    """
    from safetensors.torch import load_file, save_file

    from megarl.megatron.trainer_model import MegatronModel

    batch, result = tiny.batch(), {}
    with tempfile.TemporaryDirectory() as folder:
        for family in (name for name, hf in tiny.HF.items() if "vision_config" not in hf):
            hf = tiny.hf_model(family)
            hf.save_pretrained(f"{folder}/{family}")
            model = MegatronModel(tiny.HF[family], tiny.config(), RANKS, "actor")
            model.load_hf(f"{folder}/{family}")
            with torch.no_grad():
                expected, _ = reference.policy(hf, batch)
            result[family] = float((model.forward(batch)["logprobs"] - expected).abs().max())
        critic = MegatronModel(tiny.HF["qwen3_moe"], tiny.config(), RANKS, "critic")
        critic.load_hf(f"{folder}/qwen3_moe")
        result["no head"] = float(critic.forward(batch)["values"].abs().max())
        file, value_head = f"{folder}/qwen3_moe/model.safetensors", reference.value_head(32)
        save_file(load_file(file) | {"score.weight": value_head}, file, metadata={"format": "pt"})
        critic.load_hf(f"{folder}/qwen3_moe")
        with torch.no_grad():
            expected = reference.values(tiny.hf_model("qwen3_moe"), value_head, batch)
        result["head"] = float((critic.forward(batch)["values"] - expected).abs().max())
        tensors = load_file(file)
        tensors["model.layers.1.self_attn.k_proj.weight"][0, 0] = torch.nan
        save_file(tensors, file, metadata={"format": "pt"})
        try:
            critic.load_hf(f"{folder}/qwen3_moe")
        except ConfigError as error:
            result["not finite"] = str(error)
    return result


def absent_config_keys() -> dict[str, float]:
    """Return the largest differences from transformers if config.json lacks every key that has a default."""
    import transformers

    from megarl.megatron.trainer_model import MegatronModel
    from megarl.models.config_json import DEFAULTS

    larger = {"deepseek_v3": {"num_hidden_layers": 4, "n_routed_experts": 32, "num_experts_per_tok": 8}}
    larger["deepseek_v32"] = larger["glm_moe_dsa"] = larger["deepseek_v3"]
    for family in ("qwen3_next", "qwen3_5_moe", "qwen3_5"):  # every fourth layer has attention
        larger[family] = {"num_hidden_layers": 4}
    # Of a head with the default size.
    larger["qwen3_5_moe"]["rope_parameters"] = dict(rope_type="default", rope_theta=10000.0, mrope_section=[11, 11, 10])
    families = [family for family in tiny.family_names() if family != "ling2"]  # which transformers does not have
    cases = {family: (family, tuple(DEFAULTS[family.replace("_", "")]), larger.get(family, {})) for family in families}
    cases["deepseek_v2"] = ("deepseek_v2", cases["deepseek_v2"][1], {"num_experts_per_tok": 3})
    for key in ("n_group", "topk_group", "routed_scaling_factor"):
        groups = {"n_group": 8, "topk_group": 4} | larger["deepseek_v3"]
        cases[f"deepseek_v3 {key}"] = ("deepseek_v3", (key,), groups)
    llama3 = dict(tiny.HF["llama"]["rope_parameters"])
    rope_scaling = {"rope_scaling": llama3, "original_max_position_embeddings": 12}
    cases["llama 3, rope_scaling"] = ("llama", ("rope_parameters",), rope_scaling)
    cases["both blocks"] = ("llama", (), {"rope_scaling": llama3})
    batch, result = tiny.batch(), {}
    for case, (family, keys, changes) in cases.items():
        values = {key: value for key, value in (tiny.HF[family] | changes).items() if key not in keys}
        values["initializer_range"] = 0.1  # does not affect log-probs
        name = values["architectures"][0]
        config = getattr(transformers, name).config_class(**json.loads(json.dumps(values)))
        config._attn_implementation = "eager"
        torch.manual_seed(0)
        hf = tiny.set_latent_eps(getattr(transformers, name)(config).float().eval())
        with tempfile.TemporaryDirectory() as folder:
            hf.save_pretrained(folder)
            model = MegatronModel(values, tiny.config(), RANKS, "actor")
            model.load_hf(folder)
        with torch.no_grad():
            expected, _ = reference.policy(hf, batch)
            result[case] = float((model.forward(batch)["logprobs"] - expected).abs().max())
    return result


def bf16_training() -> dict[str, float]:
    """Compare bf16 with fp32, and train with updates far below bf16's resolution, which fp32 masters accumulate."""
    batch = tiny.batch()
    exact = build("qwen3_moe").forward(batch)["logprobs"]
    optimizer = {"lr": 2e-4, "schedule": "constant", "warmup_fraction": 0.0, "weight_decay": 0.0}
    model = build("qwen3_moe", model={"dtype": "bfloat16"}, actor_optimizer=optimizer)
    actual = model.forward(batch)["logprobs"]
    name = "decoder.final_layernorm.weight"  # about 1, where bf16 has steps of 0.0078: forty updates
    start = model.local_params()[name].clone().float()
    losses = [model.train_step(batch, nll)["actor/loss"] for _ in range(40)]
    change = (model.local_params()[name].float() - start).abs()
    bias = build("deepseek_v3", model={"dtype": "bfloat16"}).local_params()["decoder.layers.1.mlp.router.expert_bias"]
    exact_bias = build("deepseek_v3").local_params()["decoder.layers.1.mlp.router.expert_bias"]
    return {
        "bias": float((bias - exact_bias).abs().max()) if bias.dtype == torch.float32 else torch.inf,
        "bias_size": float(exact_bias.abs().max()),
        "difference": float((actual - exact).abs().mean()),
        "first": losses[0],
        "last": losses[-1],
        "updated": float((change > 0).float().mean()),
    }


def schedule() -> dict[str, list[float]]:
    from megarl.megatron.optimizer import set_schedule_step

    batch = tiny.batch((5, 6))
    result = {}
    for kind in ("cosine", "linear", "constant"):
        optimizer = {
            "lr": 1.0,
            "min_lr": 0.0,
            "schedule": kind,
            "warmup_fraction": 0.4,
            "eps": 1e9,
            "weight_decay": 0.0,
        }
        model = build("qwen2", updates=5, actor_optimizer=optimizer)
        result[kind] = [model.train_step(batch, nll)["actor/lr"] for _ in range(5)]
        longer_run = build("qwen2", updates=10, actor_optimizer=optimizer | {"lr": 2.0, "min_lr": 0.5})
        set_schedule_step(longer_run.scheduler, model.scheduler.num_steps)
        result[f"{kind}, longer"] = [longer_run.train_step(batch, nll)["actor/lr"] for _ in range(2)]
    return result


def critic() -> dict[str, Any]:
    """A head of zeros outputs zeros, and only the head has a gradient at first: -2 sum_t w_t return_t h_t."""
    batch = tiny.batch()
    # AdamW's first step is -lr * g / (|g| + eps): with a huge eps, -lr / eps * g
    optimizer = dict(lr=1.0, eps=1e6, schedule="constant", warmup_fraction=0.0, weight_decay=0.0, max_grad_norm=0.0)
    model = build("qwen3_moe", "critic", critic={"optimizer": optimizer})
    before = tiny.snapshot(model)
    values = model.forward(batch)["values"]

    def squares(output: ModelOutput, part: TrainBatch) -> TokenLoss:
        return TokenLoss((output.values - part.returns) ** 2, {})  # type: ignore[operator]

    metrics = model.train_step(batch, squares)
    after = tiny.snapshot(model)
    head = after["output_layer.weight"] * -1e6
    trunk = tiny.hf_model("qwen3_moe").model
    expected = torch.zeros_like(head)
    assert batch.loss_weights is not None and batch.returns is not None
    with torch.no_grad():
        for start, stop in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
            hidden = trunk(batch.tokens[None, start:stop]).last_hidden_state[0, :-1]
            actions = slice(start + 1, stop)
            expected -= 2 * (batch.loss_weights[actions] * batch.returns[actions]) @ hidden
    return {
        "values": float(values.abs().max()),
        "shape": list(head.shape),
        "gradient": float((head - expected).abs().max() / expected.abs().max()),
        "grad_norm": abs(metrics["critic/grad_norm"] / float(expected.norm()) - 1),
        "trunk": max(float((after[n] - before[n]).abs().max()) for n in before if n != "output_layer.weight"),
    }


def aux_losses() -> dict[str, Any]:
    """Train a step with and without auxiliary losses."""
    batch = tiny.batch((8, 20, 12))
    without_aux = build("qwen3_moe").train_step(batch, nll)
    aux = build("qwen3_moe", model={"megatron": tiny.AUX_LOSSES}).train_step(batch, nll)
    mtp = build("deepseek_v3_mtp", model={"megatron": tiny.AUX_LOSSES}, train={"mtp_loss_coef": 0.1}).train_step(
        batch, nll
    )
    return {"plain": without_aux, "aux": aux, "mtp": mtp}


def training() -> dict[str, Any]:
    """Return a worker's learning rates over its updates, and its errors for numbers that are not finite."""
    from megarl.observe.clock import Clock
    from megarl.workers.actor import ActorWorker
    from megarl.workers.context import Context

    batch = tiny.batch((5, 6))
    optimizer = dict(lr=1.0, schedule="cosine", warmup_fraction=0.4, eps=1e9, weight_decay=0.0)
    chat: Any = None

    def worker(folder: str, **settings: Any) -> ActorWorker:
        sections = {
            "actor_optimizer": optimizer | settings,
            "run": {"max_skipped_updates": 1},
            "model": {"path": folder},
        }
        context = Context(
            tiny.config(**sections),
            RANKS.job,
            tiny.HF["qwen2"],
            chat,
            Clock(),
            Path(folder),
            {"actor": 5},
            {"actor": RANKS},
        )
        actor = ActorWorker(context)
        actor.start()
        return actor

    def infinite_loss(output: ModelOutput, part: TrainBatch) -> TokenLoss:
        return TokenLoss(nll(output, part).loss * 1e30 * 1e30)

    def error(call: Callable[[], Any]) -> str:
        try:
            call()
        except ConfigError as failure:
            return str(failure)
        return "no error"

    with tempfile.TemporaryDirectory() as folder_path:
        tiny.hf_model("qwen2").save_pretrained(folder_path)
        actor = worker(folder_path)
        rates = [actor.update(batch, nll).sync()["actor/lr"] for _ in range(5)]
        for step, loss in ((1, infinite_loss), (2, nll), (3, infinite_loss)):  # only consecutive ones count
            actor.begin_step(step)
            actor.update(batch, loss)
        actor.begin_step(4)
        skip_results = [actor.skip_failure, actor.update(batch, infinite_loss).sync(), actor.skip_failure]
        actor.on_rollback()
        skip_results += [actor.skip_failure, actor.update(batch, infinite_loss).sync(), actor.skip_failure]
        infinite = torch.full_like(batch.loss_mask, torch.inf, dtype=torch.float32)
        nonfinite_columns = {name: infinite for name in ("advantages", "returns", "rollout_logprobs")}
        nonfinite_columns["sequence_reward"] = torch.tensor([0.0, torch.nan])
        inputs = {
            name: error(lambda: actor.update(batch.with_(**{name: values}), nll))  # noqa: B023
            for name, values in nonfinite_columns.items()
        }
        unused = torch.where(batch.loss_mask, 0.0, infinite)
        num_skipped_unused = actor.update(batch.with_(values=unused), nll).sync()["actor/skipped"]
        # AdamW then divides 0 by 0 for zero gradients, as of unused vocabulary: eps underflows in fp32.
        underflow_error = error(lambda: worker(folder_path, eps=1e-60).update(batch, nll))
    next(iter(actor.model.local_params().values())).fill_(torch.nan)
    outputs = error(lambda: actor.forward(batch))
    return dict(
        rates=rates,
        skip_results=skip_results,
        inputs=inputs,
        unused_skipped=num_skipped_unused,
        underflow=underflow_error,
        outputs=outputs,
    )


def empty_batch() -> dict[str, list[int]]:
    """Run forward passes of an empty batch."""
    batch = TrainBatch.from_rollouts([])
    return {
        name: list(values.shape)
        for role in ("actor", "critic")
        for name, values in build("qwen3_moe", role).forward(batch).items()
    }


def aborted_rewards() -> dict[str, Any]:
    """Return the rollouts that a reward function is called on, and the rewards of all."""
    from megarl.observe.clock import Clock
    from megarl.types import Prompt, Rollout, Rollouts, Status, Turn
    from megarl.workers.context import Context
    from megarl.workers.reward import RewardWorker

    scored_seeds = []

    def reward(rollout: Rollout) -> float:
        scored_seeds.append(rollout.seed)
        return 1.0

    chat: Any = None
    context = Context(tiny.config(), RANKS.job, tiny.HF["qwen3_moe"], chat, Clock(), Path("."), {})
    worker = RewardWorker(context, reward_fn=reward)
    endings: list[Status] = ["stop", "aborted", "length", "aborted"]
    rollouts = [Rollout(Prompt("p", ()), (Turn((1,)),), status, seed=i) for i, status in enumerate(endings)]
    scored = worker.score(Rollouts.gather(rollouts))
    assert worker.score(Rollouts.gather(rollouts[1:2])).local == (rollouts[1],) and not len(
        worker.score(Rollouts.gather([]))
    )
    return {"scored": scored_seeds, "rewards": scored.reward.tolist(), "order": [r.seed for r in scored.local]}


def engine_calls() -> list[str]:
    import recording_engine_worker

    return recording_engine_worker.engine_calls(tiny.config(), tiny.HF["qwen3_moe"], RANKS)


def engine_turns() -> dict[str, Any]:
    import policy_engines

    return {
        "shared": policy_engines.on_shared_ranks(),
        "beside another actor": policy_engines.beside_another_actor(),
        "separate": policy_engines.on_separate_ranks(),
    }


def rollback_metrics() -> list[dict[str, float]]:
    from megarl.workers.model_worker import KLRollback

    model: Any = SimpleNamespace(save_snapshot=lambda: None, rollback=lambda: None)
    guards = [KLRollback(0.05), KLRollback(0.05, "actor_b")]
    return [guard.after_update(model, {"actor/ppo_kl": 0.5}) for guard in guards]


def generation_numbers() -> list[Any]:
    import recording_engine_worker

    return recording_engine_worker.generation_numbers(tiny.config(), tiny.HF["qwen3_moe"], RANKS)


def weight_checks() -> dict[str, Any]:
    import fake_server_worker

    return fake_server_worker.check_weights(tiny.config(), tiny.HF["qwen3_moe"], RANKS)


def set_placement() -> dict[str, Any]:
    from megarl.flow import HybridFlow

    flow = HybridFlow(tiny.config(world=8))
    flow.set_placement({"actor": "0-3", "critic": range(4, 6)})
    return flow.config.placement


def other_names() -> list[str]:
    """Return the errors of calls that have the names of other projects."""
    from megarl.flow import HybridFlow

    flow = HybridFlow(tiny.config())
    foreign: Any = flow
    calls = (
        lambda: foreign.run(num_rollouts=3),
        lambda: foreign.run(num_rolout=3),
        lambda: flow.register_worker("actor", model_path="/m"),
        lambda: flow.register_worker("actor", tensor_model_parallel_size=2),
        lambda: flow.register_worker("actor", parallel={"tensor_model_parallel_size": 2}),
        lambda: flow.register_worker("critic", gpus=4),
        lambda: HybridFlow({"algorithm": "ppo"}),  # type: ignore[arg-type]
    )
    errors = []
    for call in calls:
        try:
            call()
        except ValueError as error:
            errors.append(str(error))
    return errors


def roles_before_run() -> Any:
    """Return the errors of roles read before the run, and of a name that is no role."""
    from megarl.flow import HybridFlow

    flow = HybridFlow(tiny.config())
    flow.register_worker("judge", "lab.judges:Judge")
    errors = []
    for name in ("actor", "judge", "teacher"):
        try:
            getattr(flow, name)
        except AttributeError as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def zero_spread_alarms() -> list[str]:
    """Return the alarms of a flow over steps in which no prompt has responses with different rewards."""

    from megarl.config import from_dict
    from megarl.controllers.controller import StepResult, load_requirements
    from megarl.flow import HybridFlow
    from megarl.observe.metrics import ZeroSpreadWarning

    flow: Any = HybridFlow(from_dict({"algorithm": "grpo"}))
    flow.spread, flow.workers, flow.job = (
        ZeroSpreadWarning(load_requirements(flow.config)),
        {},
        SimpleNamespace(world=1),
    )
    flow.loader = flow.clock = flow.profile = SimpleNamespace(
        epoch_metrics=dict, lap=lambda step: {"time/step": 1.0}, drain_spans=list, end=lambda step: None
    )
    alarms: list[str] = []
    flow.log = SimpleNamespace(
        alarm=alarms.append,
        write_spans=lambda spans: None,
        end_step=lambda step, metrics, *args: metrics,
    )
    for flow.step in range(1, 5):
        flow._finish_step(StepResult({"rollout/zero_spread_frac": 1.0, "rollout/reward_mean": 0.0}))
    return alarms


CHECKS: list[Callable[[], Any]] = [
    platform, names, packed_rope, logprobs, micro_batch, shared_micro_batch, attention, capped_attention,
    sink_attention,
    scaled_embedding, recomputed_output, replayed_routing, routing_by_role, config_errors, hf_folders,
    absent_config_keys, bf16_training, schedule, critic, aux_losses, training, engine_calls, engine_turns,
    rollback_metrics, generation_numbers, weight_checks, empty_batch, aborted_rewards, set_placement, other_names,
    loss_columns, roles_before_run, zero_spread_alarms,
    sampling_masks.masked_logprobs, sampling_masks.masked_micro_batch,
]  # fmt: skip

if __name__ == "__main__":
    RANKS = parallel_ranks.initialize(tiny.config().parallel, timeout_s=120)
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(f"{record.name}: {record.getMessage()}")  # type: ignore[method-assign]
    logging.getLogger("megatron").addHandler(handler)
    results = {check.__name__: check() for check in CHECKS}
    print("RESULT " + json.dumps(results | {"megatron_log": messages}))
    parallel_ranks.shutdown()
