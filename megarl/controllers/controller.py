"""The base class of controllers, and what all of them use: mini-batches and averaged metrics."""

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
"""Loss of a role's update; `types.batch.reads` declares the columns that it reads."""


@dataclass(frozen=True)
class StepResult:
    """The result of a step: metrics to log, the rollouts, and the batch built from them."""

    metrics: dict[str, float]
    rollouts: Rollouts | None = None
    batch: TrainBatch | None = None
    trained_rollouts: Rollouts | None = None
    """The rollouts in the batch, in its order; None if all are."""


class Evaluation(Protocol):
    """An evaluation in progress. All ranks must call its methods together."""

    def is_done(self) -> bool:
        """Return whether `result` returns without waiting."""
        ...

    def result(self) -> dict[str, float]:
        """Return the metrics of `evaluate`, and the weight versions that answered. Raises ConfigError on all ranks if
        the evaluation failed."""
        ...


@dataclass(frozen=True)
class NoOptions:
    """Options of an algorithm that has none."""


class Controller(ABC):
    """Base class of algorithms. Every rank runs the same controller on the same values.

    Class attributes declare what the algorithm needs, and `declare_requirements` collects them; no other code depends
    on an algorithm's name.
    """

    item: ClassVar[ItemKind]
    """Kind of item that `load_items` returns; the dry run checks the data files against it."""
    trained_roles: ClassVar[tuple[str, ...]] = ("actor",)
    """Roles whose models are updated and checkpointed. The first is exported; it starts from `model.path` and uses the
    layout `parallel`."""
    has_scalar_head: ClassVar[bool] = False
    """Whether the first trained role has a head of one value in place of the vocabulary; it is exported as a
    classifier."""
    is_group_relative: ClassVar[bool] = False
    """Whether samples of a prompt are compared with each other. A prompt then needs at least two samples, and sampling
    may not be greedy."""
    is_off_policy: ClassVar[bool] = False
    """Whether the loss accepts samples of an older policy, because it has a ratio to that policy and bounds it."""
    has_fixed_prompts: ClassVar[bool] = False
    """Whether rollouts must answer exactly the prompts that the controller passes, in their order."""
    has_dynamic_sampling: ClassVar[bool] = False
    """Whether a step may draw prompts beyond those it is given, from `flow.loader`."""
    workers: ClassVar[Mapping[str, str]] = {}
    """Workers of roles that the algorithm defines itself, as `module:name` by role."""
    Options: ClassVar[type] = NoOptions
    """Frozen dataclass of settings that only this algorithm has, with defaults and ranges: the key `options`."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.options: Any = self.read_options(config)

    @classmethod
    def read_options(cls, config: Config) -> Any:
        """Return the key `options` as an `Options`. Raises ConfigError for an unknown key or a value out of range."""
        return strict.build_dataclass(cls.Options, config.options, "options.", root=Config)

    @classmethod
    @abstractmethod
    def roles(cls, config: Config) -> tuple[str, ...]:
        """Return the roles that the algorithm calls, in the order in which they start."""

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
        """Return the items that the loader deals out to steps: prompts, or finished conversations for SFT. Called
        before the workers start, so that a mistake in the data fails before models are loaded."""

    @abstractmethod
    def step(self, flow: HybridFlow, items: Sequence[Any]) -> StepResult:
        """Run one step of the training loop."""

    def num_updates(self, role: str) -> int:
        """Return the role's number of optimizer steps in the whole run, which its learning-rate schedule spans."""
        return self.config.run.num_rollout * self.config.run.num_update

    def load_eval_items(self, flow: HybridFlow) -> Sequence[Any]:
        """Return the items of `data.eval` for `evaluate`; empty if the algorithm does not evaluate."""
        return ()

    def evaluate(self, flow: HybridFlow, items: Sequence[Any]) -> dict[str, float]:
        """Return metrics of the current model, under eval/."""
        return {}

    def begin_evaluation(self, flow: HybridFlow, items: Sequence[Any]) -> Evaluation | None:
        """Start an evaluation that continues during the next steps, where generation has its own ranks. Returns None if
        the algorithm only has the synchronous `evaluate`."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the algorithm's state for a checkpoint, as plain JSON values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return None

    def save(self) -> Write:
        """Take a snapshot of state too large for `state_dict`, and return a function that writes it. Each rank writes
        its own files, possibly while the controller already continues."""
        return write_nothing

    def restore(self, folder: Path, comm: Comm) -> None:
        """Restore what `save` wrote, also on another number of ranks. Collective."""
        return None


def split_mini_batches(batch: TrainBatch, config: Config, seed: int) -> Iterator[TrainBatch]:
    """Split a batch into `run.num_update` mini-batches over `run.epochs` passes, each pass in its own order. Episodes
    are split, so that branches of one stay together.

    Each mini-batch carries `loss_weights`, each token's share in the mean that `loss.mean` names over this mini-batch;
    the `counts` that its metrics are averaged over; and the tokens `marked` by the policy loss, if it marks any.
    Mini-batches without a trained token are left out: there may be fewer sequences than mini-batches, or their losses
    may be masked.
    """
    # [N], so that every rank knows the size of a mini-batch's mean.
    actions = batch.all_gather(sequence_sums(batch.loss_mask.int(), batch.cu_seqlens))
    episodes = batch.episodes
    parts = split_indices(len(episodes), config.run.num_update, config.run.epochs, seed)
    for number, part in enumerate(map(episodes.sequence_indices, parts)):
        mini_actions = actions[part]
        if not bool(mini_actions.any()):
            continue
        mini = batch.select(part) if len(part) < batch.num_sequences else batch
        yield mark_tokens(set_loss_weights(mini, mini_actions, config), config, seed * config.run.num_update + number)


def split_indices(count: int, num_update: int, epochs: int, seed: int) -> Iterator[list[int]]:
    """Split range(count) into `num_update` parts over `epochs` passes, each pass in its own order."""
    per_epoch = num_update // epochs
    order = list(range(count))
    for epoch in range(epochs):
        if per_epoch > 1:
            random.Random(f"{seed}/{epoch}").shuffle(order)
        for part in range(per_epoch):
            yield order[part::per_epoch]


class MetricMeans:
    """Means of metrics that are reported once per update."""

    def __init__(self) -> None:
        self._updates: list[UpdateMetrics] = []

    def add(self, metrics: UpdateMetrics) -> None:
        """Record the metrics of an update. They stay where they are until `sync`, so no rank waits for the update."""
        self._updates.append(metrics)

    def sync(self) -> dict[str, float]:
        """Return the means on every rank. Collective where a role is on separate ranks."""
        values: dict[str, list[float]] = {}
        for metrics in sync_metrics(self._updates):
            for name, value in metrics.items():
                values.setdefault(name, []).append(value)
        return {name: sum(series) / len(series) for name, series in values.items()}
