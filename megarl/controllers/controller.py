"""What a controller is, and the two things that every one of them needs: mini-batches and averaged metrics."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from megarl.algorithms.token_rewards import sequence_sums
from megarl.checkpoint.manifest import Write, write_nothing
from megarl.config import Config, strict
from megarl.controllers.choose_loss import mark_tokens, set_loss_weights
from megarl.types import Comm, ModelOutput, Rollouts, TokenLoss, TrainBatch
from megarl.types.requirements import ItemKind, Requirements
from megarl.workers.futures import UpdateMetrics, sync_metrics

if TYPE_CHECKING:
    from megarl.flow import HybridFlow


LossFn = Callable[[ModelOutput, TrainBatch], TokenLoss]
"""A loss of a role's update; see `types.batch.reads`."""


@dataclass(frozen=True)
class StepResult:
    """What one step of the loop leaves behind: numbers to log, and the rollouts with the batch made of them."""

    metrics: dict[str, float]
    rollouts: Rollouts | None = None
    batch: TrainBatch | None = None
    trained_rollouts: Rollouts | None = None
    """Those of the rollouts that the batch holds, in its order; None for all."""


class Evaluation(Protocol):
    """One that is under way. All ranks do the same with it."""

    def is_done(self) -> bool:
        """Whether `figures` has nothing to wait for."""
        ...

    def result(self) -> dict[str, float]:
        """What `evaluate` would have said, and by which weights. Raises ConfigError on all ranks where it failed."""
        ...


@dataclass(frozen=True)
class NoOptions:
    """Of an algorithm that has none of its own."""


class Controller(ABC):
    """An algorithm. Every rank runs the same controller on the same values.

    What it needs is declared by the class, and `declare_requirements` puts it together: nothing else is asked to know its name.
    """

    item: ClassVar[ItemKind]
    """What `load_items` returns, so that a broken file is found before anything starts."""
    trained_roles: ClassVar[tuple[str, ...]] = ("actor",)
    """The roles whose models it updates, which checkpoints hold. The first is what is exported; it starts from
    `model.path`, and `parallel` is its layout."""
    has_scalar_head: ClassVar[bool] = False
    """Whether the first of them has a head of one value in place of the words: a classifier is exported."""
    is_group_relative: ClassVar[bool] = False
    """Whether samples of a prompt are judged by each other: there must be two of them, and they may not be greedy."""
    is_off_policy: ClassVar[bool] = False
    """Whether its loss may be given what an older policy sampled: by a ratio to that policy, and a bound of it."""
    has_fixed_prompts: ClassVar[bool] = False
    """Whether what it generates must be of the very prompts that it gives, in their order."""
    has_dynamic_sampling: ClassVar[bool] = False
    """Whether a step may take prompts beyond those that it is given, by `flow.loader.further`."""
    workers: ClassVar[Mapping[str, str]] = {}
    """Who plays a role of a name of its own, as `module:name`."""
    Options: ClassVar[type] = NoOptions
    """A frozen dataclass of settings that no other algorithm has, with their defaults and ranges: the key `options`."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.options: Any = self.read_options(config)

    @classmethod
    def read_options(cls, config: Config) -> Any:
        """`options` as an `Options`. Raises ConfigError for what is none of them, or out of range."""
        return strict.build_dataclass(cls.Options, config.options, "options.", root=Config)

    @classmethod
    @abstractmethod
    def roles(cls, config: Config) -> tuple[str, ...]:
        """The roles it calls, in the order in which they start."""

    @classmethod
    def declare_requirements(cls, config: Config) -> Requirements:
        return Requirements(
            name=config.algorithm,
            item=cls.item,
            roles=tuple(cls.roles(config)),
            trained_roles=tuple(cls.trained_roles),
            has_scalar_head=cls.has_scalar_head,
            is_group_relative=cls.is_group_relative,
            is_off_policy=cls.is_off_policy,
            has_fixed_prompts=cls.has_fixed_prompts,
            has_dynamic_sampling=cls.has_dynamic_sampling,
            workers=dict(cls.workers),
        )

    @abstractmethod
    def load_items(self, flow: HybridFlow) -> Sequence[Any]:
        """What the loader deals out, step by step: prompts, or finished conversations for SFT. Asked for before the
        workers start, so that a mistake in the data costs no loading of models."""

    @abstractmethod
    def step(self, flow: HybridFlow, items: Sequence[Any]) -> StepResult:
        """One turn of the loop."""

    def num_updates(self, role: str) -> int:
        """Optimizer steps that a role takes in the whole run, over which its learning-rate schedule goes."""
        return self.config.run.num_rollout * self.config.run.num_update

    def load_eval_items(self, flow: HybridFlow) -> Sequence[Any]:
        """What `evaluate` looks at, out of `data.eval`; nothing where the algorithm does not evaluate."""
        return ()

    def evaluate(self, flow: HybridFlow, items: Sequence[Any]) -> dict[str, float]:
        """Figures of the model as it is now, under eval/."""
        return {}

    def begin_evaluation(self, flow: HybridFlow, items: Sequence[Any]) -> Evaluation | None:
        """`evaluate` in two halves, for a flow that generates beside training: what was begun goes on while steps are
        taken. None where it has to be in one."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must keep of the algorithm; plain JSON values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return None

    def save(self) -> Write:
        """What is too large for `state_dict`, as it is now: on each rank its own files. They may be written while the
        controller already goes on, by each rank on its own."""
        return write_nothing

    def restore(self, folder: Path, everyone: Comm) -> None:
        """What `save` had written, by as many ranks or others. Collective."""
        return None


