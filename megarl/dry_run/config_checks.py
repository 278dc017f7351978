"""Checks of a configuration, one function per subject. Pure: they only read files and raise ConfigError.

For a setting that is legal but surely not intended they append a line to `warnings`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from megarl.checkpoint import disk_space
from megarl.config import Config, ConfigError, DataConfig, LoraConfig
from megarl.config.keys import MuonConfig
from megarl.config.paths import is_hub_name
from megarl.controllers.mini_batches import load_policy_loss
from megarl.data.datasets import check_first_rows, iter_prompts
from megarl.data.loader import check_files, check_no_nan
from megarl.engine.engine_backends import engine_backend
from megarl.environments.catalog import COLUMN
from megarl.models import megatron_fields, qwen_vl
from megarl.models.config_json import rope_options
from megarl.models.family import HFConfig
from megarl.models.hf_folder import check_target, open_hf
from megarl.models.int4 import is_int4
from megarl.models.layout_algebra import IndivisibleError
from megarl.models.lora_tables import adapter_params
from megarl.models.pipeline_stages import stage_layers
from megarl.models.registry import family_of, num_trained_mtp
from megarl.models.routing import routing_shape
from megarl.models.sparse_indices import index_shape
from megarl.parallel import device
from megarl.parallel.placement import (
    check_engine_ranks,
    optimizer_key,
    placement_of,
    prefix_role_error,
    role_config,
    role_parallel,
    role_settings,
    split_role,
)
from megarl.parallel.policy_configs import policy_config
from megarl.rewards.functions import check_truth_file
from megarl.types.requirements import Requirements

MIN_TEMPERATURE = 0.001
_IMAGE_ROWS = 100  # of each file, from which the size of images is estimated


def data_parallel_size(config: Config, declared: Requirements) -> int:
    layout = role_parallel(config, declared.main_role)
    return layout.world_size // (layout.tp * layout.cp * layout.pp)


def sequences_per_step(config: Config, declared: Requirements) -> int:
    """Return the number of units of a step's batch: rollouts, conversations, or pairs for a reward model."""
    return config.data.prompts_per_step * (config.rollout.samples_per_prompt if declared.has_rollout else 1)


def batch_unit(declared: Requirements) -> str:
    """Return the unit in which a batch is counted."""
    return "pairs" if declared.item == "pairs" else "sequences"


def check_nodes(config: Config, declared: Requirements) -> None:
    """Check that nodes are complete, and that each engine is part of a node or spans whole nodes."""
    parallel, rollout = config.parallel, config.rollout
    if parallel.world_size % min(parallel.world_size, parallel.ranks_per_node):
        raise ConfigError(
            f"{parallel.world_size=} is not a multiple of {parallel.ranks_per_node=}; every node must run the same "
            "number of ranks"
        )
    if declared.has_engines(config):
        check_engine_ranks(config)
        if rollout.tp % rollout.ep:
            raise ConfigError(f"{rollout.ep=} does not divide {rollout.tp=}")


def check_registered_buffers(config: Config, declared: Requirements) -> None:
    """Check that each trained role has all ranks if `train.ddp.nccl_ub` registers gradient buffers with NCCL: Megatron
    calls `torch.distributed.barrier()` over the whole job for each buffer. Frozen roles have none."""
    placement = placement_of(config)
    for role in declared.trained_roles if config.train.ddp.get("nccl_ub") else ():
        if len(placement.ranks_of(role)) < placement.world:
            raise ConfigError(
                f"train.ddp.nccl_ub: Megatron waits for all ranks of the job in it, but placement has the {role} on "
                f"{placement.format_ranks(role)} only; remove one of them"
            )


