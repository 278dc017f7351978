"""Log-probabilities and entropies from hidden states, without materialising all logits.

With h the hidden state of a token, W the weight of the output layer, whose rows (the vocabulary) are split over tensor
parallel ranks, x = h W' divided by the temperature, z = log sum_j exp(x_j) and p_j = exp(x_j - z):

    log p(target) = x_target - z              d log p(target) / d x_j = [j is target] - p_j
    entropy H     = z - sum_j p_j x_j         d H / d x_j             = -p_j (x_j - z + H)

Where a model caps its logits, x = cap tanh(h W' / cap) / temperature, and d x / d h W' = (1 - tanh^2) / temperature.

With truncated sampling, j runs over the tokens that could have been sampled, for z, p and H alike; all others have no
gradient. A rank contributes those of them that it holds, possibly none.

Both passes compute the logits of a chunk of tokens, use them and drop them. The backward pass recomputes them, which is
a third more work for this one layer. Only per-token numbers are communicated, never logits, and the backward pass needs
no communication, since every rank has z and H. Logits are computed in the weight's dtype and used in fp32. A chunk
covers some tokens times this rank's vocabulary or, with truncated sampling, the few candidates of each token, for which
rows of the weight are gathered.

`Reader` turns what the last pipeline stage emits for a micro-batch into per-token values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megarl.megatron.micro_batch import MicroBatch
from megarl.parallel.context_parallel import gather_context
from megarl.types import ModelOutput, SamplingMask

MASKED_LOGIT = -1e30
"""The logit of no token: far below any, and finite, so that 0 times it is 0."""


@dataclass(frozen=True)
class LogitsChunk:
    """Some tokens, and the logits that are made of them."""

    rows: slice | torch.Tensor  # [n] which tokens
    target_columns: torch.Tensor  # [n] int64, at which of a token's logits its target is; any where it is not here
    has_target: torch.Tensor  # [n] bool, whether it is
    candidate_ids: (
        torch.Tensor | None
    )  # [n, K] int64 rows of the weight for each token, -1 for none; None for all `columns`
    columns: int

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor, scale: float, cap: float) -> torch.Tensor:
        """[n, columns] or [n, K] fp32, `NOTHING` where there is none."""
        states = hidden[self.rows]
        if self.candidate_ids is None:
            return make_logits(states, weight[: self.columns], scale, cap)
        found = torch.matmul(weight[self.candidate_ids.clamp(min=0)], states[:, :, None])[..., 0].float()
        return cap_and_scale(found, scale, cap).masked_fill_(self.candidate_ids < 0, MASKED_LOGIT)

    def compute_hidden_grad(self, grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[n, hidden]: the gradient of the states, of that of the logits, in the weight's type."""
        if self.candidate_ids is None:
            return grad @ weight[: self.columns]
        return torch.matmul(grad[:, None], weight[self.candidate_ids.clamp(min=0)])[:, 0]

    def accumulate_weight_grad(self, total: torch.Tensor, grad: torch.Tensor, hidden: torch.Tensor) -> None:
        """Add the gradient of the weight to [columns, hidden] fp32, of that of the logits, in the weight's type."""
        states = hidden[self.rows]
        if self.candidate_ids is None:
            total += grad.T @ states
            return
        parts = grad[:, :, None].float() * states[:, None].float()  # where there is no logit there is no gradient
        total.index_add_(0, self.candidate_ids.clamp(min=0).flatten(), parts.flatten(0, 1))


def make_logits(hidden: torch.Tensor, weight: torch.Tensor, scale: float, cap: float) -> torch.Tensor:
    """[rows, columns] fp32."""
    return cap_and_scale(torch.matmul(hidden, weight.T).float(), scale, cap)


def cap_and_scale(logits: torch.Tensor, scale: float, cap: float) -> torch.Tensor:
    """In place, as the model caps its logits, and divided by the temperature."""
    return logits.div_(cap).tanh_().mul_(cap * scale) if cap else logits.mul_(scale)


