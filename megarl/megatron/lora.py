"""LoRA on Megatron's linear layers: y = W x + alpha / rank * B (A x), with W and everything else frozen.

Which weights have adapters, and how A and B are cut, says `models/lora_tables.py`. The adapters are modules of their
own in `GPTModel.adapters`, and a hook on the linear layer adds what they give; so the layers, their names and their
checkpoints stay Megatron's, and Transformer Engine's layers are treated as the local ones are. x [s / tp, b, in] and y
are the rank's parts; communication is of [s, b, rank], beside the layer's own of [s, b, hidden]:

    layer         W      A       B       A x                      y                   gradients to sum over TP
    column        rows   whole   rows    gathered over s          rows of it          A's
    row           cols   cols    whole   summed, scattered in s   the rank's tokens   B's
    duplicated    whole  whole   whole   the rank's tokens        the rank's tokens   both
    of an expert  (cut by expert TP) as column and row, but its tokens come and go with Megatron's dispatcher

Transformer Engine's fused norm and grouped experts have been tested by stand-ins only, there being no GPU.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

from megarl.config import Config
from megarl.megatron.output_layers import ValueHead
from megarl.megatron.parameter_names import named_params, unwrap
from megarl.models.layout_algebra import Dim1Sharding, GateUpSharding, Param, Replicated, shard, split_with
from megarl.models.lora_tables import LORA_A, LORA_B, adapted_weights, factor_names, factor_params, merge_adapter
from megarl.models.registry import family_of


class Adapter(torch.nn.Module):
    """The factors of one linear layer; of one of grouped experts, those of each of them.

    weights: the rows of the table of the layer's weights. factors: this rank's A and B of each. parts: in how many
    they are cut.
    """

    def __init__(
        self, weights: Sequence[Param], factors: Sequence[tuple[torch.Tensor, torch.Tensor]], scale: float, parts: int
    ) -> None:
        super().__init__()
        self.weights, self.scale, self.enabled = list(weights), scale, True
        self.is_expert = weights[0].expert is not None
        self.is_row_parallel = isinstance(weights[0].sharding, Dim1Sharding)
        self.is_replicated = isinstance(weights[0].sharding, Replicated)
        self.is_sharded = parts > 1
        self.lora_a = torch.nn.ParameterList(a for a, _ in factors)
        self.lora_b = torch.nn.ParameterList(b for _, b in factors)

    def hook(self, module: torch.nn.Module, inputs: tuple[Any, ...], output: tuple[torch.Tensor, Any]) -> Any:
        """After a linear layer's forward: (y, bias) -> (y + what the adapter gives, bias)."""
        if not self.enabled:
            return None
        x, *splits = inputs
        if hasattr(module, "layer_norm_weight"):  # Transformer Engine's fused norm: the linear layer sees its output
            x = _apply_fused_norm(module, x)
        return output[0] + self(x, *splits), output[1]

    def forward(self, x: torch.Tensor, splits: Sequence[int] | None = None) -> torch.Tensor:
        """x as the linear layer gets it, [tokens, ..., in]; splits: of grouped experts, how many tokens each has."""
        if splits is None:
            return self._apply_factors(x, self.lora_a[0], self.lora_b[0])
        parts = zip(x.split(list(splits)), self.lora_a, self.lora_b, strict=True)
        return torch.cat([self._apply_factors(part, a, b) for part, a, b in parts])

    def _apply_factors(self, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if self.is_sharded and self.is_expert:  # every rank of its group has all tokens, and a part of the gradient
            group = parallel_state.get_expert_tensor_parallel_group()
            if self.is_row_parallel:
                b = copy_to_tensor_model_parallel_region(b, group)
            else:
                a = copy_to_tensor_model_parallel_region(a, group)
        inner = F.linear(x, a)
        if self.is_sharded and not self.is_expert and not self.is_replicated:
            group = parallel_state.get_tensor_model_parallel_group()
            if self.is_row_parallel:
                inner = reduce_scatter_to_sequence_parallel_region(inner, group)
            else:
                inner = gather_from_sequence_parallel_region(inner, tensor_parallel_output_grad=True, group=group)
        return F.linear(inner, b) * self.scale


class Adapters(torch.nn.Module):
    """All adapters of a model chunk. Its state is named by the table, so that it can be loaded in any layout."""

    def __init__(self, layers: Sequence[Adapter], num_experts: int) -> None:
        super().__init__()
        self.adapters, self.num_experts = tuple(layers), num_experts
        self.layers = torch.nn.ModuleList(layers)

    def named_factors(self) -> Iterator[tuple[str, Param, torch.nn.Parameter]]:
        """(name within this module, row of the table, tensor) of each factor."""
        for number, layer in enumerate(self.adapters):
            for i, weight in enumerate(layer.weights):
                for name, param in zip((LORA_A, LORA_B), factor_params(weight, len(layer.lora_a[i])), strict=True):
                    yield f"layers.{number}.{name}.{i}", param, getattr(layer, name)[i]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """For Megatron's distributed checkpoint. The experts of a layer are one tensor."""
        assert not sharded_offsets and metadata is not None
        state = {}
        for name, param, tensor in self.named_factors():
            parts, part = _tp_size_and_rank(param)
            offsets, first = [], 0
            key, group = param.megatron, metadata["dp_cp_group"]
            if param.expert is not None:
                key = key.replace(f".{param.expert}.linear", ".linear")
                group = parallel_state.get_expert_data_parallel_group()
                offsets, first = [(0, param.expert, self.num_experts)], 1
            whole = isinstance(param.sharding, Replicated)
            cut = [] if whole else [(first + split_with(param, param.sharding, parts, part).dim, part, parts)]
            made = ShardedTensor.from_rank_offsets(
                f"{prefix}{key}",
                tensor,
                *offsets,
                *cut,
                replica_id=(0, part if whole else 0, group.rank()),
                prepend_axis_num=first,
            )
            # Gate and up are two halves of each rank's part.
            gated = isinstance(param.sharding, GateUpSharding)
            state[f"{prefix}{name}"] = apply_swiglu_sharded_factory(made, tuple(offsets)) if gated else made
        return state


def add_adapters(model: GPTModel, hf: Mapping[str, Any], config: Config) -> None:
    """Freeze all of a model chunk but a critic's head, and give it adapters. A is uniform in +- 1 / sqrt(in), PEFT's
    Kaiming initialisation, drawn for each weight by its name, so that it is the same in any layout; B is zero."""
    family = family_of(hf)
    targeted = adapted_weights(family.params(hf, config.parallel.tp, config.parallel.etp), config.lora.targets)
    table = {param.megatron: param for param in targeted}
    model.requires_grad_(False)
    if isinstance(getattr(model, "output_layer", None), ValueHead):
        model.output_layer.requires_grad_(True)
    if getattr(model, "embedding", None) is not None:
        # Recomputation gives no gradients where no input needs one, and Megatron's schedule none to a stage whose
        # output does not need one.
        model.embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())
    owner = {id(tensor): module for module in model.modules() for tensor in module.parameters(recurse=False)}
    found: dict[torch.nn.Module, list[Param]] = {}
    for name, tensor in named_params([model], parallel_state.get_expert_model_parallel_rank()).items():
        if name in table:
            found.setdefault(owner[id(tensor)], []).append(table[name])
    layers = []
    for module, weights in found.items():
        pairs = [
            _init_factors(weight, config, model.config.params_dtype, model.config.sequence_parallel)
            for weight in weights
        ]
        layer = Adapter(weights, pairs, config.lora.alpha / config.lora.rank, _tp_size_and_rank(weights[0])[0])
        module.register_forward_hook(layer.hook)
        layers.append(layer)
    model.adapters = Adapters(layers, family.num_experts(hf))


