"""Build Megatron's `GPTModel` from an HF config, wrapped for data parallelism.

The family's table decides what the model computes, our configuration decides its parallelism and dtype, and
`model.megatron` overrides every field that neither of them owns.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from copy import copy
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.fusions import fused_layer_norm
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megarl.config import Config, ConfigError
from megarl.cpu import megatron_modules
from megarl.megatron import layer_wise, vision
from megarl.megatron.fsdp import ShardedModel, fsdp_config
from megarl.megatron.gated_delta_net import use_delta_nets
from megarl.megatron.lora import Adapter, add_adapters
from megarl.megatron.model_layers import (
    DeferredLogits,
    GroupLimitedRouter,
    MTPModel,
    NormOverHeads,
    PlainQueryMLA,
    PostNormLayer,
    ScaledEmbedding,
    SoftmaxBiasRouter,
    ValueHead,
    scale_rotary,
)
from megarl.megatron.parameter_names import named_params
from megarl.megatron.sparse_attention import ReplayedDSAttention, SparseAttention
from megarl.models import megatron_fields as fields
from megarl.models import norm_counting, qwen_vl
from megarl.models.activation_memory import can_fuse_activation
from megarl.models.deepseek_sparse import INDEXER, is_indexer
from megarl.models.family import Extras
from megarl.models.layout_algebra import padded_vocab
from megarl.models.pipeline_stages import stage_layers
from megarl.models.prefix_sharing import reason_against
from megarl.models.registry import family_of
from megarl.parallel import device

_SOFTMAX = "scaled_upper_triang_masked_softmax_cuda", "scaled_masked_softmax_cuda", "scaled_softmax_cuda"
"""Apex modules that Megatron's FusedScaleMaskSoftmax imports on its first call."""


def select_fusions(values: Mapping[str, Any]) -> dict[str, bool]:
    """Return the fusion fields of TransformerConfig, given its other fields.

    Those that need kernels for GPUs are off without a GPU, where no test could cover them.

    bias_activation_fusion: SwiGLU saves its input alone for the backward pass, and not the output of SiLU, too. On GPUs
        Megatron compiles it.
    gradient_accumulation_fusion: the weight-gradient GEMM accumulates into the fp32 buffer, which saves a copy of the
        gradient. Decoder layers use Transformer Engine's kernels. The output layer uses Apex's
        `fused_weight_gradient_mlp_cuda`, which Megatron requires wherever the field is on.
    masked_softmax_fusion: for attention other than Transformer Engine's, without a logit cap.
    persist_layer_norm: for Apex's LayerNorm; Megatron's torch norm rejects the field. All families use RMSNorm.
    """
    has_gpu = device.has_cuda()
    has_layer_norm = values.get("normalization") == "LayerNorm" and bool(fused_layer_norm.HAVE_PERSIST_LAYER_NORM)
    return {
        "bias_activation_fusion": can_fuse_activation(values),
        "gradient_accumulation_fusion": has_gpu and bool(layers._grad_accum_fusion_available),
        "masked_softmax_fusion": has_gpu and all(find_spec(name) is not None for name in _SOFTMAX),
        "persist_layer_norm": has_gpu and has_layer_norm,
    }


Role = Literal["actor", "critic", "reward_model"]


