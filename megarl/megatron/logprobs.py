"""Log-probabilities and entropies from hidden states, without ever having all the logits.

With h a token's hidden state, W the output layer's weight, whose rows, the vocabulary, are cut over tensor parallel
ranks, x = h W' divided by the temperature, z = log sum_j exp(x_j) and p_j = exp(x_j - z):

    log p(target) = x_target - z              d log p(target) / d x_j = [j is target] - p_j
    entropy H     = z - sum_j p_j x_j         d H / d x_j             = -p_j (x_j - z + H)

Where a model caps its logits, x = cap tanh(h W' / cap) / temperature, and d x / d h W' = (1 - tanh^2) / temperature.

Where sampling was cut off, j runs over what could have been drawn, for z, p and H alike; all other words have no
gradient. A rank takes part with those of them that it has, which may be none.

Both passes make the logits of some tokens, use them and drop them; the backward pass makes them again, a third more
work for this one layer. Only numbers per token travel between ranks, never logits, and the backward pass needs no
communication of its own, since every rank has z and H. Logits are made in the weight's type and used in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megarl.megatron.pieces import NOTHING, pieces_of
from megarl.types import Support


def vocab_parallel_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    at_once: int = 512,
    cap: float = 0.0,
    with_entropy: bool = True,
    support: Support | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probability of each target, and the entropy of each distribution, if it is wanted; both [T] fp32, the same on
    every rank.

    hidden: [T, H], any float type, the same on every rank. Its gradient is this rank's part, to be summed over `group`.
    weight: [V / tp, H]; rank r has rows r * V / tp and on.
    targets: [T] int64, the same on every rank.
    vocab_size: rows from this one on are padding and have no probability.
    temperature: divides the logits; must be above 0.
    at_once: tokens whose logits exist at the same time.
    cap: above 0, the soft cap of the logits.
    support: where sampling was cut off, on the host, what each of the T targets could have been; of a token with ids
    the distribution is over these, its target among them, and of what else it could be nothing is computed.
    The gradients that come in must be the same on every rank of `group`, as they are where each computes the same loss.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0, not {temperature}")
    arguments = hidden, weight, targets, vocab_size, group, 1.0 / temperature, at_once, cap, with_entropy, support
    logprobs, entropy = _VocabParallelLogprobs.apply(*arguments)
    return logprobs, entropy


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        vocab_size: int,
        group: dist.ProcessGroup | None,
        scale: float,
        at_once: int,
        cap: float,
        with_entropy: bool,
        support: Support | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rank = 0 if group is None else group.rank()
        width, count = len(weight), len(hidden)
        columns = min(width, max(0, vocab_size - rank * width))  # of mine that are no padding
        pieces = list(pieces_of(targets, support, rank * width, columns, at_once, weight.shape[1]))

        own_peak = hidden.new_full((count,), NOTHING, dtype=torch.float32)
        mine = torch.zeros(count, dtype=torch.bool, device=hidden.device)
        sums = torch.zeros(3, count, dtype=torch.float32, device=hidden.device)  # exp, exp * x, x of the target
        for piece in pieces:
            rows, x = piece.rows, piece.logits(hidden, weight, scale, cap)
            own_peak[rows], mine[rows] = x.amax(dim=1), piece.here
            x -= own_peak[rows, None]
            sums[2, rows] = x.gather(1, piece.target[:, None])[:, 0] * piece.here
            exp = x.exp() if with_entropy else x.exp_()
            sums[0, rows] = exp.sum(dim=1)
            if with_entropy:
                sums[1, rows] = exp.mul_(x).sum(dim=1)
        # What each rank took relative to its own peak is made relative to the highest.
        peak = own_peak.clone()
        _all_reduce(peak, dist.ReduceOp.MAX, group)
        lower = own_peak - peak
        sums[1] = lower.exp() * (sums[1] + lower * sums[0])
        sums[0] *= lower.exp()
        sums[2] += lower * mine
        _all_reduce(sums, dist.ReduceOp.SUM, group)

        log_sum = sums[0].log()
        entropy = log_sum - sums[1] / sums[0] if with_entropy else None
        ctx.save_for_backward(hidden, weight, peak + log_sum, entropy)
        ctx.pieces, ctx.columns, ctx.scale, ctx.cap = pieces, columns, scale, cap
        ctx.set_materialize_grads(False)
        return sums[2] - log_sum, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        grad_logprobs, grad_entropy = grads
        nothing = (None,) * 8
        if grad_logprobs is None and grad_entropy is None:
            return None, None, *nothing
        hidden, weight, log_z, entropy = ctx.saved_tensors
        columns, scale, cap = ctx.columns, ctx.scale, ctx.cap
        grad_hidden, total_weight = torch.zeros_like(hidden), None
        if ctx.needs_input_grad[1]:  # not where it is frozen
            total_weight = torch.zeros(columns, weight.shape[1], dtype=torch.float32, device=weight.device)
        for piece in ctx.pieces:
            rows = piece.rows
            log_p = piece.logits(hidden, weight, scale, cap).sub_(log_z[rows, None])
            # These are the largest tensors of all: where the log-probs of all words are not needed again, they are
            # what the gradient is computed in.
            p = log_p.exp() if cap or grad_entropy is not None else log_p.exp_()
            factor = torch.zeros_like(log_z[rows, None]) if grad_logprobs is None else -grad_logprobs[rows, None]
            if grad_entropy is not None:
                total = p.mul_((log_p + entropy[rows, None]).mul_(-grad_entropy[rows, None]).add_(factor))
            else:
                total = p.mul_(factor)
            if grad_logprobs is not None:
                at_target = (grad_logprobs[rows] * piece.here)[:, None]
                total.scatter_add_(1, piece.target[:, None], at_target)
            if cap:
                tanh = log_p.add_(log_z[rows, None]).div_(scale * cap).clamp_(min=-1)  # where there is no logit
                total *= 1 - tanh.square_()
            grad = total.mul_(scale).to(weight.dtype)
            grad_hidden[rows] = piece.to_hidden(grad, weight)
            if total_weight is not None:
                piece.add_to_weight(total_weight, grad, hidden)
        if total_weight is None:
            return grad_hidden, None, *nothing
        grad_weight = torch.zeros_like(weight)
        grad_weight[:columns] = total_weight
        return grad_hidden, grad_weight, *nothing


def _all_reduce(values: torch.Tensor, operation: Any, group: dist.ProcessGroup | None) -> None:
    if group is not None and group.size() > 1:
        dist.all_reduce(values, op=operation, group=group)