def iter_chunks(
    targets: torch.Tensor, support: SamplingMask | None, first: int, columns: int, at_once: int, width: int
) -> Iterator[LogitsChunk]:
    """What this rank makes of each token's logits.

    targets: [T] int64 on the device. support: of these T tokens, on the host. The rank has the `columns` ids from
    `first` on, without padding, and the logits of `at_once` tokens at a time, or weights of `width` numbers for as many
    numbers at a time.
    """
    if not columns:
        return
    if support is None:
        for start in range(0, len(targets), at_once):
            yield _full_vocab_chunk(targets, slice(start, start + at_once), first, columns)
        return
    for rows in (support.counts == 0).nonzero()[:, 0].split(at_once):
        yield _full_vocab_chunk(targets, rows.to(targets.device), first, columns)
    own = (support.ids >= first) & (support.ids < first + columns)
    owner = torch.repeat_interleave(torch.arange(len(support)), support.counts)[own]
    ids = support.ids[own].long() - first
    counts = owner.bincount(minlength=len(support))
    starts = counts.cumsum(0) - counts
    order = counts.argsort(descending=True, stable=True)[: int((counts > 0).sum())]  # those alike together
    place = 0
    while place < len(order):
        most = int(counts[order[place]])
        rows = order[place : place + max(1, min(at_once, at_once * columns // (most * width)))]
        place += len(rows)
        column = torch.arange(most)
        there = column < counts[rows][:, None]
        chosen = torch.where(there, ids[(starts[rows][:, None] + column).clamp(max=len(ids) - 1)], -1)
        chosen, rows = chosen.to(targets.device), rows.to(targets.device)
        found = chosen == (targets[rows] - first)[:, None]
        yield LogitsChunk(rows, found.int().argmax(1), found.any(1), chosen, columns)


def _full_vocab_chunk(targets: torch.Tensor, rows: slice | torch.Tensor, first: int, columns: int) -> LogitsChunk:
    at = targets[rows] - first
    return LogitsChunk(rows, at.clamp(0, columns - 1), (at >= 0) & (at < columns), None, columns)


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
    support: SamplingMask | None = None,
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
        support: SamplingMask | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rank = 0 if group is None else group.rank()
        width, count = len(weight), len(hidden)
        columns = min(width, max(0, vocab_size - rank * width))  # of mine that are no padding
        pieces = list(iter_chunks(targets, support, rank * width, columns, at_once, weight.shape[1]))

        own_peak = hidden.new_full((count,), MASKED_LOGIT, dtype=torch.float32)
        mine = torch.zeros(count, dtype=torch.bool, device=hidden.device)
        sums = torch.zeros(3, count, dtype=torch.float32, device=hidden.device)  # exp, exp * x, x of the target
        for piece in pieces:
            rows, x = piece.rows, piece.logits(hidden, weight, scale, cap)
            own_peak[rows], mine[rows] = x.amax(dim=1), piece.has_target
            x -= own_peak[rows, None]
            sums[2, rows] = x.gather(1, piece.target_columns[:, None])[:, 0] * piece.has_target
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
            grad_hidden[rows] = piece.compute_hidden_grad(grad, weight)
            if total_weight is not None:
                piece.accumulate_weight_grad(total_weight, grad, hidden)
        if total_weight is None:
            return grad_hidden, None, *nothing
        grad_weight = torch.zeros_like(weight)
        grad_weight[:columns] = total_weight
        return grad_hidden, grad_weight, *nothing


def _all_reduce(values: torch.Tensor, operation: Any, group: dist.ProcessGroup | None) -> None:
    if group is not None and group.size() > 1:
        dist.all_reduce(values, op=operation, group=group)


@dataclass(frozen=True)
class OutputReader:
    """model: the GPTModel of the last stage. role: of the model. vocab_size: without padding. at_once: tokens whose
    logits exist at the same time. cap: above 0, the soft cap of the logits."""

    model: Any
    role: str
    vocab_size: int
    at_once: int
    cap: float

    def read(
        self, micro: MicroBatch, emitted: torch.Tensor, temperature: float, with_entropy: bool = True
    ) -> ModelOutput:
        """[1, P / cp, hidden] states or [1, P / cp, 1] values, as emitted -> [T], shifted but for scores.

        Every context parallel rank has all of a micro-batch's numbers and computes the same loss of them.
        """
        if self.role == "reward_model":
            return ModelOutput(scores=micro.remove_padding(_gather_context(micro, emitted[0, :, 0].float())))
        if self.role == "critic":
            return ModelOutput(values=micro.align(_gather_context(micro, emitted[0, :, 0].float())))
        weight = self._output_weight()
        states = emitted[0, :, : weight.shape[1]]
        found = self._logprobs(states, weight, micro.next_tokens[0], temperature, with_entropy, micro.sampling_mask)
        logprobs, entropy = (None if x is None else micro.align(_gather_context(micro, x)) for x in found)
        return ModelOutput(logprobs=logprobs, entropy=entropy)

    def mtp_loss(self, micro: MicroBatch, emitted: torch.Tensor) -> torch.Tensor:
        """Of states [1, P / cp, (1 + layers) hidden]: the mean over MTP layers of the cross-entropy of what each
        predicts, weighted as the batch weights these tokens; a number, without a gradient for the output layer."""
        weight = self._output_weight().detach()
        assert micro.batch.loss_weights is not None
        losses = []
        for number, states in enumerate(emitted[0].split(weight.shape[1], dim=1)[1:], 1):
            logprobs, _ = self._logprobs(states, weight, micro.next_tokens[number], 1.0, False)
            losses.append(-(micro.batch.loss_weights * micro.align(_gather_context(micro, logprobs), number + 1)).sum())
        return torch.stack(losses).mean()

    def _output_weight(self) -> torch.Tensor:
        tied = self.model.share_embeddings_and_output_weights
        weight: torch.Tensor = (
            self.model.shared_embedding_or_output_weight() if tied else self.model.output_layer.weight
        )
        return weight

    def _logprobs(
        self,
        states: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        with_entropy: bool,
        support: SamplingMask | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        group = parallel_state.get_tensor_model_parallel_group()
        settings = self.vocab_size, group, temperature, self.at_once, self.cap
        return vocab_parallel_logprobs(states, weight, targets, *settings, with_entropy, support)


def _gather_context(micro: MicroBatch, local: torch.Tensor) -> torch.Tensor:
    return gather_context(local, micro.context_indices, parallel_state.get_context_parallel_group(), same_gradient=True)