def transformer_config(hf: Mapping[str, Any], config: Config) -> TransformerConfig:
    """Return Megatron's configuration of the model.

    Raises ConfigError for a key of `model.megatron` that Megatron does not have, that a key of MegaRL's sets, or whose
    value Megatron rejects.
    """
    family = family_of(hf)
    values = dict(family.megatron_config(hf))
    config_class = MLATransformerConfig if values.get("multi_latent_attention") else TransformerConfig
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
        moe_token_dispatcher_type="alltoall",  # the only one that supports variable sequence lengths
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
        deterministic_mode=config.train.deterministic,
        transformer_impl="transformer_engine" if device.has_cuda() else "local",
        use_cpu_initialization=False,
    )
    values.update(select_fusions({**values, **config.model.megatron}))
    is_sparse = values.get("experimental_attention_variant") == "dsa"
    if is_sparse:
        values["cp_comm_type"] = "allgather"  # the only one that Megatron implements for sparse attention
    if family.extras(hf).has_sinks:
        values["cp_comm_type"] = "a2a"  # the only one that Transformer Engine 2.20 implements for sinks
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
    if is_sparse and config.model.megatron.get("fp8"):
        raise ConfigError(
            "model.megatron.fp8 with sparse attention: Megatron 0.19.2's AbsorbedMLA does not support FP8; remove it"
        )
    train = config.train
    if device.has_cuda() and train.sparse_index_replay and train.indexer_loss_coef:
        raise ConfigError(
            "train.indexer_loss_coef with train.sparse_index_replay: Megatron's DSAttention has the loss only where "
            "its indexer chooses the keys; set the first to 0 or the second to false"
        )
    fields.check(config.model.megatron, config_class is MLATransformerConfig, family.extras(hf))
    groups = (values.get("num_query_groups") or values["num_attention_heads"]) // parallel.tp
    if family.extras(hf).has_sinks and device.has_cuda() and groups % parallel.cp:
        raise ConfigError(
            f"parallel.cp={parallel.cp} does not divide the {groups} key-value heads of a tensor parallel rank, which "
            "Transformer Engine distributes over context parallel ranks for attention with sinks; choose a divisor"
        )
    values.update(config.model.megatron)
    if values.get("num_moe_experts") and values.get("add_bias_linear"):
        reasons = {
            "bias_activation_fusion": "fused activation takes neither clamps with SiLU nor gate and up in turn",
            "bias_dropout_fusion": "grouped experts with biases do not support it",
        }
        for name, reason in reasons.items():
            if values.get(name):
                raise ConfigError(f"model.megatron.{name}: Megatron-Core 0.19.2's {reason}; remove it")
    stage_layers(values["num_layers"], parallel.pp, values, parallel.vpp)  # raises if the layers do not divide
    if values.get("fp8"):
        if not device.has_cuda():
            raise ConfigError("model.megatron.fp8: Transformer Engine's FP8 needs a GPU; remove it here")
        values.setdefault("fp8_recipe", fields.FP8_RECIPE)
        if values.get("num_moe_experts"):  # FP8 matrices need multiples of 16 rows, per expert too
            values.setdefault("moe_router_padding_for_quantization", True)
    try:
        return config_class(**values)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"Megatron refuses this model configuration: {error}") from error


