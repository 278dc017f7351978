"""Speculative decoding on a CPU without AMX: SGLang's kernels for it in plain torch, for a chain of drafts (topk = 1).

Each round runs the policy over a window of n tokens per sequence: the last one that it chose, and n - 1 that the draft
layer proposes after it. From left to right a proposal is accepted or replaced, and what comes after a replaced one is
dropped; after n - 1 accepted ones, one more is chosen. What SGLang calls trees, [sequences, n], are chains here.

The functions named *_cpu stand in for those of `sgl_kernel`, and have its signatures; `install` puts the others where
SGLang has nothing for a CPU, or what it has does not sample: it would take the likeliest token at any temperature.
"""

from __future__ import annotations

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
    """out_cache_loc [sequences * num_cols]: where the tokens after the first `seq_lens` have their place. In place."""
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
    """out_cache_loc: the places of the tokens [start, end) of each sequence, one after the other. In place."""
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
    """The chain as SGLang describes a tree: nobody has a sibling, and each comes after the one before. In place.

    tree_mask stays as it is: the attention is causal.
    """
    if topk != 1:
        raise NotImplementedError("speculative decoding on a CPU: one draft at a time only")
    n = draft_token_num
    positions.copy_((seq_lens[:, None] + torch.arange(n)).flatten())
    retrieve_index.copy_(torch.arange(retrieve_index.numel()).view(-1, n))
    retrieve_next_token[:, :-1] = torch.arange(1, n)


def fill_bonus_tokens_cpu(tokens: torch.Tensor, lengths: torch.Tensor, last: torch.Tensor, width: int) -> None:
    """last [sequences]: the last of the first `lengths` tokens of each row of `tokens` [sequences, width]. In place."""
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
    """Accept proposals as long as they are what the policy finds likeliest, `target_predict` [sequences, n]. In place,
    see `_write_accepted`."""
    _write_accepted(
        target_predict, candidates[:, 1:] == target_predict[:, :-1], predicts, accept_index, accept_token_num
    )


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
    """Tokens with exactly the policy's probabilities: rejection sampling (arXiv:2211.17192) for a proposal that is
    certain to be made.

    Where the policy chooses x with probability p(x), a proposal d is accepted with probability p(d); else the token is
    drawn from p without d, which gives x != d the probability (1 - p(d)) * p(x) / (1 - p(d)) = p(x).

    candidates [sequences, n], the proposals from column 1 on; uniform_samples [sequences, n] and
    uniform_samples_for_final_sampling [sequences] in [0, 1); target_probs [sequences, n, vocabulary] after each token
    of the window. In place, see `_write_accepted`.
    """
    proposed = candidates[:, 1:].long()
    accepted = uniform_samples[:, :-1] < target_probs[:, :-1].gather(2, proposed[..., None])[..., 0]
    rows, number = torch.arange(len(candidates)), accepted.long().cumprod(1).sum(1)
    left = target_probs[rows, number].double()
    cut = number < proposed.shape[1]  # there is one that was not accepted
    left[rows[cut], proposed[rows[cut], number[cut]]] = 0.0
    sums = left.cumsum(1)
    drawn = torch.searchsorted(sums, (uniform_samples_for_final_sampling.double() * sums[:, -1])[:, None], right=True)
    chosen = torch.cat([proposed, proposed[:, :1]], dim=1).scatter(1, number[:, None], drawn)
    _write_accepted(chosen, accepted, predicts, accept_index, accept_token_num)


def _write_accepted(
    chosen: torch.Tensor,
    accepted: torch.Tensor,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
) -> None:
    """Write down what came of a round.

    chosen [sequences, n]: what follows each token of the window; accepted [sequences, n - 1]: whether that is the
    proposal. Only entries up to the first that is not accepted count. predicts [sequences * n] becomes `chosen`;
    accept_token_num [sequences], how many proposals were accepted; accept_index [sequences, n], the places in
    `predicts` of those and of the one chosen after them, then -1.
    """
    count, n = chosen.shape
    number = accepted.long().cumprod(1).sum(1)
    places = torch.arange(count * n).view(count, n)
    predicts.copy_(chosen.flatten())
    accept_token_num.copy_(number)
    accept_index.copy_(places.where(torch.arange(n) <= number[:, None], -1))


