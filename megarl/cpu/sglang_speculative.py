"""Speculative decoding of a chain of drafts (topk = 1): verification on every device, and SGLang's kernels in plain
torch for a CPU without AMX.

Each round runs the policy over a window of n tokens per sequence: its last chosen token, and n - 1 that the draft layer
proposes after it. From left to right, a proposal is accepted or replaced, and everything after a replaced one is
dropped. After n - 1 accepted proposals, one more token is chosen. SGLang's trees, [sequences, n], are chains here.

`install_verification` samples a token after each of the window with the sampler that SGLang uses without drafts, and
accepts proposals while they equal the samples. A token x is then chosen with exactly the sampler's probability p(x),
and a proposal d accepted with p(d), the most that any verification of a deterministic proposal can accept
(arXiv:2211.17192). SGLang's own verification has the same distribution over the whole vocabulary, but truncates by
top_p in another way than its sampler, ignores min_p, returns no sampling masks, and on a CPU takes the most likely
token at any temperature.

The functions named *_cpu replace those of `sgl_kernel` and have their signatures. `install` sets the others where
SGLang has no CPU implementation.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


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
    """Accept proposals while they equal the chosen tokens. Writes its results in place.

    candidates: [sequences, n], the proposals from column 1 on.
    target_predict: [sequences, n], the token chosen after each token of the window.
    predicts: [sequences * n], set to `target_predict`.
    accept_token_num: [sequences], set to the number of accepted proposals.
    accept_index: [sequences, n], set to the indices in `predicts` of those and of the token chosen after them, then -1.
    """
    count, n = target_predict.shape
    num_accepted = (candidates[:, 1:] == target_predict[:, :-1]).long().cumprod(1).sum(1)
    indices = torch.arange(count * n).view(count, n)
    predicts.copy_(target_predict.flatten())
    accept_token_num.copy_(num_accepted)
    accept_index.copy_(indices.where(torch.arange(n) <= num_accepted[:, None], -1))


def expand_sampling_info(info: SamplingBatchInfo, n: int) -> SamplingBatchInfo:
    """Repeat SGLang's sampling settings of each request for the n tokens of its window: [sequences * n]."""
    names = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed")
    columns = {name: getattr(info, name) for name in names}
    columns = {name: column.repeat_interleave(n, 0) for name, column in columns.items() if column is not None}
    if (rows := info.sampling_mask_batch_indices) is not None:
        rows = (rows[:, None] * n + torch.arange(n, device=rows.device)).flatten()
    return replace(info, sampling_mask_batch_indices=rows, **columns)


def install_verification() -> None:
    """Make SGLang verify proposals by its ordinary sampler, on every device, and return sampling masks with drafts.

    `eagle_sample` compares proposals with the most likely tokens, if all sampling is greedy. Here it always does, and
    the sampler's tokens take the place of the most likely ones.
    """
    from sglang.srt.layers.dp_attention import is_dp_attention_enabled
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.layers.sampler import create_sampler
    from sglang.srt.managers import scheduler
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.speculative import eagle_utils, eagle_worker_common

    scheduler.validate_spec_sampling_mask_request = lambda req, algorithm: None
    eagle_utils._verify_uses_greedy = lambda **_: True
    accept, verify = eagle_utils.verify_tree_greedy_func, eagle_utils.eagle_sample
    make_sampler = functools.cache(create_sampler)

    def eagle_sample(window: Any, batch: Any, logits_output: Any, *rest: Any, **options: Any) -> Any:
        n, output = window.draft_token_num, LogitsProcessorOutput(None)

        def accept_sampled(*, target_predict: torch.Tensor, **tensors: Any) -> Any:
            # At this point the logits have penalties and grammars. The sampler overwrites its own.
            output.next_token_logits = logits_output.next_token_logits.clone()
            info = expand_sampling_info(batch.sampling_info, n)
            tokens = make_sampler()(output, info, False, [], [], window.positions).view(-1, n).to(target_predict.dtype)
            results = accept(target_predict=tokens, **tensors)
            ranks = get_parallel().attn_tp_group if is_dp_attention_enabled() else get_parallel().tp_group
            if ranks.world_size > 1:  # as SGLang does: by rounding, ranks may differ in proposals and in tokens
                for tensor in results:
                    ranks.broadcast(tensor, src=0)
            return results

        eagle_utils.verify_tree_greedy_func = accept_sampled
        try:
            predict, accept_lens, accept_index = verify(window, batch, logits_output, *rest, **options)
        finally:  # free the logits: the engine may sleep next
            eagle_utils.verify_tree_greedy_func, output.next_token_logits = accept, None
        if (masks := output.sampling_mask_output) is not None:
            masks.map_device_tensors(lambda tensor: tensor.unflatten(0, (-1, n)))
            masks.num_accept_tokens = accept_lens[batch.sampling_info.sampling_mask_batch_indices]
            logits_output.sampling_mask_output = masks
        return predict, accept_lens, accept_index

    eagle_worker_common.eagle_sample = eagle_sample


def install() -> None:
    """Install SGLang's missing CPU implementations."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

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
