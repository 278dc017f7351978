"""SGLang's CPU kernels for gated delta nets and gated attention (Qwen3-Next, Qwen3.5), in plain torch.

SGLang calls them from its package of kernels for CPUs with AMX, which `stubs/sgl_kernel` stands in for. A request has a
state in each layer with a delta net, in a slot of two pools: the last inputs of the convolution, [channels, width - 1],
and the state of the delta rule, [heads, value size, key size]. The kernels read and write these slots.

In speculative decoding the policy runs over a window of tokens of each request, of which it keeps a part. The kernels
then leave the slots as they are and write what they would be after each token of the window, "intermediate" states,
from which `keep_accepted` takes those after the last kept tokens.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F

from megarl.cpu.flash_linear_attention import chunk_gated_delta_rule, l2norm


def install() -> None:
    """Let SGLang's configurations and norms work on a CPU without AMX."""
    from sglang.kernels.ops.attention.fla import fused_norm_gate, layernorm_gated
    from sglang.kernels.ops.elementwise import elementwise
    from sglang.srt.configs.qwen3_next import Qwen3NextConfig
    from sglang.srt.layers.attention import hybrid_linear_attn_backend

    hybrid_linear_attn_backend.scatter_mamba_states_after_mtp_verify = keep_accepted

    # For AMX, SGLang pads the numbers of heads. The plug-in keeps them, see `sglang_plugin`.
    for name in ("linear_num_key_heads", "linear_num_value_heads"):
        setattr(Qwen3NextConfig, f"{name}_cpu", property(attrgetter(name)))

    def gated_norm(self: Any, x: torch.Tensor, gate: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        activation = torch.sigmoid if self.activation == "sigmoid" else F.silu
        y = F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps)
        return (y * activation(gate.float())).to(x.dtype)

    for norm_class in (fused_norm_gate.FusedRMSNormGated, layernorm_gated.RMSNorm):
        norm_class.forward = gated_norm

    def add_gated(x: torch.Tensor, gate: torch.Tensor, shared: torch.Tensor, output: torch.Tensor) -> None:
        """Add the shared expert's output, times the sigmoid of its gate, to that of the routed experts."""
        output.add_(torch.sigmoid((x @ gate)[:, None].float()).to(shared.dtype) * shared)

    elementwise.fused_gate_sigmoid_mul_add = add_gated


# --- convolution -----------------------------------------------------------------------------------------------------


def causal_conv1d_fn_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    activation: str | None,
    conv_states: torch.Tensor,
    has_initial_state: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens_cpu: Any = None,
) -> torch.Tensor:
    """Convolve the new tokens of each request and store its last inputs. Return [channels, T].

    x: [channels, T], one request after the other. has_initial_state: whether earlier tokens are in the slot.
    """
    past = weight.shape[1] - 1
    bounds, outputs = query_start_loc.tolist(), []
    for number, slot in enumerate(cache_indices.tolist()):
        tokens = x[:, bounds[number] : bounds[number + 1]]
        state = conv_states[slot] if has_initial_state[number] else torch.zeros_like(conv_states[slot])
        inputs = torch.cat([state[:, -past:].to(x.dtype), tokens], dim=1)
        outputs.append(_convolve(inputs[None], weight, bias, activation)[0])
        conv_states[slot] = inputs[:, -past:].to(conv_states.dtype)
    return torch.cat(outputs, dim=1)


