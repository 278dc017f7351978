"""The shape of a record of sparse attention indices: the keys that an engine's indexers chose for each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megarl.config import Config, ConfigError
from megarl.models import deepseek_sparse
from megarl.models.layout_algebra import HFConfig
from megarl.models.registry import family_of

UNUSED = -2
"""Keys of a token whose output predicts nothing, the last of a sequence or padding, for which no record exists."""
_SHORT = 1 << 16


@dataclass(frozen=True)
class IndexShape:
    """A record is [tokens, layers with an indexer, topk] of positions in the sequence.

    It starts at token `topk`, as earlier ones see all keys, and ends before the last, which no engine runs. Positions
    of two bytes are unsigned, held in int16, as torch lacks most operations on uint16.
    """

    layers: tuple[int, ...]  # indices of the decoder layers with an indexer
    topk: int
    is_short: bool  # two bytes per position

    @property
    def dtype(self) -> torch.dtype:
        return torch.int16 if self.is_short else torch.int32

    @property
    def token_bytes(self) -> int:
        """Bytes of the record per token after the first `topk`."""
        return len(self.layers) * self.topk * self.dtype.itemsize


def positions(record: torch.Tensor) -> torch.Tensor:
    """Return the positions in a record as int32."""
    return record.int() & (_SHORT - 1) if record.dtype == torch.int16 else record.int()


def select(record: torch.Tensor, rows: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
    """Return the keys of each token, [len(rows), layers, topk] int32, -1 for tokens without a record.

    record: [recorded tokens, layers, topk]. rows: the row of `record` of each token, -1 for none. layers: indices among
    the layers of the record.
    """
    recorded = (rows >= 0).nonzero().squeeze(1)
    keys = torch.full((len(rows), len(layers), record.shape[2]), -1, dtype=torch.int32)
    if len(recorded):
        chosen = record.index_select(0, rows[recorded])
        if tuple(layers) != tuple(range(record.shape[1])):
            chosen = chosen.index_select(1, torch.tensor(list(layers)))
        keys.index_copy_(0, recorded, positions(chosen))
    return keys


def check_record(record: torch.Tensor, shape: IndexShape) -> None:
    """Raise ConfigError unless a record has this model's layers, and distinct earlier keys of each token."""
    expected = (len(shape.layers), shape.topk)
    if not len(record):
        return
    if tuple(record.shape[1:]) != expected:
        raise ConfigError(
            f"the recorded sparse attention indices are of {record.shape[1]} layers with {record.shape[2]} keys a "
            f"token, the trainer's model has {expected[0]} with {expected[1]}: engine and trainer must load the same "
            "config.json"
        )
    ascending = positions(record).sort(dim=-1).values
    last = torch.arange(shape.topk, shape.topk + len(record))[:, None]
    valid = (ascending.diff(dim=-1) > 0).all(-1) & (ascending[..., 0] >= 0) & (ascending[..., -1] <= last)
    if not valid.all():
        token, layer = (~valid).nonzero()[0].tolist()
        raise ConfigError(
            f"the recorded sparse attention indices of token {token + shape.topk} in layer {shape.layers[layer]} are "
            f"not {shape.topk} different tokens up to itself; the engine does not record this model's: set "
            "train.sparse_index_replay=false"
        )


def index_shape(hf: HFConfig, config: Config) -> IndexShape | None:
    """Return the shape of the records that `train.sparse_index_replay` replays; None if it is off.

    Raises ConfigError for a model without sparse attention.
    """
    if not config.train.sparse_index_replay:
        return None
    family = family_of(hf)
    topk = family.megatron_config(hf).get("dsa_indexer_topk")
    if not topk:
        raise ConfigError(
            f"train.sparse_index_replay=true, but {family.architecture} has no sparse attention; set it to false"
        )
    layers = tuple(layer for layer, kind in enumerate(deepseek_sparse.indexer_types(hf)) if kind == "full")
    return IndexShape(layers, int(topk), config.rollout.max_context < _SHORT)
