"""DeepSeek sparse attention (DSA, arXiv:2512.02556 section 2.1) on packed sequences, with replay of an engine's
choice.

A lightning indexer scores all earlier tokens of a query, in fp32; the layer's attention sees the `topk` best of them.
The choice has no gradient, so the indexer learns only from a loss of its own, the KL divergence from attention's
distribution over the chosen keys to the softmax of the scores (`train.indexer_loss_coef`). Its input is detached.

`SparseAttention` is for a CPU: Megatron's DSAttention scores the whole pack at once and has layers only on Transformer
Engine. `ReplayedDSAttention` is Megatron's module with replay, for GPUs. Both have the same parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexerLossAutoScaler,
    DSAIndexerLossLoggingHelper,
    DSAttention,
    source_dsa_compute_layer,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig

from megarl.cpu.megatron_modules import DuplicatedLinear, PackedAttention
from megarl.megatron.routing_replay import RecordedRows
from megarl.models.sparse_indices import IndexShape
from megarl.parallel.context_parallel import gather_context, zigzag
from megarl.parallel.ranks import Ranks, all_gather_objects

_CHOSEN = "_megarl_chosen_keys"
"""Attribute of a micro-batch's PackedSeqParams: the keys of each query by layer, for layers that share them."""


class Block(NamedTuple):
    """Consecutive queries of one sequence on this rank, and the keys up to the last of them."""

    rows: slice  # of the queries, among this rank's tokens
    keys: slice  # among all tokens of the micro-batch

    @property
    def first(self) -> int:
        """Return the position of the first query in its sequence."""
        return (self.keys.stop - self.keys.start) - (self.rows.stop - self.rows.start)


def query_blocks(cu_seqlens: torch.Tensor, cp: int, cp_rank: int) -> Iterator[Block]:
    """Iterate over the blocks of queries that `zigzag` gives a context parallel rank, in its order."""
    offset = 0
    for start, stop in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        size = (stop - start) // (2 * cp) if cp > 1 else stop - start
        for part in (cp_rank, 2 * cp - 1 - cp_rank) if cp > 1 else (0,):
            yield Block(slice(offset, offset + size), slice(start, start + (part + 1) * size))
            offset += size


