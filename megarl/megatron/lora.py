"""LoRA on Megatron's linear layers: y = W x + alpha / rank * B (A x), with W and everything else frozen.

`models/lora_tables.py` defines which weights have adapters, and how A and B are sharded. The adapters are separate
modules in `GPTModel.adapters`, and a forward hook on the linear layer adds their output. So the layers, their names and
their checkpoints stay Megatron's, and Transformer Engine's layers need no special case. x [s / tp, b, in] and y are
local to the rank. Adapters communicate [s, b, rank] tensors, beside the layer's own [s, b, hidden]:

    layer         W      A       B       A x                      y                   gradients to sum over TP
    column        rows   whole   rows    gathered over s          rows of it          A's
    row           cols   cols    whole   summed, scattered in s   the rank's tokens   B's
    duplicated    whole  whole   whole   the rank's tokens        the rank's tokens   both
    expert        (sharded by expert TP) as column and row, but Megatron's dispatcher moves the tokens

Transformer Engine's fused norm and grouped experts have been tested with stand-ins only, for lack of a GPU.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.models.gpt import GPTModel
from megatron.core.ssm.utils import _split_tensor_factory
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.config import Config
from megarl.megatron.model_layers import ValueHead
from megarl.megatron.parameter_names import named_params, unwrap
from megarl.models.layout_algebra import Dim1Sharding, Param, Replicated, SectionSharding, shard, split_with
from megarl.models.lora_tables import LORA_A, LORA_B, adapted_weights, factor_params
from megarl.models.registry import family_of

STATE_PREFIX = "adapters."
"""Beginning of the names of adapters in a model chunk's state dict."""


class LayerSlots(NamedTuple):
    """Several adapters of a layer, stacked, which take the place of the trained one (`adapter_slots.py`).

    lora_a: [slots * rank, in], lora_b: [out, slots * rank], of each weight. token_slots: returns the slots of the
    tokens in the current pass, [tokens] int64, -1 for padding: of this rank's with sequence parallelism, or of the
    expert's.
    """

    lora_a: Sequence[torch.Tensor]
    lora_b: Sequence[torch.Tensor]
    token_slots: Callable[[], torch.Tensor]


class Adapter(torch.nn.Module):
    """The adapter of one linear layer, or one pair of factors per expert for grouped experts.

    linear: the layer. weights: its weights in the parameter table. factors: this rank's A and B of each weight.
    parts: number of shards.
    """

    def __init__(
        self,
        linear: torch.nn.Module,
        weights: Sequence[Param],
        factors: Sequence[tuple[torch.Tensor, torch.Tensor]],
        scale: float,
        parts: int,
    ) -> None:
        super().__init__()
        self.weights, self.scale, self.enabled = list(weights), scale, True
        self.linear = weakref.ref(linear)  # no submodule, whose parameters would be listed twice
        self.slots: LayerSlots | None = None
        self.is_expert = weights[0].expert is not None
        self.is_row_parallel = isinstance(weights[0].sharding, Dim1Sharding)
        self.is_replicated = isinstance(weights[0].sharding, Replicated)
        self.is_sharded = parts > 1
        self.lora_a = torch.nn.ParameterList(a for a, _ in factors)
        self.lora_b = torch.nn.ParameterList(b for _, b in factors)

    def hook(self, module: torch.nn.Module, inputs: tuple[Any, ...], output: tuple[torch.Tensor, Any]) -> Any:
        """Forward hook of the linear layer: (y, bias) -> (y + adapter output, bias)."""
        if not self.enabled:
            return None
        x, *splits = inputs
        if hasattr(module, "layer_norm_weight"):  # Transformer Engine's fused norm: the linear layer sees its output
            x = _apply_fused_norm(module, x)
        return output[0] + self(x, *splits), output[1]

    def forward(self, x: torch.Tensor, splits: Sequence[int] | None = None) -> torch.Tensor:
        """Return the adapter's output. x: the layer's input, [tokens, ..., in]. splits: tokens per grouped expert."""
        stacked = self.slots
        factors_a, factors_b = (self.lora_a, self.lora_b) if stacked is None else (stacked.lora_a, stacked.lora_b)
        slots = None if stacked is None else stacked.token_slots()
        if splits is None:
            return self._apply_factors(x, factors_a[0], factors_b[0], slots)
        sizes = list(splits)
        slot_parts = [None] * len(sizes) if slots is None else slots.split(sizes)
        parts = zip(x.split(sizes), factors_a, factors_b, slot_parts, strict=True)
        return torch.cat([self._apply_factors(*part) for part in parts])

    def _apply_factors(
        self, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, slots: torch.Tensor | None
    ) -> torch.Tensor:
        if self.is_sharded and self.is_expert:  # every rank has all tokens and a partial gradient
            group = parallel_state.get_expert_tensor_parallel_group()
            if self.is_row_parallel:
                b = copy_to_tensor_model_parallel_region(b, group)
            else:
                a = copy_to_tensor_model_parallel_region(a, group)
        inner = F.linear(x, a)
        if self.is_sharded and not self.is_expert and not self.is_replicated:
            group = parallel_state.get_tensor_model_parallel_group()
            if self.is_row_parallel:
                inner = self._select_slots(reduce_scatter_to_sequence_parallel_region(inner, group), slots)
            else:
                inner = self._select_slots(inner, slots)
                inner = gather_from_sequence_parallel_region(inner, tensor_parallel_output_grad=True, group=group)
        else:
            inner = self._select_slots(inner, slots)
        return F.linear(inner, b) * self.scale

    def _select_slots(self, inner: torch.Tensor, slots: torch.Tensor | None) -> torch.Tensor:
        """Set what other adapters than the token's have computed to zero. inner: [tokens, ..., slots * rank]."""
        if slots is None:
            return inner
        rank = len(self.lora_a[0])
        columns = torch.arange(inner.shape[-1], device=inner.device) // rank
        is_other = (slots[:, None] != columns).view(len(slots), *[1] * (inner.dim() - 2), len(columns))
        return inner.masked_fill(is_other, 0.0)