def check_training_layout(hf: HFConfig, config: Config) -> None:
    """Check that the model divides: parameters by tp, experts by ep, layers by pp; and that LoRA's targets exist."""
    family, parallel = family_of(hf), config.parallel
    settings = family.megatron_config(hf)
    megatron_fields.check_ddp(config.train.ddp)
    megatron_fields.check(config.model.megatron, bool(settings.get("multi_latent_attention")), family.extras(hf))
    qwen_vl.check_training(hf, family, config)
    settings = {**settings, **config.model.megatron}
    for name, tp, etp in (("tp", parallel.tp, 1), ("etp", 1, parallel.etp)):
        try:
            family.params(hf, tp, etp, max_experts=1)  # all of a layer divide alike
        except IndivisibleError as error:
            raise ConfigError(f"parallel.{name}={getattr(parallel, name)}: {error.reason}") from None
    experts = settings.get("num_moe_experts")
    for name in ("ep", "etp"):
        if not experts and (size := getattr(parallel, name)) > 1:
            raise ConfigError(f"parallel.{name}={size}, but {family.architecture} has no experts; set it to 1")
    if experts and experts % parallel.ep:
        fits = ", ".join(str(n) for n in range(1, experts + 1) if experts % n == 0)
        raise ConfigError(f"{parallel.ep=} does not divide the model's {experts} experts; sizes that do: {fits}")
    stage_layers(int(settings["num_layers"]), parallel.pp, settings, parallel.vpp)
    if any(settings.get("linear_attention_freq") or ()):
        _check_delta_nets(settings, config)
    if parallel.dynamic_cp:
        _check_dynamic_cp(settings)
    lora = config.lora
    if lora.rank == 0 and lora.target_modules:
        raise ConfigError("lora.target_modules is set, but lora.rank=0 trains all weights; set lora.rank")
    if lora.rank > (hidden := int(hf["hidden_size"])):
        raise ConfigError(f"{lora.rank=} is beyond the model's hidden_size={hidden}; no matrix has more ranks")
    if lora.rank:
        mtp = bool(num_trained_mtp(hf, config))
        table = family.params(hf, parallel.tp, parallel.etp, mtp=mtp, max_experts=1)
        adapter_params(table, lora)  # raises for a missing target


def _check_dynamic_cp(settings: Mapping[str, Any]) -> None:
    kinds = settings.get("cp_comm_type")
    if "a2a+p2p" in (kinds if isinstance(kinds, list) else [kinds]):
        raise ConfigError(
            "model.megatron.cp_comm_type=a2a+p2p divides context parallel groups in two levels of fixed sizes, and "
            "with parallel.dynamic_cp some have one rank; choose p2p, all_gather or a2a"
        )
    if settings.get("overlap_moe_expert_parallel_comm"):
        raise ConfigError(
            "model.megatron.overlap_moe_expert_parallel_comm computes layers of two micro-batches in turn, whose sizes "
            "differ with parallel.dynamic_cp; remove one of the two"
        )


def _check_delta_nets(settings: Mapping[str, Any], config: Config) -> None:
    parallel, heads = config.parallel, int(settings["linear_num_key_heads"])
    if heads % (parallel.tp * parallel.cp):
        raise ConfigError(
            f"parallel.tp={parallel.tp} x cp={parallel.cp} does not divide the model's linear_num_key_heads={heads}, "
            "which Megatron's gated delta net distributes over both"
        )
    if config.train.deterministic and device.has_cuda():
        raise ConfigError(
            "train.deterministic=true, but Megatron's gated delta net has no deterministic kernel for packed "
            "sequences; set it to false"
        )


def check_muon(hf: HFConfig, config: Config, role: str) -> None:
    """Check that Muon, if it is the optimizer of a role, is installed and can train the role's model."""
    settings, policy = family_of(hf).megatron_config(hf), policy_config(config, role)
    optimizer = policy.actor_optimizer if split_role(role)[0] == "actor" else policy.critic.optimizer
    if optimizer.type != "muon":
        return
    if find_spec("emerging_optimizers") is None:
        raise ConfigError(
            f"{optimizer_key(role)}.type=muon: the package emerging-optimizers is not installed; run launch/install.sh"
        )
    if config.lora.rank:
        return
    if settings.get("num_moe_experts") and settings.get("add_bias_linear"):
        raise ConfigError(
            f"{optimizer_key(role)}.type=muon, but the model's experts have biases: Megatron-Core 0.19.2 has no AdamW "
            "for parameters of experts other than matrices (optimizer/__init__.py:914); set it to adam"
        )


