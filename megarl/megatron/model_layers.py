"""Layers that Megatron-Core 0.19.2 lacks: heads, multi-token prediction, Gemma 2's layers, group-limited routing.

Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): layer k takes the previous layer's state of a token
(the decoder's for k = 1) and the embedding of the k-th following token, and emits a state that predicts the token after
that. Engines draft with these layers (`rollout.num_speculative_tokens`). In RL they learn to predict the policy and
must not change it: their inputs, the embedding and the output layer are detached, so gradients stay within these
layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megarl.models.rotary import ScaledRotary
from megarl.parallel import device


class ValueHead(torch.nn.Module):
    """A value head in place of `output_layer`: a [1, hidden] weight, initially zero, replicated over TP, without bias.

    With sequence parallelism each rank applies it to its part of the sequence and gathers all values. Every rank then
    computes the same loss, so the gather's backward only slices, and Megatron sums the weight's gradient.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.weight.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]  # AdamW beside Muon

    def forward(self, hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """Map [s / tp, b, hidden] to values [s, b, 1] fp32. The second result, the bias, is None."""
        values = F.linear(hidden.float(), self.weight.float())
        if self.sequence_parallel:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


class DeferredLogits(ColumnParallelLinear):  # type: ignore[misc]
    """Megatron's output layer, except that it emits its input, [s, b, hidden]; `logprobs.py` computes the logits."""

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
        # Not the tokens: a recomputation would keep them alive.
        layer_kwargs = {name: context[name] for name in ("attention_mask", "rotary_pos_emb", "packed_seq_params")}
        # Recomputation yields no gradients unless some input requires one, and with LoRA all weights before it may be
        # frozen.
        states, state = [hidden_states], hidden_states.detach()
        state.requires_grad_(self.config.recompute_granularity is not None)
        for layer, tokens in zip(self.mtp.layers, labels[:-1], strict=True) if labels is not None else ():
            embedded = self.embedding(input_ids=tokens[None], position_ids=context["position_ids"])
            # A stage that holds its embedding only for MTP still needs a gradient for it: zero.
            embedded = embedded.detach() if self.pre_process else embedded.detach() + 0.0 * embedded

            def run(state: torch.Tensor, embedded: torch.Tensor, layer: Any = layer) -> torch.Tensor:
                emitted: torch.Tensor = layer._proj_and_transformer_layer(state, embedded, **layer_kwargs)
                return emitted

            if self.config.recompute_granularity == "full" and not self.config.fp8:  # it would disturb FP8 scales
                state = tensor_parallel.checkpoint(run, False, state, embedded)
            else:
                state = run(state, embedded)
            states.append(state)
        emitted = torch.cat([self.output_layer(state)[0] for state in states], dim=-1)
        return emitted.transpose(0, 1).contiguous()


class PlainQueryMLA(MLASelfAttention):  # type: ignore[misc]
    """MLA without a low-rank projection of the query, whose query has no norm, as in DeepSeek-V2-Lite.

    With `qk_layernorm`, Megatron 0.19 would normalize the input of the query's projection.
    """

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        return {
            "linear_q_proj": submodules.linear_q_proj,
            "linear_q_up_proj": IdentityOp,
            "linear_kv_up_proj": submodules.linear_kv_up_proj,
            "q_layernorm": IdentityOp,
            "kv_layernorm": submodules.kv_layernorm,
        }


class NormOverHeads(torch.nn.Module):
    """RMSNorm of queries or keys over all heads of a token together, on all tensor parallel ranks, as in MiniMax-M2.

    Megatron's norms of queries and keys are over each head. The weight has the elements of the rank's heads.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, *, num_heads: int) -> None:
        super().__init__()
        self.eps, self.num_heads = eps, num_heads
        local = num_heads // config.tensor_model_parallel_size
        self.weight = torch.nn.Parameter(torch.ones(local * hidden_size, dtype=config.params_dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Norm [..., local heads, head dim]."""
        heads = x.flatten(-2).float()
        total = heads.square().sum(-1, keepdim=True)
        # Sum forward, and also backward: each rank norms other heads by this sum.
        total = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(total))
        mean = total / (self.num_heads * x.shape[-1])
        return (heads * torch.rsqrt(mean + self.eps)).to(x.dtype).mul(self.weight).view(x.shape)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the weight for Megatron's distributed checkpoint, sharded along its only dimension."""
        assert metadata is not None
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )
        return state


def scale_rotary(model: GPTModel, rotary: ScaledRotary) -> None:
    """Give a model with grouped-query attention scaled rotary embeddings.

    Megatron's YarnRotaryEmbedding ignores `rotary_percent`, and its llama3 scaling has fixed constants.
    """
    frequencies = rotary.frequencies.to(model.rotary_pos_emb.inv_freq.device)
    assert frequencies.shape == model.rotary_pos_emb.inv_freq.shape
    model.rotary_pos_emb.inv_freq = frequencies
    for module in model.modules():
        if isinstance(module, Attention):
            module._yarn_concentration_factor = rotary.scale  # Megatron's factor on cosines and sines


# --- Gemma 2 --------------------------------------------------------------------------------------------------------


