"""Sampling that was cut off, in a layout: log-probs, entropies, loss and gradients over the ids that each token could have
had, against transformers, whose other logits are masked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import reference
import tiny
import torch

from megarl.models.cuts import shard
from megarl.types import ModelOutput, TokenLoss, TrainBatch

FAMILIES = ("qwen3_moe", "qwen2", "gemma2")
"""One with experts, one whose output layer is the embedding, one that caps its logits."""


def policy_loss(output: ModelOutput, batch: TrainBatch) -> TokenLoss:
    assert output.logprobs is not None and output.entropy is not None and batch.advantages is not None
    return TokenLoss(-output.logprobs * batch.advantages - 0.1 * output.entropy)


def check(
    family: str,
    layout: dict[str, int],
    megatron: dict[str, Any],
    ranks: Any,
    gradients: Callable[[Any], dict[str, torch.Tensor]],
) -> dict[str, float]:
    """The largest differences."""
    from megarl.megatron.model import MegatronModel

    hf, plain = tiny.HF[family], tiny.batch()
    batch = plain.with_(support=tiny.supports(plain))
    trainer = reference.Trainer(family, "actor")
    weights = {name: tensor.clone() for name, tensor in trainer.tensors().items()}
    optimizer = dict(lr=0.01, schedule="constant", warmup_fraction=0.0, max_grad_norm=0.0)

    def built(budget: int) -> Any:
        sections: dict[str, Any] = {"actor_optimizer": optimizer, "model": {"megatron": megatron}}
        config = tiny.config(**layout, **sections, train={"token_budget": budget})
        model = MegatronModel(hf, config, ranks, "actor")
        model.load(lambda param, tp, rank: shard(param, weights, tp, rank))
        return model

    model, given = built(26), tiny.in_shares(batch)
    found = {
        name: tiny.whole(given, values)
        for name, values in model.forward(given, temperature=0.7, names=("logprobs", "entropy")).items()
    }
    with torch.no_grad():
        logprobs, entropy = reference.policy(trainer.model, batch, temperature=0.7)
        free, _ = reference.policy(trainer.model, plain, temperature=0.7)
    assert float((logprobs - free)[batch.loss_mask].abs().max()) > 0.1
    other = built(1000).forward(batch, temperature=0.7)["logprobs"]
    loss = model.train_step(given, policy_loss)["actor/loss"]
    own = gradients(model)
    expected = trainer.loss(batch)
    expected.backward()
    truth = trainer.tensors(grads=True)
    largest = max(float(truth[name].abs().max()) for name in own)
    return {
        "logprobs": float((found["logprobs"] - logprobs).abs().max()),
        "entropy": float((found["entropy"] - entropy).abs().max()),
        "loss": abs(loss - float(expected)),
        "gradients": max(float((own[name] - truth[name]).abs().max()) for name in own) / largest,
        "packing": float((other - found["logprobs"]).abs().max()),
    }