def _init_factors(
    weight: Param, config: Config, dtype: torch.dtype, sequence_parallel: bool
) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
    """This rank's A and B of a weight, marked as Megatron marks parameters."""
    made = []
    for param in factor_params(weight, config.lora.rank):
        parts, part = _tp_size_and_rank(param)
        whole = {tensor.name: torch.zeros(tensor.shape) for tensor in param.hf}
        if param.megatron.endswith(LORA_A):
            seed = zlib.crc32(f"{config.run.seed} {param.megatron}".encode())
            (drawn,) = whole.values()
            drawn.uniform_(-1, 1, generator=torch.Generator().manual_seed(seed)).mul_(drawn.shape[1] ** -0.5)
        tensor = torch.nn.Parameter(shard(param, whole, parts, part).to(dtype))
        replicated, expert = isinstance(param.sharding, Replicated), param.expert is not None
        # For the norm of all gradients each is counted once: a dense one that all tensor parallel ranks have, on the
        # first; those of experts everywhere, since their replicas share a gradient, but for copies in expert TP.
        tensor.tensor_model_parallel = expert or not replicated  # type: ignore[attr-defined]
        tensor.shared = expert and replicated and part > 0  # type: ignore[attr-defined]
        tensor.allreduce = not expert  # type: ignore[attr-defined]
        # The tokens of a sequence are on all tensor parallel ranks, so the gradients must be summed over them.
        tensor.sequence_parallel = sequence_parallel and replicated and not expert  # type: ignore[attr-defined]
        made.append(tensor)
    return made[0], made[1]


def local_adapters(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """This rank's factors, in place, by canonical name."""
    return {
        param.megatron: tensor.detach() for layers in _adapters(chunks) for _, param, tensor in layers.named_factors()
    }


@contextmanager
def disable_adapters(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Within the block the model is the base model."""
    layers = [layer for adapters in _adapters(chunks) for layer in adapters.adapters]
    for layer in layers:
        layer.enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.enabled = True


class MergedWeights(Mapping[str, torch.Tensor]):
    """Weights by canonical name, with their adapters added: computed when asked for, each time, and not kept.

    weights: of a rank, in place. adapters: `local_adapters`. Shapes and places are those of the weights.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], adapters: Mapping[str, torch.Tensor], scale: float) -> None:
        self.weights, self.adapters, self.scale = weights, adapters, scale

    def __getitem__(self, name: str) -> torch.Tensor:
        a, b = factor_names(name)
        if a not in self.adapters:
            return self.weights[name]
        return merge_adapter(self.weights[name], self.adapters[a], self.adapters[b], self.scale)

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


def _adapters(chunks: Sequence[torch.nn.Module]) -> list[Adapters]:
    models = [unwrap(chunk) for chunk in chunks]
    return [model.adapters for model in models if hasattr(model, "adapters")]


def _tp_size_and_rank(param: Param) -> tuple[int, int]:
    """In how many parts a parameter is cut, and which of them this rank has."""
    if param.expert is not None:
        state = parallel_state
        return state.get_expert_tensor_parallel_world_size(), state.get_expert_tensor_parallel_rank()
    return parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()


def _apply_fused_norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    """What the linear layer in Transformer Engine's LayerNormLinear gets."""
    if module.normalization != "RMSNorm":
        raise NotImplementedError(f"LoRA on a fused {module.normalization}")
    weight = module.layer_norm_weight
    return F.rms_norm(x, (x.shape[-1],), weight + 1 if module.zero_centered_gamma else weight, module.eps)
