"""Stand-ins for what a rehearsal lacks: data, engines' answers, rewards, and the other ranks' rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from megarl.data.datasets import Pair
from megarl.megatron.trainer_model import MegatronModel
from megarl.models.routing import RoutingShape, routing_shape
from megarl.parallel import ranks
from megarl.rehearse.rehearsed_engines import RehearsedEngines
from megarl.types import Prompt, Rollout, Rollouts, Turn
from megarl.types.requirements import ItemKind
from megarl.workers.context import Context, Worker

_PROMPT_TOKENS = 8


class DataStandIn:
    """The reader of data: conversations of one length, dealt out to all ranks. rank, world: of the job."""

    def __init__(self, length: int, rank: int, world: int) -> None:
        self.length = length
        self.homes = [rank, *(other for other in range(world) if other != rank)]

    def shard(self, conversations: Sequence[Rollout], group_size: int = 1) -> Rollouts:
        """Like `ItemReader.shard`, except that this rank is the first to get conversations."""
        return make_rollouts(len(conversations) // group_size, group_size, self.length, 0, self.homes)


class LoaderStandIn:
    def next_items(self, count: int) -> list[Prompt]:
        return make_prompts(count)


def make_items(kind: ItemKind, count: int) -> list[Any]:
    """Return items of a step."""
    prompts = make_prompts(count)
    if kind == "prompts":
        return list(prompts)
    conversations = [Rollout(prompt, (Turn(prompt.token_ids),), seed=0, group=0) for prompt in prompts]
    if kind == "pairs":
        return [Pair(item, item) for item in conversations]
    return list(conversations)


def make_prompts(count: int) -> list[Prompt]:
    return [Prompt(id=str(i), messages=(), token_ids=np.zeros(_PROMPT_TOKENS, np.int32)) for i in range(count)]


class RepeatingComm:
    """`types.Comm` of a job in which every other rank has what this one has."""

    @property
    def rank(self) -> int:
        return int(ranks._job().rank)

    def all_reduce(self, local: torch.Tensor) -> torch.Tensor:
        return local

    def all_gather_rows(self, local: torch.Tensor) -> torch.Tensor:
        return local.repeat(ranks._job().world, *[1] * (local.dim() - 1))

    def all_gather_objects(self, local: Any) -> list[Any]:
        return [local] * ranks._job().world


class EmptyRowExchange:
    """Stands in for `row_exchange.RowExchange`: delivers zeros of the right sizes."""

    def __init__(self) -> None:
        self.group = ranks.host_group()

    def deliver(
        self,
        columns: Mapping[str, torch.Tensor],
        kinds: Mapping[str, Any],
        lengths: torch.Tensor | Mapping[str, torch.Tensor],
        homes: torch.Tensor,
        wants: Sequence[Sequence[int]],
        parts: Mapping[str, Sequence[Sequence[int] | None]] | None = None,
    ) -> Any:
        rank = ranks._job().rank

        def rows(name: str) -> list[torch.Tensor]:
            dtype, tail = kinds[name]
            if parts and (part := parts.get(name)) and part[rank] is not None:
                tail = (len(part[rank]), *tail[1:])  # type: ignore[arg-type]
            sizes = lengths[name] if isinstance(lengths, Mapping) else lengths
            return [torch.zeros((int(sizes[index]), *tail), dtype=dtype) for index in wants[rank]]

        return SimpleNamespace(rows=rows)

    def close(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class RehearsedRollouts(Rollouts):
    """Rollouts of which only this rank's can change."""

    def replace_local(self, rollouts: Sequence[Rollout]) -> Rollouts:
        gathered = Rollouts.gather(rollouts)
        columns: dict[str, Any] = {}
        for item in dataclasses.fields(Rollouts):
            column = getattr(self, item.name)
            if isinstance(column, torch.Tensor) and item.name not in ("home", "local_indices", "episode"):
                columns[item.name] = column.index_copy(0, self.local_indices, getattr(gathered, item.name))
        parts = {name: values[:1].expand(len(self)) for name, values in gathered.reward_parts.items()}
        return dataclasses.replace(self, local=gathered.local, reward_parts=parts, **columns)