def build_chunks(
    hf: Mapping[str, Any], config: Config, role: Role, mtp_layers: int = 0, trains: bool = True
) -> list[Any]:
    """Build this rank's part of the model: `parallel.vpp` chunks with arbitrary weights.

    mtp_layers: number of multi-token prediction layers. trains: wrap the chunks in DistributedDataParallel, which
    allocates gradient buffers; otherwise their weights are frozen.
    """
    qwen_vl.check_training(hf, family_of(hf), config, role)
    settings = transformer_config(hf, config)
    settings.mtp_num_layers = mtp_layers or None
    settings.dsa_indexer_loss_coeff = config.train.indexer_loss_coef if role == "actor" and trains else 0.0
    if config.train.deterministic and device.has_cuda():
        os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # Transformer Engine's attention reads it
    chunks: list[Any] = [_build_chunk(hf, config, role, settings, chunk) for chunk in range(config.parallel.vpp)]
    if settings.bf16:
        chunks = [Float16Module(settings, chunk) for chunk in chunks]
        for tower in (module.visual for chunk in chunks for module in chunk.modules() if hasattr(module, "visual")):
            vision.restore_rope(tower)
    for router in (module for chunk in chunks for module in chunk.modules() if hasattr(module, "expert_bias")):
        # The wrapper has cast the expert bias to bf16 with everything else. Megatron casts it back only in the first
        # forward pass, which would round biases loaded before that.
        router._maintain_float32_expert_bias()
    for name, module in ((name, module) for chunk in chunks for name, module in chunk.named_modules()):
        if name.endswith(f"{INDEXER}k_norm"):
            module.float()  # as in the engine and the table
    if not trains:
        return [chunk.requires_grad_(False) for chunk in chunks]
    norm_counting.check_expert_flags(chunks)
    fields.check_ddp(config.train.ddp)
    if config.train.fsdp:
        ddp = fsdp_config(config.train.ddp, settings.params_dtype)
        return [ShardedModel(settings, ddp, chunk, units=[Adapter]) for chunk in chunks]
    ddp = DistributedDataParallelConfig(
        **{**config.train.ddp, "use_distributed_optimizer": True, "grad_reduce_in_fp32": True}
    )
    optimizer = config.actor_optimizer if role == "actor" else config.critic.optimizer
    layouts = layer_wise.lay_out(chunks, ddp) if optimizer.type == "muon" else [None] * len(chunks)
    wrapped = [
        DistributedDataParallel(settings, ddp, chunk, full_param_layout=layout)
        for chunk, layout in zip(chunks, layouts, strict=True)
    ]
    if ddp.overlap_grad_reduce:  # reduce only in the last micro-batch's backward pass
        no_sync_funcs = [chunk.no_sync for chunk in wrapped]
        settings.no_sync_func = no_sync_funcs if len(no_sync_funcs) > 1 else no_sync_funcs[0]
    return wrapped


def _build_chunk(
    hf: Mapping[str, Any], config: Config, role: Role, settings: TransformerConfig, chunk: int
) -> GPTModel:
    vp_stage = chunk if config.parallel.vpp > 1 else None
    is_first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    extras = family_of(hf).extras(hf)
    # Transformer Engine's attention then has another context parallel group for each micro-batch.
    has_groups = config.parallel.dynamic_cp or reason_against(hf, config, device.has_cuda()) is None
    arguments = dict(family_of(hf).gpt_kwargs(hf))
    arguments["vocab_size"] = padded_vocab(arguments["vocab_size"], config.parallel.tp)
    if role != "actor":
        arguments["share_embeddings_and_output_weights"] = False
    spec = _layer_spec(settings, extras, vp_stage, has_groups)
    build_model = MTPModel if settings.mtp_num_layers else GPTModel
    if (vision_family := family_of(hf).vision) is not None:
        build_model = vision.VisionLanguageModel
        rope = settings.kv_channels, arguments["rotary_base"], settings.mrope_section, vision_family.is_interleaved
        arguments["rope"] = vision.MultimodalRope(*rope)
        arguments["tower"] = vision.build_tower(hf, vision_family, config) if is_first else None
        for layer in spec.layer_specs:
            layer.module = vision.DeepstackLayer
    if settings.mtp_num_layers:
        has_te = device.has_cuda()
        # These layers are like the last one of `like`. Models with delta nets have attention there, whatever the last
        # decoder layer of this stage has.
        attention, like = copy(settings), spec
        if settings.experimental_attention_variant == "gated_delta_net":
            attention.experimental_attention_variant = None
            like = _layer_spec(attention, extras, vp_stage, has_groups)
        mtp_spec = get_gpt_mtp_block_spec(settings, like, use_transformer_engine=has_te, vp_stage=vp_stage)
        arguments["mtp_block_spec"] = mtp_spec if has_te else megatron_modules.adapt_local_spec(mtp_spec)
    model = build_model(
        config=settings,
        transformer_layer_spec=spec,
        pre_process=is_first,
        post_process=is_last,
        parallel_output=True,
        vp_stage=vp_stage,
        **arguments,
    )
    if is_first and extras.embedding_scale != 1:
        model.embedding.__class__ = ScaledEmbedding  # same parameters and state, different forward
        # HF and SGLang round the scale to the model's dtype, too.
        model.embedding.scale = float(torch.tensor(extras.embedding_scale, dtype=settings.params_dtype))
    if extras.rotary is not None:
        scale_rotary(model, extras.rotary)
    if settings.mtp_num_layers and settings.experimental_attention_variant == "dsa" and is_last:
        for layer in model.mtp.layers:
            layer.mtp_model_layer.self_attention.core_attention.separate_from_decoder()
    if role != "actor" and is_last:
        model.output_layer = ValueHead(settings)
    elif is_last:
        model.output_layer.__class__ = DeferredLogits
    # Megatron treats routed experts as dense parameters unless EP > 1. But their replicas lie on different ranks: those
    # on other TP or CP ranks see other tokens, so gradients must be summed over these too. That includes biases, whose
    # gradients Megatron would sum over TP a second time.
    for name, parameter in model.named_parameters():
        if ".mlp.experts." in name:
            parameter.allreduce = False
            parameter.sequence_parallel = False
    table = family_of(hf).params(hf, config.parallel.tp, config.parallel.etp, mtp=bool(settings.mtp_num_layers))
    named = named_params([model], parallel_state.get_expert_model_parallel_rank())
    if role != "actor":
        named.pop("output_layer.weight", None)  # the value head, which is not in the table
    norm_counting.set_flags(named, table)
    if not (role == "actor" and settings.dsa_indexer_loss_coeff):
        for name, parameter in named.items():
            if is_indexer(name):
                parameter.requires_grad_(False)  # the choice of keys has no gradient
    if config.lora.rank:
        add_adapters(model, hf, config)
    megatron_modules.complete_sequential_experts(model)
    return model.to(device.device())


