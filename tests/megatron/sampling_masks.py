"""Sampling masks in a layout: log-probs, entropies, loss and gradients over each token's candidate ids, compared with
transformers, whose other logits are masked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import reference
import tiny
import torch

from megarl.models.layout_algebra import shard
from megarl.types import ModelOutput, SamplingMask, TokenLoss, TrainBatch

FAMILIES = ("qwen3_moe", "qwen2", "gemma2")
"""A family with experts, one with a tied output layer, and one that caps its logits."""


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
    """Return the largest differences."""
    from megarl.megatron.trainer_model import MegatronModel

    hf, plain = tiny.HF[family], tiny.batch()
    batch = plain.with_(sampling_mask=tiny.sampling_masks(plain)).with_prefixes()
    trainer = reference.Trainer(family, "actor")
    weights = {name: tensor.clone() for name, tensor in trainer.tensors().items()}
    optimizer = dict(lr=0.01, schedule="constant", warmup_fraction=0.0, max_grad_norm=0.0)

    def build(budget: int) -> Any:
        sections: dict[str, Any] = {"actor_optimizer": optimizer, "model": {"megatron": megatron}}
        config = tiny.config(**layout, **sections, train={"max_tokens_per_gpu": budget})
        model = MegatronModel(hf, config, ranks, "actor")
        model.load_shards(lambda param, tp, rank: shard(param, weights, tp, rank))
        return model

    model, sharded = build(26), tiny.shard_batch(batch)
    plan = model.dispatcher.plan(sharded, forward_only=True)
    sent = model.dispatcher.dispatch(sharded, plan, ("tokens",)).select(plan[model.dispatcher.this_rank.row][0])
    assert (sent.sampling_mask is not None) == model.dispatcher.this_rank.is_last_stage  # no other rank needs it
    actual = {
        name: tiny.gather_tokens(sharded, values)
        for name, values in model.forward(sharded, temperature=0.7, names=("logprobs", "entropy")).items()
    }
    with torch.no_grad():
        logprobs, entropy = reference.policy(trainer.model, batch, temperature=0.7)
        free, _ = reference.policy(trainer.model, plain, temperature=0.7)
    assert float((logprobs - free)[batch.loss_mask].abs().max()) > 0.1
    large_batch_logprobs = build(1000).forward(batch, temperature=0.7)["logprobs"]
    loss = model.train_step(sharded, policy_loss)["actor/loss"]
    local = gradients(model)
    expected = trainer.loss(batch)
    expected.backward()
    reference_grads = trainer.tensors(grads=True)
    grad_scale = max(float(reference_grads[name].abs().max()) for name in local)
    return {
        "logprobs": float((actual["logprobs"] - logprobs).abs().max()),
        "entropy": float((actual["entropy"] - entropy).abs().max()),
        "loss": abs(loss - float(expected)),
        "gradients": max(float((local[name] - reference_grads[name]).abs().max()) for name in local) / grad_scale,
        "packing": float((large_batch_logprobs - actual["logprobs"]).abs().max()),
    }


def find_targets_of_a_shard() -> list[bool]:
    """Return which targets are in the shard of ids 4 to 7. The first is just before it, and its candidates are padded,
    since the second token has more."""
    from megarl.megatron.logprobs import iter_chunks

    support, has_target = SamplingMask.from_rows([[3, 5, 6], [4, 5, 6, 7]]), torch.zeros(2, dtype=torch.bool)
    for chunk in iter_chunks(torch.tensor([3, 4]), support, first=4, columns=4, chunk_tokens=16, width=1):
        has_target[chunk.rows] = chunk.has_target
    return list(has_target.tolist())


def masked_logprobs() -> dict[str, dict[str, Any]]:
    """Compare with log_softmax of masked logits in fp64, with gradients of both outputs.

    Candidate sets have one, some or all ids, or are absent. Also counts the weight's elements gathered at a time."""
    from megarl.megatron.logprobs import iter_chunks, vocab_parallel_logprobs

    result = {}
    for name, cap, sizes in (("plain", 0.0, (0, 1, 3, 13, 2, 0, 5, 1)), ("capped", 3.0, (4, 13, 0, 1, 1, 7, 2, 5))):
        generator = torch.Generator().manual_seed(len(name))
        rows, real, padded, wide = len(sizes), 13, 16, 6
        hidden = torch.randn(rows, wide, generator=generator).requires_grad_()
        head = (2 * torch.randn(padded, wide, generator=generator)).requires_grad_()
        targets = torch.randint(0, real, (rows,), generator=generator)
        weight = torch.randn(2, rows, generator=generator)
        ids = []
        for target, size in zip(targets.tolist(), sizes, strict=True):
            other_ids = [i for i in torch.randperm(real, generator=generator).tolist() if i != target]
            ids.append([*other_ids[: size - 1], target] if size else [])
        support = SamplingMask.from_rows(ids)
        options = real, None, 0.7, 4, cap
        actual = vocab_parallel_logprobs(hidden, head, targets, *options, sampling_mask=support)
        (weight[0] * actual[0] + weight[1] * actual[1]).sum().backward()  # type: ignore[operator]
        chunks = list(iter_chunks(targets, support, 0, real, 4, wide))
        masked_logprobs_only, _ = vocab_parallel_logprobs(
            hidden, head, targets, *options, with_entropy=False, sampling_mask=support
        )
        exact = hidden.detach().double().requires_grad_(), head.detach().double().requires_grad_()
        logits = (exact[0] @ exact[1].T)[:, :real]
        logits = (cap * torch.tanh(logits / cap) if cap else logits) / 0.7
        log_p = logits.masked_fill(~reference.candidate_mask(support, real), -torch.inf).log_softmax(-1)
        expected = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p.clamp(min=-1e9)).sum(-1)
        (weight[0] * expected[0] + weight[1] * expected[1]).sum().backward()
        gaps = [
            float((leaf.grad - exact_leaf.grad).abs().max())
            for leaf, exact_leaf in zip((hidden, head), exact, strict=True)
        ]  # type: ignore[operator]
        is_single = support.counts == 1
        result[name] = {
            "targets of a shard": find_targets_of_a_shard(),
            "logprobs": float((actual[0] - expected[0]).abs().max()),
            "entropy": float((actual[1] - expected[1]).abs().max()),  # type: ignore[operator]
            "gradient": max(gaps),
            "without entropy": float((masked_logprobs_only - actual[0]).abs().max()),
            "single candidate": float(actual[0][is_single].abs().max() + hidden.grad[is_single].abs().max()),  # type: ignore[index]
            "padding": float(head.grad[real:].abs().max()),  # type: ignore[index]
            "gathered elements": float(
                max(chunk.candidate_ids.numel() * wide for chunk in chunks if chunk.candidate_ids is not None)
            ),
        }
    return result