class Indexer(torch.nn.Module):
    """The lightning indexer with replicated weights: low-rank queries of each head, one key per token, head weights.

    interleaved: rotate the pairs (0, 1), (2, 3).. of elements, not each of the first half with one of the second.
    """

    def __init__(self, config: MLATransformerConfig) -> None:
        super().__init__()
        self.heads, self.size = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim
        self.rope_size, self.interleaved = config.qk_pos_emb_head_dim, config.dsa_indexer_rope_interleaved
        linear = partial(DuplicatedLinear, config=config, init_method=config.init_method, bias=False)
        self.linear_wq_b = linear(config.q_lora_rank, self.heads * self.size)
        self.linear_wk = linear(config.hidden_size, self.size)
        self.k_norm = torch.nn.LayerNorm(self.size, eps=config.dsa_indexer_k_norm_epsilon, dtype=torch.float32)
        self.linear_weights_proj = linear(config.hidden_size, self.heads)
        for parameter in self.k_norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        common = dict(rotary_base=config.rotary_base)
        if config.rope_type == "yarn":
            self.rotary_pos_emb = YarnRotaryEmbedding(
                self.rope_size,
                scaling_factor=config.rotary_scaling_factor,
                original_max_position_embeddings=config.original_max_position_embeddings,
                beta_fast=config.beta_fast,
                beta_slow=config.beta_slow,
                mscale=config.mscale,
                mscale_all_dim=config.mscale_all_dim,
                **common,
            )
        else:
            self.rotary_pos_emb = RotaryEmbedding(self.rope_size, rotary_percent=config.rotary_percent, **common)

    def forward(
        self, x: torch.Tensor, latent_query: torch.Tensor, positions: torch.Tensor, gather: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries [T, heads, size], keys [T, size] and head weights [T, heads], all fp32.

        x: [t, hidden], latent_query: [t, q_lora_rank], this rank's part of the T tokens with sequence parallelism.
        positions: [T] in their sequences. gather: collects [t, ...] to [T, ...].
        """
        query = gather(self.linear_wq_b(latent_query)[0]).unflatten(-1, (self.heads, self.size))
        key = self.linear_wk(x)[0]
        key = gather(self.k_norm(key.float()).to(key.dtype))
        weights = gather(self.linear_weights_proj(x)[0]).float()
        length = int(positions.max()) + 1
        table = self.rotary_pos_emb(length, packed_seq=True)
        table, scale = table if isinstance(table, tuple) else (table, 1.0)
        angles = table[:, 0, 0][positions]  # [T, rope size], the second half equal to the first
        cos, sin = angles.cos() * scale, angles.sin() * scale
        query, key = self._rotate(query, cos[:, None], sin[:, None]), self._rotate(key, cos, sin)
        return query.float(), key.float(), weights * self.heads**-0.5

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        turned, rest = x[..., : self.rope_size].float(), x[..., self.rope_size :]
        if self.interleaved:  # products of queries and keys do not depend on the order of the pairs
            turned = torch.cat([turned[..., 0::2], turned[..., 1::2]], dim=-1)
        first, second = turned.chunk(2, dim=-1)
        turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
        return torch.cat([turned.to(x.dtype), rest], dim=-1)


def index_scores(query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor, first: int) -> torch.Tensor:
    """Return the scores of all keys for each query, [n, m] fp32; -inf for later ones.

    query: [n, heads, size], at the positions first, first + 1.. key: [m, size]. weights: [n, heads].
    """
    products = torch.relu((query @ key.T) * query.shape[-1] ** -0.5)  # [n, heads, m]
    scores = (weights[:, None] @ products)[:, 0]
    return scores.masked_fill(~causal_mask(len(query), len(key), first, query.device), -torch.inf)


def causal_mask(queries: int, keys: int, first: int, device: torch.device) -> torch.Tensor:
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(first)


class SparseAttention(PackedAttention):
    """Causal latent attention over the keys that the indexer, an earlier layer or a replayed record chose.

    `recorded` is the record of a replay, see `start_micro_batch`.
    """

    requires_dsa_inputs = True  # Megatron's MLA then passes `x` and `qr`

    def __init__(self, config: MLATransformerConfig, layer_number: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, layer_number, *args, **kwargs)
        self.layer_number, self.topk = layer_number, int(config.dsa_indexer_topk)
        self.source_layer = source_dsa_compute_layer(
            layer_number, config.dsa_indexer_skip_topk_offset, config.dsa_indexer_topk_freq
        )
        self.indexer = Indexer(config) if self.source_layer == layer_number else None
        self.holder = _CHOSEN
        self.recorded = RecordedRows()

    def forward(  # type: ignore[override]
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        *,
        x: torch.Tensor,
        qr: torch.Tensor,
        **_: Any,
    ) -> torch.Tensor:
        """Return attention outputs, [T, heads * d_v].

        query, key: [T, heads, d]. value: [T, heads, d_v]. x: [t, 1, hidden], the layer's normed input, and qr: [t,
        q_lora_rank], the normed latent of the query, of this rank's part of the tokens with sequence parallelism.
        """
        assert packed_seq_params is not None
        recorded = self.recorded.for_pass()
        coef = (self.config.dsa_indexer_loss_coeff or 0.0) if self.training and self.indexer is not None else 0.0
        trains = coef > 0 and torch.is_grad_enabled()
        if packed_seq_params.max_seqlen_q <= self.topk and not trains:  # every query sees all its keys
            return super().forward(query, key, value, None, packed_seq_params)
        group = parallel_state.get_context_parallel_group()
        cp = group.size()
        cu_seqlens = packed_seq_params.cu_seqlens_q
        indices = zigzag(cu_seqlens, cp)

        def gather_keys(local: torch.Tensor) -> torch.Tensor:
            return gather_context(local, indices, group, same_gradient=False) if cp > 1 else local

        scorer: _Scorer | None = None
        if self.indexer is not None:
            with torch.enable_grad() if trains else torch.no_grad():
                positions = self._positions(cu_seqlens, indices[group.rank() if cp > 1 else 0])
                index_query, index_key, weights = self.indexer(
                    x.detach().squeeze(1), qr.detach(), positions, self._gather_sequence
                )
                scorer = _Scorer(index_query, gather_keys(index_key), weights)
        chosen = vars(packed_seq_params).setdefault(self.holder, {})
        blocks = list(query_blocks(cu_seqlens, cp, group.rank() if cp > 1 else 0))
        if scorer is not None:
            chosen[self.layer_number] = [
                None if block.keys.stop - block.keys.start <= self.topk else self._choose(scorer, block, recorded)
                for block in blocks
            ]
        elif self.source_layer not in chosen:
            raise RuntimeError(f"layer {self.layer_number} shares the keys of layer {self.source_layer}, not in stage")
        key, value = gather_keys(key), gather_keys(value)
        is_token = getattr(packed_seq_params, "real_token_mask_q", None)
        outputs, divergence = [], query.new_zeros((), dtype=torch.float32)
        for block, keys in zip(blocks, chosen[self.source_layer], strict=True):
            q, k, v = query[block.rows], key[block.keys], value[block.keys]
            visible = causal_mask(len(q), len(k), block.first, q.device)
            if keys is not None:
                visible = visible & torch.zeros_like(visible).scatter_(1, keys, True)
            if keys is None and len(q) == len(k):
                outputs.append(self._attend(q[:, None], k[:, None], v[:, None])[:, 0])
            else:
                outputs.append(self._attend_to(q, k, v, visible))
            if trains and scorer is not None:
                valid = torch.ones(len(q), dtype=torch.bool) if is_token is None else is_token[block.rows]
                divergence = divergence + self._divergence(scorer, block, visible, q.detach(), k.detach(), valid)
        output = torch.cat(outputs)
        if trains:
            loss = divergence * coef
            DSAIndexerLossLoggingHelper.save_loss_to_tracker(loss, self.layer_number, self.config.num_layers)
            output = DSAIndexerLossAutoScaler.apply(output, loss)
        return output

    def separate_from_decoder(self) -> None:
        """Keep a multi-token prediction layer, whose number is a decoder layer's, from replacing that one's choice."""
        self.holder = f"{_CHOSEN}_mtp"

    def _gather_sequence(self, local: torch.Tensor) -> torch.Tensor:
        """Gather the parts of tensor parallel ranks, each of which then computes the same."""
        if not self.config.sequence_parallel:
            return local
        gathered: torch.Tensor = gather_from_sequence_parallel_region(local, tensor_parallel_output_grad=False)
        return gathered

    @staticmethod
    def _positions(cu_seqlens: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        """Return the positions in their sequences of the tokens `local`, which count from the micro-batch's first."""
        local = local.to(cu_seqlens.device)
        return local - cu_seqlens[torch.searchsorted(cu_seqlens, local, right=True) - 1]

    @torch.no_grad()
    def _choose(self, scorer: _Scorer, block: Block, recorded: torch.Tensor | None) -> torch.Tensor:
        """Return the keys of each query, [n, topk] int64, as positions in the sequence.

        The first topk queries of a sequence may name later keys, which causality hides.
        """
        if recorded is None:
            return scorer(block).topk(self.topk, dim=-1).indices
        rows = recorded[block.rows].long()
        missing = (rows[:, 0] < 0).nonzero().squeeze(1)
        if len(missing):
            rows = rows.index_copy(0, missing, scorer(block)[missing].topk(self.topk, dim=-1).indices)
        return rows

    def _attend_to(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor
    ) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        dropout = self.dropout if self.training else 0.0
        output = F.scaled_dot_product_attention(q, k, v, visible, dropout, scale=self.scale)
        return output[0].transpose(0, 1).flatten(1)

    def _divergence(
        self,
        scorer: _Scorer,
        block: Block,
        visible: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        valid: torch.Tensor,
    ) -> torch.Tensor:
        """Return the sum over queries of KL(attention, mean over heads || softmax of index scores)."""
        with torch.no_grad():
            logits = torch.einsum("nhd,mhd->hnm", query.float(), key.float()) * self.scale
            target = logits.masked_fill(~visible, -torch.inf).softmax(-1).sum(0)
            if self.config.tensor_model_parallel_size > 1:
                torch.distributed.all_reduce(target, group=parallel_state.get_tensor_model_parallel_group())
            target = target / target.sum(-1, keepdim=True)
        log_scores = scorer(block).masked_fill(~visible, -torch.inf).log_softmax(-1).masked_fill(~visible, 0.0)
        rows = torch.special.xlogy(target, target).sum(-1) - (target * log_scores).sum(-1)
        return rows[valid].sum()


