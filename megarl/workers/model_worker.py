"""The base classes of roles that have a model. They live on the role's ranks; all ranks of the job call them.

`TrainingWorker` adds updates, and raises an alarm when several updates in a row were skipped.

`KLRollback` implements `guards.ppo_kl`: it rolls the policy back when it has moved too far from the policy that sampled.
The `actor/ppo_kl` of an update measures how far the earlier updates of its step have moved the policy: it is 0 in the
first, or what `rollout.asynchronous` makes of it. The last good policy is therefore the one at the start of the step,
which is also the engine's, and a snapshot of it is taken. All ranks of the role see the same value and decide alike.
Other ranks need not know: rows are sent for skipped updates, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NoReturn

import torch

from megarl.algorithms.token_rewards import sequence_sums
from megarl.config import Config, ConfigError
from megarl.megatron.build import Role
from megarl.megatron.distribution import BatchDispatcher
from megarl.megatron.trainer_model import OUTPUT_NAMES, LossFn, MegatronModel
from megarl.models.flops import model_flops
from megarl.observe.clock import REMOTE
from megarl.observe.mfu import RoleFlops
from megarl.parallel import ranks
from megarl.parallel.placement import placement_of
from megarl.types import LOCAL, ModelOutput, TrainBatch
from megarl.types.batch import select_columns
from megarl.workers.context import Context, Worker
from megarl.workers.futures import Future, UpdateMetrics


class ModelWorker(Worker):
    """`model` is None on ranks that are not the role's. There a call sends what is here of the batch and returns at
    once.

    Numbers that are not finite are found where they come from: what the model says, what a loss is given. Where the
    model is on all ranks they have the same numbers, and raise the same ConfigError; else those that see it raise.
    """

    role: Role
    placement_key: ClassVar[str] = ""
    """Its key in `placement`, where that is not the role."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.model: MegatronModel | None = None
        self.name = context.role or self.placement_key or self.role
        """Of the role that it plays; what `role` says is what kind of model it has."""
        self.members = placement_of(self.config).ranks_of(self.name)
        self.is_disaggregated = len(self.members) < self.job.world
        self.work: RoleFlops | None = None
        """What its model has computed, as every rank can say; there once it is built."""

    def build(self, hf: Mapping[str, Any], path: str, config: Config, trains: bool = True) -> None:
        """The model, from a folder, on the ranks that have it."""
        with self.clock.phase("load"):
            if self.name not in self.context.layouts:
                raise ConfigError(
                    f"roles.{self.name}.model is not set; it must name the HF folder of the {self._display_name}"
                )
            lora = config.lora if trains else None
            flops = model_flops(hf, lora, valued=self.role != "actor")
            # A reward model has no time of its own: its scores are made among the other parts of the reward.
            phase = f"{self.role}_update" if trains else f"{self.name}_logprobs" if self.role == "actor" else ""
            layout = self.context.layouts[self.name]
            self.work = RoleFlops(
                self.name, flops, phase, max(1, len(self.members)), min(self.members, default=0), trains
            )
            if layout is None:
                return
            updates = self.context.num_updates[self.name] if trains else 1
            self.model = MegatronModel(hf, config, layout, self.role, updates, trains)
            self.model.load_hf(path)
            self.context.models.add(self.model)

    def wait_ready(self) -> None:
        known = self.model.dispatcher if self.model is not None else None
        if self.is_disaggregated:
            known = ranks.broadcast_object(known, self.members[0])
        assert known is not None
        self.distribution: BatchDispatcher = known

    def metrics(self) -> dict[str, float]:
        """Where `guards.memory` is on, what its ranks have agreed on, on all ranks."""
        if not self.config.guards.memory or not self.members:
            return {}
        known = None if self.model is None else self.model.oom_retry.metrics
        found = ranks.broadcast_object(known, self.members[0]) if self.is_disaggregated else known
        return {f"guards/{self.name}_{name}": value for name, value in (found or {}).items()}

    @property
    def phase_owner(self) -> str:
        """Who is in this role's phases on this rank."""
        return REMOTE if self.model is None else self.name

    def forward(self, batch: TrainBatch) -> Future[ModelOutput]:
        """Compute the model's output for this rank's tokens, [T] fp32 on the host. All ranks call it, and `wait`."""
        return self._forward(batch, self.role.replace("_", " "))

    def _forward(
        self,
        batch: TrainBatch,
        what: str,
        temperature: float = 1.0,
        within: AbstractContextManager[None] | None = None,
        every: bool | None = False,
    ) -> Future[ModelOutput]:
        """Begin a forward pass; the returned future raises ConfigError for output that is not finite.

        what: name of the output in that error. within: context that the role's ranks enter for the pass. every:
        whether all values must be finite; if False, those of action tokens in at least half of the sequences; if None,
        none.
        """
        names = OUTPUT_NAMES[self.role]
        if self.work is not None:
            self.work.add_forward(batch.lengths.tolist())
        if self.model is None:
            read = self.distribution.join_forward(batch, names)
        else:
            with within or nullcontext():
                found = self.model.forward(batch, temperature)
            read = found.copy

        def receive() -> ModelOutput:
            values = read()
            if every is not None:
                self.check_finite({what: values[names[0]]}, batch, every, spares=not every)
            return ModelOutput(**values)

        return Future(receive) if self.is_disaggregated else Future.completed(receive())

    def check_finite(
        self, columns: Mapping[str, torch.Tensor], batch: TrainBatch, every: bool = False, spares: bool = False
    ) -> None:
        """Raise ConfigError unless these [T] are numbers for all action tokens, or for every token. spares: unless they
        are for at least half of the sequences; of the others nothing is trained on
        (`controllers/mask_nonfinite.py`)."""
        everyone = LOCAL if self.is_disaggregated else batch.comm
        where = torch.ones_like(batch.loss_mask) if every else batch.loss_mask
        # A finite sum has finite summands, which is quickly seen; only where it is not each of them is looked at.
        odd = {what: values for what, values in columns.items() if not bool(torch.isfinite(values.sum()))}
        wrong = {what: where & ~torch.isfinite(values) for what, values in odd.items()}
        found = [int(wrong[what].sum()) if what in wrong else 0 for what in columns]
        hit = [_any_per_sequence(batch, mask) for mask in (where, *wrong.values())] if spares and wrong else []
        bad = int(torch.stack(hit[1:]).any(dim=0).sum()) if hit else 0
        asked = int((hit[0] if hit else _any_per_sequence(batch, where)).sum()) if spares else 0
        counts = everyone.all_reduce(torch.tensor([bad, asked, int(torch.count_nonzero(where)), *found])).tolist()
        bad, asked, places, *found = counts
        for what, count in zip(columns, found, strict=True):
            if count and not (spares and 2 * bad <= asked):
                seen = everyone.all_gather_objects(columns[what][wrong[what]][:1].tolist() if what in wrong else [])
                self.raise_nonfinite(what, next(value for here in seen for value in here), count, places)

    def raise_nonfinite(self, what: str, value: float, count: int, places: int) -> NoReturn:
        raise nonfinite_error(self.step, f"{what} of the {self._display_name}", value, count, places, self._remedy)

    @property
    def _display_name(self) -> str:
        return self.name.replace("_", " ")

    @property
    def _remedy(self) -> str:
        optimizer = "actor_optimizer" if self.role == "actor" else "critic.optimizer"
        return f"look at the rewards and the data, or lower {optimizer}.lr"


