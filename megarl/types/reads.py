"""Which columns of a batch a loss reads. It says so itself, and no others are sent to the model that it updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from megarl.strict import ConfigError
from megarl.types.batch import COLUMNS, TrainBatch

Loss = TypeVar("Loss", bound=Callable[..., Any])

ALWAYS = ("tokens", "loss_mask", "loss_weights")
"""What every loss is given; what is of a sequence, such as `group`, is everywhere."""


def reads(*columns: str) -> Callable[[Loss], Loss]:
    """Name the columns that a loss reads beside ALWAYS:

        @reads("values", "returns")
        def critic_loss(output: ModelOutput, part: TrainBatch) -> TokenLoss: ...

    Another column of its `part` cannot be read then. A loss that says nothing is given all that there are. Raises
    ConfigError for a name that is no column.
    """
    if unknown := [name for name in columns if name not in COLUMNS]:
        raise ConfigError(f"@reads: {unknown[0]!r} is no column of a batch; there are {', '.join(COLUMNS)}")

    def mark(loss: Loss) -> Loss:
        loss.reads = columns  # type: ignore[attr-defined]
        return loss

    return mark


def named_by(loss: Callable[..., Any]) -> tuple[str, ...] | None:
    """What a loss has named; None where it has said nothing."""
    return getattr(loss, "reads", None)


def read_by(loss: Callable[..., Any], batch: TrainBatch) -> tuple[str, ...]:
    """The columns of a batch that a loss is given, of those that there are."""
    named = named_by(loss)
    return tuple(name for name in batch.columns() if named is None or name in named or name in ALWAYS)
