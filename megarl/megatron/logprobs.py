"""Log-probabilities and entropies of logits whose vocabulary is cut over tensor parallel ranks.

With x the logits divided by the temperature, z = log sum_j exp(x_j) and p_j = exp(x_j - z):

    log p(target) = x_target - z              d log p(target) / d x_j = [j is target] - p_j
    entropy H     = z - sum_j p_j x_j         d H / d x_j             = -p_j (x_j - z + H)

Only numbers per token travel between ranks, never logits, and the backward pass needs no communication, since every
rank has z and H. Both passes work in fp32 on a few rows at a time, so that no fp32 copy of all the logits exists.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

_ROWS = 1024  # tokens per slice of the computation


def vocab_parallel_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target, and the entropy of each distribution; both [T] fp32, the same on every rank.

    logits: [T, V / tp], any float type; rank r holds columns r * V / tp and on.
    targets: [T] int64, the same on every rank.
    vocab_size: columns from this one on are padding and have no probability.
    temperature: divides the logits; must be above 0.
    The gradients that come in must be the same on every rank of `group`, as they are where each computes the same loss.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0, not {temperature}")
    logprobs, entropy = _VocabParallelLogprobs.apply(logits, targets, vocab_size, group, 1.0 / temperature)
    return logprobs, entropy


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        vocab_size: int,
        group: dist.ProcessGroup | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rank = 0 if group is None else group.rank()
        width = logits.shape[1]
        columns = min(width, max(0, vocab_size - rank * width))  # of mine that are no padding
        local_targets = targets - rank * width
        mine = (local_targets >= 0) & (local_targets < columns)
        local_targets = local_targets.clamp(0, max(columns - 1, 0))

        peak = logits.new_full((len(logits),), -torch.inf, dtype=torch.float32)
        if columns:
            peak = logits[:, :columns].amax(dim=1).float() * scale
        _all_reduce(peak, dist.ReduceOp.MAX, group)

        sums = torch.zeros(3, len(logits), dtype=torch.float32, device=logits.device)  # exp, exp * x, x of the target
        for rows in _slices(len(logits)):
            if columns:
                x = logits[rows, :columns].float() * scale - peak[rows, None]
                sums[2, rows] = x.gather(1, local_targets[rows, None])[:, 0] * mine[rows]
                exp = x.exp()
                sums[0, rows] = exp.sum(dim=1)
                sums[1, rows] = exp.mul_(x).sum(dim=1)
        _all_reduce(sums, dist.ReduceOp.SUM, group)

        log_sum = sums[0].log()
        logprobs = sums[2] - log_sum
        entropy = log_sum - sums[1] / sums[0]
        ctx.save_for_backward(logits, local_targets, mine, peak + log_sum, entropy)
        ctx.columns, ctx.scale = columns, scale
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None, None]:
        grad_logprobs, grad_entropy = grads
        if grad_logprobs is None and grad_entropy is None:
            return None, None, None, None, None
        logits, local_targets, mine, log_z, entropy = ctx.saved_tensors
        columns, scale = ctx.columns, ctx.scale
        grad = torch.zeros_like(logits)
        for rows in _slices(len(logits)):
            if not columns:
                break
            log_p = logits[rows, :columns].float() * scale - log_z[rows, None]
            p = log_p.exp()
            total = torch.zeros_like(p)
            if grad_logprobs is not None:
                total -= p * grad_logprobs[rows, None]
                at_target = (grad_logprobs[rows] * mine[rows])[:, None]
                total.scatter_add_(1, local_targets[rows, None], at_target)
            if grad_entropy is not None:
                total -= p * (log_p + entropy[rows, None]) * grad_entropy[rows, None]
            grad[rows, :columns] = (total * scale).to(grad.dtype)
        return grad, None, None, None, None


def _all_reduce(values: torch.Tensor, operation: Any, group: dist.ProcessGroup | None) -> None:
    if group is not None and group.size() > 1:
        dist.all_reduce(values, op=operation, group=group)


def _slices(length: int) -> list[slice]:
    return [slice(start, start + _ROWS) for start in range(0, length, _ROWS)]
