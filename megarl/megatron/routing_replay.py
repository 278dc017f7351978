"""Rollout routing replay (R3, arXiv:2510.11370): the trainer's tokens go through the experts that the engine chose.

The same weights in other kernels give other rounding, and where two experts of a token nearly tie, trainer and engine
choose differently: then they are two policies. Given experts leave no choice. Their weights still come from the
trainer's own router, over the given ones, so that its gradient flows.

A router asks what stands in its `router_replay` for its top-k, for softmax before or after it, sigmoid, bias and groups
alike. Megatron's own class for that place is not used: it keeps the routers of all models of a process in one list, has
to be told by hand when a backward pass recomputes, which alternates with forward passes inside of a pipeline's
schedule, and knows no tokens without a record.
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


class ReplayedTopK:
    """The top-k of one layer's router. `layer`: its place among the layers with experts, over all stages."""

    def __init__(self, layer: int) -> None:
        self.moe_layer_index = layer
        self._recorded_experts: torch.Tensor | None = None
        self._training = False
        self._to_recompute: deque[torch.Tensor | None] = deque()

    def set_recorded(self, chosen: torch.Tensor | None, training: bool) -> None:
        """A micro-batch's forward pass begins. chosen: [tokens, topk] int16, rows of -1 for the router's own choice."""
        self._recorded_experts, self._training = chosen, training

    def reset(self) -> None:
        """What was begun has been broken off."""
        self._recorded_experts = None
        self._to_recompute.clear()

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: TopK,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """scores [tokens, experts] -> the scores of the chosen experts and their numbers, both [tokens, topk], best
        first, as `torch.topk` has them: the same experts give the same bits, in whatever order they were recorded."""
        chosen = self._experts_for_pass()
        if chosen is None:
            return default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        with torch.no_grad():
            chosen = chosen.long()
            _, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
            others = torch.ones_like(scores, dtype=torch.bool).scatter_(1, torch.where(chosen < 0, own, chosen), False)
        return torch.topk(scores.masked_fill(others, -torch.inf), k=topk, dim=1)

    def _experts_for_pass(self) -> torch.Tensor | None:
        """In training, a pass without gradients is the first of a layer that is recomputed, which is noted; one with
        gradients while any are noted is a recomputation. Backward passes come in the order of the forward ones."""
        if self._training and not torch.is_grad_enabled():
            self._to_recompute.append(self._recorded_experts)
        elif self._training and self._to_recompute:
            return self._to_recompute.popleft()
        return self._recorded_experts


def install(chunks: Sequence[torch.nn.Module], shape: RoutingShape) -> None:
    """Let the routers of these model chunks be told what to choose. Layers of multi-token prediction keep their own."""
    for chunk in chunks:
        for router in _routers(chunk):
            router.router_replay = ReplayedTopK(shape.moe_layers.index(router.layer_number - 1))


@dataclass(frozen=True)
class ReplayShard:
    """What one chunk on one rank replays of a record: of these layers, places among those that the record is of, that
    part of the tokens which sequence parallelism gives to this rank."""

    layers: tuple[int, ...]
    tp: int
    tp_rank: int

    def select(self, record: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """[known, layers, topk] of a micro-batch's tokens, [P] which of them is each of the tokens on the ranks that
        share them, -1 for none -> [P / tp, layers, topk] int16, -1 where nothing is known."""
        mine = rows.chunk(self.tp)[self.tp_rank]
        known = (mine >= 0).nonzero().squeeze(1)
        chosen = record.index_select(0, mine[known])  # whole rows: an index for each layer of each is much slower
        if self.layers != tuple(range(record.shape[1])):
            chosen = chosen.index_select(1, torch.tensor(self.layers, dtype=torch.int64))
        found = record.new_full((len(mine), len(self.layers), record.shape[2]), -1, dtype=torch.int16)
        found.index_copy_(0, known, chosen.short())
        return found


def make_replay_shard(chunk: torch.nn.Module, tp: int, tp_rank: int, of: Sequence[int]) -> ReplayShard:
    """of: the layers of the record, by their places among all with experts."""
    return ReplayShard(tuple(list(of).index(layer) for layer in _chunk_layers(chunk)), tp, tp_rank)


def replayed_layers(chunks: Sequence[torch.nn.Module]) -> tuple[int, ...]:
    """Those of all chunks that replay, by their places among the layers with experts."""
    return tuple(layer for chunk in chunks for layer in _chunk_layers(chunk))


def start_micro_batch(chunk: torch.nn.Module, routing: torch.Tensor | None, shape: RoutingShape) -> None:
    """The chunk's next forward pass replays `routing`, cut as its `share`, or chooses for itself where that is None.

    Raises ConfigError where it is none of this model.
    """
    if routing is not None:
        check(routing, shape, _chunk_layers(chunk))
    for number, router in enumerate(_routers(chunk)):
        router.router_replay.begin(None if routing is None else routing[:, number], chunk.training)


def reset(chunks: Sequence[torch.nn.Module]) -> None:
    """Of passes that were broken off: there is nothing to recompute any more."""
    for router in (router for chunk in chunks for router in _routers(chunk)):
        if router.router_replay is not None:
            router.router_replay.forget()


def check_shape(record: torch.Tensor, shape: RoutingShape) -> None:
    """Raise ConfigError unless a whole record has the layers of this model, and as many experts in each."""
    expected = (len(shape.moe_layers), shape.topk)
    if len(record) and tuple(record.shape[1:]) != expected:
        raise ConfigError(
            f"the recorded routing is of {record.shape[1]} layers with {record.shape[2]} experts a token, the "
            f"trainer's model has {expected[0]} with {expected[1]}: engine and trainer must load the same config.json"
        )


def check(routing: torch.Tensor, shape: RoutingShape, layers: Sequence[int]) -> None:
    """Raise ConfigError unless each token has in each layer `topk` different experts of the model, or none at all.

    layers: which those of `routing` are, by their places among the layers with experts.
    """
    ascending = routing.sort(dim=-1).values
    valid = (ascending.diff(dim=-1) > 0).all(-1) & (ascending[..., 0] >= 0) & (ascending[..., -1] < shape.num_experts)
    wrong = ~(valid | (routing == -1).all(-1))
    if wrong.any():
        token, layer = wrong.nonzero()[0].tolist()
        raise ConfigError(
            f"the recorded routing names the experts {routing[token, layer].tolist()} for a token in layer "
            f"{shape.moe_layers[layers[layer]]}, not {shape.topk} different ones of {shape.num_experts}; the engine does "
            "not record this model's routing: set train.replay_routing=false"
        )


def _chunk_layers(chunk: torch.nn.Module) -> tuple[int, ...]:
    """Those that replay, by their places among the layers with experts."""
    return tuple(router.router_replay.layer for router in _routers(chunk))


def _routers(chunk: torch.nn.Module) -> Iterator[Any]:
    for layer in unwrap(chunk).decoder.layers:
        if hasattr(layer.mlp, "router"):
            yield layer.mlp.router
