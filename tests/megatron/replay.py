"""Routing replay in one layout: a model's own experts change no bit, and others give what transformers computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import reference
import tiny
import torch

from megarl.models.layout_algebra import shard
from megarl.models.routing import routing_shape
from megarl.types import ModelOutput, TokenLoss, TrainBatch

Gradients = Callable[[Any], dict[str, torch.Tensor]]


def policy_loss(output: ModelOutput, batch: TrainBatch) -> TokenLoss:
    return TokenLoss(-output.logprobs * batch.advantages - 0.1 * output.entropy)  # type: ignore[operator]


def gates(model: Any) -> list[Any]:
    routers = (getattr(layer.mlp, "gate", None) or getattr(layer.mlp, "router", None) for layer in model.model.layers)
    return [router for router in routers if router is not None]


def model_routing(model: Any, batch: TrainBatch) -> torch.Tensor:
    """Return the experts that transformers chooses, [T, MoE layers, topk], one sequence at a time."""
    recorded: list[list[torch.Tensor]] = [[] for _ in gates(model)]
    hooks = [
        gate.register_forward_hook(lambda _, __, out, records=records: records.append(out[2]))
        for gate, records in zip(gates(model), recorded, strict=True)
    ]
    with torch.no_grad():
        reference.policy(model, batch)
    for hook in hooks:
        hook.remove()
    return torch.stack([torch.cat(parts) for parts in recorded], dim=1).short()


@contextmanager
def force_routing(model: Any, routing: torch.Tensor) -> Iterator[None]:
    """Make transformers' model use the experts of `routing`, and its own where a row is -1."""

    def patch(gate: Any, chosen: torch.Tensor) -> None:
        rows = iter(chosen.long())
        local = gate.forward

        def choose(self: Any, hidden: torch.Tensor, *bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
            _, _, indices = local(hidden, *bias)
            stacked = torch.stack([next(rows) for _ in range(len(indices))])
            indices = torch.where(stacked < 0, indices, stacked)
            logits = hidden.view(-1, hidden.shape[-1]) @ self.weight.T
            if hasattr(self, "bias"):  # gpt-oss
                logits = logits + self.bias
                return logits, logits.gather(1, indices).softmax(-1), indices
            scores = logits.sigmoid() if bias or hasattr(self, "e_score_correction_bias") else logits.softmax(-1)
            weights = scores.gather(1, indices)
            if getattr(self, "norm_topk_prob", bool(bias) or hasattr(self, "moe_statics")):
                weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights * getattr(self, "routed_scaling_factor", 1.0), indices

        gate.forward = MethodType(choose, gate)

    for layer, gate in enumerate(gates(model)):
        patch(gate, routing[:, layer])
    try:
        yield
    finally:
        for gate in gates(model):
            del gate.forward


def check(
    family: str, layout: dict[str, int], megatron: dict[str, Any], ranks: Any, gradients: Gradients
) -> dict[str, float]:
    """Return the largest differences.

    In a pipeline the second step is repeated with recomputation, which must use each micro-batch's own experts
    although later micro-batches have started."""
    from megarl.megatron.trainer_model import MegatronModel

    hf, batch = tiny.HF[family], tiny.batch()
    trainer = reference.Trainer(family, "actor")
    weights = {name: tensor.clone() for name, tensor in trainer.tensors().items()}
    optimizer = dict(lr=0.01, schedule="constant", warmup_fraction=0.0, max_grad_norm=0.0)

    def train_one_step(batch: TrainBatch, **recompute: Any) -> tuple[torch.Tensor, float, dict[str, torch.Tensor]]:
        sections = {"actor_optimizer": optimizer, "model": {"megatron": megatron | recompute}}
        config = tiny.config(**layout, **sections, train={"routing_replay": True})
        model = MegatronModel(hf, config, ranks, "actor")
        model.load_shards(lambda param, tp, rank: shard(param, weights, tp, rank))
        expert_ids = tiny.shard_batch(batch)
        logprobs = tiny.gather_tokens(expert_ids, model.forward(expert_ids)["logprobs"])
        loss = model.train_step(expert_ids, policy_loss)["actor/loss"]
        return logprobs, loss, gradients(model)

    def difference(a: Any, b: Any) -> float:
        gaps = [float((a[2][name] - b[2][name]).abs().max()) for name in a[2]]
        return max(float((a[0] - b[0]).abs().max()), abs(a[1] - b[1]), *gaps)

    local = model_routing(trainer.model, batch)
    natural = train_one_step(batch)
    result = {"same experts": difference(train_one_step(tiny.with_routing(batch, local.flip(-1))), natural)}

    shape = routing_shape(hf, {})
    generator = torch.Generator().manual_seed(7)
    expert_ids = torch.rand(*local.shape[:2], shape.num_experts, generator=generator).topk(shape.topk).indices.short()
    starts = batch.cu_seqlens.tolist()
    for first, second, common in tiny.common_tokens(batch.lengths.tolist()):
        expert_ids[starts[second] :][:common] = expert_ids[starts[first] :][:common]
    expert_ids[batch.cu_seqlens[1:] - 1] = -1
    other_routing = tiny.with_routing(batch, expert_ids)
    assert other_routing.prefixes is not None and int((other_routing.prefixes.shared > 0).sum()) == 2
    replayed = train_one_step(other_routing)
    with force_routing(trainer.model, expert_ids), torch.no_grad():
        logprobs, _ = reference.policy(trainer.model, batch)
    with force_routing(trainer.model, expert_ids):
        loss = trainer.loss(batch)
    loss.backward()
    expected = trainer.tensors(grads=True)
    grad_scale = max(float(grad.abs().max()) for grad in expected.values())
    result["logprobs"] = float((replayed[0] - logprobs).abs().max())
    result["loss"] = abs(replayed[1] - float(loss))
    result["gradients"] = (
        max(float((replayed[2][name] - expected[name]).abs().max()) for name in replayed[2]) / grad_scale
    )
    result["effect"] = float((replayed[0] - natural[0]).abs().max())
    if layout.get("pp", 1) > 1:
        full = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
        moe = dict(recompute_granularity="selective", recompute_modules=["moe"])
        result["recompute full"] = difference(train_one_step(other_routing, **full), replayed)
        result["recompute moe"] = difference(train_one_step(other_routing, **moe), replayed)
    return result
