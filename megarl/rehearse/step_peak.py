"""Device memory of a training step of one model on one rank, to compare with a measured one."""

from __future__ import annotations

import torch

from megarl.config import Config
from megarl.models.layout_algebra import HFConfig
from megarl.types import ModelOutput, TokenLoss, TrainBatch


def make_batch(sequences: int, length: int, vocab_size: int) -> TrainBatch:
    """Return sequences of `length` random tokens each, all of which count but the first, with equal weights."""
    tokens = sequences * length
    ids = torch.randint(0, vocab_size, (tokens,), generator=torch.Generator().manual_seed(1))
    starts, mask = torch.arange(0, tokens + 1, length), torch.ones(tokens, dtype=torch.bool)
    mask[starts[:-1]] = False
    columns = torch.arange(sequences), torch.zeros(sequences), torch.zeros(tokens)
    return TrainBatch(ids, starts, mask, *columns).with_(loss_weights=mask / mask.sum())


def loss(output: ModelOutput, _: TrainBatch) -> TokenLoss:
    """Return the cross entropy of each token."""
    assert output.logprobs is not None
    return TokenLoss(-output.logprobs)


def rehearse_peak(hf: HFConfig, config: Config, sequences: int, length: int) -> int:
    """Return the most bytes of device memory in a training step, above the model's states.

    In a process that has joined a `fake_job` of one rank, after `play.prepare` and `megatron_values.balance_experts`.

    config: with `parallel` for one rank. sequences, length: of one micro-batch, which `train.max_tokens_per_gpu` must
    allow.
    """
    from megarl.megatron.optimizer import create_states
    from megarl.megatron.trainer_model import MegatronModel
    from megarl.parallel import ranks
    from megarl.rehearse.host_reads import HostReads

    batch = make_batch(sequences, length, int(hf["vocab_size"]))
    memory = HostReads()
    with memory:
        model = MegatronModel(hf, config, ranks.create_layout(config.parallel), "actor")
        create_states(model.optimizer)
        model.train_step(batch, loss)  # Transformer Engine allocates dummy gradients
        states = memory.live
        with memory.phase() as peak:
            model.train_step(batch, loss)
    if memory.live != states:
        raise AssertionError(f"a step left {memory.live - states:,} bytes")
    return peak[0] - states
