"""The functions of the package flash-linear-attention (fla) that Megatron's gated delta net calls, in plain torch.

The package's kernels need a GPU. `install` gives Megatron's modules these functions instead, with the same arguments.
Sequences are packed: `cu_seqlens` are the offsets of N sequences, from 0 to the number of tokens T.

The gated delta rule (arXiv:2412.06464): a state S [key size, value size], zero at the start of a sequence, becomes

    S <- exp(g) S,  S <- S + k (beta (v - S^T k))^T

with each token, whose output is S^T q / sqrt(key size).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

CHUNK = 64
"""Tokens of a sequence that are computed together. The state is passed on from chunk to chunk."""


def install() -> None:
    """Let Megatron's gated delta net use these functions."""
    from megatron.core.ssm.gated_delta_net import common, gdn

    common.HAVE_FLA = True
    for module in (common, gdn):
        vars(module).update(causal_conv1d=causal_conv1d, chunk_gated_delta_rule=chunk_gated_delta_rule)
    common.l2norm = l2norm


def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Return x / sqrt(sum(x^2) + eps) along the last dimension, computed in fp32."""
    y = x.float()
    return (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Convolve each channel over the token and its predecessors in the sequence, as many as weights. Second: no state.

    x: [1, T, channels]. weight: [channels, width], of which the last is for the token itself.
    """
    width, tokens = weight.shape[1], x.shape[1]
    position = _positions(x, cu_seqlens)
    padded = F.pad(x, (0, 0, width - 1, 0))
    y = torch.zeros_like(x)
    for distance in range(width):
        start = width - 1 - distance
        term = padded[:, start : start + tokens] * weight[:, start]
        y = y + (term if distance == 0 else term * (position >= distance)[None, :, None])
    if bias is not None:
        y = y + bias
    return (F.silu(y) if activation in ("silu", "swish") else y), None


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the outputs, [1, T, heads, value size], and the final states, [N, heads, key size, value size], if asked.

    q, k: [1, T, heads, key size]. v: [1, T, heads, value size]. g, beta: [1, T, heads]. initial_state: like the result.
    """
    lengths = [q.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()
    queries, keys = (l2norm(x) if use_qk_l2norm_in_kernel else x for x in (q, k))
    queries = queries * (scale or q.shape[-1] ** -0.5)
    layout = _ChunkLayout(lengths, q.device)
    chunks = [layout.scatter(x[0].float()) for x in (queries, keys, v, g, beta)]
    outputs, states = _chunked_rule(layout, initial_state, *chunks)
    return layout.gather(outputs)[None].to(v.dtype), states if output_final_state else None


class _ChunkLayout:
    """Chunks of all sequences in rounds: first chunk of each sequence, then second ones, and so on, longest first.

    So the sequences that still have a chunk in a round are the first ones, and one step computes a round of all.
    """

    def __init__(self, lengths: list[int], device: torch.device) -> None:
        sizes = torch.tensor(lengths, device=device)
        counts = (sizes + CHUNK - 1) // CHUNK
        self.order = counts.argsort(descending=True, stable=True)  # sequences, longest first
        sorted_counts = counts[self.order]
        rounds = int(sorted_counts[0]) if len(lengths) else 0
        self.alive = [int((sorted_counts > number).sum()) for number in range(rounds)]
        """Sequences with a chunk in each round."""
        first = torch.tensor([0, *self.alive], device=device).cumsum(0)
        rank = torch.empty_like(self.order)
        rank[self.order] = torch.arange(len(lengths), device=device)
        position = _positions_of(sizes)
        rank_of_token = torch.repeat_interleave(rank, sizes)
        chunk = first[position // CHUNK] + rank_of_token
        self.index = chunk * CHUNK + position % CHUNK
        self.chunks = int(first[-1])

    def scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Map [T, heads, ...] to [chunks, heads, CHUNK, ...], with zeros after the end of a sequence."""
        padded = x.new_zeros(self.chunks * CHUNK, *x.shape[1:]).index_copy(0, self.index, x)
        return padded.unflatten(0, (self.chunks, CHUNK)).transpose(1, 2)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Map [chunks, heads, CHUNK, ...] to [T, heads, ...]."""
        return x.transpose(1, 2).flatten(0, 1).index_select(0, self.index)


def _chunked_rule(
    layout: _ChunkLayout,
    initial_state: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs [chunks, heads, CHUNK, value size] and final states [N, heads, key size, value size].

    Within a chunk let G be the cumulative sum of g. The value that token i writes, w_i = beta_i (v_i - S_i^T k_i) with
    its decayed state S_i, is the solution of a triangular system:

        w_i + sum_{j < i} beta_i exp(G_i - G_j) (k_i . k_j) w_j = beta_i (v_i - exp(G_i) S^T k_i)

    with the state S before the chunk. Its right-hand side is linear in S, so what does not depend on S is solved for
    all chunks at once.
    """
    decay = g.cumsum(-1)
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    pairwise = (decay[..., :, None] - decay[..., None, :]).masked_fill(~causal, -torch.inf).exp()
    system = beta[..., None] * (k @ k.transpose(-1, -2)) * pairwise
    targets = torch.cat([v, decay.exp()[..., None] * k], dim=-1) * beta[..., None]
    solved = torch.linalg.solve_triangular(system, targets, upper=False, unitriangular=True)
    written, reads = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    scores = (q @ k.transpose(-1, -2)) * pairwise
    late_queries = q * decay.exp()[..., None]
    late_keys = (k * (decay[..., -1:] - decay).exp()[..., None]).transpose(-1, -2)
    total_decay = decay[..., -1].exp()[..., None, None]

    sequences, heads = len(layout.order), q.shape[1]
    states = q.new_zeros(sequences, heads, k.shape[-1], v.shape[-1])
    if initial_state is not None:
        states = initial_state.to(states)[layout.order]
    outputs, finals, start = [], [], 0
    for alive in layout.alive:
        finals.append(states[alive:])  # of sequences that ended
        states, part = states[:alive], slice(start, start + alive)
        values = written[part] - reads[part] @ states
        outputs.append(late_queries[part] @ states + scores[part] @ values)
        states = total_decay[part] * states + late_keys[part] @ values
        start += alive
    finals.append(states)
    ordered = torch.cat(finals[::-1])
    return torch.cat(outputs), ordered.new_empty(ordered.shape).index_copy(0, layout.order, ordered)


def _positions(x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    if cu_seqlens is None:
        return torch.arange(x.shape[1], device=x.device)
    return _positions_of(cu_seqlens.diff().long())


def _positions_of(lengths: torch.Tensor) -> torch.Tensor:
    """Return each token's position within its sequence, [T]."""
    starts = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum()), device=lengths.device) - torch.repeat_interleave(starts, lengths)