def check_fsdp(hf: HFConfig, config: Config, role: str) -> None:
    """Check that Megatron-FSDP, if it is on, can shard a trained role's model."""
    if not config.train.fsdp:
        return
    policy, key = policy_config(config, role), optimizer_key(role)
    optimizer = policy.actor_optimizer
    if split_role(role)[0] != "actor":
        optimizer = policy.critic.optimizer
    if optimizer.type == "muon":
        raise ConfigError(
            f"train.fsdp with {key}.type=muon: Muon needs whole matrices, of which FSDP gives each rank some rows; "
            "remove one of them"
        )
    if optimizer.offload_fraction:
        raise ConfigError(
            f"train.fsdp with {key}.offload_fraction={optimizer.offload_fraction:g}: Megatron-FSDP keeps the masters "
            "itself, on the device (distrib_optimizer.py:704); remove one of them"
        )
    settings = role_config(config, role)
    is_actor, parallel = split_role(role)[0] == "actor", settings.parallel
    is_tied = bool(family_of(hf).gpt_kwargs(hf).get("share_embeddings_and_output_weights"))
    trains_embedding = is_actor and not settings.lora.rank
    if trains_embedding and parallel.pp > 1 and (is_tied or num_trained_mtp(hf, settings)):
        user = "output layer" if is_tied else "multi-token prediction"
        raise ConfigError(
            f"train.fsdp with {parallel.pp=} of the {role}, whose {user} uses the embedding: Megatron-Core 0.19.2 sums "
            "its gradients over the stages as if a rank's rows were the whole (finalize_model_grads.py:259); set "
            "parallel.pp to 1"
        )
    if "overlap_grad_reduce" in config.train.ddp:
        raise ConfigError("train.ddp.overlap_grad_reduce with train.fsdp, which always overlaps; remove it")


def check_role_layout(hf: HFConfig, config: Config, role: str) -> None:
    """Apply `check_training_layout` to another role's model and layout. Adapters exist for trained roles only."""
    role_settings = role_config(config, role)
    try:
        base = split_role(role)[0]
        if base in ("critic", "reward_model"):
            qwen_vl.check_training(hf, family_of(hf), role_settings, role)
        if base not in ("actor", "critic"):
            role_settings = replace(role_settings, lora=LoraConfig())
        if base != "actor":
            role_settings = replace(role_settings, train=replace(role_settings.train, mtp_loss_coef=0))
        check_training_layout(hf, role_settings)
    except ConfigError as error:
        raise prefix_role_error(config, role, error) from None


