"""Rollout routing replay (R3, arXiv:2510.11370): the trainer's tokens go through the experts that the engine chose.

The experts' weights still come from the trainer's own router, over the replayed experts, so its gradient flows. A
router delegates its top-k to its `router_replay` attribute. Megatron's own replay class keeps the routers of all models
of a process in one list, has to be told when a backward pass recomputes, which alternates with forward passes in a
pipeline schedule, and does not support tokens without recorded routing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megarl.config import ConfigError
from megarl.megatron.parameter_names import unwrap
from megarl.models.routing import RoutingShape

TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class RecordedRows:
    """A layer's rows for the tokens of the micro-batch in the current pass, original or recomputed.

    They are its part of an engine's record, or the tokens' adapters.
    """

    def __init__(self) -> None:
        self._recorded: torch.Tensor | None = None
        self._training = False
        self._to_recompute: deque[torch.Tensor | None] = deque()

    def set_recorded(self, chosen: torch.Tensor | None, training: bool) -> None:
        """Set the choices for the next forward pass: [tokens, topk] int16, rows of -1 for the model's own choice."""
        self._recorded, self._training = chosen, training

    def reset(self) -> None:
        """Discard the state of an aborted pass."""
        self._recorded = None
        self._to_recompute.clear()

    def for_pass(self) -> torch.Tensor | None:
        """Return the choices for the current pass. Call this once per pass.

        In training, a pass without gradients is the first one of a recomputed layer; recomputations, with gradients,
        come in the same order.
        """
        if self._training and not torch.is_grad_enabled():
            self._to_recompute.append(self._recorded)
        elif self._training and self._to_recompute:
            return self._to_recompute.popleft()
        return self._recorded


class ReplayedTopK(RecordedRows):
    """The top-k of one layer's router. layer: its index among the MoE layers of all stages."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.moe_layer_index = layer

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: TopK,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores and indices of the replayed experts, both [tokens, topk], best first like `torch.topk`.

        Equal experts give bitwise equal results, in whatever order they were recorded.

        scores: [tokens, experts].
        """
        chosen = self.for_pass()
        if chosen is None:
            return default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        with torch.no_grad():
            chosen = chosen.long()
            _, default_experts = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
            is_excluded = torch.ones_like(scores, dtype=torch.bool).scatter_(
                1, torch.where(chosen < 0, default_experts, chosen), False
            )
        return torch.topk(scores.masked_fill(is_excluded, -torch.inf), k=topk, dim=1)


def install(chunks: Sequence[torch.nn.Module], shape: RoutingShape) -> None:
    """Install replay in the routers of these model chunks, except for multi-token prediction layers."""
    for chunk in chunks:
        for router in _routers(chunk):
            router.router_replay = ReplayedTopK(shape.moe_layers.index(router.layer_number - 1))


@dataclass(frozen=True)
class ReplayShard:
    """The part of a routing record that one chunk replays, for this rank's tokens with sequence parallelism."""

    layers: tuple[int, ...]  # indices among the layers of the record
    tp: int
    tp_rank: int

    def select(self, record: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return this rank's experts, [P / tp, layers, topk] int16, -1 for tokens without a record.

        record: [recorded tokens, layers, topk].
        rows: [P], the row of `record` for each of the micro-batch's tokens on these TP ranks, -1 for none.
        """
        local_rows = rows.chunk(self.tp)[self.tp_rank]
        recorded = (local_rows >= 0).nonzero().squeeze(1)
        chosen = record.index_select(0, local_rows[recorded])  # whole rows: indexing by layer as well is much slower
        if self.layers != tuple(range(record.shape[1])):
            chosen = chosen.index_select(1, torch.tensor(self.layers, dtype=torch.int64))
        experts = record.new_full((len(local_rows), len(self.layers), record.shape[2]), -1, dtype=torch.int16)
        experts.index_copy_(0, recorded, chosen.short())
        return experts


def replayed_layers(chunks: Sequence[torch.nn.Module]) -> tuple[int, ...]:
    """Return the layers of these chunks that replay, as indices among all MoE layers."""
    return tuple(router.router_replay.moe_layer_index for chunk in chunks for router in _routers(chunk))


def start_micro_batch(chunk: torch.nn.Module, routing: torch.Tensor | None, shape: RoutingShape) -> None:
    """Set what the chunk's next forward pass replays. Its routers choose for themselves if `routing` is None.

    routing: as from the chunk's `ReplayShard.select`. Raises ConfigError if it does not fit this model.
    """
    if routing is not None:
        check(routing, shape, replayed_layers([chunk]))
    for index, router in enumerate(_routers(chunk)):
        router.router_replay.set_recorded(None if routing is None else routing[:, index], chunk.training)


def reset(chunks: Sequence[torch.nn.Module]) -> None:
    """Discard the replay state of aborted passes in these chunks."""
    for router in (router for chunk in chunks for router in _routers(chunk)):
        if router.router_replay is not None:
            router.router_replay.reset()


def check_shape(record: torch.Tensor, shape: RoutingShape) -> None:
    """Raise ConfigError unless a full record has this model's MoE layers and experts per token."""
    expected = (len(shape.moe_layers), shape.topk)
    if len(record) and tuple(record.shape[1:]) != expected:
        raise ConfigError(
            f"the recorded routing is of {record.shape[1]} layers with {record.shape[2]} experts a token, the "
            f"trainer's model has {expected[0]} with {expected[1]}: engine and trainer must load the same config.json"
        )


def check(routing: torch.Tensor, shape: RoutingShape, layers: Sequence[int]) -> None:
    """Raise ConfigError unless each token has `topk` different experts of the model in each layer, or none at all.

    layers: the layers of `routing`, as indices among all MoE layers.
    """
    ascending = routing.sort(dim=-1).values
    valid = (ascending.diff(dim=-1) > 0).all(-1) & (ascending[..., 0] >= 0) & (ascending[..., -1] < shape.num_experts)
    invalid = ~(valid | (routing == -1).all(-1))
    if invalid.any():
        token, layer = invalid.nonzero()[0].tolist()
        raise ConfigError(
            f"the recorded routing names the experts {routing[token, layer].tolist()} for a token in layer "
            f"{shape.moe_layers[layers[layer]]}, not {shape.topk} different ones of {shape.num_experts}; the engine "
            "does not record this model's routing: set train.routing_replay=false"
        )


def _routers(chunk: torch.nn.Module) -> Iterator[Any]:
    for layer in unwrap(chunk).decoder.layers:
        if hasattr(layer.mlp, "router"):
            yield layer.mlp.router
