"""What the roles that are trained have in common: a model, its updates, and an end where more of them are in vain."""

from __future__ import annotations

from dataclasses import fields

import torch

from megarl.config import ConfigError
from megarl.megatron.build import Role
from megarl.megatron.model import LossFn, MegatronModel
from megarl.types import TrainBatch
from megarl.workers.context import Context, Worker


class TrainingWorker(Worker):
    """Numbers that are not finite are found where they come from: what the model says, what a loss is given, what an
    update makes of the weights. All ranks have the same numbers, and raise the same ConfigError."""

    role: Role
    model: MegatronModel

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._skipped: list[int] = []
        """Of the latest updates, if they were skipped: in which step each was."""

    def update(self, batch: TrainBatch, loss_fn: LossFn) -> dict[str, float]:
        """One optimizer step on a mini-batch with `loss_weights`; metrics under the role's name."""
        for item in fields(batch):
            values = getattr(batch, item.name)
            if values is not None and values.is_floating_point():
                every = item.name == "sequence_reward"  # the others are of tokens, and only those of actions are used
                where = torch.ones_like(values, dtype=torch.bool) if every else batch.loss_mask
                self.require_finite(f"{item.name} in the batch", values, where)
        with self.clock.phase(f"{self.role}_update"):
            metrics = self.model.train_step(batch, loss_fn, self.temperature)
        if not metrics[f"{self.role}/skipped"]:
            self._skipped = []
            return metrics
        self._skipped.append(self.step)
        if len(self._skipped) > self.config.run.max_skipped:
            raise ConfigError(self._in_vain(batch, metrics))
        return metrics

    @property
    def temperature(self) -> float:
        """Of a policy, what divides its logits."""
        return 1.0

    def require_finite(self, what: str, values: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        """`values`, which have numbers `where` that says so, a mask of their shape. Raises ConfigError otherwise."""
        wrong = where & ~torch.isfinite(values)
        if bool(wrong.any()):
            raise ConfigError(
                f"step {self.step}: not finite: {what} of the {self._name}, {float(values[wrong][0])} in "
                f"{int(wrong.sum())} of {int(where.sum())} places; {self._remedy}"
            )
        return values

    def _in_vain(self, batch: TrainBatch, metrics: dict[str, float]) -> str:
        norm, loss = (metrics.get(f"{self.role}/{name}", 0.0) for name in ("grad_norm", "loss"))
        largest = {"reward": batch.sequence_reward, "advantage": batch.advantages, "return": batch.returns}
        found = [f"largest |{name}| {float(x.abs().max()):g}" for name, x in largest.items() if x is not None]
        return (
            f"{len(self._skipped)} updates of the {self._name} in a row were skipped, from step {self._skipped[0]} on, "
            f"for its gradient is not finite: norm {norm:g}, loss {loss:g}, {', '.join(found)}; more than "
            f"run.max_skipped={self.config.run.max_skipped}: {self._remedy}"
        )

    @property
    def _name(self) -> str:
        return self.role.replace("_", " ")

    @property
    def _remedy(self) -> str:
        optimizer = "actor_optimizer" if self.role == "actor" else "critic.optimizer"
        return f"look at the rewards and the data, or lower {optimizer}.lr"
