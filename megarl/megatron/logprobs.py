"""Log-probabilities and entropies from hidden states, without materialising all logits.

With h the hidden state of a token, W the weight of the output layer, whose rows (the vocabulary) are split over tensor
parallel ranks, x = h W' divided by the temperature, z = log sum_j exp(x_j) and p_j = exp(x_j - z):

    log p(target) = x_target - z              d log p(target) / d x_j = [j is target] - p_j
    entropy H     = z - sum_j p_j x_j         d H / d x_j             = -p_j (x_j - z + H)

Where a model caps its logits, x = cap tanh(h W' / cap) / temperature, and d x / d h W' = (1 - tanh^2) / temperature.

With truncated sampling, j runs over the tokens in the sampling mask, for z, p and H alike; all others have no gradient.
A rank contributes the masked-in tokens of its vocabulary shard, possibly none.

Both passes compute the logits of a chunk of tokens, use them and drop them. The backward pass recomputes them, which
costs a third more work for this one layer. Ranks communicate per-token values only, never logits, and the backward pass
needs no communication, since every rank has z and H. Logits are computed in the weight's dtype and used in fp32. A
chunk covers some tokens times this rank's vocabulary or, with truncated sampling, the few candidates of each token, for
which rows of the weight are gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megarl.megatron.fsdp import ShardedModel
from megarl.megatron.micro_batch import MicroBatch
from megarl.parallel.context_parallel import gather_context
from megarl.types import ModelOutput, SamplingMask

MASKED_LOGIT = -1e30
"""The logit of an absent token: far below any real logit, and finite, so that 0 times it is 0."""


@dataclass(frozen=True)
class LogitsChunk:
    """A chunk of tokens, and the vocabulary columns whose logits are computed for it."""

    rows: slice | torch.Tensor  # [n] token indices
    target_columns: torch.Tensor  # [n] int64, column of each token's target; arbitrary unless has_target
    has_target: torch.Tensor  # [n] bool, whether the target is among this rank's logits
    candidate_ids: torch.Tensor | None  # [n, K] int64 rows of the weight, -1 for padding; None for all `columns`
    columns: int

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor, scale: float, cap: float) -> torch.Tensor:
        """Return logits, [n, columns] or [n, K] fp32, `MASKED_LOGIT` for padding."""
        states = hidden[self.rows]
        if self.candidate_ids is None:
            return make_logits(states, weight[: self.columns], scale, cap)
        logits = torch.matmul(weight[self.candidate_ids.clamp(min=0)], states[:, :, None])[..., 0].float()
        return cap_and_scale(logits, scale, cap).masked_fill_(self.candidate_ids < 0, MASKED_LOGIT)

    def compute_hidden_grad(self, grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the hidden states, [n, hidden]. grad: of the logits, in the weight's dtype."""
        if self.candidate_ids is None:
            return grad @ weight[: self.columns]
        return torch.matmul(grad[:, None], weight[self.candidate_ids.clamp(min=0)])[:, 0]

    def accumulate_weight_grad(self, total: torch.Tensor, grad: torch.Tensor, hidden: torch.Tensor) -> None:
        """Add the weight's gradient to `total`, [columns, hidden] fp32. grad: of the logits, in the weight's dtype."""
        states = hidden[self.rows]
        if self.candidate_ids is None:
            total += grad.T @ states
            return
        parts = grad[:, :, None].float() * states[:, None].float()  # padding has zero gradient
        total.index_add_(0, self.candidate_ids.clamp(min=0).flatten(), parts.flatten(0, 1))


def make_logits(hidden: torch.Tensor, weight: torch.Tensor, scale: float, cap: float) -> torch.Tensor:
    """Return capped and scaled logits, [rows, columns] fp32."""
    return cap_and_scale(torch.matmul(hidden, weight.T).float(), scale, cap)


def cap_and_scale(logits: torch.Tensor, scale: float, cap: float) -> torch.Tensor:
    """Apply the soft cap, if any, and multiply by `scale`, the inverse temperature, in place."""
    return logits.div_(cap).tanh_().mul_(cap * scale) if cap else logits.mul_(scale)


