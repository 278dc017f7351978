"""What the roles that are trained have in common: a model, its updates, and an end where more of them are in vain."""

from __future__ import annotations

from typing import NoReturn

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
        rewards = batch.sequence_reward
        if len(odd := rewards[~torch.isfinite(rewards)]):
            self._complain("sequence_reward in the batch", float(odd[0]), len(odd), len(rewards))
        given = {name: getattr(batch, name) for name in batch.columns()}
        self._require_finite({f"{name} in the batch": x for name, x in given.items() if x.is_floating_point()}, batch)
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

    def require_finite(self, what: str, values: torch.Tensor, batch: TrainBatch, every: bool = False) -> torch.Tensor:
        """`values`, [T], which are numbers for all action tokens, or for every token. Raises ConfigError otherwise."""
        self._require_finite({what: values}, batch, every)
        return values

    def _require_finite(self, columns: dict[str, torch.Tensor], batch: TrainBatch, every: bool = False) -> None:
        where = torch.ones_like(batch.loss_mask) if every else batch.loss_mask
        # A finite sum has finite summands, which is quickly seen; only where it is not each of them is looked at.
        odd = {what: x for what, x in columns.items() if not bool(torch.isfinite(x.sum()))}
        wrong = {what: where & ~torch.isfinite(values) for what, values in odd.items()}
        found = [int(wrong[what].sum()) if what in wrong else 0 for what in columns]
        counts = batch.total(torch.tensor([int(torch.count_nonzero(where)), *found])).tolist()
        for what, count in zip(columns, counts[1:], strict=True):
            if count:
                mine = columns[what][wrong[what]][:1].tolist() if what in wrong else []
                seen = batch.everyone.objects(mine)
                self._complain(what, next(value for here in seen for value in here), count, counts[0])

    def _complain(self, what: str, value: float, count: int, places: int) -> NoReturn:
        raise ConfigError(
            f"step {self.step}: not finite: {what} of the {self._name}, {value} in {count} of {places} places; "
            f"{self._remedy}"
        )

    def _in_vain(self, batch: TrainBatch, metrics: dict[str, float]) -> str:
        norm, loss = (metrics.get(f"{self.role}/{name}", 0.0) for name in ("grad_norm", "loss"))
        largest = {"reward": batch.sequence_reward, "advantage": batch.advantages, "return": batch.returns}
        sizes = {name: float(x.abs().max()) if len(x) else 0.0 for name, x in largest.items() if x is not None}
        of_all = batch.everyone.objects(sizes)
        found = [f"largest |{name}| {max(one[name] for one in of_all):g}" for name in sizes]
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