class Adapters(torch.nn.Module):
    """All adapters of a model chunk. Checkpoint keys are the table's names, so any layout can load them."""

    def __init__(self, layers: Sequence[Adapter], num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.layers = torch.nn.ModuleList(layer for layer in layers if not layer.is_expert)
        self.experts = torch.nn.ModuleList(layer for layer in layers if layer.is_expert)
        """Those of experts, whose parameters Megatron-FSDP knows by ".experts." in their names."""

    @property
    def adapters(self) -> list[Adapter]:
        return [*self.layers, *self.experts]

    def named_factors(self) -> Iterator[tuple[str, Param, torch.nn.Parameter]]:
        """Iterate over (name within this module, table row, tensor) of each factor."""
        for prefix, layer in self.named_modules():
            for i, weight in enumerate(layer.weights) if isinstance(layer, Adapter) else ():
                for name, param in zip((LORA_A, LORA_B), factor_params(weight, len(layer.lora_a[i])), strict=True):
                    yield f"{prefix}.{name}.{i}", param, getattr(layer, name)[i]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the state for Megatron's distributed checkpoint. The experts of a layer form one tensor."""
        assert not sharded_offsets and metadata is not None
        state = {}
        for name, param, tensor in self.named_factors():
            parts, part = _tp_size_and_rank(param)
            offsets, prepended_axes = [], 0
            key, group = param.megatron, metadata["dp_cp_group"]
            if param.expert is not None:
                key = key.replace(f".{param.expert}.linear", ".linear")
                group = parallel_state.get_expert_data_parallel_group()
                offsets, prepended_axes = [(0, param.expert, self.num_experts)], 1
            is_replicated = isinstance(param.sharding, Replicated)
            shard_offsets = []
            if not is_replicated:
                shard_offsets.append((prepended_axes + split_with(param, param.sharding, parts, part).dim, part, parts))
            sharded_tensor = ShardedTensor.from_rank_offsets(
                f"{prefix}{key}",
                tensor,
                *offsets,
                *shard_offsets,
                replica_id=(0, part if is_replicated else 0, group.rank()),
                prepend_axis_num=prepended_axes,
            )
            if isinstance(param.sharding, SectionSharding):
                sections, groups = param.sharding.sections, param.sharding.num_groups // parts
                sizes, names = [section.size * groups for section in sections], [section.name for section in sections]
                state[f"{prefix}{name}"] = _split_tensor_factory(sharded_tensor, sizes, names, 0)
                continue
            # Each rank's shard consists of a gate half and an up half.
            is_gated = len(param.hf) == 2
            state[f"{prefix}{name}"] = (
                apply_swiglu_sharded_factory(sharded_tensor, tuple(offsets)) if is_gated else sharded_tensor
            )
        return state


def add_adapters(model: GPTModel, hf: Mapping[str, Any], config: Config) -> None:
    """Freeze a model chunk except for a critic's head, and add adapters.

    A is uniform in +- 1 / sqrt(in), PEFT's Kaiming initialisation, seeded by each weight's name so that it is equal in
    every layout. B is zero.
    """
    family = family_of(hf)
    params = family.params(hf, config.parallel.tp, config.parallel.etp, mtp=bool(model.config.mtp_num_layers))
    targeted = adapted_weights(params, config.lora.target_modules)
    table = {param.megatron: param for param in targeted}
    model.requires_grad_(False)
    if isinstance(getattr(model, "output_layer", None), ValueHead):
        model.output_layer.requires_grad_(True)
    if getattr(model, "embedding", None) is not None:
        # Recomputation yields no gradients unless some input requires one, and neither does Megatron's schedule for a
        # stage whose output requires none.
        model.embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())
    owner = {id(tensor): module for module in model.modules() for tensor in module.parameters(recurse=False)}
    weights_by_module: dict[torch.nn.Module, list[Param]] = {}
    for name, tensor in named_params([model], parallel_state.get_expert_model_parallel_rank()).items():
        if name in table:
            weights_by_module.setdefault(owner[id(tensor)], []).append(table[name])
    layers = []
    for module, weights in weights_by_module.items():
        pairs = [_init_factors(weight, config, model.config) for weight in weights]
        layer = Adapter(module, weights, pairs, config.lora.scale, _tp_size_and_rank(weights[0])[0])
        module.register_forward_hook(layer.hook)
        layers.append(layer)
    model.adapters = Adapters(layers, family.num_experts(hf))