def iter_chunks(
    targets: torch.Tensor, sampling_mask: SamplingMask | None, first: int, columns: int, chunk_tokens: int, width: int
) -> Iterator[LogitsChunk]:
    """Iterate over chunks of tokens, with the columns of this rank's vocabulary shard that each needs.

    targets: [T] int64 on the device.
    sampling_mask: sampling mask of these T tokens, on the host.
    first, columns: this rank holds `columns` token ids from `first` on, without padding.
    chunk_tokens: tokens whose full logits exist at a time.
    width: elements of a weight row. With a mask, a chunk gathers at most `chunk_tokens * columns` weight elements.
    """
    if not columns:
        return
    if sampling_mask is None:
        for start in range(0, len(targets), chunk_tokens):
            yield _full_vocab_chunk(targets, slice(start, start + chunk_tokens), first, columns)
        return
    for rows in (sampling_mask.counts == 0).nonzero()[:, 0].split(chunk_tokens):
        yield _full_vocab_chunk(targets, rows.to(targets.device), first, columns)
    is_local = (sampling_mask.ids >= first) & (sampling_mask.ids < first + columns)
    token_indices = torch.repeat_interleave(torch.arange(len(sampling_mask)), sampling_mask.counts)[is_local]
    ids = sampling_mask.ids[is_local].long() - first
    counts = token_indices.bincount(minlength=len(sampling_mask))
    starts = counts.cumsum(0) - counts
    order = counts.argsort(descending=True, stable=True)  # tokens with similar counts together
    num_masked, position = int((counts > 0).sum()), 0
    while position < num_masked:
        max_count = int(counts[order[position]])
        size = max(1, min(chunk_tokens, chunk_tokens * columns // (max_count * width)))
        rows = order[position : min(position + size, num_masked)]
        position += len(rows)
        column = torch.arange(max_count)
        is_valid = column < counts[rows][:, None]
        candidate_ids = torch.where(is_valid, ids[(starts[rows][:, None] + column).clamp(max=len(ids) - 1)], -1)
        candidate_ids, rows = candidate_ids.to(targets.device), rows.to(targets.device)
        # The target just before this shard is at -1, like padding.
        matches = (candidate_ids == (targets[rows] - first)[:, None]) & (candidate_ids >= 0)
        yield LogitsChunk(rows, matches.int().argmax(1), matches.any(1), candidate_ids, columns)


def _full_vocab_chunk(targets: torch.Tensor, rows: slice | torch.Tensor, first: int, columns: int) -> LogitsChunk:
    target_columns = targets[rows] - first
    has_target = (target_columns >= 0) & (target_columns < columns)
    return LogitsChunk(rows, target_columns.clamp(0, columns - 1), has_target, None, columns)


def vocab_parallel_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    chunk_tokens: int = 512,
    cap: float = 0.0,
    with_entropy: bool = True,
    sampling_mask: SamplingMask | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return each target's log-probability and, with `with_entropy`, each distribution's entropy.

    Both are [T] fp32 and equal on every rank. Incoming gradients must be equal on every rank of `group`, as they are
    when every rank computes the same loss.

    hidden: [T, H], any float dtype, equal on every rank. Its gradient is this rank's part, to be summed over `group`.
    weight: [V / tp, H]; rank r holds the rows from r * V / tp on.
    targets: [T] int64, equal on every rank.
    vocab_size: rows from this index on are padding and have no probability.
    temperature: divides the logits; must be above 0.
    chunk_tokens: number of tokens whose logits exist at the same time.
    cap: soft cap of the logits, if above 0.
    sampling_mask: with truncated sampling, the mask of the T targets, on the host. The distribution of a token with ids
        is over these ids, which include its target; no other logits are computed.

    Raises ValueError unless `temperature` is above 0.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0, not {temperature}")
    scale = 1.0 / temperature
    result: tuple[torch.Tensor, torch.Tensor | None] = _VocabParallelLogprobs.apply(
        hidden, weight, targets, vocab_size, group, scale, chunk_tokens, cap, with_entropy, sampling_mask
    )
    return result


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
        chunk_tokens: int,
        cap: float,
        with_entropy: bool,
        sampling_mask: SamplingMask | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rank = 0 if group is None else group.rank()
        width, count = len(weight), len(hidden)
        columns = min(width, max(0, vocab_size - rank * width))  # without padding
        chunks = list(iter_chunks(targets, sampling_mask, rank * width, columns, chunk_tokens, weight.shape[1]))

        local_peak = hidden.new_full((count,), MASKED_LOGIT, dtype=torch.float32)
        has_target = torch.zeros(count, dtype=torch.bool, device=hidden.device)
        sums = torch.zeros(3, count, dtype=torch.float32, device=hidden.device)  # exp, exp * x, x of the target
        for chunk in chunks:
            rows, x = chunk.rows, chunk.logits(hidden, weight, scale, cap)
            local_peak[rows], has_target[rows] = x.amax(dim=1), chunk.has_target
            x -= local_peak[rows, None]
            sums[2, rows] = x.gather(1, chunk.target_columns[:, None])[:, 0] * chunk.has_target
            exp = x.exp() if with_entropy else x.exp_()
            sums[0, rows] = exp.sum(dim=1)
            if with_entropy:
                sums[1, rows] = exp.mul_(x).sum(dim=1)
        # Rescale this rank's sums from its own peak to the global peak.
        peak = local_peak.clone()
        _all_reduce(peak, dist.ReduceOp.MAX, group)
        peak_offset = local_peak - peak
        sums[1] = peak_offset.exp() * (sums[1] + peak_offset * sums[0])
        sums[0] *= peak_offset.exp()
        sums[2] += peak_offset * has_target
        _all_reduce(sums, dist.ReduceOp.SUM, group)

        log_sum = sums[0].log()
        entropy = log_sum - sums[1] / sums[0] if with_entropy else None
        ctx.save_for_backward(hidden, weight, peak + log_sum, entropy)
        ctx.chunks, ctx.columns, ctx.scale, ctx.cap = chunks, columns, scale, cap
        ctx.set_materialize_grads(False)
        return sums[2] - log_sum, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        grad_logprobs, grad_entropy = grads
        if grad_logprobs is None and grad_entropy is None:
            return (None,) * 10
        hidden, weight, log_z, entropy = ctx.saved_tensors
        columns, scale, cap = ctx.columns, ctx.scale, ctx.cap
        grad_hidden, weight_grad_sum = torch.zeros_like(hidden), None
        if ctx.needs_input_grad[1]:  # False if the weight is frozen
            weight_grad_sum = torch.zeros(columns, weight.shape[1], dtype=torch.float32, device=weight.device)
        for chunk in ctx.chunks:
            rows = chunk.rows
            log_p = chunk.logits(hidden, weight, scale, cap).sub_(log_z[rows, None])
            # These are the largest tensors of all. Compute the gradient in place unless the full log-probs are needed
            # again.
            p = log_p.exp() if cap or grad_entropy is not None else log_p.exp_()
            factor = torch.zeros_like(log_z[rows, None]) if grad_logprobs is None else -grad_logprobs[rows, None]
            if grad_entropy is not None:
                total = p.mul_((log_p + entropy[rows, None]).mul_(-grad_entropy[rows, None]).add_(factor))
            else:
                total = p.mul_(factor)
            if grad_logprobs is not None:
                at_target = (grad_logprobs[rows] * chunk.has_target)[:, None]
                total.scatter_add_(1, chunk.target_columns[:, None], at_target)
            if cap:
                tanh = log_p.add_(log_z[rows, None]).div_(scale * cap).clamp_(min=-1)  # MASKED_LOGIT
                total *= 1 - tanh.square_()
            grad = total.mul_(scale).to(weight.dtype)
            grad_hidden[rows] = chunk.compute_hidden_grad(grad, weight)
            if weight_grad_sum is not None:
                chunk.accumulate_weight_grad(weight_grad_sum, grad, hidden)
        grad_weight = None
        if weight_grad_sum is not None:
            grad_weight = torch.zeros_like(weight)
            grad_weight[:columns] = weight_grad_sum
        return grad_hidden, grad_weight, *(None,) * 8


def _all_reduce(values: torch.Tensor, operation: Any, group: dist.ProcessGroup | None) -> None:
    if group is not None and group.size() > 1:
        dist.all_reduce(values, op=operation, group=group)


@dataclass(frozen=True)
class OutputReader:
    """Turns the last pipeline stage's output into per-token values."""

    model: Any  # the GPTModel of the last stage
    role: str
    vocab_size: int  # without padding
    chunk_tokens: int  # number of tokens whose logits exist at the same time
    cap: float  # soft cap of the logits, if above 0
    sharded: ShardedModel | None = None  # the chunk with FSDP that `model` is in, if it is trained with it

    def read(
        self, micro: MicroBatch, emitted: torch.Tensor, temperature: float, with_entropy: bool = True
    ) -> ModelOutput:
        """Turn emitted states [1, P / cp, hidden] or values [1, P / cp, 1] into [T], shifted except for scores.

        Every context parallel rank gets all values of the micro-batch and computes the same loss.
        """
        if self.role == "reward_model":
            return ModelOutput(scores=micro.align(_gather_context(micro, emitted[0, :, 0].float()), offset=0))
        if self.role == "critic":
            return ModelOutput(values=micro.align(_gather_context(micro, emitted[0, :, 0].float())))
        weight = self._output_weight()
        outputs = self._logprobs(emitted, weight, micro, 0, temperature, with_entropy, micro.sampling_mask)
        if self.sharded is not None:
            self.sharded.begin_backward_with([output for output in outputs if output is not None])
        logprobs, entropy = (None if x is None else micro.align(_gather_context(micro, x)) for x in outputs)
        return ModelOutput(logprobs=logprobs, entropy=entropy)

    def empty_loss(self, emitted: torch.Tensor) -> torch.Tensor:
        """Return the loss of a micro-batch without sequences, zero, with a gradient of zero for all parameters.

        With FSDP, the output layer's must come first as elsewhere: it decides the order of the peers' collectives.
        """
        loss = emitted.float().sum() * 0.0
        if self.sharded is not None and self.role == "actor":
            loss = loss + self._output_weight()[:1].sum().float() * 0.0
            self.sharded.begin_backward_with([loss])
        return loss

    def mtp_loss(self, micro: MicroBatch, emitted: torch.Tensor, loss_weights: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy of the MTP layers' predictions, averaged over layers, as a scalar.

        The output layer gets no gradient.

        emitted: [1, P / cp, (1 + layers) * hidden]. loss_weights: [T] weights of the tokens.
        """
        weight = self._output_weight().detach()
        losses = []
        for layer in range(1, emitted.shape[-1] // weight.shape[1]):
            logprobs, _ = self._logprobs(emitted, weight, micro, layer, with_entropy=False)
            losses.append(-(loss_weights * micro.align(_gather_context(micro, logprobs), layer + 1)).sum())
        return torch.stack(losses).mean()

    def _output_weight(self) -> torch.Tensor:
        if self.model.share_embeddings_and_output_weights:
            return cast(torch.Tensor, self.model.shared_embedding_or_output_weight())
        return cast(torch.Tensor, self.model.output_layer.weight)

    def _logprobs(
        self,
        emitted: torch.Tensor,
        weight: torch.Tensor,
        micro: MicroBatch,
        layer: int,
        temperature: float = 1.0,
        with_entropy: bool = True,
        sampling_mask: SamplingMask | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return log-probs and entropies of the decoder, layer 0, or of an MTP layer, from 1."""
        states = emitted[0, :, layer * weight.shape[1] : (layer + 1) * weight.shape[1]]
        targets, group = micro.on_device("next_tokens")[layer], parallel_state.get_tensor_model_parallel_group()
        settings = self.vocab_size, group, temperature, self.chunk_tokens, self.cap
        return vocab_parallel_logprobs(states, weight, targets, *settings, with_entropy, sampling_mask)


def _gather_context(micro: MicroBatch, local: torch.Tensor) -> torch.Tensor:
    places = micro.context_indices if len(micro.context_indices) == 1 else micro.on_device("context_indices")
    return gather_context(local, places, parallel_state.get_context_parallel_group(), same_gradient=True)