def make_rollouts(
    prompts: int, samples: int, length: int, first_group: int, homes: Sequence[int], shape: RoutingShape | None = None
) -> Rollouts:
    """Return `prompts * samples` rollouts of `length` tokens each, whose rewards differ within a group.

    homes: the ranks that have the samples of a prompt, in turn; the first is this rank, in the place of the first lead.
    shape: of recorded routing, if there is any.
    """
    comm, count = RepeatingComm(), prompts * samples
    (prompt,), size = make_prompts(1), length - _PROMPT_TOKENS
    logprobs = np.full(size, -1.0, dtype=np.float32)
    turns = Turn(prompt.token_ids), Turn(np.zeros(size, dtype=np.int32), logprobs, is_action=True, weight_version=0)
    routing = None
    if shape is not None:  # one element for all
        routing = torch.zeros((), dtype=shape.dtype).expand(length - 1, len(shape.moe_layers), shape.topk)
    home = torch.tensor([homes[i // samples % len(homes)] for i in range(count)])
    local_indices = (home == homes[0]).nonzero()[:, 0]
    local = tuple(
        Rollout(prompt, turns, seed=i, group=first_group + i // samples, routing=routing)
        for i in local_indices.tolist()
    )
    gathered = Rollouts.gather(local[:1], version=0)
    columns = {
        item.name: torch.full((count,), value[0].item(), dtype=value.dtype)
        for item in dataclasses.fields(Rollouts)
        if isinstance(value := getattr(gathered, item.name), torch.Tensor)
    }
    columns |= {
        "home": home,
        "local_indices": local_indices,
        "group": first_group + torch.arange(count) // samples,
        "episode": torch.arange(count),
        "reward": (torch.arange(count) % 2).double(),
    }
    fields = {item.name: getattr(gathered, item.name) for item in dataclasses.fields(Rollouts)}
    return RehearsedRollouts(**{**fields, **columns, "local": local, "comm": comm})


class EngineStandIn(Worker):
    """The role of the engines: rollouts of one length."""

    def __init__(self, context: Context, length: int, homes: Sequence[int]) -> None:
        super().__init__(context)
        self.length, self.homes, self.next_group = length, homes, 0
        self.generations: list[Any] = []
        self.engines = RehearsedEngines(context)
        settings = self.config.model.megatron
        self.routing = routing_shape(context.hf_config, settings) if self.config.train.routing_replay else None

    def wait_ready(self) -> None:
        self.engines.wait_ready()

    def generate(self, prompts: Sequence[Prompt], samples: int, greedy: bool = False, held_out: bool = False) -> Any:
        self._offload(None)
        with self.clock.phase("generate"):
            first, self.next_group = self.next_group, self.next_group + len(prompts)
            return make_rollouts(len(prompts), samples, self.length, first, self.homes, self.routing)

    def generate_again(self, rollouts: Rollouts, samples: int = 1, greedy: bool = True) -> Rollouts:
        groups = rollouts.group.unique()
        result = make_rollouts(len(groups), samples, self.length, 0, self.homes, self.routing)
        return result.with_groups(dict(enumerate(groups.tolist())))

    def sleep(self) -> None: ...

    def update_weights(self, actor: Any) -> None:
        self._offload(actor.model)
        with self.clock.phase("weight_sync"):
            self.engines.sync_weights(actor, self.step)

    def _offload(self, synced: MegatronModel | None) -> None:
        """Like `Engines.offload_models`."""
        if self.config.train.offload and not self.config.rollout.replay:
            with self.clock.phase("offload"):
                self.context.models.offload(synced)


class RewardStandIn(Worker):
    """The role of rewards that no model computes."""

    scored: tuple[Any, ...] = ()

    def score(self, rollouts: Rollouts) -> Rollouts:
        return rollouts
