"""`@reads`: the batch columns that a loss declares."""

import pytest
import torch

from megarl.config import ConfigError
from megarl.types import Prompt, Rollout, TrainBatch, Turn, reads
from megarl.types.batch import get_declared_columns, select_columns

BATCH = TrainBatch.from_rollouts([Rollout(Prompt("p", ()), (Turn((1, 2)), Turn((3,), (-0.5,), True)))])


def test_loss_gets_declared_and_common_columns():
    batch = BATCH.with_(values=torch.zeros(3), returns=torch.ones(3), loss_weights=torch.ones(3))

    @reads("returns", "advantages")
    def loss(output, part):
        return output

    assert get_declared_columns(loss) == ("returns", "advantages")
    assert select_columns(loss, batch) == (
        "tokens",
        "loss_mask",
        "returns",
        "loss_weights",
    )  # the batch has no advantages
    assert select_columns(reads()(lambda output, part: None), batch) == ("tokens", "loss_mask", "loss_weights")


def test_undeclared_loss_gets_all_columns():
    assert get_declared_columns(lambda output, part: None) is None
    assert (
        select_columns(lambda output, part: None, BATCH)
        == BATCH.columns()
        == ("tokens", "loss_mask", "rollout_logprobs")
    )


def test_rejects_unknown_columns():
    with pytest.raises(ConfigError, match="@reads: 'advantage' is not a column of a batch; columns are tokens, "):
        reads("returns", "advantage")
