"""Sparse attention in one layout: replayed keys against transformers with the same keys, and the indexers' own loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import reference
import tiny
import torch
from replay import policy_loss

from megarl.models.layout_algebra import shard
from megarl.types import TrainBatch

FAMILIES = ("deepseek_v32", "glm_moe_dsa")
COEF = 0.7
Gradients = Callable[[Any], dict[str, torch.Tensor]]


def indexers(model: Any) -> list[Any]:
    attentions = (layer.self_attn for layer in model.model.layers)
    return [attention.indexer for attention in attentions if attention.indexer is not None]


def model_keys(model: Any, batch: TrainBatch) -> list[list[torch.Tensor]]:
    """Return the keys that transformers chooses, [tokens, min(topk, tokens)], by sequence and layer with an indexer."""
    recorded: list[list[torch.Tensor]] = [[] for _ in indexers(model)]
    hooks = [
        module.register_forward_hook(lambda _, __, out, keys=keys: keys.append(out[0]))
        for module, keys in zip(indexers(model), recorded, strict=True)
    ]
    with torch.no_grad():
        reference.policy(model, batch)
    for hook in hooks:
        hook.remove()
    return [list(layers) for layers in zip(*recorded, strict=True)]


def records(keys: list[list[torch.Tensor]], topk: int) -> tuple[torch.Tensor, ...]:
    """Return the engine's record of each sequence: of all tokens but the first topk and the last."""
    return tuple(
        torch.stack([layer[topk:-1] if layer.shape[1] == topk else layer.new_zeros(0, topk) for layer in layers], dim=1)
        .short()
        .contiguous()
        for layers in keys
    )


@contextmanager
def force_keys(model: Any, keys: list[list[torch.Tensor]], topk: int) -> Iterator[None]:
    """Make transformers' model see these keys, and those of its own choice in the first topk tokens and the last."""
    for number, indexer in enumerate(indexers(model)):
        sequences, own = iter([layers[number] for layers in keys]), indexer.forward

        def choose(self: Any, *args: Any, _sequences: Any = sequences, _own: Any = own, **kwargs: Any) -> torch.Tensor:
            chosen, forced = _own(*args, **kwargs), next(_sequences)
            if chosen.shape[2] == topk:
                chosen[0, topk:-1] = forced[topk:-1].int()
            return chosen

        indexer.forward = MethodType(choose, indexer)
    try:
        yield
    finally:
        for indexer in indexers(model):
            del indexer.forward


def index_scores(
    indexer: Any, hidden: torch.Tensor, latent: torch.Tensor, rope: Any, interleaved: bool
) -> torch.Tensor:
    """Return the scores of one sequence, [tokens, tokens], written out from the mathematics."""
    size, heads, turned = indexer.head_dim, indexer.n_heads, indexer.qk_rope_head_dim
    cos, sin = (part[0][:, None] for part in rope)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        part = x[..., :turned]
        if interleaved:
            part = torch.cat([part[..., 0::2], part[..., 1::2]], dim=-1)
        first, second = part.chunk(2, dim=-1)
        return torch.cat([part * cos + torch.cat([-second, first], dim=-1) * sin, x[..., turned:]], dim=-1)

    query = rotate(indexer.wq_b(latent).view(-1, heads, size))
    key = rotate(indexer.k_norm(indexer.wk(hidden))[:, None])[:, 0]
    weights = indexer.weights_proj(hidden) * heads**-0.5
    return torch.einsum("th,ths->ts", weights, torch.relu(torch.einsum("thd,sd->ths", query, key) * size**-0.5))


def indexer_loss(model: Any, batch: TrainBatch, interleaved: bool) -> torch.Tensor:
    """Return the sum over tokens and layers of KL(attention, mean over heads || softmax of scores of chosen keys)."""
    terms: list[torch.Tensor] = []

    def hook(attention: Any, _: Any, kwargs: dict[str, Any], out: Any) -> None:
        if attention.indexer is None:
            return
        target = out[1][0].detach().mean(0)
        hidden = kwargs["hidden_states"][0].detach()
        latent = attention.q_a_layernorm(attention.q_a_proj(hidden)).detach()
        scores = index_scores(attention.indexer, hidden, latent, kwargs["position_embeddings"], interleaved)
        chosen = torch.zeros_like(scores, dtype=torch.bool)
        count = min(attention.indexer.index_topk, len(scores))
        causal = torch.ones_like(chosen).tril()
        best = scores.detach().masked_fill(~causal, -torch.inf).topk(count, dim=-1).indices
        chosen = chosen.scatter(1, best, True) & causal
        log_scores = scores.masked_fill(~chosen, -torch.inf).log_softmax(-1).masked_fill(~chosen, 0.0)
        terms.append((torch.special.xlogy(target, target) - target * log_scores).sum())

    hooks = [layer.self_attn.register_forward_hook(hook, with_kwargs=True) for layer in model.model.layers]
    for start, stop in reference.sequences(batch):
        model.model(batch.tokens[None, start:stop])
    for handle in hooks:
        handle.remove()
    return torch.stack(terms).sum()


