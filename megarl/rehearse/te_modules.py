"""Stand-ins for Transformer Engine 2.20 on tensors without bytes.

Megatron builds its layers for GPUs from these classes, whose kernels need a GPU. The stand-ins have the same
parameters, allocate outputs of the same shapes, save the same tensors for the backward pass, and call the same
collectives, but compute nothing. `install` registers them as the package `transformer_engine`.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from megarl.rehearse.step_costs import add_product

VERSION = "2.20.0"
_dummy_grads: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}
"""Gradients that are returned for weights whose gradients were accumulated in place, by shape and dtype."""


def _gather_rows(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """All-gather [rows, ..] to [ranks * rows, ..]."""
    assert group is not None
    output = x.new_empty(len(x) * group.size(), *x.shape[1:])
    dist.all_gather_into_tensor(output, x.contiguous(), group=group)
    return output


def _reduce_scatter_rows(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Reduce-scatter [ranks * rows, ..] to [rows, ..]."""
    assert group is not None
    output = x.new_empty(len(x) // group.size(), *x.shape[1:])
    dist.reduce_scatter_tensor(output, x.contiguous(), group=group)
    return output


def _weight_grad(weight: torch.Tensor, is_fused: bool) -> torch.Tensor:
    """Return a new gradient of the weight, or if it is accumulated into `main_grad` one that exists already."""
    if not (is_fused and hasattr(weight, "main_grad")):
        return torch.empty_like(weight)
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    key = weight.shape, weight.dtype
    if key not in _dummy_grads:
        _dummy_grads[key] = torch.empty_like(weight)
    return _dummy_grads[key].detach()


# --- FP8 ------------------------------------------------------------------------------------------------------------


class Recipe:
    """A way to scale FP8 tensors. elements_per_scale, elements_per_weight_scale: 0 for one scale in all."""

    elements_per_scale, elements_per_weight_scale, scale_dtype = 0, 0, torch.float32

    def __init__(self, **options: Any) -> None:
        self.__dict__ |= options


class DelayedScaling(Recipe): ...


class Float8CurrentScaling(Recipe): ...


class Float8BlockScaling(Recipe):
    elements_per_scale, elements_per_weight_scale = 128, 128 * 128


class MXFP8BlockScaling(Recipe):
    elements_per_scale, elements_per_weight_scale, scale_dtype = 32, 32, torch.uint8


class FP8State:
    """FP8GlobalStateManager."""

    recipe: Recipe | None = None

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.recipe is not None

    @staticmethod
    def is_fp8_calibration() -> bool:
        return False

    @classmethod
    def get_fp8_recipe(cls) -> Recipe | None:
        return cls.recipe


@contextlib.contextmanager
def fp8_autocast(enabled: bool = True, fp8_recipe: Recipe | None = None, **_: Any) -> Iterator[None]:
    before, FP8State.recipe = FP8State.recipe, fp8_recipe if enabled else None
    try:
        yield
    finally:
        FP8State.recipe = before


def _quantize(
    x: torch.Tensor, group: dist.ProcessGroup | None = None, is_weight: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an FP8 copy of x, in one direction of a matrix product, and its scales.

    group: ranks that have other rows of the same matrix, and need the same scale where there is only one.
    """
    recipe = FP8State.recipe
    assert recipe is not None
    if x.shape[-1] % 16 or x.numel() // x.shape[-1] % 8:
        raise ValueError(f"FP8 products need multiples of 8 rows and 16 columns, not {tuple(x.shape)}")
    elements = recipe.elements_per_weight_scale if is_weight else recipe.elements_per_scale
    scales = -(-x.numel() // elements) if elements else 1
    if group is not None and not recipe.elements_per_scale:
        dist.all_reduce(x.new_empty(1, dtype=torch.float32), dist.ReduceOp.MAX, group=group)
    return x.new_empty(x.shape, dtype=torch.uint8), x.new_empty(scales, dtype=recipe.scale_dtype)


class _FP8Weights:
    """FP8 copies of a layer's weights, from its first pass on: one for outputs, another for gradients of inputs."""

    def __init__(self) -> None:
        self._copies: dict[bool, list[Any]] = {}

    def update(self, weights: Sequence[torch.Tensor], is_cached: bool, trains: bool) -> None:
        """Create the copies that a pass needs. is_cached: whether they outlive it."""
        if FP8State.recipe is None:
            return
        for is_transposed in (False, True) if trains else (False,):
            if is_transposed not in self._copies:
                copies = [_quantize(weight, is_weight=True) for weight in weights]
                if is_cached:
                    self._copies[is_transposed] = copies


# --- layers ---------------------------------------------------------------------------------------------------------


class _LinearFunction(torch.autograd.Function):
    """A linear layer [rows, .., in] -> [rows', .., out], with a norm before it if `norm_weight` is not None."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        norm_weight: torch.Tensor | None,
        norm_bias: torch.Tensor | None,
        layer: Linear,
    ) -> torch.Tensor:
        ctx.layer, ctx.shape = layer, x.shape
        saved: list[torch.Tensor | None] = [weight, norm_weight]
        if norm_weight is not None:
            rows = x.numel() // x.shape[-1]
            saved += [x, x.new_empty(rows, dtype=torch.float32)]  # and the inverse deviation of each row
            x = torch.empty_like(x)
        ctx.recipe, dtype, saved_input = FP8State.recipe, x.dtype, x
        if ctx.recipe is not None:
            x, _ = quantized = _quantize(x, layer.tp_group if layer.gathers_input else None)
            if not layer.save_original_input:
                saved_input = x
                saved.append(quantized[1])
        saved.append(saved_input if weight.requires_grad else None)
        total = _gather_rows(x, layer.tp_group) if layer.gathers_input else x
        output = total.new_empty(*total.shape[:-1], layer.weight.shape[0], dtype=dtype)
        add_product(total.numel(), len(weight))
        if layer.scatters_output:
            output = _reduce_scatter_rows(output, layer.tp_group)
        elif layer.parallel_mode == "row" and layer.tp_size > 1:
            dist.all_reduce(output, group=layer.tp_group)
        ctx.save_for_backward(*saved)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        layer: Linear = ctx.layer
        weight, norm_weight, *_, x = ctx.saved_tensors
        dtype, copies = grad.dtype, []
        with fp8_autocast(fp8_recipe=ctx.recipe):
            if ctx.recipe is not None:  # one copy for each of the two products
                copies = [_quantize(grad, layer.tp_group if layer.scatters_output else None), _quantize(grad)]
                grad = copies[0][0]
        if layer.scatters_output:
            grad = _gather_rows(grad, layer.tp_group)
        work, total = None, x
        if layer.gathers_input and x is not None:  # the gather overlaps with the input's gradient
            total = x.new_empty(len(x) * layer.tp_size, *x.shape[1:])
            work = dist.all_gather_into_tensor(total, x, group=layer.tp_group, async_op=True)
        grad_input = grad.new_empty(*grad.shape[:-1], weight.shape[1], dtype=dtype)
        add_product(grad.numel(), weight.shape[1], 1 + ctx.needs_input_grad[1])
        if work is not None:
            work.wait()
        reduce_work = None
        if layer.gathers_input:
            full, grad_input = grad_input, grad_input.new_empty(ctx.shape)
            reduce_work = dist.reduce_scatter_tensor(grad_input, full, group=layer.tp_group, async_op=True)
        elif layer.parallel_mode == "column" and layer.tp_size > 1:
            reduce_work = dist.all_reduce(grad_input, group=layer.tp_group, async_op=True)
        grad_weight = _weight_grad(weight, layer.fuse_wgrad_accumulation) if ctx.needs_input_grad[1] else None
        grad_bias = layer.weight.new_empty(len(layer.weight)) if ctx.needs_input_grad[2] else None
        del total, copies
        if reduce_work is not None:
            reduce_work.wait()
        grad_norm = grad_norm_bias = None
        if norm_weight is not None:
            grad_input = torch.empty_like(grad_input)
            grad_norm = torch.empty_like(norm_weight) if ctx.needs_input_grad[3] else None
            grad_norm_bias = torch.empty_like(norm_weight) if ctx.needs_input_grad[4] else None
        return grad_input.view(ctx.shape), grad_weight, grad_bias, grad_norm, grad_norm_bias, None


class Linear(torch.nn.Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype = torch.float32,
        parallel_mode: str | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.parallel_mode, self.tp_size, self.tp_group = parallel_mode, tp_size, tp_group
        self.sequence_parallel, self.fuse_wgrad_accumulation = sequence_parallel, fuse_wgrad_accumulation
        self.return_bias, self.save_original_input = return_bias, False
        self.fp8_weights = _FP8Weights()
        is_sequence_parallel = sequence_parallel and tp_size > 1
        self.gathers_input = is_sequence_parallel and parallel_mode == "column"
        self.scatters_output = is_sequence_parallel and parallel_mode == "row"
        out_features //= tp_size if parallel_mode == "column" else 1
        in_features //= tp_size if parallel_mode == "row" else 1
        self.in_features, self.out_features = in_features, out_features
        self.weight = torch.nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device="meta"))
        self.bias = torch.nn.Parameter(torch.empty(out_features, dtype=params_dtype, device="meta")) if bias else None
        _mark(self.weight, parallel_mode is not None, 1 if parallel_mode == "row" else 0)
        if self.bias is not None:
            _mark(self.bias, parallel_mode == "column", 0)
            if parallel_mode == "row":
                self.bias.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None, **_: Any) -> Any:
        self.fp8_weights.update([self.weight], is_first_microbatch is not None, torch.is_grad_enabled())
        output = _LinearFunction.apply(x, self.weight, None if self.return_bias else self.bias, None, None, self)
        return (output, self.bias) if self.return_bias else output


class LayerNormLinear(Linear):
    def __init__(
        self,
        *args: Any,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        dtype, size = self.weight.dtype, options["in_features"]
        self.normalization, self.eps, self.zero_centered_gamma = normalization, eps, zero_centered_gamma
        self.layer_norm_weight = torch.nn.Parameter(torch.empty(size, dtype=dtype, device="meta"))
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        self.layer_norm_bias = None
        if normalization == "LayerNorm":
            self.layer_norm_bias = torch.nn.Parameter(torch.empty(size, dtype=dtype, device="meta"))
            self.layer_norm_bias.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None, **_: Any) -> Any:
        bias = None if self.return_bias else self.bias
        self.fp8_weights.update([self.weight], is_first_microbatch is not None, torch.is_grad_enabled())
        output = _LinearFunction.apply(x, self.weight, bias, self.layer_norm_weight, self.layer_norm_bias, self)
        return (output, self.bias) if self.return_bias else output


class _GroupedLinearFunction(torch.autograd.Function):
    """[rows, in] -> [rows, out], whose rows are split among several weights."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: GroupedLinear, *params: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.layer, ctx.shape, ctx.recipe = layer, x.shape, FP8State.recipe
        saved_input, scales = x, None
        if ctx.recipe is not None and not layer.save_original_input:
            saved_input, scales = _quantize(x)
        ctx.save_for_backward(*(saved_input, scales) if params[0].requires_grad else (None, None), *params)
        add_product(x.numel(), layer.out_features)
        return x.new_empty(*x.shape[:-1], layer.out_features)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        layer: GroupedLinear = ctx.layer
        _, _, *params = ctx.saved_tensors
        copies = []
        with fp8_autocast(fp8_recipe=ctx.recipe):
            if ctx.recipe is not None:
                copies = [_quantize(grad), _quantize(grad)]
        grad_input = grad.new_empty(ctx.shape) if ctx.needs_input_grad[0] else None
        add_product(grad.numel(), layer.in_features, ctx.needs_input_grad[0] + ctx.needs_input_grad[2])
        grads = [
            _weight_grad(param, layer.fuse_wgrad_accumulation and param.dim() == 2) if is_needed else None
            for param, is_needed in zip(params, ctx.needs_input_grad[2:], strict=True)
        ]
        del copies
        return grad_input, None, *grads


class GroupedLinear(torch.nn.Module):
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype = torch.float32,
        parallel_mode: str | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.num_gemms, self.use_bias, self.return_bias = num_gemms, bias, return_bias
        self.fp8, self.fp8_calibration, self.fp8_meta = False, False, {"fp8_checkpoint": False}
        self.fuse_wgrad_accumulation, self.save_original_input = fuse_wgrad_accumulation, False
        self.apply_bias, self.parallel_mode = bias and not return_bias, parallel_mode
        self.fp8_weights = _FP8Weights()
        self.in_features = in_features // (tp_size if parallel_mode == "row" else 1)
        self.out_features = out_features // (tp_size if parallel_mode == "column" else 1)
        for number in range(num_gemms):
            weight = torch.empty(self.out_features, self.in_features, dtype=params_dtype, device="meta")
            self.register_parameter(f"weight{number}", torch.nn.Parameter(weight))
            _mark(self.get_parameter(f"weight{number}"), parallel_mode is not None, 1 if parallel_mode == "row" else 0)
        for number in range(num_gemms if bias else 0):
            values = torch.empty(self.out_features, dtype=params_dtype, device="meta")
            self.register_parameter(f"bias{number}", torch.nn.Parameter(values))
            _mark(self.get_parameter(f"bias{number}"), parallel_mode == "column", 0)

    def forward(
        self, x: torch.Tensor, m_splits: Sequence[int], is_first_microbatch: bool | None = None, **_: Any
    ) -> Any:
        if sum(map(int, m_splits)) != len(x):
            raise ValueError(f"the splits {list(m_splits)[:8]} .. of a grouped linear layer are not its {len(x)} rows")
        weights = [self.get_parameter(f"weight{number}") for number in range(self.num_gemms)]
        biases = [self.get_parameter(f"bias{number}") for number in range(self.num_gemms if self.use_bias else 0)]
        self.fp8_weights.update(weights, is_first_microbatch is not None, torch.is_grad_enabled())
        output = _GroupedLinearFunction.apply(x, self, *weights, *(biases if self.apply_bias else ()))
        return (output, biases) if self.return_bias else output

    def init_fp8_metadata(self, num_gemms: int = 1) -> None: ...

    def get_extra_state(self) -> torch.Tensor:
        """Return an empty tensor, the state without FP8 training, which checkpoints of experts have."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None: ...


class Fp8Padding(torch.nn.Module):
    """Pads the rows of each matrix of a grouped product to a multiple, for FP8."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.multiple = align_size or 16

    def padded(self, m_splits: Sequence[int]) -> list[int]:
        return [-(-int(rows) // self.multiple) * self.multiple for rows in m_splits]

    def forward(self, x: torch.Tensor, m_splits: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
        splits = self.padded(m_splits)
        return torch.cat([x, x.new_zeros(sum(splits) - len(x), *x.shape[1:])]), splits


class Fp8Unpadding(Fp8Padding):
    def forward(self, x: torch.Tensor, m_splits: Sequence[int]) -> torch.Tensor:  # type: ignore[override]
        return x[: sum(map(int, m_splits))].clone()


class _NormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = x.contiguous()  # the copy of a part is saved, and not what it is a part of
        ctx.save_for_backward(x, x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32), *params)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, _, *params = ctx.saved_tensors
        grads = [
            torch.empty_like(param) if needed else None
            for param, needed in zip(params, ctx.needs_input_grad[1:], strict=True)
        ]
        return torch.empty_like(x), *grads


class RMSNorm(torch.nn.Module):
    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype = torch.float32,
        hidden_size: int | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        size = normalized_shape or hidden_size
        self.weight = torch.nn.Parameter(torch.empty(size, dtype=params_dtype, device="meta"))  # type: ignore[arg-type]
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = _NormFunction.apply(x, *self.parameters())
        return output


class LayerNorm(RMSNorm):
    def __init__(self, normalized_shape: int | None = None, sequence_parallel: bool = False, **options: Any) -> None:
        super().__init__(normalized_shape, sequence_parallel=sequence_parallel, **options)
        self.bias = torch.nn.Parameter(torch.empty_like(self.weight))
        self.bias.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]


class _AttentionFunction(torch.autograd.Function):
    """Flash attention: [T, heads, d], [T, groups, d], [T, groups, d_v] -> [T, heads * d_v]."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        offset: torch.Tensor | None,
        layer: DotProductAttention,
        length: int,
    ) -> torch.Tensor:
        heads = query.shape[-2]
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.layer, ctx.length, ctx.cp_group = layer, length, layer.cp_group
        add_product(query.numel() + output.numel(), length // 2)  # causal
        if (group := layer.cp_group) is not None and group.size() > 1:
            if layer.cp_comm_type == "p2p":
                for _ in range(group.size() - 1):
                    _exchange_ring(torch.empty(key.numel() + value.numel(), dtype=key.dtype, device="meta"), group)
            elif layer.cp_comm_type == "all_gather":
                key, value = (_gather_rows(x, group) for x in (key, value))
            else:
                for x in (query, key, value, output):
                    dist.all_to_all_single(torch.empty_like(x), x.contiguous(), group=group)
        statistics = query.new_empty(query.numel() // heads // query.shape[-1], heads, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, statistics, offset)
        return output.flatten(-2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        query, key, value, output, _, offset = ctx.saved_tensors
        layer: DotProductAttention = ctx.layer
        add_product(3 * query.numel() + 2 * output.numel(), ctx.length // 2)  # the scores once more
        grads = [torch.empty_like(x) for x in (query, key, value)]
        if (group := ctx.cp_group) is not None and group.size() > 1:
            if layer.cp_comm_type == "p2p":
                size = key.numel() + value.numel()
                for number in range(group.size()):  # keys and values, and from the second on also their gradients
                    factor = 1 if number == 0 else 2
                    _exchange_ring(torch.empty(factor * size, dtype=key.dtype, device="meta"), group)
            elif layer.cp_comm_type == "all_gather":
                grads[1:] = [_reduce_scatter_rows(x, group) for x in grads[1:]]
            else:
                for x in (output, *grads):
                    dist.all_to_all_single(torch.empty_like(x), x.contiguous(), group=group)
        return *grads, None if offset is None else torch.empty_like(offset), None, None


def _exchange_ring(sent: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Send to the next rank of a ring and receive from the previous one, in the order that does not block."""
    rank, size = group.rank(), group.size()
    ranks = dist.get_process_group_ranks(group)
    following, previous = ranks[(rank + 1) % size], ranks[(rank - 1) % size]
    received = torch.empty_like(sent)
    operations = [
        dist.P2POp(dist.isend, sent, following, group=group),
        dist.P2POp(dist.irecv, received, previous, group=group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


class DotProductAttention(torch.nn.Module):
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        tp_size: int = 1,
        cp_group: dist.ProcessGroup | None = None,
        cp_comm_type: str = "p2p",
        softmax_type: str = "vanilla",
        **_: Any,
    ) -> None:
        super().__init__()
        self.cp_group, self.cp_comm_type = cp_group, {"allgather": "all_gather"}.get(cp_comm_type, cp_comm_type)
        self.softmax_offset = None
        if softmax_type == "learnable":
            heads = num_attention_heads // tp_size
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, device="meta"))

    def set_context_parallel_group(self, cp_group: dist.ProcessGroup | None, *_: Any) -> None:
        self.cp_group = cp_group

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        parts = (x.contiguous() for x in (query, key, value))  # values may be a part of the projection's output
        length = len(key) if packed_seq_params is None else int(packed_seq_params.max_seqlen_kv)
        output: torch.Tensor = _AttentionFunction.apply(*parts, self.softmax_offset, self, length)
        return output


class FusedAdam(torch.optim.Optimizer):
    """AdamW whose moments, in fp32, come into being in the first step."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, bias_correction: bool = True, **_: Any,
    ) -> None:  # fmt: skip
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "bias_correction": bias_correction})

    @torch.no_grad()
    def step(self, closure: Any = None, grad_scaler: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is not None and not self.state[param]:
                    for name in ("exp_avg", "exp_avg_sq"):
                        self.state[param][name] = torch.zeros_like(param, dtype=torch.float32)

    def get_unscaled_state(self, param: torch.Tensor, name: str) -> Any:
        return self.state[param][name]

    def set_scaled_state(self, param: torch.Tensor, name: str, value: torch.Tensor) -> None:
        self.state[param][name] = value


class CudaRNGStatesTracker:
    """Transformer Engine's tracker of random states; there are none without a GPU."""

    def __init__(self) -> None:
        self.states_: dict[str, Any] = {}

    def reset(self) -> None:
        self.states_ = {}

    def get_states(self) -> dict[str, Any]:
        return dict(self.states_)

    def set_states(self, states: dict[str, Any]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        self.states_[name] = seed

    @contextlib.contextmanager
    def fork(self, name: str = "") -> Iterator[None]:
        yield


class QuantizedTensor(torch.Tensor):
    """Base of Transformer Engine's FP8 parameters; a rehearsal has none."""


def _mark(param: torch.nn.Parameter, is_parallel: bool, dimension: int) -> None:
    """Set the attributes by which Megatron recognises a tensor parallel parameter."""
    param.tensor_model_parallel = is_parallel  # type: ignore[attr-defined]
    param.partition_dim = dimension  # type: ignore[attr-defined]
    param.partition_stride = 1  # type: ignore[attr-defined]


def _apply(
    function: Callable[..., Any], flag: torch.Tensor, tensors: Sequence[Sequence[torch.Tensor]], *args: Any
) -> Any:
    return function(flag, tensors, *args)


def _l2norm(flag: torch.Tensor, tensors: Sequence[Sequence[torch.Tensor]], per_tensor: bool = False, *_: Any) -> Any:
    return torch.zeros(1, device="meta"), torch.zeros(len(tensors[0]) if per_tensor else 0, device="meta")


def _scale(flag: torch.Tensor, tensors: Sequence[Sequence[torch.Tensor]], *_: Any) -> None: ...


def _unavailable(name: str) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"a rehearsal has no stand-in for Transformer Engine's {name}")

    return call


def _checkpoint(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    rest = {name: value for name, value in options.items() if name not in _CHECKPOINT_OPTIONS}
    recipe = FP8State.recipe

    def run(*args: Any) -> Any:  # again in the backward pass, outside of the FP8 context
        with fp8_autocast(fp8_recipe=recipe):
            return function(*args, **rest)

    return torch_checkpoint(run, *args, use_reentrant=True, preserve_rng_state=False)


_CHECKPOINT_OPTIONS = "distribute_saved_activations", "get_rng_state_tracker", "tp_group", "use_reentrant"


def install() -> None:
    """Register the stand-ins as `transformer_engine`, before anything imports Megatron-Core."""
    null = lambda *_, **__: contextlib.nullcontext()  # noqa: E731
    modules: dict[str, dict[str, Any]] = {
        "": {"__version__": VERSION},
        "common": {},
        "common.recipe": {
            "Format": SimpleNamespace(E4M3="e4m3", HYBRID="hybrid"),
            **{recipe.__name__: recipe for recipe in Recipe.__subclasses__()},
        },
        "pytorch": {
            "Linear": Linear,
            "LayerNormLinear": LayerNormLinear,
            "GroupedLinear": GroupedLinear,
            "DotProductAttention": DotProductAttention,
            "RMSNorm": RMSNorm,
            "LayerNorm": LayerNorm,
            "ops": SimpleNamespace(),
            "Fp8Padding": Fp8Padding,
            "Fp8Unpadding": Fp8Unpadding,
            "fp8_autocast": fp8_autocast,
        },
        "pytorch.fp8": {"FP8GlobalStateManager": FP8State, "fp8_autocast": fp8_autocast, "fp8_model_init": null},
        "pytorch.distributed": {
            "CudaRNGStatesTracker": CudaRNGStatesTracker,
            "checkpoint": _checkpoint,
            "activation_recompute_forward": null,
        },
        "pytorch.optimizers": {
            "FusedAdam": FusedAdam,
            "FusedSGD": _unavailable("FusedSGD"),
            "multi_tensor_applier": _apply,
            "multi_tensor_l2norm": _l2norm,
            "multi_tensor_scale": _scale,
            "multi_tensor_scale_tensor": _scale,
        },
        "pytorch.tensor": {"QuantizedTensor": QuantizedTensor},
        "pytorch.router": {
            name: _unavailable(name)
            for name in (
                "fused_compute_score_for_moe_aux_loss",
                "fused_moe_aux_loss",
                "fused_topk_with_score_function",
            )
        },
    }
    for path, contents in modules.items():
        name = f"transformer_engine.{path}".rstrip(".")
        module = ModuleType(name, __doc__)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        vars(module).update(contents)
        sys.modules[name] = module
        if path:
            parent, _, child = name.rpartition(".")
            setattr(sys.modules[parent], child, module)
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