def _any_per_sequence(batch: TrainBatch, where: torch.Tensor) -> torch.Tensor:
    """[n] bool: those of the sequences here with a token of [T] in them."""
    return sequence_sums(where.int(), batch.cu_seqlens) > 0


def nonfinite_error(step: int, what: str, value: float, count: int, places: int, remedy: str) -> ConfigError:
    return ConfigError(f"step {step}: not finite: {what}, {value} in {count} of {places} places; {remedy}")


KL_METRIC = "actor/ppo_kl"
ROLLBACK_METRIC = "guards/ppo_kl"
"""Metric of a step that did: what was too much."""


class KLRollback:
    """Of one model. `limit` None: never."""

    def __init__(self, limit: float | None) -> None:
        self._limit = limit
        self._snapshot_step = self._rollback_step = -1
        """Steps."""

    def should_skip(self, step: int) -> bool:
        """Whether the rest of this step's updates is left out."""
        return self._rollback_step == step

    def before_update(self, step: int, model: MegatronModel) -> None:
        """Before each update: the first of a step is of a policy to go back to."""
        if self._limit is not None and self._snapshot_step != step:
            model.save_snapshot()
        self._snapshot_step = step

    def after_update(self, model: MegatronModel, metrics: dict[str, float]) -> dict[str, float]:
        """What an update has reported, after which the model may be another. One that is not a number is too much."""
        found = metrics.get(KL_METRIC, 0.0)
        if self._limit is None or found <= self._limit:
            return metrics
        model.rollback()
        self._rollback_step = self._snapshot_step
        return metrics | {ROLLBACK_METRIC: found}