def keep_top_k(probs: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """[n, vocabulary]: each row of `probs` without all but its k [n] likeliest tokens, summing to 1 again."""
    order = probs.argsort(dim=-1, descending=True, stable=True)
    kept = probs.scatter(-1, order, (torch.arange(probs.shape[-1]) < k[:, None]) * probs.gather(-1, order))
    return kept / kept.sum(-1, keepdim=True)


def keep_top_p(probs: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """[n, vocabulary]: each row without the tokens that come after the likeliest ones with p [n] in sum, as SGLang's
    sampler does without speculation, summing to 1 again."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    kept = probs.scatter(-1, order, ordered * (ordered.cumsum(-1) - ordered <= p[:, None]))
    return kept / kept.sum(-1, keepdim=True)


def install() -> None:
    """Put all this into SGLang."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.speculative import eagle_utils
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    eagle_utils._verify_uses_greedy = lambda *, is_all_greedy, **_: is_all_greedy
    eagle_utils.tree_speculative_sampling_target_only = sample_chain
    eagle_utils.top_k_renorm_prob, eagle_utils.top_p_renorm_prob = keep_top_k, keep_top_p

    torch.cuda.synchronize = lambda device=None: None  # so waits DeepSeek's draft model, wherever it is

    # A chain's accepted tokens are where they belong: keys and values are never moved, so nothing is got ready for it.
    MHATokenToKVPool._init_kv_copy_and_warmup = lambda self: setattr(self, "_kv_copy_config", None)

    prompts = TorchNativeAttnBackend.forward_extend

    def extend(self: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, *rest: Any, **options: Any) -> torch.Tensor:
        """A window's tokens are decoded like those of as many sequences, of which each sees one token more. Where the
        policy verifies it, `seq_lens` are those before the window; where the draft layer reads it, after."""
        mode = batch.forward_mode
        if not (mode.is_target_verify() or mode.is_draft_extend_v2()):
            return prompts(self, q, k, v, layer, batch, *rest, **options)
        n = len(q) // len(batch.seq_lens)
        before = batch.seq_lens if mode.is_target_verify() else batch.seq_lens - n
        lengths = (before[:, None] + torch.arange(1, n + 1)).flatten()
        rows = _decode_batch(batch, batch.req_pool_indices.repeat_interleave(n), lengths)
        return self.forward_decode(q, k, v, layer, rows, *rest, **options)

    TorchNativeAttnBackend.forward_extend = extend

    class Step(TorchNativeAttnBackend):  # type: ignore[misc, valid-type]
        """Of the draft layer: it sees the `ahead` tokens that it has proposed after `seq_lens` others."""

        ahead = 0

        def forward_decode(
            self, q: Any, k: Any, v: Any, layer: Any, batch: Any, *rest: Any, **options: Any
        ) -> torch.Tensor:
            rows = _decode_batch(batch, batch.req_pool_indices, batch.seq_lens + self.ahead)
            return super().forward_decode(q, k, v, layer, rows, *rest, **options)

    class Steps:
        """All of them, as SGLang asks for them: the first proposal comes from `extend`, each other one from a step."""

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
    DraftBackendFactory.create_draft_extend_backend = lambda self: None  # the draft model's own will do


def _decode_batch(batch: Any, requests: torch.Tensor, lengths: torch.Tensor) -> SimpleNamespace:
    """What the backend's decoding reads of a batch: whose keys each token sees [tokens], and how many [tokens]."""
    return SimpleNamespace(
        out_cache_loc=batch.out_cache_loc, req_pool_indices=requests, seq_lens=lengths, encoder_lens=None
    )
