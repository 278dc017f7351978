"""Build Megatron's `GPTModel` from an HF config, wrapped for data parallelism.

Uses Transformer Engine's layer spec on CUDA, and the local spec with `cpu/megatron_modules.py` elsewhere. The family's
table decides what the model computes; our configuration decides its parallelism and dtype; `model.megatron` overrides
everything that neither of them owns.

`fused` asks Megatron which of Apex's fused kernels it has found and turns those on. Megatron itself would fail at the
first use of a kernel that is turned on and missing. Transformer Engine's fusions come with its modules.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.fusions import fused_layer_norm
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megarl.config import Config, ConfigError
from megarl.megatron.gemma_layers import CappedAttention, PostNormLayer, scale_embedding
from megarl.megatron.lora import add_adapters
from megarl.megatron.output_layers import DeferredLogits, MTPModel, ValueHead
from megarl.megatron.parameter_names import named_params
from megarl.megatron.router import GroupLimitedRouter
from megarl.models import megatron_fields as fields
from megarl.models import norm_counting
from megarl.models.family import Extras
from megarl.models.layout_algebra import padded_vocab
from megarl.models.pipeline_stages import stage_layers
from megarl.models.registry import family_of
from megarl.parallel import device

_SOFTMAX = "scaled_upper_triang_masked_softmax_cuda", "scaled_masked_softmax_cuda", "scaled_softmax_cuda"
"""Apex's modules that Megatron's FusedScaleMaskSoftmax imports when it is first called."""


def select_fusions(values: Mapping[str, Any]) -> dict[str, bool]:
    """These fields of TransformerConfig, given the others. All are off without a GPU, where no test could try them.

    gradient_accumulation_fusion: a layer's product for its weights' gradient adds to the fp32 buffer, which saves a
    copy of the gradient; of the layers by Transformer Engine's own kernels, of the output layer by Apex's
    `fused_weight_gradient_mlp_cuda`, which Megatron asks for wherever the field is on.
    masked_softmax_fusion: in attention that is not Transformer Engine's, and not capped.
    persist_layer_norm: for LayerNorm, as Apex's is; Megatron's torch norm refuses the field. All families have RMSNorm.
    """
    there = device.has_cuda()
    plain = values.get("normalization") == "LayerNorm" and bool(fused_layer_norm.HAVE_PERSIST_LAYER_NORM)
    return {
        "gradient_accumulation_fusion": there and bool(layers._grad_accum_fusion_available),
        "masked_softmax_fusion": there and all(find_spec(name) is not None for name in _SOFTMAX),
        "persist_layer_norm": there and plain,
    }


Role = Literal["actor", "critic", "reward_model"]


def transformer_config(hf: Mapping[str, Any], config: Config) -> TransformerConfig:
    """Megatron's configuration of the model. Raises ConfigError for a key of `model.megatron` that it does not have,
    that has a key of ours, or that Megatron refuses."""
    family = family_of(hf)
    values = dict(family.megatron_config(hf))
    kind = MLATransformerConfig if values.get("multi_latent_attention") else TransformerConfig
    parallel, dtype = config.parallel, getattr(torch, config.model.dtype)
    values.update(
        tensor_model_parallel_size=parallel.tp,
        sequence_parallel=parallel.tp > 1,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        context_parallel_size=parallel.cp,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        pipeline_dtype=dtype,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the only one for sequences of any length
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
        deterministic_mode=config.train.deterministic,
        use_cpu_initialization=False,
    )
    values.update(select_fusions(values))
    if values.get("num_moe_experts"):
        if values["num_moe_experts"] % parallel.ep:
            raise ConfigError(
                f"parallel.ep={parallel.ep} does not divide the model's {values['num_moe_experts']} experts"
            )
        values.update(
            expert_model_parallel_size=parallel.ep,
            expert_tensor_parallel_size=parallel.etp,
            moe_grouped_gemm=device.has_cuda(),
        )
    elif max(parallel.ep, parallel.etp) > 1:
        raise ConfigError(f"parallel.ep={parallel.ep}, etp={parallel.etp}, but the model has no experts; set them to 1")
    fields.check(config.model.megatron, kind is MLATransformerConfig, family.extras(hf))
    values.update(config.model.megatron)
    stage_layers(values["num_layers"], parallel.pp, values, parallel.vpp)  # refuses what does not divide
    if values.get("fp8"):
        if not device.has_cuda():
            raise ConfigError("model.megatron.fp8: Transformer Engine's FP8 needs a GPU; leave it out here")
        values.setdefault("fp8_recipe", fields.FP8_RECIPE)
        if values.get("num_moe_experts"):  # matrices of FP8 have multiples of 16 rows: of each expert, too
            values.setdefault("moe_router_padding_for_quantization", True)
    # Each tensor and context parallel rank weights its part of an auxiliary loss by its own tokens, of which it has
    # 1 / (tp cp), and all are divided by the tokens of the whole: Megatron 0.16.1 loses this factor with
    # calculate_per_token_loss.
    ranks_of_a_sequence = parallel.tp * parallel.cp
    for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
        if isinstance(weight := values.get(name), list):
            values[name] = [item * ranks_of_a_sequence for item in weight]
        elif weight:
            values[name] = weight * ranks_of_a_sequence
    try:
        return kind(**values)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"Megatron refuses this model configuration: {error}") from error


def build_chunks(
    hf: Mapping[str, Any], config: Config, role: Role, mtp_layers: int = 0, trains: bool = True
) -> list[Any]:
    """This rank's part of the model: one chunk, or `parallel.vpp` of them. Weights are arbitrary at first.

    mtp_layers: those of multi-token prediction that it is to have. trains: whether chunks are wrapped for data
    parallelism, which has gradient buffers, or are their weights alone.
    """
    settings = transformer_config(hf, config)
    settings.mtp_num_layers = mtp_layers or None
    if config.train.deterministic and device.has_cuda():
        os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # read by Transformer Engine's attention
    chunks: list[Any] = [_build_chunk(hf, config, role, settings, chunk) for chunk in range(config.parallel.vpp)]
    if settings.bf16:
        chunks = [Float16Module(settings, chunk) for chunk in chunks]
    for router in (module for chunk in chunks for module in chunk.modules() if hasattr(module, "expert_bias")):
        # Of which the wrapper has made bf16, as of everything. Megatron puts that right in the first forward, when the
        # biases that were loaded in the meantime have been rounded.
        router._maintain_float32_expert_bias()
    if not trains:
        return [chunk.requires_grad_(False) for chunk in chunks]
    norm_counting.check_expert_flags(chunks)
    fields.check_ddp(config.train.ddp)
    ddp = DistributedDataParallelConfig(
        **{**config.train.ddp, "use_distributed_optimizer": True, "grad_reduce_in_fp32": True}
    )
    wrapped = [DistributedDataParallel(settings, ddp, chunk) for chunk in chunks]
    if ddp.overlap_grad_reduce:  # only in the last micro-batch's backward pass
        without = [chunk.no_sync for chunk in wrapped]
        settings.no_sync_func = without if len(without) > 1 else without[0]
    return wrapped


def _build_chunk(
    hf: Mapping[str, Any], config: Config, role: Role, settings: TransformerConfig, chunk: int
) -> GPTModel:
    vp_stage = chunk if config.parallel.vpp > 1 else None
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    extras = family_of(hf).extras(hf)
    arguments = dict(family_of(hf).gpt_kwargs(hf))
    arguments["vocab_size"] = padded_vocab(arguments["vocab_size"], config.parallel.tp)
    if role != "actor":
        arguments["share_embeddings_and_output_weights"] = False
    spec = _layer_spec(settings, extras, vp_stage)
    if settings.mtp_num_layers:
        arguments["mtp_block_spec"] = _mtp_spec(settings, spec, vp_stage)
    model = (MTPModel if settings.mtp_num_layers else GPTModel)(
        config=settings,
        transformer_layer_spec=spec,
        pre_process=first,
        post_process=last,
        parallel_output=True,
        vp_stage=vp_stage,
        **arguments,
    )
    if first and extras.embedding_scale != 1:
        scale_embedding(model.embedding, extras.embedding_scale)
    if role != "actor" and last:
        model.output_layer = ValueHead(settings)
    elif last:
        model.output_layer.__class__ = DeferredLogits  # the same parameters and state, another forward
    # Megatron takes routed experts for dense parameters unless EP > 1. But their replicas lie otherwise: those on other
    # tensor or context parallel ranks see other tokens, and the gradients must be summed over these too.
    for name, parameter in model.named_parameters():
        if ".mlp.experts." in name:
            parameter.allreduce = False
    table = family_of(hf).params(hf, config.parallel.tp, config.parallel.etp, mtp=bool(settings.mtp_num_layers))
    named = named_params([model], parallel_state.get_expert_model_parallel_rank())
    if role != "actor":
        named.pop("output_layer.weight", None)  # a head of one value, which the table does not speak of
    norm_counting.set_flags(named, table)
    if config.lora.rank:
        add_adapters(model, hf, config)
    return model.to(device.device())


def _mtp_spec(settings: TransformerConfig, decoder: Any, vp_stage: int | None) -> Any:
    """None where the stage has no such layers."""
    if device.has_cuda():
        return get_gpt_mtp_block_spec(settings, decoder, use_transformer_engine=True, vp_stage=vp_stage)
    from megarl.cpu.megatron_modules import adapt_local_spec

    return adapt_local_spec(get_gpt_mtp_block_spec(settings, decoder, use_transformer_engine=False, vp_stage=vp_stage))


def _layer_spec(settings: TransformerConfig, extras: Extras, vp_stage: int | None) -> Any:
    if device.has_cuda():
        from megatron.core.extensions.transformer_engine import TENorm as norm

        spec = get_gpt_decoder_block_spec(settings, use_transformer_engine=True, vp_stage=vp_stage)
    else:
        from megarl.cpu.megatron_modules import RMSNorm as norm
        from megarl.cpu.megatron_modules import adapt_local_spec

        spec = adapt_local_spec(
            get_gpt_decoder_block_spec(
                settings, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
            )
        )
    for layer in spec.layer_specs:  # some are the same object
        if extras.attention_cap:
            attention = partial(CappedAttention, cap=extras.attention_cap)
            layer.submodules.self_attention.submodules.core_attention = attention
        if extras.post_norms:
            layer.module, layer.params = PostNormLayer, {"post_norm": norm}
        if extras.has_group_max_routing and layer.submodules.mlp.module is MoELayer:
            layer.submodules.mlp.submodules.router = GroupLimitedRouter
    return spec