SKIPS_METRIC = "guards/{}_in_vain"
"""Metric of an update that was one too many to be skipped: how many were in a row. By the role's name."""


class TrainingWorker(ModelWorker):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._skipped_steps: list[int] = []
        """Of the latest updates, if they were skipped: in which step each was."""
        self.skip_failure: tuple[int, str] | None = None
        """On the role's ranks, once too many in a row were skipped: the step of the first of them, and what to say."""
        self._kl_rollback = KLRollback(self.config.guards.ppo_kl if self.role == "actor" else None)

    def update(self, batch: TrainBatch, loss_fn: LossFn) -> UpdateMetrics:
        """Take one optimizer step on a mini-batch that has `loss_weights`. All ranks call it.

        Only the columns that the loss declares (`types.batch.reads`) are sent and checked. Returns metrics under the
        role's name; their `sync()` makes them known to all ranks.
        """
        rewards = batch.sequence_reward
        if len(odd := rewards[~torch.isfinite(rewards)]):
            self.raise_nonfinite("sequence_reward in the batch", float(odd[0]), len(odd), len(rewards))
        given = {name: getattr(batch, name) for name in select_columns(loss_fn, batch)}
        self.check_finite({f"{name} in the batch": x for name, x in given.items() if x.is_floating_point()}, batch)
        local: dict[str, float] | None = None
        if self.work is not None:
            self.work.add_update(batch.lengths.tolist())
        with self.clock.phase(f"{self.role}_update", self.phase_owner):
            if self.model is None or self._kl_rollback.should_skip(self.step):
                self.distribution.join_train_step(batch, given)
                local = None if self.model is None else {}
            else:
                self._kl_rollback.before_update(self.step, self.model)
                local = self._kl_rollback.after_update(self.model, self._train_step(self.model, batch, loss_fn))
        return UpdateMetrics(local, self.members[0] if self.is_disaggregated else None)

    def _train_step(self, model: MegatronModel, batch: TrainBatch, loss_fn: LossFn) -> dict[str, float]:
        metrics = model.train_step(batch, loss_fn, self.temperature)
        if not metrics[f"{self.role}/skipped"]:
            self._skipped_steps = []
            return metrics
        self._skipped_steps.append(self.step)
        if len(self._skipped_steps) <= self.config.run.max_skipped:
            return metrics
        self.skip_failure = self._skipped_steps[0], self._describe_skips(batch, metrics)
        return metrics | {SKIPS_METRIC.format(self.name): float(len(self._skipped_steps))}

    @property
    def first_skipped_step(self) -> int | None:
        """The step of the first of the latest updates that were skipped, on the role's ranks; None where the last was
        taken."""
        return self._skipped_steps[0] if self._skipped_steps else None

    def on_rollback(self) -> None:
        """The model is what an older checkpoint has: what came of the updates since is of no interest."""
        self._skipped_steps, self.skip_failure = [], None

    @property
    def temperature(self) -> float:
        """Of a policy, what divides its logits."""
        return 1.0

    def _describe_skips(self, batch: TrainBatch, metrics: dict[str, float]) -> str:
        norm, loss = (metrics.get(f"{self.role}/{name}", 0.0) for name in ("grad_norm", "loss"))
        largest: dict[str, torch.Tensor | None] = {"reward": batch.sequence_reward}
        if not self.is_disaggregated:  # the others are where the rollouts are
            largest |= {"advantage": batch.advantages, "return": batch.returns}
        sizes = {name: float(x.abs().max()) if len(x) else 0.0 for name, x in largest.items() if x is not None}
        of_all = [sizes] if self.is_disaggregated else batch.comm.all_gather_objects(sizes)
        found = [f"largest |{name}| {max(one[name] for one in of_all):g}" for name in sizes]
        return (
            f"{len(self._skipped_steps)} updates of the {self._display_name} in a row were skipped, from step {self._skipped_steps[0]} on, "
            f"for its gradient is not finite: norm {norm:g}, loss {loss:g}, {', '.join(found)}; more than "
            f"run.max_skipped={self.config.run.max_skipped}: {self._remedy}"
        )

    @property
    def local_model(self) -> MegatronModel:
        """The model, on a rank that has it."""
        assert self.model is not None, f"the {self._display_name} is not on this rank"
        return self.model