def _layer_spec(settings: TransformerConfig, extras: Extras, vp_stage: int | None, has_groups: bool) -> Any:
    is_sparse = settings.experimental_attention_variant == "dsa"
    standard = copy(settings)
    standard.experimental_attention_variant = None  # whose layers Megatron builds for Transformer Engine only
    if device.has_cuda():
        from megatron.core.extensions.transformer_engine import TENorm as norm

        if is_sparse:
            spec = get_transformer_block_with_experimental_attention_variant_spec(settings, vp_stage=vp_stage)
        else:
            spec = get_gpt_decoder_block_spec(standard, use_transformer_engine=True, vp_stage=vp_stage)
    else:
        norm = megatron_modules.RMSNorm
        spec = megatron_modules.adapt_local_spec(
            get_gpt_decoder_block_spec(
                standard, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
            )
        )
    if settings.experimental_attention_variant == "gated_delta_net":
        use_delta_nets(spec, settings, vp_stage)
    for layer in spec.layer_specs:  # some entries are the same object
        if is_sparse and device.has_cuda():
            layer.submodules.self_attention.submodules.core_attention.module = ReplayedDSAttention
        elif is_sparse:
            layer.submodules.self_attention.submodules.core_attention = SparseAttention
        elif has_groups and device.has_cuda():
            from megarl.megatron.te_attention import SharedPrefixAttention

            layer.submodules.self_attention.submodules.core_attention = SharedPrefixAttention
        if extras.attention_cap:
            attention = partial(megatron_modules.PackedAttention, cap=extras.attention_cap)
            layer.submodules.self_attention.submodules.core_attention = attention
        if extras.norm_over_heads:
            attention = layer.submodules.self_attention.submodules
            attention.q_layernorm = partial(NormOverHeads, num_heads=settings.num_attention_heads)
            attention.k_layernorm = partial(NormOverHeads, num_heads=settings.num_query_groups)
        if extras.post_norms:
            layer.module, layer.params = PostNormLayer, {"post_norm": norm}
        if settings.multi_latent_attention and settings.q_lora_rank is None:
            layer.submodules.self_attention.module = PlainQueryMLA
        build_mlp = layer.submodules.mlp
        if extras.has_own_router and isinstance(build_mlp, partial) and build_mlp.func is MoELayer:
            router = GroupLimitedRouter if extras.has_group_max_routing else SoftmaxBiasRouter
            build_mlp.keywords["submodules"].router = router
    return spec
