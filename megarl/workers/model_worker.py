"""Base classes of roles that have a model. The model lives on the role's ranks; all ranks of the job call its methods.

`TrainingWorker` adds updates, and raises an alarm when several updates in a row were skipped.

`KLRollback` implements `guards.ppo_kl`: it rolls the policy back when it has moved too far from the behavior policy.
The `actor/ppo_kl` of an update measures how far the earlier updates of its step have moved the policy: it is 0 in the
first, unless rollouts are asynchronous. The last good policy is therefore the one at the start of the step, which is
also the engine's; a snapshot of it is taken. All ranks of the role see the same value and decide alike. Other ranks
need not know: rows are sent for skipped updates, too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NoReturn

import torch

from megarl.algorithms.token_stats import sequence_sums
from megarl.config import Config, ConfigError
from megarl.megatron.build import Role
from megarl.megatron.distribution import BatchDispatcher, row_budget
from megarl.megatron.trainer_model import OUTPUT_NAMES, LossFn, MegatronModel
from megarl.models.flops import model_flops
from megarl.observe.clock import REMOTE
from megarl.observe.mfu import RoleFlops
from megarl.parallel import ranks
from megarl.parallel.placement import optimizer_key, placement_of, role_parallel
from megarl.types import LOCAL, ModelOutput, TrainBatch
from megarl.types.batch import select_columns
from megarl.workers.context import Context, Worker
from megarl.workers.futures import Future, UpdateMetrics


class ModelWorker(Worker):
    """Base of roles with a model. `model` is None on ranks outside the role; there, calls send the local part of the
    batch and return at once.

    Non-finite values are caught where they arise: in the model's output and in the inputs of a loss. If the model is on
    all ranks, all count the same values and raise the same ConfigError; otherwise the ranks that see the values raise
    it.
    """

    role: Role
    placement_key: ClassVar[str] = ""
    """Key in `placement`, if it differs from the role."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.model: MegatronModel | None = None
        self.name = context.role or self.placement_key or self.role
        """Name of the role in this flow; `role` is the kind of model it has."""
        self.members = placement_of(self.config).ranks_of(self.name)
        self.is_disaggregated = len(self.members) < self.job.world
        self.vocab_size: int | None = None
        """Rows of the model's embedding; None until `build`."""
        self.work: RoleFlops | None = None
        """FLOP counts of the model, known to every rank; None until `build`."""

    def build(self, hf: Mapping[str, Any], path: str, config: Config, trains: bool = True) -> None:
        """Build the model on the role's ranks and load its weights from an HF folder."""
        with self.clock.phase("load"):
            if self.name not in self.context.layouts:
                raise ConfigError(
                    f"roles.{self.name}.model is not set; it must name the HF folder of the {self._display_name}"
                )
            lora = config.lora if trains else None
            self.vocab_size = int(hf["vocab_size"])
            flops = model_flops(hf, lora, has_scalar_head=self.role != "actor")
            # A reward model has no phase of its own: it scores along with the other parts of the reward.
            phase = f"{self.name}_update" if trains else f"{self.name}_logprobs" if self.role == "actor" else ""
            layout = self.context.layouts[self.name]
            self.work = RoleFlops(
                self.name, flops, phase, max(1, len(self.members)), min(self.members, default=0), trains
            )
            if layout is None:
                return
            updates = self.context.num_updates[self.name] if trains else 1
            self.model = MegatronModel(hf, config, layout, self.role, updates, trains, self.name)
            self.distribution: BatchDispatcher = self.model.dispatcher
            self.model.load_hf(path)
            self.context.models.add(self.model)

    def wait_ready(self) -> None:
        # Ranks without the model learn it from one that has it. In a rehearsal, which has no others, they know it.
        dispatcher = vars(self).get("distribution") if self.model is None else self.model.dispatcher
        if self.is_disaggregated:
            dispatcher = ranks.broadcast_object(dispatcher, self.members[0])
        assert dispatcher is not None
        self.distribution = dispatcher

    def set_config(self, config: Config) -> None:
        if config.train.max_tokens_per_gpu != self.config.train.max_tokens_per_gpu:
            budget = row_budget(config, role_parallel(config, self.name))
            self.distribution = dataclasses.replace(self.distribution, token_budget=budget)
            if self.model is not None:
                self.model.set_dispatcher(self.distribution)
        super().set_config(config)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of `guards.oom_retry`, on which the role's ranks have agreed, on all ranks; empty if it is
        off."""
        if not self.config.guards.oom_retry or not self.members:
            return {}
        local = None if self.model is None else self.model.oom_retry.metrics
        synced = ranks.broadcast_object(local, self.members[0]) if self.is_disaggregated else local
        return {f"guards/{self.name}_{name}": value for name, value in (synced or {}).items()}

    @property
    def phase_owner(self) -> str:
        """Owner of this role's phases on this rank."""
        return REMOTE if self.model is None else self.name

    def forward(self, batch: TrainBatch) -> Future[ModelOutput]:
        """Compute the model's output for this rank's tokens, [T] fp32 on the host. All ranks call it, and `wait`."""
        return self._forward(batch, self.role.replace("_", " "))

    def _forward(
        self,
        batch: TrainBatch,
        what: str,
        temperature: float = 1.0,
        context: AbstractContextManager[None] | None = None,
        all_tokens: bool | None = False,
    ) -> Future[ModelOutput]:
        """Begin a forward pass; the returned future raises ConfigError for output that is not finite.

        A policy may sample an id of a padding row of its embedding. A model with fewer rows has no value for it: its
        output is NaN from there to the end of the sequence.

        what: name of the output in that error. within: context that the role's ranks enter for the pass. every: whether
        all values must be finite; if False, those of action tokens in at least half of the sequences; if None, none.
        """
        names = OUTPUT_NAMES[self.role]
        unknown: torch.Tensor | None = None
        if self.vocab_size is not None and bool((batch.tokens >= self.vocab_size).any()):
            unknown = _from_first(batch.tokens >= self.vocab_size, batch.cu_seqlens)
            batch = batch.with_(tokens=batch.tokens.clamp(max=self.vocab_size - 1))
        if self.work is not None:
            self.work.add_forward(*self.distribution.list_work(batch, forward_only=True))
        if self.model is None:
            read = self.distribution.join_forward(batch, names)
        else:
            with context or nullcontext():
                output = self.model.forward(batch, temperature)
            read = output.copy

        def receive() -> ModelOutput:
            values = read()
            if all_tokens is not None:
                self.check_finite({what: values[names[0]]}, batch, all_tokens, tolerate_minority=not all_tokens)
            if unknown is not None:  # not the model's fault
                values = {name: value.masked_fill(unknown, math.nan) for name, value in values.items()}
            return ModelOutput(**values)

        return Future(receive) if self.is_disaggregated else Future.completed(receive())

    def check_finite(
        self,
        columns: Mapping[str, torch.Tensor],
        batch: TrainBatch,
        all_tokens: bool = False,
        tolerate_minority: bool = False,
    ) -> None:
        """Raise ConfigError unless these [T] columns are finite on all action tokens, or on all tokens if `all_tokens`.

        tolerate_minority: raise only if more than half of the sequences have a non-finite value; the caller masks such
        sequences (`controllers/policy_gradient.py`).
        """
        comm = LOCAL if self.is_disaggregated else batch.comm
        where = torch.ones_like(batch.loss_mask) if all_tokens else batch.loss_mask
        # A finite sum proves that all summands are finite; only otherwise check them one by one.
        suspects = {what: values for what, values in columns.items() if not bool(torch.isfinite(values.sum()))}
        invalid = {what: where & ~torch.isfinite(values) for what, values in suspects.items()}
        column_counts = [int(invalid[what].sum()) if what in invalid else 0 for what in columns]
        hits = (
            [_any_per_sequence(batch, mask) for mask in (where, *invalid.values())]
            if tolerate_minority and invalid
            else []
        )
        num_invalid = int(torch.stack(hits[1:]).any(dim=0).sum()) if hits else 0
        num_total = int((hits[0] if hits else _any_per_sequence(batch, where)).sum()) if tolerate_minority else 0
        counts = comm.all_reduce(
            torch.tensor([num_invalid, num_total, int(torch.count_nonzero(where)), *column_counts])
        ).tolist()
        num_invalid, num_total, places, *column_counts = counts
        for what, count in zip(columns, column_counts, strict=True):
            if count and not (tolerate_minority and 2 * num_invalid <= num_total):
                examples = comm.all_gather_objects(columns[what][invalid[what]][:1].tolist() if what in invalid else [])
                self.raise_nonfinite(what, next(value for local in examples for value in local), count, places)

    def raise_nonfinite(self, what: str, value: float, count: int, places: int) -> NoReturn:
        raise nonfinite_error(self.step, f"{what} of the {self._display_name}", value, count, places, self._remedy)

    @property
    def _display_name(self) -> str:
        return self.name.replace("_", " ")

    @property
    def _remedy(self) -> str:
        return f"check the rewards and the data, or lower {optimizer_key(self.name)}.lr"


