"""Heads and extra layers behind the decoder: the value head, deferred logits, and multi-token prediction.

Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): layer k takes the previous layer's state of a token
(the decoder's for k = 1) and the embedding of the k-th following token, and emits a state that predicts the token after
that. Engines draft with these layers (`rollout.num_speculative_tokens`). In RL they learn to predict the policy and
must not change it: their inputs, the embedding and the output layer are detached, so gradients stay within these
layers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig


class ValueHead(torch.nn.Module):
    """A value head in place of `output_layer`: a [1, hidden] weight, initially zero, replicated over TP, without bias.

    Each rank applies it to its part of the sequence and gathers the values, so every rank has all values and computes
    the same loss. The gather's backward therefore only slices. The weight's gradient is a sum over the ranks' parts of
    the sequence, which Megatron computes for every parameter marked `sequence_parallel`.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """Map [s / tp, b, hidden] to values [s, b, 1] fp32. The second result, the bias, is None."""
        values = F.linear(hidden.float(), self.weight.float())
        if self.sequence_parallel:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


class DeferredLogits(ColumnParallelLinear):  # type: ignore[misc]
    """Megatron's output layer, except that it emits its input, [s, b, hidden].

    `logprobs.py` computes the logits, some tokens at a time. With sequence parallelism every rank gets the whole
    sequence, and gradients are summed over ranks.
    """

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        return hidden, None


class MTPModel(GPTModel):  # type: ignore[misc]
    """A GPTModel that also emits the states of its multi-token prediction layers.

    Given the following tokens as `labels`, [1 + layers, s], it emits the decoder's states followed by those of the MTP
    layers, [b, s, (1 + layers) * hidden]. Without `labels` it emits the decoder's states only.

    Replaces Megatron's forward pass of these layers, which materialises all logits for its loss, sends gradients into
    the trunk, and cannot recompute layers with packed sequences.
    """

    def _postprocess(self, hidden_states: torch.Tensor, labels: torch.Tensor | None = None, **context: Any) -> Any:
        if not self.post_process:
            return hidden_states
        states = [hidden_states]
        if labels is not None:
            states += self._forward_mtp(hidden_states.detach(), labels, context)
        emitted = torch.cat([self.output_layer(state)[0] for state in states], dim=-1)
        return emitted.transpose(0, 1).contiguous()

    def _forward_mtp(self, state: torch.Tensor, ahead: torch.Tensor, context: dict[str, Any]) -> list[torch.Tensor]:
        needed = (
            "attention_mask",
            "rotary_pos_emb",
            "packed_seq_params",
        )  # not the tokens: a recomputation would keep them alive
        layer_kwargs, states = {name: context[name] for name in needed}, []
        for layer, tokens in zip(self.mtp.layers, ahead[:-1], strict=True):
            embedded = self.embedding(input_ids=tokens[None], position_ids=context["position_ids"])
            # A stage that holds its embedding only for MTP still needs a gradient for it: zero.
            embedded = embedded.detach() if self.pre_process else embedded.detach() + 0.0 * embedded

            def run(state: torch.Tensor, embedded: torch.Tensor, layer: Any = layer) -> torch.Tensor:
                emitted: torch.Tensor = layer._proj_and_transformer_layer(state, embedded, **layer_kwargs)
                return emitted

            if (
                self.config.recompute_granularity == "full" and not self.config.fp8
            ):  # recomputing would disturb FP8 scales
                state = tensor_parallel.checkpoint(run, False, state.requires_grad_(), embedded)
            else:
                state = run(state, embedded)
            states.append(state)
        return states
