"""Estimate and check disk space and host memory before something large is written."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from megarl.config import Config
from megarl.config.keys import max_pending_groups
from megarl.models.family import HFConfig
from megarl.models.layout_algebra import Param
from megarl.models.lora_tables import adapter_params
from megarl.models.memory import critic_params
from megarl.models.registry import family_of, load_hf_config, num_trained_mtp
from megarl.models.routing import routing_shape
from megarl.models.sparse_indices import index_shape
from megarl.parallel.placement import POLICY_ROLES, split_role
from megarl.parallel.policy_configs import policy_config
from megarl.types.requirements import Requirements

OPTIMIZER_BYTES = 12
"""Bytes per trained element in addition to the weight: an fp32 master and Adam's two moments."""
TOKEN_BYTES, TEXT_BYTES, ID_BYTES = 8, 12, 4
"""Bytes per token of an unfinished conversation.

Token id and log-prob; its share of the messages, where prompt text occurs twice; and with truncated sampling the size
of the sampling mask and each of its ids.
"""


class SpaceEstimate(NamedTuple):
    """Upper estimates of the bytes of one checkpoint and of the exported folder."""

    checkpoint: int
    export: int


def estimate_space(
    hf: HFConfig, critic_hf: HFConfig | None, config: Config, requirements: Requirements
) -> SpaceEstimate:
    """Estimate checkpoint and export sizes. critic_hf: config.json of the critic, or None."""
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    policy = family_of(hf).params(hf, 1, mtp=bool(num_trained_mtp(hf, config)))
    if requirements.has_scalar_head:  # a classifier with a scalar head
        policy = critic_params(policy, int(hf["hidden_size"]))
    tables = [policy]
    if critic_hf is not None:
        tables.append(critic_params(family_of(critic_hf).params(critic_hf, 1), int(critic_hf["hidden_size"])))
    total, exported = 0, _weights(policy, dtype)
    if not requirements.trained_roles:
        tables, exported = [], 0
    for table in tables:
        adapters = adapter_params(table, config.lora) if config.lora.rank else []
        total += _weights([*table, *adapters], dtype) + OPTIMIZER_BYTES * sum(param.size for param in adapters or table)
    if config.kl.refresh_reference_every and "reference" in requirements.roles:
        total += _weights(adapter_params(policy, config.lora) if config.lora.rank else policy, dtype)
    total += partial_rollout_bytes(hf, config) if requirements.has_rollout else 0
    for role in requirements.trained_roles:
        base, name = split_role(role)
        if name and base == "actor":
            other = policy_config(config, role)
            policy_roles = [kind for kind in POLICY_ROLES if f"{kind}_{name}" in requirements.roles]
            critic_path = other.critic.path or other.model.path
            other_critic = load_hf_config(critic_path) if "critic" in policy_roles else None
            parts = replace(requirements, trained_roles=("actor",), roles=tuple(policy_roles))
            space = estimate_space(load_hf_config(other.model.path), other_critic, other, parts)
            total, exported = total + space.checkpoint, exported + space.export
    return SpaceEstimate(_add_overhead(total), _add_overhead(exported))


def partial_rollout_bytes(hf: HFConfig, config: Config) -> int:
    """Return the maximum bytes of rollouts that a later step continues (`rollout.oversample`)."""
    rollout, prompts = config.rollout, config.data.prompts_per_step
    groups = max_pending_groups(prompts, rollout.oversample) - prompts
    if rollout.replay or not groups:
        return 0
    token_bytes = TOKEN_BYTES + TEXT_BYTES
    if config.records_routing:
        shape = routing_shape(hf, config.model.megatron)
        token_bytes += len(shape.moe_layers) * shape.topk * shape.dtype.itemsize
    if (indices := index_shape(hf, config)) is not None:
        token_bytes += indices.token_bytes
    if rollout.has_truncated_sampling:
        token_bytes += ID_BYTES * (1 + max(0, rollout.top_k))
    return groups * rollout.samples_per_prompt * rollout.max_context * token_bytes


def free_bytes(folder: Path) -> int:
    """Return the free bytes at a path, which need not exist yet. Raises OSError."""
    return shutil.disk_usage(_existing_parent(folder)).free


def can_hold_files(folder: Path) -> bool:
    """Return False for /proc and the like, which have no size. The folder need not exist yet. Raises OSError."""
    return os.statvfs(_existing_parent(folder)).f_blocks > 0


def _existing_parent(folder: Path) -> Path:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def check_free_space(folder: Path, needed: int) -> None:
    """Raise OSError, with both numbers, if `folder` has less than `needed` bytes free."""
    if needed and (available := free_bytes(folder)) < needed:
        raise OSError(errno.ENOSPC, f"about {format_bytes(needed)} are needed, and {format_bytes(available)} are free")


def free_memory() -> int:
    """Return the bytes of memory that this machine, and this process's control group, can still provide."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(lines["MemAvailable"].split()[0]) << 10
    group = Path("/sys/fs/cgroup") / Path("/proc/self/cgroup").read_text().rpartition("::/")[2].strip()
    try:
        limit = (group / "memory.max").read_text().strip()
        used = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())["anon"]
    except (OSError, KeyError, ValueError):  # not cgroup v2
        return available
    return available if limit == "max" else min(available, int(limit) - int(used))


def check_copy_memory(needed: Sequence[tuple[str, int, int]], keys: str = "run.save_async=false") -> list[str]:
    """Return a line for each machine whose memory cannot hold the copies of saves, which these keys avoid. needed: for
    each rank its machine's name, the bytes of its copies, and the free bytes of the machine."""
    lines = []
    for machine in dict.fromkeys(name for name, _, _ in needed):
        total = sum(copy_bytes for name, copy_bytes, _ in needed if name == machine)
        available = min(free for name, _, free in needed if name == machine)
        if total > available:
            lines.append(
                f"a save copies up to {format_bytes(total)} on {machine}, where {format_bytes(available)} of memory "
                f"are free: set {keys}"
            )
    return lines


def format_bytes(number: int) -> str:
    return f"{number / 1e9:.1f} GB" if number >= 1e8 else f"{number / 1e6:.1f} MB"


def _weights(table: Iterable[Param], dtype: torch.dtype) -> int:
    return sum(param.size * (param.dtype or dtype).itemsize for param in table)


def _add_overhead(number: int) -> int:
    """Add headers, vocabulary padding, tokenizer and random states."""
    return number + number // 50 + (4 << 20)