def masked_micro_batch() -> dict[str, Any]:
    """Select the first and last of three sequences: candidates of the next token at each position, also under CP."""
    from megarl.megatron.micro_batch import make_micro_batch

    batch = tiny.batch((3, 1, 2))
    sets = [[], [7, 8], [9], [], [], [4, 5, 6]]
    parts = tuple(SamplingMask.from_rows(sets[a:b]) for a, b in ((0, 3), (3, 4), (4, 6)))
    chosen = batch.with_(sampling_mask=parts).select([0, 2])

    def candidates_of(**truncation: int) -> list[list[int]]:
        support = make_micro_batch(chosen, [0, 2], torch.device("cpu"), **truncation).sampling_mask
        assert support is not None
        return [part.tolist() for part in support.ids.split(support.counts.tolist())]

    empty = make_micro_batch(batch.with_(sampling_mask=parts).select([]), [], torch.device("cpu"), tp=4).sampling_mask
    no_mask = make_micro_batch(batch, [0, 1, 2], torch.device("cpu")).sampling_mask
    assert empty is not None
    return {
        "complete": candidates_of(tp=4),
        "context": [candidates_of(cp=2, cp_rank=rank) for rank in (0, 1)],
        "empty": empty.counts.tolist(),
        "none": no_mask is None,
    }