def _init_factors(
    weight: Param, config: Config, settings: TransformerConfig
) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
    """Return this rank's A and B of a weight, with the attributes that Megatron sets on parameters."""
    factors = []
    for param in factor_params(weight, config.lora.rank):
        parts, part = _tp_size_and_rank(param)
        full_tensors = {tensor.name: torch.zeros(tensor.shape) for tensor in param.hf}
        if param.megatron.endswith(LORA_A):
            seed = zlib.crc32(f"{config.run.seed} {param.megatron}".encode())
            (lora_a,) = full_tensors.values()
            lora_a.uniform_(-1, 1, generator=torch.Generator().manual_seed(seed)).mul_(lora_a.shape[1] ** -0.5)
        tensor = torch.nn.Parameter(shard(param, full_tensors, parts, part).to(settings.params_dtype))
        is_replicated, is_expert = isinstance(param.sharding, Replicated), param.expert is not None
        # The gradient norm counts each gradient once: a dense replicated one on the first TP rank only, an expert's on
        # every rank, since its replicas share a gradient, except for copies within expert TP.
        tensor.tensor_model_parallel = is_expert or not is_replicated  # type: ignore[attr-defined]
        tensor.shared = is_expert and is_replicated and part > 0  # type: ignore[attr-defined]
        tensor.allreduce = not is_expert  # type: ignore[attr-defined]
        tensor.expert_tp = is_expert  # type: ignore[attr-defined]  # this and the next for Muon
        tensor.partition_dim = -1 if is_replicated else split_with(param, param.sharding, parts, part).dim  # type: ignore[attr-defined]
        # A sequence's tokens are spread over the TP ranks, so gradients must be summed over these.
        is_summed = settings.sequence_parallel and is_replicated and not is_expert
        tensor.sequence_parallel = is_summed  # type: ignore[attr-defined]
        factors.append(tensor)
    return factors[0], factors[1]


def named_adapters(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """Return this rank's factors by canonical name."""
    return {param.megatron: tensor for layers in _adapters(chunks) for _, param, tensor in layers.named_factors()}


@contextmanager
def disable_adapters(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Disable all adapters within the block."""
    layers = adapter_layers(chunks)
    for layer in layers:
        layer.enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.enabled = True


def adapter_layers(chunks: Sequence[torch.nn.Module]) -> list[Adapter]:
    """Return the adapters of all layers."""
    return [layer for adapters in _adapters(chunks) for layer in adapters.adapters]


def _adapters(chunks: Sequence[torch.nn.Module]) -> list[Adapters]:
    models = [unwrap(chunk) for chunk in chunks]
    return [model.adapters for model in models if hasattr(model, "adapters")]


def _tp_size_and_rank(param: Param) -> tuple[int, int]:
    """Return the size of the TP group that shards a parameter (expert TP for experts), and this rank in it."""
    if param.expert is not None:
        state = parallel_state
        return state.get_expert_tensor_parallel_world_size(), state.get_expert_tensor_parallel_rank()
    return parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()


def _apply_fused_norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the input of the linear layer inside Transformer Engine's LayerNormLinear."""
    if module.normalization != "RMSNorm":
        raise NotImplementedError(f"LoRA on a fused {module.normalization}")
    weight = module.layer_norm_weight
    return F.rms_norm(x, (x.shape[-1],), weight + 1 if module.zero_centered_gamma else weight, module.eps)
