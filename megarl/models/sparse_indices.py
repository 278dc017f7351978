"""The shape of a record of sparse attention indices: the keys that an engine's indexers chose for each token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megarl.config import Config, ConfigError
from megarl.models import deepseek_sparse
from megarl.models.layout_algebra import HFConfig
from megarl.models.registry import family_of

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
