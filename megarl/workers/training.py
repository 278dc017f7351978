"""What the roles that are trained have in common: updates, and a word where more of them are in vain."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megarl.megatron.model import LossFn, MegatronModel
from megarl.types import TrainBatch
from megarl.types.reads import read_by
from megarl.workers.context import Context
from megarl.workers.going_back import GoingBack
from megarl.workers.handles import Reported
from megarl.workers.model import ModelWorker

IN_VAIN = "guards/{}_in_vain"
"""Metric of an update that was one too many to be skipped: how many were in a row. By the role's name."""


class TrainingWorker(ModelWorker):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._skipped: list[int] = []
        """Of the latest updates, if they were skipped: in which step each was."""
        self.in_vain: tuple[int, str] | None = None
        """On the role's ranks, once too many in a row were skipped: the step of the first of them, and what to say."""
        self._unread: list[Reported] = []
        self._back = GoingBack(self.config.guards.ppo_kl if self.role == "actor" else None)

    def update(self, batch: TrainBatch, loss_fn: LossFn) -> Mapping[str, float]:
        """One optimizer step on a mini-batch with `loss_weights`; metrics under the role's name. Of a loss that names
        what it reads, see `types.reads`, nothing else is sent or looked at."""
        rewards = batch.sequence_reward
        if len(odd := rewards[~torch.isfinite(rewards)]):
            self.complain("sequence_reward in the batch", float(odd[0]), len(odd), len(rewards))
        given = {name: getattr(batch, name) for name in read_by(loss_fn, batch)}
        self.require_finite({f"{name} in the batch": x for name, x in given.items() if x.is_floating_point()}, batch)
        mine: dict[str, float] | None = None
        if self.work is not None:
            self.work.learned(batch.lengths.tolist())
        with self.clock.phase(f"{self.role}_update", self.at_work):
            if self.model is None or self._back.pauses(self.step):
                self.distribution.train_elsewhere(batch, given)
                mine = None if self.model is None else {}
            else:
                self._back.begin(self.step, self.model)
                mine = self._back.checked(self.model, self._take_step(self.model, batch, loss_fn))
        return Reported(self.members[0], mine, self._unread) if self.apart or mine is None else mine

    def _take_step(self, model: MegatronModel, batch: TrainBatch, loss_fn: LossFn) -> dict[str, float]:
        metrics = model.train_step(batch, loss_fn, self.temperature)
        if not metrics[f"{self.role}/skipped"]:
            self._skipped = []
            return metrics
        self._skipped.append(self.step)
        if len(self._skipped) <= self.config.run.max_skipped:
            return metrics
        self.in_vain = self._skipped[0], self._said_of(batch, metrics)
        return metrics | {IN_VAIN.format(self.name): float(len(self._skipped))}

    @property
    def skipped_since(self) -> int | None:
        """The step of the first of the latest updates that were skipped, on the role's ranks; None where the last was
        taken."""
        return self._skipped[0] if self._skipped else None

    def went_back(self) -> None:
        """The model is what an older checkpoint has: what came of the updates since is of no interest."""
        self._skipped, self.in_vain = [], None

    @property
    def temperature(self) -> float:
        """Of a policy, what divides its logits."""
        return 1.0

    def _said_of(self, batch: TrainBatch, metrics: dict[str, float]) -> str:
        norm, loss = (metrics.get(f"{self.role}/{name}", 0.0) for name in ("grad_norm", "loss"))
        largest: dict[str, torch.Tensor | None] = {"reward": batch.sequence_reward}
        if not self.apart:  # the others are where the rollouts are
            largest |= {"advantage": batch.advantages, "return": batch.returns}
        sizes = {name: float(x.abs().max()) if len(x) else 0.0 for name, x in largest.items() if x is not None}
        of_all = [sizes] if self.apart else batch.everyone.objects(sizes)
        found = [f"largest |{name}| {max(one[name] for one in of_all):g}" for name in sizes]
        return (
            f"{len(self._skipped)} updates of the {self._name} in a row were skipped, from step {self._skipped[0]} on, "
            f"for its gradient is not finite: norm {norm:g}, loss {loss:g}, {', '.join(found)}; more than "
            f"run.max_skipped={self.config.run.max_skipped}: {self._remedy}"
        )

    @property
    def trained(self) -> MegatronModel:
        """The model, on a rank that has it."""
        assert self.model is not None, f"the {self._name} is not on this rank"
        return self.model