def _from_first(flags: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Return [T] bool: True from the first True of each sequence of `flags`, [T], to the sequence's end."""
    counts = torch.cat([cu_seqlens.new_zeros(1), flags.cumsum(0)])
    return counts[1:] > torch.repeat_interleave(counts[cu_seqlens[:-1]], cu_seqlens.diff())


def _any_per_sequence(batch: TrainBatch, where: torch.Tensor) -> torch.Tensor:
    """Return [n] bool: local sequences with a True token in [T] `where`."""
    return sequence_sums(where.int(), batch.cu_seqlens) > 0


def nonfinite_error(step: int, what: str, value: float, count: int, places: int, remedy: str) -> ConfigError:
    return ConfigError(f"step {step}: not finite: {what}, {value} in {count} of {places} places; {remedy}")


KL_METRIC = "actor/ppo_kl"
ROLLBACK_METRIC = "guards/ppo_kl"
"""The KL that exceeded the limit, in a step that rolled back the actor; that of actor_b is `guards/actor_b_ppo_kl`."""


class KLRollback:
    """Rollback state of the model of `role`. A `limit` of None disables it."""

    def __init__(self, limit: float | None, role: str = "actor") -> None:
        self._limit = limit
        self._metric = ROLLBACK_METRIC if role == "actor" else f"guards/{role}_ppo_kl"
        self._snapshot_step = self._rollback_step = -1

    def should_skip(self, step: int) -> bool:
        """Return whether to skip the remaining updates of this step."""
        return self._rollback_step == step

    def before_update(self, step: int, model: MegatronModel) -> None:
        """Take a snapshot before the first update of a step. Call it before each update."""
        if self._limit is not None and self._snapshot_step != step:
            model.save_snapshot()
        self._snapshot_step = step

    def after_update(self, model: MegatronModel, metrics: dict[str, float]) -> dict[str, float]:
        """Roll the model back if the update's KL exceeds the limit or is NaN. Returns the metrics, with
        the KL as `ROLLBACK_METRIC` after a rollback."""
        kl = metrics.get(KL_METRIC, 0.0)
        if self._limit is None or kl <= self._limit:
            return metrics
        model.rollback()
        self._rollback_step = self._snapshot_step
        return metrics | {self._metric: kl}


SKIPS_METRIC = "guards/{}_consecutive_skips"
"""Number of updates skipped in a row, in the update that exceeded the limit; formatted with the role's name."""


class TrainingWorker(ModelWorker):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._skipped_steps: list[int] = []
        """Steps of the latest updates that were skipped in a row."""
        self.skip_failure: tuple[int, str] | None = None
        """Step of the first skipped update, and the error message; set on the role's ranks once too many in a row were
        skipped."""
        self._kl_rollback = KLRollback(self.config.guards.ppo_kl if self.role == "actor" else None, self.name)

    def set_config(self, config: Config) -> None:
        super().set_config(config)
        if self.model is not None:
            settings = config.actor_optimizer if self.role == "actor" else config.critic.optimizer
            self.model.set_peak_lr(settings.lr)

    def update(self, batch: TrainBatch, loss_fn: LossFn) -> UpdateMetrics:
        """Take one optimizer step on a mini-batch that has `loss_weights`. All ranks call it.

        Only the columns that the loss declares (`types.batch.reads`) are sent and checked. Returns metrics under the
        role's name; their `sync()` creates them known to all ranks.
        """
        rewards = batch.sequence_reward
        if len(nonfinite := rewards[~torch.isfinite(rewards)]):
            self.raise_nonfinite("sequence_reward in the batch", float(nonfinite[0]), len(nonfinite), len(rewards))
        columns = {name: getattr(batch, name) for name in select_columns(loss_fn, batch)}
        self.check_finite({f"{name} in the batch": x for name, x in columns.items() if x.is_floating_point()}, batch)
        local: dict[str, float] | None = None
        if self.work is not None:
            self.work.add_update(*self.distribution.list_work(batch, forward_only=False))
        with self.clock.phase(f"{self.name}_update", self.phase_owner):
            if self.model is None or self._kl_rollback.should_skip(self.step):
                self.distribution.join_train_step(batch, columns)
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
        if len(self._skipped_steps) <= self.config.run.max_skipped_updates:
            return metrics
        self.skip_failure = self._skipped_steps[0], self._describe_skips(batch, metrics)
        return metrics | {SKIPS_METRIC.format(self.name): float(len(self._skipped_steps))}

    @property
    def first_skipped_step(self) -> int | None:
        """Step of the first of the latest skipped updates, on the role's ranks; None if the last update was taken."""
        return self._skipped_steps[0] if self._skipped_steps else None

    def on_rollback(self) -> None:
        """Forget the skipped updates: the model is restored from an older checkpoint."""
        self._skipped_steps, self.skip_failure = [], None

    @property
    def temperature(self) -> float:
        """Temperature that divides a policy's logits; 1 for other models."""
        return 1.0

    def _describe_skips(self, batch: TrainBatch, metrics: dict[str, float]) -> str:
        norm, loss = (metrics.get(f"{self.role}/{name}", 0.0) for name in ("grad_norm", "loss"))
        largest: dict[str, torch.Tensor | None] = {"reward": batch.sequence_reward}
        if not self.is_disaggregated:  # otherwise these columns are on the rollouts' ranks
            largest |= {"advantage": batch.advantages, "return": batch.returns}
        sizes = {name: float(x.abs().max()) if len(x) else 0.0 for name, x in largest.items() if x is not None}
        all_sizes = [sizes] if self.is_disaggregated else batch.comm.all_gather_objects(sizes)
        largest_texts = [f"largest |{name}| {max(rank_sizes[name] for rank_sizes in all_sizes):g}" for name in sizes]
        return (
            f"{len(self._skipped_steps)} consecutive updates of the {self._display_name} were skipped since step "
            f"{self._skipped_steps[0]}, because its gradient is not finite: norm {norm:g}, loss {loss:g}, "
            f"{', '.join(largest_texts)}; more than "
            f"run.max_skipped_updates={self.config.run.max_skipped_updates}: {self._remedy}"
        )

    @property
    def local_model(self) -> MegatronModel:
        """The model; only on the role's ranks."""
        assert self.model is not None, f"the {self._display_name} is not on this rank"
        return self.model