def use_megatron_module() -> None:
    """Build Megatron's DSAttention, which GPUs have, from modules that run on a CPU."""
    from megatron.core.transformer.experimental_attention_variant import dsa
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megarl.cpu.megatron_modules import DuplicatedLinear
    from megarl.megatron import build
    from megarl.megatron.sparse_attention import ReplayedDSAttention

    class LayerNorm(torch.nn.LayerNorm):
        def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
            super().__init__(hidden_size, eps=eps, dtype=torch.float32)

    linears = ("linear_wq_b", "linear_wk", "linear_weights_proj")
    indexer = dsa.DSAIndexerSubmodules(**dict.fromkeys(linears, DuplicatedLinear), k_norm=LayerNorm)
    submodules = dsa.DSAttentionSubmodules(indexer=ModuleSpec(module=dsa.DSAIndexer, submodules=indexer))
    vars(build)["SparseAttention"] = ModuleSpec(module=ReplayedDSAttention, submodules=submodules)


def check(
    family: str, layout: dict[str, int], megatron: dict[str, Any], ranks: Any, gradients: Gradients
) -> dict[str, float]:
    """Return the largest differences.

    In a pipeline the second step is repeated with recomputation, which must use each micro-batch's own keys.
    """
    from megarl.megatron.trainer_model import MegatronModel

    hf, batch = tiny.HF[family], tiny.batch()
    topk, interleaved = hf["index_topk"], hf.get("indexer_rope_interleave", False)
    trainer = reference.Trainer(family, "actor")
    weights = {name: tensor.clone() for name, tensor in trainer.tensors().items()}
    optimizer = dict(lr=0.01, schedule="constant", warmup_fraction=0.0, max_grad_norm=0.0)

    def train_one_step(
        batch: TrainBatch, coef: float = 0.0, **recompute: Any
    ) -> tuple[torch.Tensor, dict[str, float], dict[str, torch.Tensor]]:
        sections = {"actor_optimizer": optimizer, "model": {"megatron": megatron | recompute}}
        settings = {"sparse_index_replay": True, "indexer_loss_coef": coef}
        model = MegatronModel(hf, tiny.config(**layout, **sections, train=settings), ranks, "actor")
        model.load_shards(lambda param, tp, rank: shard(param, weights, tp, rank))
        local = tiny.shard_batch(batch)
        logprobs = tiny.gather_tokens(local, model.forward(local)["logprobs"])
        metrics = model.train_step(local, policy_loss)
        return logprobs, metrics, gradients(model)

    def difference(a: Any, b: Any) -> float:
        gaps = [float((a[2][name] - b[2][name]).abs().max()) for name in a[2]]
        return max(float((a[0] - b[0]).abs().max()), abs(a[1]["actor/loss"] - b[1]["actor/loss"]), *gaps)

    own = model_keys(trainer.model, batch)
    natural = train_one_step(batch)
    flipped = [[layer.flip(-1) for layer in layers] for layers in own]
    same = train_one_step(batch.with_(sparse_indices=records(flipped, topk)))
    result = {"same keys": difference(same, natural)}

    generator = torch.Generator().manual_seed(7)
    others = [
        [
            torch.stack(
                [
                    torch.randperm(token + 1, generator=generator)[:topk] if token >= topk else torch.zeros(topk).long()
                    for token in range(len(layer))
                ]
            )
            if layer.shape[1] == topk
            else layer
            for layer in layers
        ]
        for layers in own
    ]
    other_batch = batch.with_(sparse_indices=records(others, topk))
    replayed = train_one_step(other_batch)
    with force_keys(trainer.model, others, topk), torch.no_grad():
        logprobs, _ = reference.policy(trainer.model, batch)
    with force_keys(trainer.model, others, topk):
        loss = trainer.loss(batch)
    loss.backward()
    expected = trainer.tensors(grads=True)
    scale = max(float(grad.abs().max()) for grad in expected.values())
    result["logprobs"] = float((replayed[0] - logprobs).abs().max())
    result["loss"] = abs(replayed[1]["actor/loss"] - float(loss))
    result["gradients"] = max(float((replayed[2][name] - expected[name]).abs().max()) for name in replayed[2]) / scale
    result["effect"] = float((replayed[0] - natural[0]).abs().max())
    if layout.get("pp", 1) > 1:
        full = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
        result["recompute full"] = difference(train_one_step(other_batch, **full), replayed)

    # The indexers' loss trains them and changes no other gradient.
    trained = train_one_step(batch, coef=COEF)
    trainer = reference.Trainer(family, "actor")
    divergence = indexer_loss(trainer.model, batch, interleaved) / len(batch.tokens)
    (COEF * divergence).backward()
    names = [name for name in natural[2] if ".indexer." in name]
    expected = trainer.tensors(grads=True)
    scale = max(float(expected[name].abs().max()) for name in names)
    result["indexer loss"] = abs(trained[1]["actor/indexer_loss"] - float(divergence.detach()))
    result["indexer gradients"] = max(float((trained[2][name] - expected[name]).abs().max()) for name in names) / scale
    result["indexer effect"] = max(
        float((trained[2][name] - natural[2][name]).abs().max()) for name in natural[2] if name not in names
    )
    return result
