"""What stands in a model's `output_layer`: the critic's head, and for the policy what leaves logits to the loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig


class ValueHead(torch.nn.Module):
    """A [1, hidden] weight without bias that starts at zero, on every tensor parallel rank; stands in `output_layer`.

    Each rank applies it to its part of the sequence and the values are then gathered, so that every rank has them all
    and computes the same loss. The gather's backward therefore only slices, and the weight's gradient is a sum over
    the ranks' parts of the sequence, which Megatron forms for whatever is marked `sequence_parallel`.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """[s / tp, b, hidden] -> [s, b, 1] fp32, and no bias, as Megatron's output layer returns."""
        values = F.linear(hidden.float(), self.weight.float())
        if self.sequence_parallel:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


class DeferredLogits(ColumnParallelLinear):  # type: ignore[misc]
    """Megatron's output layer, but that it emits its input, [s, b, hidden]: `logprobs.py` makes logits of it, of some
    tokens at a time. With sequence parallelism every rank gets the whole sequence, and gradients are summed over ranks.
    """

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        return hidden, None