def check_engine(hf: HFConfig, config: Config) -> None:
    """Check that the model divides by the engines' tp and ep, and the engines' settings."""
    settings, tp, ep = family_of(hf).megatron_config(hf), config.rollout.tp, config.rollout.ep
    if config.lora.rank and is_int4(hf) and _adapts_experts(hf, config):
        raise ConfigError(
            "lora.rank: adapters on the routed experts of an INT4 checkpoint would be merged and then rounded for the "
            "engine, to another policy than the one trained; name other layers in lora.target_modules, such as "
            "linear_proj"
        )
    rollout = config.rollout
    if rollout.sync_adapters_only and not config.lora.rank:
        raise ConfigError(
            "rollout.sync_adapters_only: lora.rank=0 trains no adapters; set lora.rank, or remove the key"
        )
    if rollout.max_loras and not config.lora.rank:
        raise ConfigError("rollout.max_loras: lora.rank=0 trains no adapters; set lora.rank, or remove the key")
    engine_backend(config).check(hf, config)
    check_drafts(hf, config)
    heads = int(settings["num_attention_heads"])
    groups = int(settings.get("num_query_groups") or heads)
    experts = settings.get("num_moe_experts")
    if not experts and ep > 1:
        raise ConfigError(f"{rollout.ep=}, but the model has no experts; set it to 1")
    if experts and experts % ep:
        raise ConfigError(f"{rollout.ep=} does not divide the model's {experts} experts")
    if heads % tp:
        raise ConfigError(f"{rollout.tp=} does not divide the model's {heads} attention heads")
    if groups % tp and tp % groups:
        raise ConfigError(f"{rollout.tp=} neither divides the model's {groups} key-value heads nor is a multiple")
    frequency = settings.get("moe_layer_freq", 1)
    widths = []
    if not experts or (not all(frequency) if isinstance(frequency, list) else frequency != 1):  # has dense layers
        widths.append(("intermediate_size", int(settings["ffn_hidden_size"]), tp))
    if experts:
        widths.append(("moe_intermediate_size", int(settings["moe_ffn_hidden_size"]), tp // ep))
    for name, width, parts in widths:
        if width % parts:
            raise ConfigError(f"{rollout.tp=} with {rollout.ep=} would cut the model's {name}={width} in {parts}")


def _adapts_experts(hf: HFConfig, config: Config) -> bool:
    table = family_of(hf).params(hf, 1, mtp=bool(num_trained_mtp(hf, config)), max_experts=1)
    return any(param.expert is not None for param in adapter_params(table, config.lora))


def check_role_engine(hf: HFConfig, config: Config, role: str) -> None:
    """Check the engines of a role besides `rollout`, on their ranks and for their model."""
    derived = policy_config(config, role)
    try:
        check_engine_ranks(derived)
        if derived.rollout.tp % derived.rollout.ep:
            raise ConfigError(f"rollout.ep={derived.rollout.ep} does not divide rollout.tp={derived.rollout.tp}")
        check_engine(hf, derived if split_role(role)[1] else replace(derived, lora=LoraConfig()))
        longest = int(family_of(hf).gpt_kwargs(hf)["max_sequence_length"])
        if derived.rollout.max_context > longest:
            raise ConfigError(
                f"rollout.max_context={derived.rollout.max_context} is beyond the model's {longest} positions; lower it"
            )
    except ConfigError as error:
        text = re.sub(r"(?<![.\w])rollout\.", f"roles.{role}.rollout.", str(error))
        text = text.replace("placement.rollout", f"placement.{role}")
        raise ConfigError(f"the engines of the {role}: {text}") from None


def check_drafts(hf: HFConfig, config: Config) -> None:
    """Raise ConfigError if the model cannot draft for `rollout.num_speculative_tokens`, or the combination is
    untested."""
    rollout, path = config.rollout, Path(config.model.path)
    if rollout.num_speculative_tokens == 0:
        return
    family = family_of(hf)
    if (layers := family.num_mtp_layers(hf)) != 1:
        raise ConfigError(
            f"{rollout.num_speculative_tokens=} needs a model with one layer of multi-token prediction "
            f"({family.mtp_key}), but this {family.architecture} has {layers}; set it to 0"
        )
    prefix = family.untrained_prefixes(hf)[0]
    if config.model.path and path.is_dir() and not any(name.startswith(prefix) for name in open_hf(path).names()):
        raise ConfigError(
            f"{rollout.num_speculative_tokens=}: config.json declares a layer of multi-token prediction, but {path} "
            f"has no tensors {prefix}*; set it to 0"
        )
    longest = int(family_of(hf).gpt_kwargs(hf)["max_sequence_length"])
    if (needed := rollout.max_context + rollout.num_speculative_tokens + 1) > longest:
        raise ConfigError(
            f"{rollout.max_context=} with {rollout.num_speculative_tokens=} needs {needed} positions, because the "
            f"engine reserves a window for drafts, but the model has {longest}; lower the first"
        )


def check_mtp(hf: HFConfig, config: Config, declared: Requirements) -> None:
    """Check that the algorithm trains a policy, and that the model has the layers, for multi-token prediction."""
    if config.train.mtp_loss_coef and declared.has_scalar_head:
        raise ConfigError(
            f"train.mtp_loss_coef trains a policy's layers, but algorithm={declared.name} trains none; set it to 0"
        )
    num_trained_mtp(hf, config)


def check_routing(hf: HFConfig, config: Config, declared: Requirements) -> None:
    """Check routing replay: it needs experts, an engine that records routing, and a router that can be overridden."""
    if not config.train.routing_replay:
        return
    if not declared.has_rollout:
        raise ConfigError(
            f"train.routing_replay=true, but {declared.name} has no engine whose routing could be replayed"
        )
    routing_shape(hf, config.model.megatron)
    megatron = config.model.megatron
    if megatron.get("moe_router_fusion"):
        raise ConfigError("model.megatron.moe_router_fusion: Transformer Engine's router cannot replay routing")
    if "sinkhorn" in str(megatron.get(name := "moe_router_load_balancing_type")):
        raise ConfigError(f"model.megatron.{name}=sinkhorn is incompatible with train.routing_replay")


def check_sparse_indices(hf: HFConfig, config: Config, declared: Requirements) -> None:
    """Check the keys of sparse attention: they need a model that has it, and replay an engine that records it."""
    settings = family_of(hf).megatron_config(hf)
    if config.train.indexer_loss_coef and not settings.get("dsa_indexer_topk"):
        raise ConfigError(
            f"train.indexer_loss_coef={config.train.indexer_loss_coef:g}, but {family_of(hf).architecture} has no "
            "sparse attention; set it to 0"
        )
    if config.train.indexer_loss_coef and config.lora.rank:
        raise ConfigError("train.indexer_loss_coef trains whole indexers, lora.rank adapters alone; set one to 0")
    if index_shape(hf, config) is None:
        return
    if not declared.has_rollout:
        raise ConfigError(
            f"train.sparse_index_replay=true, but {declared.name} has no engine whose choice of keys could be replayed"
        )


def check_run_dir(config: Config) -> None:
    """Check the run folder without touching it; `observe/run_folder.py` checks whose run it holds."""
    if not config.run.dir.strip() or "\0" in config.run.dir:
        raise ConfigError(f"run.dir={config.run.dir!r} is not a folder; set it to one for this run, such as runs/first")
    if config.run.export:
        run_dir, source = Path(config.run.dir), Path(config.model.path)
        try:
            check_target(run_dir / "export", source)
            adapter = run_dir / "adapter"
            if config.lora.rank and adapter.exists() and not (adapter / "adapter_config.json").is_file():
                raise ConfigError(f"{adapter} exists but is not an adapter; move it, or set run.dir to another folder")
        except (OSError, RuntimeError) as error:  # RuntimeError for circular links
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(f"run.dir={config.run.dir[:300]}: {reason}; set it to another folder") from None


def check_disk_space(
    hf: HFConfig, critic_hf: HFConfig | None, config: Config, declared: Requirements, warnings: list[str]
) -> None:
    """Check disk space for everything that the run will write. A resumed run may have written it already."""
    run, estimate = config.run, disk_space.estimate_space(hf, critic_hf, config, declared)
    try:
        if not disk_space.can_hold_files(Path(run.dir)):
            raise ConfigError(f"{run.dir=!s} is in a virtual file system; set it to a folder on a disk")
        free = disk_space.free_bytes(Path(run.dir))
    except OSError:
        return  # reported when the folder is created
    num_kept = min(run.keep_checkpoints + 1, -(-run.num_rollout // run.save_every)) if run.save_every else 0
    export = estimate.export if run.export else 0
    min_bytes, max_bytes = min(num_kept, 1) * estimate.checkpoint + export, num_kept * estimate.checkpoint + export
    parts = [f"{num_kept} x {disk_space.format_bytes(estimate.checkpoint)} for checkpoints"] if num_kept else []
    parts += [f"{disk_space.format_bytes(export)} for the export"] if export else []
    line = (
        f"{run.dir=!s} is on a disk with {disk_space.format_bytes(free)} free, and the run will write up to about "
        f"{' and '.join(parts)}; free space, set run.dir to a folder on another disk, or lower run.keep_checkpoints"
    )
    if free < min_bytes and not (run.resumes and (Path(run.dir) / "checkpoints").is_dir()):
        raise ConfigError(line)
    if free < max_bytes:
        warnings.append(line)


def check_lengths(hf: HFConfig, config: Config, warnings: list[str]) -> None:
    rollout, train, longest = config.rollout, config.train, int(family_of(hf).gpt_kwargs(hf)["max_sequence_length"])
    if rollout.max_context > longest:
        rope, hint = rope_options(hf), ""
        if (
            rope["rope_type"] == "yarn"
            and (scaled := int(rope["factor"] * rope["original_max_position_embeddings"])) > longest
        ):
            hint = f"; its rope_type yarn is for {scaled}: set max_position_embeddings in config.json"
        raise ConfigError(f"{rollout.max_context=} is beyond the model's {longest} positions{hint}")
    if rollout.max_new_tokens >= rollout.max_context:
        raise ConfigError(
            f"{rollout.max_new_tokens=} leaves no room for a prompt in {rollout.max_context=}; lower the first or "
            "raise the second"
        )
    if config.parallel.dynamic_cp and config.parallel.cp == 1:
        warnings.append("parallel.dynamic_cp=true has no effect, as parallel.cp=1 is the largest size")
    if train.max_tokens_per_gpu * config.parallel.cp < rollout.max_context:
        warnings.append(
            f"{train.max_tokens_per_gpu=} is below {rollout.max_context=}: a longer conversation is a micro-batch of "
            "its own, and memory is planned for that"
        )


def check_algorithm(config: Config, declared: Requirements, warnings: list[str]) -> None:
    """Check what the algorithm needs of sampling and of the KL to a reference, if it has them."""
    name, kl, rollout = declared.name, config.kl, config.rollout
    if not declared.has_rollout:
        return
    for variable in rollout.pass_env:
        if variable not in os.environ:
            warnings.append(f"rollout.pass_env: {variable} is not set here, so tools and rewards will not have it")
    load_policy_loss(config)
    if declared.is_group_relative and rollout.samples_per_prompt < 2:
        raise ConfigError(
            f"algorithm={name} compares the samples of a prompt with each other: with rollout.samples_per_prompt=1 "
            "every advantage is 0; set it to 2 or more"
        )
    if 0 < rollout.temperature < MIN_TEMPERATURE:
        raise ConfigError(
            f"{rollout.temperature=:g} is neither 0, which is greedy, nor at least {MIN_TEMPERATURE}: log-probs are of "
            "logits divided by it"
        )
    if rollout.temperature == 0:
        if declared.is_group_relative:
            raise ConfigError(
                f"algorithm={name} with rollout.temperature=0 gives a prompt the same answer every time, so every "
                "advantage is 0; set it above 0"
            )
        if declared.trained_roles:
            warnings.append("rollout.temperature=0: training on greedy rollouts explores nothing")
    if "reference" not in declared.roles:
        if kl.refresh_reference_every:
            raise ConfigError(
                f"{kl.refresh_reference_every=}, but algorithm={name} with {kl.apply_to=} has no reference; set the "
                "first to 0, or kl.apply_to to loss or reward"
            )
        return
    if kl.apply_to == "loss" and kl.estimator == "k1":
        raise ConfigError(
            "kl.estimator=k1 with kl.apply_to=loss: the gradient of k1 is that of the log-prob, whose mean is zero, "
            "and does not restrain the policy; set kl.estimator to null, or kl.apply_to to reward"
        )
    if kl.apply_to == "reward" and kl.estimator == "k3_unbiased":
        raise ConfigError(
            "kl.estimator=k3_unbiased with kl.apply_to=reward: it differs from k3 only in its gradient as a loss; set "
            "kl.estimator to null, which is k1 there, or kl.apply_to to loss"
        )
    if kl.target is not None and kl.coef > kl.max_coef:
        raise ConfigError(
            f"{kl.coef=:g} is above {kl.max_coef=:g}, the adaptive controller's bound; lower the first, raise the "
            "second, or set kl.target to null, which keeps the coefficient as it is"
        )
    if kl.target is not None and kl.coef == 0:
        warnings.append(
            "kl.coef=0 stays 0: the adaptive controller multiplies it; set it above 0, or kl.apply_to to none"
        )


def check_schedule(config: Config, declared: Requirements) -> None:
    """Check that something is trained, and that no minimum learning rate exceeds the initial one."""
    run, critic = config.run, config.critic
    has_critic = any(split_role(role)[0] == "critic" for role in declared.roles)
    if has_critic and critic.warmup_steps >= run.num_rollout:
        raise ConfigError(
            f"{critic.warmup_steps=} leaves none of {run.num_rollout=} steps in which the policy is updated; lower the "
            "first or raise the second"
        )
    for role in ("actor", "critic", *(role for role in declared.trained_roles if split_role(role)[1])):
        base, derived, settings = split_role(role)[0], policy_config(config, role), role_settings(config, role)
        section, optimizer = {
            "actor": ("actor_optimizer", derived.actor_optimizer),
            "critic": ("critic.optimizer", derived.critic.optimizer),
        }[base]
        key = optimizer_key(role)
        sets_muon = "muon" in settings.optimizer if split_role(role)[1] else optimizer.muon != MuonConfig()
        if optimizer.type != "muon" and sets_muon:
            raise ConfigError(
                f"{key}.muon with {key}.type={optimizer.type}: only Muon has these settings; set the second to muon, "
                "or remove the first"
            )
        if optimizer.type == "muon" and optimizer.offload_fraction:
            raise ConfigError(
                f"{key}.offload_fraction={optimizer.offload_fraction:g} with {key}.type=muon: the optimizer of "
                "Megatron-Core 0.19.2 that keeps states on the host updates by AdamW alone; set the first to 0, or the "
                "second to adam"
            )
        if optimizer.min_lr > optimizer.lr:
            min_lr_section, lr_section = (
                f"roles.{role}.optimizer" if name in settings.optimizer else section for name in ("min_lr", "lr")
            )
            raise ConfigError(
                f"{min_lr_section}.min_lr={optimizer.min_lr:g} is above {lr_section}.lr={optimizer.lr:g}, its starting "
                "point; lower the first or raise the second"
            )


def check_batch(config: Config, declared: Requirements, warnings: list[str]) -> None:
    run, dp = config.run, data_parallel_size(config, declared)
    if run.num_update % run.ppo_epochs:
        raise ConfigError(f"{run.num_update=} is not a multiple of {run.ppo_epochs=}")
    per_epoch, sequences = run.num_update // run.ppo_epochs, sequences_per_step(config, declared)
    unit = batch_unit(declared)
    if per_epoch > sequences:
        raise ConfigError(
            f"{run.num_update=} over {run.ppo_epochs=} cuts a batch of {sequences} {unit} in {per_epoch} mini-batches; "
            "raise data.prompts_per_step or lower run.num_update"
        )
    if not declared.trained_roles:
        return
    if sequences // per_epoch < dp:
        warnings.append(
            f"a mini-batch of {sequences // per_epoch} {unit} leaves some of {dp} data-parallel ranks without work"
        )
    elif sequences % per_epoch or sequences // per_epoch % dp:
        warnings.append(
            f"{sequences} {unit} do not divide evenly into {per_epoch} mini-batches on {dp} data-parallel ranks; "
            f"results are correct, but some ranks wait"
        )


def check_file_name(key: str, path: str) -> None:
    """Raise ConfigError for a missing path that could not be a data file on any machine."""
    missing = f"{key}={path[:200]}: no such file"
    if "://" in path:
        raise ConfigError(f"{missing}: it is a URL, but only local files are read; download it and name the file")
    if Path(path).is_symlink():
        raise ConfigError(f"{missing}: it is a link to {os.readlink(path)[:200]}, which does not exist; fix the link")
    if set(path) & set(",*"):
        raise ConfigError(f"{missing}; write several as a list, {key}=[one.jsonl,two.jsonl]")
    if Path(path).suffix.lower() not in (".jsonl", ".parquet"):
        remedy = "; if it is the name of a data set on the Hub, fetch that first by hf download --repo-type dataset"
        raise ConfigError(f"{missing}, and data files end in .jsonl or .parquet{remedy if is_hub_name(path) else ''}")


def _describe_overlap(data: DataConfig, train: Mapping[str, str], held_out: Mapping[str, str]) -> str:
    """Name a file or rows of the evaluation that are also trained on. train, held_out: first rows -> locations."""
    files = {os.path.realpath(path): path for path in data.train}
    for path in data.eval if held_out else ():
        if (other := files.get(os.path.realpath(path))) is not None:
            return f"data.eval={path} is data.train={other}"
    common = [text for text in held_out if text in train]
    if not common:
        return ""
    example = f"{held_out[common[0]]} as {train[common[0]]}"
    return f"data.eval: {len(common)} of the first {len(held_out)} rows are also in data.train, such as {example}"


def mean_image_bytes(config: Config) -> float:
    """Return the mean bytes of the image files of a prompt, over the first rows of the files of `data.train` that
    exist; 0 without images, or if `check_data` fails."""
    data = config.data
    try:
        sizes = [
            sum(len(image.data) for image in prompt.images)
            for path in data.train
            if os.path.exists(path)
            for _, prompt in islice(iter_prompts(Path(path), data.prompt_key, data.label_key), _IMAGE_ROWS)
        ]
    except ConfigError:
        return 0.0
    return sum(sizes) / max(1, len(sizes))


def check_data(config: Config, declared: Requirements, dry_run: bool, warnings: list[str]) -> None:
    data, run = config.data, config.run
    if declared.item == "requests":
        return
    if not data.train:
        kinds = {"conversations": "finished conversations", "pairs": "preference pairs"}
        kind = kinds.get(declared.item, declared.item)
        raise ConfigError(f"data.train is not set; it must name a file of {kind} (.parquet or .jsonl)")
    check_files(data)
    if not declared.has_rollout and run.ppo_epochs > 1:
        warnings.append(
            f"{run.ppo_epochs=} counts passes over each step's batch; passes over the data follow from run.num_rollout "
            "times data.prompts_per_step over the rows"
        )
    train_texts: dict[str, str] = {}
    eval_texts: dict[str, str] = {}
    files = [("data.train", path, train_texts, data.curriculum_key) for path in data.train]
    files += [("data.eval", path, eval_texts, "") for path in data.eval if run.eval_every]
    for key, path, first_texts, order in files:
        if not os.path.exists(path):
            check_file_name(key, path)
            if not dry_run:
                raise ConfigError(f"{key}={path[:200]}: no such file")
            warnings.append(f"{key}={path} not found; it must exist when the run starts")
            continue
        rows = check_first_rows(config, declared.item, path, order)
        for row in rows:
            first_texts.setdefault(row.text, row.location)
        named = [row for row in rows if row.extra.get(COLUMN)]
        if named and declared.has_rollout and not config.rollout.environments:
            warnings.append(
                f"{named[0].location}: the column {COLUMN!r} is {str(named[0].extra[COLUMN])[:80]!r}, but "
                "rollout.environments is empty, so no environment is used; set it, or omit the column"
            )
        if order:
            check_no_nan(Path(path), order)
        if declared.item == "prompts" and "reward" in declared.roles:
            warnings += check_truth_file(config, path)
    if overlap := _describe_overlap(data, train_texts, eval_texts):
        warnings.append(f"{overlap}: evaluating on training data does not measure generalization")
    if run.eval_samples > 1 and declared.item == "prompts" and config.rollout.temperature == 0:
        raise ConfigError(
            f"{run.eval_samples=} with rollout.temperature=0: all answers are identical; set only one of them"
        )
    if run.eval_every and not data.eval:
        raise ConfigError(f"{run.eval_every=} needs data.eval; name a file of held-out {declared.item}")
    if run.memory_save_every and run.memory_save_every >= run.save_every:
        raise ConfigError(
            f"{run.memory_save_every=} needs checkpoints on disk less often: set run.save_every to more steps than that"
        )
    if run.resumes and not run.save_every and not (Path(run.dir) / "checkpoints").is_dir():
        warnings.append(f"{run.resume=!s} but run.save_every=0: there will be no checkpoint to resume from")