def collect_indexer_loss(ranks: Ranks, coef: float, tokens: int) -> dict[str, float]:
    """Return the divergence per token, summed over layers, since the last call. Collective over the model's ranks."""
    values = DSAIndexerLossLoggingHelper.tracker.get("values")
    gathered = all_gather_objects(0.0 if values is None else float(values.sum()), ranks.host_group)
    DSAIndexerLossLoggingHelper.tracker.clear()
    return {"indexer_loss": sum(gathered) / (ranks.tp * coef * tokens)}


class _Scorer(NamedTuple):
    """An indexer's outputs for a micro-batch: queries and head weights of this rank's tokens, keys of all."""

    query: torch.Tensor
    key: torch.Tensor
    weights: torch.Tensor

    def __call__(self, block: Block) -> torch.Tensor:
        """Return the scores of a block, [queries, keys]."""
        return index_scores(self.query[block.rows], self.key[block.keys], self.weights[block.rows], block.first)


class ReplayedDSAttention(DSAttention):  # type: ignore[misc]
    """Megatron's sparse attention, with replay: it attends to recorded keys as a layer that shares an earlier choice.

    `recorded` is the record of a replay, see `start_micro_batch`.
    """

    skip_topk: bool
    index_share: bool
    _HOLDER_ATTR: str
    _LENGTH_HOLDER_ATTR: str

    def __init__(self, config: MLATransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.topk = self.index_topk
        self.recorded = RecordedRows()

    def separate_from_decoder(self) -> None:
        """Keep a multi-token prediction layer, whose number is a decoder layer's, from replacing that one's choice."""
        self._HOLDER_ATTR, self._LENGTH_HOLDER_ATTR = (
            f"{name}_mtp" for name in (self._HOLDER_ATTR, self._LENGTH_HOLDER_ATTR)
        )

    def forward(self, *args: Any, packed_seq_params: PackedSeqParams, **kwargs: Any) -> torch.Tensor:
        """Return attention outputs; see Megatron's method for the arguments."""
        rows = self.recorded.for_pass()
        if rows is None or self.skip_topk or packed_seq_params.max_seqlen_q <= self.index_topk:
            output: torch.Tensor = super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
            return output
        holder = self._get_index_share_topk_holder(packed_seq_params)
        indexer_choice, is_shared = None, self.index_share
        group = parallel_state.get_context_parallel_group()
        cp = group.size()
        cu_seqlens = packed_seq_params.cu_seqlens_q
        local = zigzag(cu_seqlens, cp)[group.rank() if cp > 1 else 0].to(cu_seqlens.device)
        sequence = torch.searchsorted(cu_seqlens, local, right=True) - 1
        starts = cu_seqlens[sequence].long()
        positions = local - starts
        is_missing = (rows[:, 0] == -1) & (positions >= self.index_topk)
        any_missing = is_missing.any().int()
        if cp > 1:  # all ranks then take part in the other pass
            torch.distributed.all_reduce(any_missing, torch.distributed.ReduceOp.MAX, group)
        try:
            self.index_share = True
            if bool(any_missing):  # a pass of which only the choice of keys is kept
                with torch.no_grad():
                    super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
                indexer_choice = holder[self.layer_number][0]
            first_keys = torch.arange(self.index_topk, device=rows.device)
            # The nearest keys; for the first index_topk tokens of a sequence, which see all earlier ones, these all.
            nearest = positions[:, None] - first_keys
            keys = torch.where(rows[:, :1] < 0, nearest, rows.long())
            chosen = torch.where(keys < 0, keys.new_tensor(-1), keys + starts[:, None])
            if indexer_choice is not None:
                chosen = torch.where(is_missing[:, None], indexer_choice, chosen)
            holder[self.source_layer] = chosen[None]
            self._get_index_share_topk_length_holder(packed_seq_params).pop(self.source_layer, None)
            self.skip_topk = True
            output = super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
        finally:
            self.index_share, self.skip_topk = is_shared, False
        return output


def sparse_layers(chunk: torch.nn.Module) -> Sequence[Any]:
    """Return the attention modules of a chunk's decoder layers that choose keys themselves."""
    from megarl.megatron.parameter_names import unwrap

    layers = (layer.self_attention for layer in unwrap(chunk).decoder.layers)
    return [layer.core_attention for layer in layers if getattr(layer.core_attention, "indexer", None) is not None]


# --- replay ---------------------------------------------------------------------------------------------------------
# The trainer's tokens attend to the keys that the engine's indexers chose. As with expert routing, rounding alone makes
# trainer and engine choose differently at the margin, and more often: many keys score nearly the same, and ReLU makes
# some scores equal.


def recorded_layers(chunks: Sequence[torch.nn.Module], shape: IndexShape) -> tuple[int, ...]:
    """Return the layers of these chunks that replay, as indices among all layers with an indexer."""
    return tuple(shape.layers.index(layer.layer_number - 1) for chunk in chunks for layer in sparse_layers(chunk))


def start_micro_batch(chunk: torch.nn.Module, keys: torch.Tensor | None) -> None:
    """Set what the chunk's next forward pass replays. Its indexers choose if `keys` is None.

    keys: as from `models.sparse_indices.select`.
    """
    for index, layer in enumerate(sparse_layers(chunk)):
        layer.recorded.set_recorded(None if keys is None else keys[:, index], chunk.training)


def reset(chunks: Sequence[torch.nn.Module]) -> None:
    """Discard the replay state of aborted passes in these chunks."""
    for layer in (layer for chunk in chunks for layer in sparse_layers(chunk)):
        layer.recorded.reset()
