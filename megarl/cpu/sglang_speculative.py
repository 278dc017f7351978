"""Speculative decoding on a CPU without AMX: SGLang's kernels in plain torch, for a chain of drafts (topk = 1).

Each round runs the policy over a window of n tokens per sequence: its last chosen token, and n - 1 that the draft layer
proposes after it. From left to right, a proposal is accepted or replaced, and everything after a replaced one is
dropped. After n - 1 accepted proposals, one more token is chosen. SGLang's trees, [sequences, n], are chains here.

The functions named *_cpu replace those of `sgl_kernel` and have their signatures. `install` sets the others where
SGLang has no CPU implementation, or one that does not sample but takes the most likely token at any temperature.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    num_cols: int,
) -> None:
    """Set out_cache_loc [sequences * num_cols] to the slots of the tokens after the first `seq_lens`, in place."""
    columns = seq_lens[:, None] + torch.arange(topk * num_cols)
    out_cache_loc.copy_(req_to_token[req_pool_indices[:, None], columns].flatten())


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Set out_cache_loc to the slots of the tokens [start, end) of each sequence, concatenated, in place."""
    spans = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    out_cache_loc.copy_(torch.cat([req_to_token[row, start:end] for row, start, end in spans]))


def build_tree_kernel_efficient_cpu(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Describe the chain as SGLang's tree, without siblings, in place. tree_mask stays: attention is causal."""
    if topk != 1:
        raise NotImplementedError("speculative decoding on a CPU: one draft at a time only")
    n = draft_token_num
    positions.copy_((seq_lens[:, None] + torch.arange(n)).flatten())
    retrieve_index.copy_(torch.arange(retrieve_index.numel()).view(-1, n))
    retrieve_next_token[:, :-1] = torch.arange(1, n)


def fill_bonus_tokens_cpu(tokens: torch.Tensor, lengths: torch.Tensor, last: torch.Tensor, width: int) -> None:
    """Set last [sequences] to the last of the first `lengths` tokens of each row of `tokens` [sequences, width]."""
    last.copy_(tokens.view(-1, width).gather(1, lengths[:, None].long() - 1)[:, 0])


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Accept proposals while they equal the policy's most likely tokens, `target_predict` [sequences, n], in place."""
    accepted = candidates[:, 1:] == target_predict[:, :-1]
    _write_accepted(target_predict, accepted, predicts, accept_index, accept_token_num)


def sample_chain(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    **_: Any,
) -> None:
    """Sample tokens with exactly the policy's probabilities, by rejection sampling of deterministic proposals.

    Source: arXiv:2211.17192. Where the policy's distribution is p, a proposal d is accepted with probability p(d);
    otherwise the token is drawn from p without d, which gives x != d the probability
    (1 - p(d)) * p(x) / (1 - p(d)) = p(x). Writes its results in place, see `_write_accepted`.

    candidates: [sequences, n], the proposals from column 1 on.
    uniform_samples: [sequences, n] in [0, 1).
    uniform_samples_for_final_sampling: [sequences] in [0, 1).
    target_probs: [sequences, n, vocabulary], after each token of the window.
    """
    proposed = candidates[:, 1:].long()
    accepted = uniform_samples[:, :-1] < target_probs[:, :-1].gather(2, proposed[..., None])[..., 0]
    rows, num_accepted = torch.arange(len(candidates)), accepted.long().cumprod(1).sum(1)
    residual = target_probs[rows, num_accepted].double()
    is_rejected = num_accepted < proposed.shape[1]  # sequences with a rejected proposal
    residual[rows[is_rejected], proposed[rows[is_rejected], num_accepted[is_rejected]]] = 0.0
    sums = residual.cumsum(1)
    draws = (uniform_samples_for_final_sampling.double() * sums[:, -1])[:, None]
    resampled = torch.searchsorted(sums, draws, right=True)
    chosen = torch.cat([proposed, proposed[:, :1]], dim=1).scatter(1, num_accepted[:, None], resampled)
    _write_accepted(chosen, accepted, predicts, accept_index, accept_token_num)


def _write_accepted(
    chosen: torch.Tensor,
    accepted: torch.Tensor,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
) -> None:
    """Write the results of a round, in place.

    chosen: [sequences, n], the token after each token of the window.
    accepted: [sequences, n - 1], whether that is the proposal. Only entries up to the first rejection count.
    predicts: [sequences * n], set to `chosen`.
    accept_token_num: [sequences], set to the number of accepted proposals.
    accept_index: [sequences, n], set to the indices in `predicts` of those and of the token chosen after them, then -1.
    """
    count, n = chosen.shape
    num_accepted = accepted.long().cumprod(1).sum(1)
    indices = torch.arange(count * n).view(count, n)
    predicts.copy_(chosen.flatten())
    accept_token_num.copy_(num_accepted)
    accept_index.copy_(indices.where(torch.arange(n) <= num_accepted[:, None], -1))


def keep_top_k(probs: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Keep the k [n] most likely tokens in each row of `probs` [n, vocabulary], renormalised."""
    return _keep_sorted(probs, lambda ordered: torch.arange(ordered.shape[-1]) < k[:, None])


def keep_top_p(probs: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Keep the most likely tokens with total probability p [n] in each row, like SGLang's usual sampler."""
    return _keep_sorted(probs, lambda ordered: ordered.cumsum(-1) - ordered <= p[:, None])


def _keep_sorted(probs: torch.Tensor, keep: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    filtered = probs.scatter(-1, order, ordered * keep(ordered))
    return filtered / filtered.sum(-1, keepdim=True)


def install() -> None:
    """Install these functions in SGLang."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.speculative import eagle_utils
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    eagle_utils._verify_uses_greedy = lambda *, is_all_greedy, **_: is_all_greedy
    eagle_utils.tree_speculative_sampling_target_only = sample_chain
    eagle_utils.top_k_renorm_prob, eagle_utils.top_p_renorm_prob = keep_top_k, keep_top_p

    torch.cuda.synchronize = lambda device=None: None  # DeepSeek's draft model calls it on any device

    # A chain's accepted tokens are in place already: keys and values are never moved, so skip preparing for it.
    MHATokenToKVPool._init_kv_copy_and_warmup = lambda self: setattr(self, "_kv_copy_config", None)

    base_extend = TorchNativeAttnBackend.forward_extend

    def extend(self: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, *rest: Any, **options: Any) -> torch.Tensor:
        """Decode a window's tokens like as many sequences, each of which sees one token more than the previous."""
        mode = batch.forward_mode
        if not (mode.is_target_verify() or mode.is_draft_extend_v2()):
            return base_extend(self, q, k, v, layer, batch, *rest, **options)
        n = len(q) // len(batch.seq_lens)
        # The policy verifies a window after `seq_lens` tokens; the draft layer reads it as their end.
        prefix_lens = batch.seq_lens if mode.is_target_verify() else batch.seq_lens - n
        lengths = (prefix_lens[:, None] + torch.arange(1, n + 1)).flatten()
        rows = _decode_batch(batch, batch.req_pool_indices.repeat_interleave(n), lengths)
        return self.forward_decode(q, k, v, layer, rows, *rest, **options)

    TorchNativeAttnBackend.forward_extend = extend

    class Step(TorchNativeAttnBackend):  # type: ignore[misc, valid-type]
        """A step of the draft layer, which sees the `ahead` tokens proposed so far after `seq_lens` others."""

        def forward_decode(
            self, q: Any, k: Any, v: Any, layer: Any, batch: Any, *rest: Any, **options: Any
        ) -> torch.Tensor:
            rows = _decode_batch(batch, batch.req_pool_indices, batch.seq_lens + self.ahead)
            return super().forward_decode(q, k, v, layer, rows, *rest, **options)

    class Steps:
        """All draft steps, in SGLang's interface. The first proposal comes from `extend`, the others from steps."""

        def __init__(self, runner: Any, number: int) -> None:
            self.attn_backends = [Step(runner) for _ in range(number)]
            for ahead, step in enumerate(self.attn_backends, 1):
                step.ahead = ahead

        def init_forward_metadata(self, batch: Any) -> None:
            for step in self.attn_backends:
                step.init_forward_metadata(batch)

    def steps(self: Any) -> Steps | None:
        number = self.speculative_num_steps - 1
        return Steps(self.draft_model_runner, number) if number else None

    DraftBackendFactory.create_decode_backend = steps
    DraftBackendFactory.create_draft_extend_backend = lambda self: None  # the draft model's own backend suffices


def _decode_batch(batch: Any, requests: torch.Tensor, lengths: torch.Tensor) -> SimpleNamespace:
    """Return what decoding reads of a batch, of which token i sees the first `lengths[i]` keys of `requests[i]`."""
    return SimpleNamespace(
        out_cache_loc=batch.out_cache_loc, req_pool_indices=requests, seq_lens=lengths, encoder_lens=None
    )