def causal_conv1d_update_cpu(
    x: torch.Tensor,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    *,
    conv_state_indices: torch.Tensor,
    intermediate_conv_window: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Convolve a new token of each request, [requests, channels], or a window of n, [requests, channels, n].

    Add the token to the stored inputs. For windows, store the inputs after token t in intermediate_conv_window[row, t],
    with a row in intermediate_state_indices for each request.
    """
    slots, past = conv_state_indices.long(), weight.shape[1] - 1
    tokens = x if x.dim() == 3 else x[..., None]
    inputs = torch.cat([conv_states[slots][..., -past:].to(x.dtype), tokens], dim=-1)
    if intermediate_conv_window is None:
        conv_states[slots] = inputs[..., 1:].to(conv_states.dtype)
    else:
        assert intermediate_state_indices is not None
        rows = intermediate_state_indices.long()
        for t in range(tokens.shape[-1]):
            after = inputs[..., t + 1 : t + 1 + past]
            intermediate_conv_window[rows, t] = after.to(intermediate_conv_window.dtype)
    y = _convolve(inputs, weight, bias, activation)
    return y.mT.contiguous().mT.view_as(x)  # a token's channels next to each other


def _convolve(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """Map [n, channels, width - 1 + tokens] to [n, channels, tokens]."""
    y = F.conv1d(inputs, weight[:, None].to(inputs.dtype), bias, groups=len(weight))
    return F.silu(y) if activation in ("silu", "swish") else y


# --- the delta rule --------------------------------------------------------------------------------------------------


def chunk_gated_delta_rule_cpu(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
) -> tuple[torch.Tensor, None, None]:
    """Return the outputs of the new tokens of all requests, [1, T, value heads, value size], and update their states.

    q, k: [1, T, key heads, key size]. v: [1, T, value heads, value size]. g, beta: [1, T, value heads].
    initial_state: the pool. The other two results, states within the sequences, are for GPUs.
    """
    assert not head_first and use_qk_l2norm_in_kernel
    repeats, slots = v.shape[2] // k.shape[2], initial_state_indices.long()
    queries, keys = (l2norm(x.float()).repeat_interleave(repeats, dim=2) for x in (q, k))
    outputs, states = chunk_gated_delta_rule(
        queries,
        keys,
        v,
        g,
        beta,
        initial_state=initial_state[slots].float().transpose(-1, -2),
        output_final_state=True,
        cu_seqlens=cu_seqlens,
    )
    assert states is not None
    initial_state[slots] = states.transpose(-1, -2).to(initial_state.dtype)
    return outputs, None, None


def _gates(
    a_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log decays and write strengths, [T, heads] fp32, from the projections a and b."""
    return -a_log.float().exp() * F.softplus(a.float() + dt_bias.float()), b.float().sigmoid()


def _fused_gdn_gating(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    decay, strength = _gates(A_log, a, b, dt_bias)
    return decay[None], strength[None]


def _delta_rule_update(
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float,
    softplus_threshold: float,
    is_kda: bool = False,
    disable_state_update: bool = False,
    intermediate_states_buffer: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the output of the new tokens, [1, requests * n, heads, value size], and update the states.

    A request has n = 1 new token, or a window of n = cache_steps. For windows, store the state after token t in
    intermediate_states_buffer[row, t] instead, with a row in intermediate_state_indices for each request.
    """
    assert use_qk_l2norm_in_kernel and softplus_beta == 1.0 and not is_kda and retrieve_parent_token is None
    repeats, slots, n = v.shape[2] // k.shape[2], initial_state_indices.long(), cache_steps or 1
    queries, keys = (l2norm(x[0].float()).repeat_interleave(repeats, dim=1) for x in (q, k))
    decays, strengths = _gates(A_log, a, b, dt_bias)
    windows = (x.unflatten(0, (-1, n)).unbind(1) for x in (queries, keys, v[0].float(), decays.exp(), strengths))
    state = initial_state_source[slots].float()  # [requests, heads, value, key]
    outputs = []
    for t, (query, key, value, decay, strength) in enumerate(zip(*windows, strict=True)):
        state = state * decay[..., None, None]
        written = (value - (state @ key[..., None])[..., 0]) * strength[..., None]
        state = state + written[..., None] * key[..., None, :]
        outputs.append((state @ query[..., None])[..., 0] * q.shape[-1] ** -0.5)
        if intermediate_states_buffer is not None and intermediate_state_indices is not None:
            rows = intermediate_state_indices[: len(state)].long()
            intermediate_states_buffer[rows, t] = state.to(intermediate_states_buffer.dtype)
    if not disable_state_update:
        initial_state_source[slots] = state.to(initial_state_source.dtype)
    return torch.stack(outputs, dim=1).flatten(0, 1)[None].to(v.dtype)


def keep_accepted(
    caches: Any,
    slots: torch.Tensor,
    last_steps: torch.Tensor,
    tracked_slots: torch.Tensor | None,
    tracked_steps: torch.Tensor | None,
    src_indices_raw: torch.Tensor | None = None,
) -> None:
    """Set the states of requests, in all layers, to those after the last kept tokens of their windows.

    caches: the pools, [layers, slots, ...], and the intermediate states, [layers, requests, n, ...].
    last_steps: index of the last kept token of each request. The further arguments are for caches that only GPUs have.
    """
    assert tracked_slots is None and src_indices_raw is None
    rows = torch.arange(len(last_steps))
    states = [(caches.temporal, caches.intermediate_ssm)]
    for pool, after in states + list(zip(caches.conv, caches.intermediate_conv_window, strict=True)):
        pool[:, slots.long()] = after[:, rows, last_steps.long()]


# --- Qwen3.5's fused operators ---------------------------------------------------------------------------------------


def _gemma_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, size: int) -> torch.Tensor:
    """Normalize each head of x, [T, heads * size] or [T, heads, size], and multiply by 1 + weight."""
    heads = x.reshape(len(x), -1, size).float()
    return F.rms_norm(heads, (size,), 1.0 + weight.float(), eps).to(x.dtype).flatten(1)


def _qk_norm(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return _gemma_norm(q, q_weight, eps, head_dim), _gemma_norm(k, k_weight, eps, head_dim)


def _qk_norm_with_gate(
    q_gate: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    head_dim: int,
    num_heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, gate = q_gate.reshape(len(q_gate), num_heads, 2, head_dim).unbind(2)
    return _gemma_norm(q, q_weight, eps, head_dim), _gemma_norm(k, k_weight, eps, head_dim), gate.flatten(1)


def _sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> None:
    x.mul_(torch.sigmoid(gate.reshape(x.shape).float()).to(x.dtype))


def _split_projections(
    qkvz: torch.Tensor, ba: torch.Tensor, key_heads: int, value_heads: int, key_size: int, value_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split the rows [q, k, v, z] and [b, a] of a rank into [q, k, v], z by heads, b and a."""
    values = value_heads * value_size
    qkv, z = qkvz.split([2 * key_heads * key_size + values, values], dim=-1)
    b, a = ba.chunk(2, dim=-1)
    return qkv.contiguous(), z.reshape(len(z), value_heads, value_size), b.contiguous(), a.contiguous()


OPERATORS: dict[str, Any] = {
    "fused_gdn_gating_cpu(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)": _fused_gdn_gating,
    "fused_sigmoid_gating_delta_rule_update_cpu(Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v, Tensor a, "
    "Tensor b, Tensor(a!) initial_state_source, Tensor initial_state_indices, Tensor cu_seqlens, "
    "bool use_qk_l2norm_in_kernel, float softplus_beta, float softplus_threshold, bool is_kda=False, "
    "bool disable_state_update=False, Tensor(b!)? intermediate_states_buffer=None, "
    "Tensor? intermediate_state_indices=None, int? cache_steps=None, Tensor? retrieve_parent_token=None) "
    "-> Tensor": _delta_rule_update,
    "fused_qk_gemma_rmsnorm_cpu(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps, int head_dim) "
    "-> (Tensor, Tensor)": _qk_norm,
    "fused_qk_gemma_rmsnorm_with_gate_cpu(Tensor q_gate, Tensor k, Tensor q_weight, Tensor k_weight, float eps, "
    "int head_dim, int num_heads) -> (Tensor, Tensor, Tensor)": _qk_norm_with_gate,
    "fused_sigmoid_mul_cpu(Tensor(a!) x, Tensor gate) -> ()": _sigmoid_mul,
    "fused_qkvzba_split_reshape_cat_contiguous_cpu(Tensor qkvz, Tensor ba, int key_heads, int value_heads, "
    "int key_size, int value_size) -> (Tensor, Tensor, Tensor, Tensor)": _split_projections,
}
"""Schema of each operator of `torch.ops.sgl_kernel` -> its implementation."""
