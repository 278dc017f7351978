"""Heads and extra layers behind the decoder: the value head, deferred logits, and multi-token prediction.

Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): layer k takes the previous layer's state of a
token, at first the decoder's, and the embedding of the k-th following token, and emits a state that predicts the one
after. Engines draft with these layers (`rollout.draft_tokens`). In RL they learn to predict the policy and must not
change it: their inputs, the embedding and the output layer are detached, so that their gradient stays within them.
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


class MTPModel(GPTModel):  # type: ignore[misc]
    """A GPTModel that, where it is given the tokens ahead as `labels`, [1 + layers, s], emits the states of its MTP
    layers behind the decoder's, [b, s, (1 + layers) hidden]; otherwise what any other model does.

    Megatron's own forward pass of these layers is not used: it makes losses out of logits, of which it has all, sends
    gradients into the trunk, and cannot recompute layers with packed sequences.
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
        needed = ("attention_mask", "rotary_pos_emb", "packed_seq_params")  # a recomputation holds on to no tokens
        given, found = {name: context[name] for name in needed}, []
        for layer, tokens in zip(self.mtp.layers, ahead[:-1], strict=True):
            embedded = self.embedding(input_ids=tokens[None], position_ids=context["position_ids"])
            # A stage that has its embedding only for this is to have a gradient all the same: zero.
            embedded = embedded.detach() if self.pre_process else embedded.detach() + 0.0 * embedded

            def run(state: torch.Tensor, embedded: torch.Tensor, layer: Any = layer) -> torch.Tensor:
                emitted: torch.Tensor = layer._proj_and_transformer_layer(state, embedded, **given)
                return emitted

            if self.config.recompute_granularity == "full" and not self.config.fp8:  # whose scales it would disturb
                state = tensor_parallel.checkpoint(run, False, state.requires_grad_(), embedded)
            else:
                state = run(state, embedded)
            found.append(state)
        return found