class PostNormLayer(TransformerLayer):  # type: ignore[misc]
    """Megatron's layer with a norm of class `post_norm` on attention and MLP outputs, before the residual add."""

    self_attn_bda: Any
    mlp_bda: Any

    def __init__(self, config: TransformerConfig, *args: Any, post_norm: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        sizes = dict(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
        self.post_self_attn_layernorm = post_norm(**sizes)
        self.post_mlp_layernorm = post_norm(**sizes)
        self.self_attn_bda = partial(_add_post_norm, self.post_self_attn_layernorm, self.self_attn_bda)
        self.mlp_bda = partial(_add_post_norm, self.post_mlp_layernorm, self.mlp_bda)


def _add_post_norm(norm: torch.nn.Module, bias_dropout_add: Callable[..., Any], training: bool, fused: bool) -> Any:
    """Return Megatron's bias-dropout-add, (output and bias, residual, dropout) -> sum, with the output normed first."""
    add = bias_dropout_add(training, fused)

    def run(output_and_bias: tuple[torch.Tensor, torch.Tensor | None], *rest: Any) -> torch.Tensor:
        output, bias = output_and_bias
        result: torch.Tensor = add((norm(output if bias is None else output + bias), None), *rest)
        return result

    return run


class ScaledEmbedding(LanguageModelEmbedding):  # type: ignore[misc]
    """Megatron's embedding, multiplied by `scale`."""

    scale: float

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        embeddings: torch.Tensor = super().forward(*args, **kwargs)
        return embeddings * self.scale


# --- group-limited routing -------------------------------------------------------------------------------------------


def group_max_topk(
    scores: torch.Tensor, topk: int, num_groups: int, group_topk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores and indices, [T, topk], of the best experts within the `group_topk` groups with the best expert.

    Megatron scores a group by the sum of its best topk / group_topk experts: DeepSeek-V3's rule if that number is 2.

    scores: [T, experts], any float dtype; groups are equal runs of adjacent experts. Source: arXiv:2405.04434, 2.2.2.
    """
    best = scores.unflatten(1, (num_groups, -1)).amax(dim=-1)  # [T, groups]
    is_group_chosen = torch.zeros_like(best, dtype=torch.bool).scatter(1, best.topk(group_topk, dim=-1).indices, True)
    eligible = is_group_chosen.repeat_interleave(scores.shape[1] // num_groups, dim=1)
    chosen = scores.masked_fill(~eligible, -torch.inf).topk(topk, dim=-1).indices
    return scores.gather(1, chosen), chosen


class GroupMaxTopK:
    """Overrides the router's top-k by `group_max_topk`, through Megatron's hook for routing replay.

    Wraps the replay already installed, if any.
    """

    def __init__(self, replay: Any) -> None:
        self.replay = replay

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: int, group_topk: int, _: Callable[..., Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        arguments = scores, topk, num_groups, group_topk
        if self.replay is None:
            return group_max_topk(*arguments)
        replayed: tuple[torch.Tensor, torch.Tensor] = self.replay.get_replay_topk(*arguments, group_max_topk)
        return replayed


class _OwnTopKRouter(TopKRouter):  # type: ignore[misc]
    """Megatron's router, except that it chooses experts as `wrap_replay` does."""

    router_replay: Any

    def wrap_replay(self, replay: Any) -> Any:
        """Return the hook that replaces `replay`, the installed one or None."""
        raise NotImplementedError

    def routing(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        replay = self.router_replay
        self.router_replay = self.wrap_replay(replay)
        try:
            probs, routing_map = super().routing(*args, **kwargs)
        finally:
            self.router_replay = replay
        return probs, routing_map


class GroupLimitedRouter(_OwnTopKRouter):
    """Megatron's router, except that it chooses experts by `group_max_topk`."""

    def wrap_replay(self, replay: Any) -> Any:
        return GroupMaxTopK(replay)


# --- softmax routing with a balancing bias ----------------------------------------------------------------------------


class BiasedTopK:
    """Chooses experts by softmax probability plus bias and returns their probabilities, normalised, without the bias.

    Megatron has such a bias for sigmoid scores only. Wraps the replay already installed, if any.
    """

    def __init__(self, replay: Any, bias: torch.Tensor) -> None:
        self.replay, self.bias = replay, bias

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: None, group_topk: None, default_compute_topk: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        arguments = (scores + self.bias).detach(), topk, num_groups, group_topk
        if self.replay is None:
            _, chosen = default_compute_topk(*arguments)
        else:
            _, chosen = self.replay.get_replay_topk(*arguments, default_compute_topk)
        weights = scores.gather(1, chosen)
        return weights / weights.sum(dim=-1, keepdim=True), chosen


class SoftmaxBiasRouter(_OwnTopKRouter):
    """Megatron's router with ERNIE 4.5's choice of experts; `expert_bias` has the shape of its checkpoints, [1, E]."""

    expert_bias: torch.Tensor

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        del self.expert_bias
        bias = torch.zeros(1, config.num_moe_experts, dtype=torch.float32, device=device.device())
        self.register_buffer("expert_bias", bias)

    def wrap_replay(self, replay: Any) -> Any:
        return BiasedTopK(replay, self.expert_bias)