def split_mini_batches(batch: TrainBatch, config: Config, seed: int) -> Iterator[TrainBatch]:
    """Cut a batch into `run.num_update` mini-batches over `run.epochs` passes, each in its own order of sequences, but
    that branches of an episode stay together: the cut is of episodes.

    Every mini-batch carries its `loss_weights`: a token's share in the mean, as `loss.mean` says, of this mini-batch;
    the `counts` that its metrics are means over; and what the policy loss has `marked`, if it does. One in which
    nothing is trained on is left out: there may be fewer sequences than mini-batches, or their losses masked.
    """
    # [N], so that every rank knows what a mini-batch is a mean of.
    actions = batch.all_gather(sequence_sums(batch.loss_mask.int(), batch.cu_seqlens))
    episodes = batch.episodes
    parts = split_indices(len(episodes), config.run.num_update, config.run.epochs, seed)
    for number, part in enumerate(map(episodes.sequence_indices, parts)):
        chosen = actions[part]
        if not bool(chosen.any()):
            continue
        mini = batch.select(part) if len(part) < batch.num_sequences else batch
        yield mark_tokens(set_loss_weights(mini, chosen, config), config, seed * config.run.num_update + number)


def split_indices(count: int, num_update: int, epochs: int, seed: int) -> Iterator[list[int]]:
    """The numbers below `count` in `num_update` parts over `epochs` passes, each pass in an order of its own."""
    per_epoch = num_update // epochs
    order = list(range(count))
    for epoch in range(epochs):
        if per_epoch > 1:
            random.Random(f"{seed}/{epoch}").shuffle(order)
        for part in range(per_epoch):
            yield order[part::per_epoch]


class MetricMeans:
    """Averages metrics that are reported once per update."""

    def __init__(self) -> None:
        self._updates: list[UpdateMetrics] = []

    def add(self, metrics: UpdateMetrics) -> None:
        """Take the metrics of an update. They stay where they are until `sync`, so nobody waits for the update."""
        self._updates.append(metrics)

    def sync(self) -> dict[str, float]:
        """Return the means on every rank. Collective where a role is on separate ranks."""
        values: dict[str, list[float]] = {}
        for metrics in sync_metrics(self._updates):
            for name, value in metrics.items():
                values.setdefault(name, []).append(value)
        return {name: sum(series) / len(series) for name, series in values.items()}
