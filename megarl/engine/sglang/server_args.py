"""Validate `rollout.sglang` against SGLang's ServerArgs, parsed from source so that ranks need not import SGLang.

`engine/sglang/engine_settings.py` lists the settings under which weight sync finds the engine's weights in place.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.config import ConfigError, RolloutConfig, foreign_dataclasses
from megarl.config.command_line import INSTALL_HINT

_MANAGED_FIELDS = {
    "model_path": "model.path",
    "dtype": "model.dtype",
    "tp_size": "rollout.tp",
    "ep_size": "rollout.ep",
    "random_seed": "run.seed",
    "host": "nothing: engines listen on 127.0.0.1",
    "port": "nothing: MegaRL picks a free port",
    "api_key": "nothing: each run has its own key",
    "nnodes": "parallel.ranks_per_node",
    "node_rank": "parallel.ranks_per_node",
    "dist_init_addr": "nothing: the launcher sets it",
    "weight_version": "nothing: the trainer counts",
    "custom_weight_loader": "nothing: MegaRL has its own",
    "device": "nothing: it follows from the machine",
    "base_gpu_id": "nothing: an engine is on the GPUs of its ranks",
    "gpu_id_step": "nothing: an engine is on the GPUs of its ranks",
    "enable_memory_saver": "nothing: engines sleep while the ranks train",
    "skip_server_warmup": "nothing: MegaRL sends requests once the engine is ready",
    "incremental_streaming_output": "nothing: MegaRL reassembles streamed output",
    "tool_call_parser": "rollout.tool_call_parser",
    "tokenizer_path": "model.path",
    "use_ray": "nothing: torchrun or Slurm starts all processes",
    "preferred_sampling_params": "rollout.temperature, rollout.top_p, rollout.top_k and rollout.min_p",
    "enable_return_routed_experts": "train.routing_replay and rollout.rebalance_experts_every",
    "enable_return_indexer_topk": "train.sparse_index_replay",
}
_MANAGED_FIELDS |= dict.fromkeys(
    (
        f"speculative_{name}"
        for name in ("algorithm", "draft_model_path", "num_steps", "eagle_topk", "num_draft_tokens")
    ),
    "rollout.num_speculative_tokens",
)
_MANAGED_FIELDS |= dict.fromkeys(
    ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"),
    "nothing: drafts must not change what the policy samples",
)
"""Fields that MegaRL sets, and the key that determines each."""
_POSITIVE_FIELDS = (
    "max_total_tokens max_running_requests max_prefill_tokens context_length page_size watchdog_timeout "
    "num_continuous_decode_steps stream_interval tokenizer_worker_num detokenizer_worker_num attn_dp_size dp_size "
    "pp_size"
).split()
"""Numbers that must be above 0."""
_FRACTION_FIELDS = ("mem_fraction_static", "swa_full_tokens_ratio")
"""Numbers between 0 and 1, both excluded; the second may be 1."""
_CHOICE_LISTS = {
    "sampling_backend": ("arg_groups/choices.py", "SAMPLING_BACKEND_CHOICES"),
    "reasoning_parser": ("parser/reasoning_parser_names.py", "REASONING_PARSER_NAMES"),
}
"""Fields whose choices are defined elsewhere: (file, name of the list)."""


@functools.cache
def sglang_folder() -> Path:
    """Return the folder of the package sglang.srt. Raises ConfigError if SGLang is not installed."""
    spec = importlib.util.find_spec("sglang")  # finds the package without running it
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"the package sglang is not installed: {INSTALL_HINT}")
    return Path(spec.submodule_search_locations[0], "srt")


def _parse_source(file: str) -> ast.Module:
    path = sglang_folder() / file
    try:
        return ast.parse(path.read_text())
    except (OSError, SyntaxError):
        raise ConfigError(f"{path} is missing or cannot be read; MegaRL needs SGLang 0.5.23") from None


def _read_choices(file: str, name: str) -> tuple[str, ...]:
    choices = foreign_dataclasses.parse_constants(_parse_source(file)).get(name)
    if not isinstance(choices, list | tuple):
        raise ConfigError(f"{sglang_folder() / file} has no list {name}; MegaRL needs SGLang 0.5.23")
    return tuple(choices)


@functools.cache
def load_fields() -> dict[str, foreign_dataclasses.Field]:
    """Return the ServerArgs fields of the installed SGLang by name, each with the class that groups it.

    Raises ConfigError if SGLang is missing.
    """
    names = foreign_dataclasses.parse_constants(_parse_source("arg_groups/choices.py"))
    fields: dict[str, foreign_dataclasses.Field] = {}
    for path in sorted((sglang_folder() / "arg_groups" / "fields").glob("*.py")):
        for node in _parse_source(f"arg_groups/fields/{path.name}").body:
            if isinstance(node, ast.ClassDef):
                fields |= foreign_dataclasses.parse_fields(node.body, names, node.name)
    fields = {name: field for name, field in fields.items() if name in load_field_names()}
    for name, location in _CHOICE_LISTS.items():
        fields[name] = replace(fields[name], choices=_read_choices(*location))
    return fields


@functools.cache
def load_field_names() -> frozenset[str]:
    """Return the names of the public ServerArgs fields of the installed SGLang."""
    order = _read_choices("arg_groups/field_order.py", "POSITIONAL_FIELD_ORDER")
    return frozenset(name for name in order if not name.startswith("_"))


def check(settings: dict[str, Any]) -> None:
    """Raise ConfigError for a key of `rollout.sglang` that MegaRL sets itself or SGLang does not know, and for an
    invalid value."""
    for key, value in settings.items():
        where = f"rollout.sglang.{key}"
        if key in _MANAGED_FIELDS:
            raise ConfigError(f"{where} cannot be set; it is decided by {_MANAGED_FIELDS[key]}")
        if key not in load_field_names():
            hint = foreign_dataclasses.did_you_mean(key, load_field_names())
            raise ConfigError(f"{where} is not a field of SGLang's ServerArgs{hint}")
        foreign_dataclasses.check_field_value(where, value, load_fields()[key])
        if value is None:
            continue
        # Ranges that SGLang would check only after starting, or never.
        if key in _POSITIVE_FIELDS and value <= 0:
            raise ConfigError(f"{where} must be above 0, not {value}")
        if key in _FRACTION_FIELDS and not 0 < value <= (1 if key != "mem_fraction_static" else 0.99):
            raise ConfigError(f"{where} is a fraction: it must be between 0 and 1, not {value}")
        if key == "chunked_prefill_size" and value == 0:
            raise ConfigError(f"{where} must be above 0, or -1 to turn it off, not 0")
        if key.endswith("_port") and not 0 < value < 1 << 16:
            raise ConfigError(f"{where} must be a port between 1 and 65535, not {value}")


def tool_call_parsers() -> tuple[str, ...]:
    """Return the names of SGLang's tool call parsers; empty if SGLang is not installed."""
    if importlib.util.find_spec("sglang") is None:
        return ()
    return _read_choices("function_call/parser_names.py", "TOOL_CALL_PARSER_NAMES")


def speculative_args(num_speculative_tokens: int) -> dict[str, Any]:
    """Return the ServerArgs with which the model's multi-token prediction layer drafts `num_speculative_tokens` at a
    time."""
    if not num_speculative_tokens:
        return {}
    return {
        "speculative_algorithm": "NEXTN",
        "speculative_num_steps": num_speculative_tokens,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": num_speculative_tokens + 1,
    }


def expert_args(rollout: RolloutConfig) -> dict[str, Any]:
    """Return the ServerArgs with which a weight sync may place the engine's experts, see
    `sglang_loader.place_experts`.

    `dynamic` divides an expert's tokens between its copies by their number in the batch, on all ranks alike. With
    copies, SGLang 0.5.23 would give the tokens of a fused shared expert to the first copy (`layers/moe/topk.py` numbers
    it after the experts, the dispatcher after the copies).
    """
    if not rollout.rebalance_experts_every:
        return {}
    copies = {"ep_num_redundant_experts": rollout.num_redundant_experts, "disable_shared_experts_fusion": True}
    return {"ep_dispatch_algorithm": "dynamic", **(copies if rollout.num_redundant_experts else {})}


def sampling_args(rollout: RolloutConfig) -> dict[str, Any]:
    """Return the ServerArgs that bound the size of reported sampling masks.

    A mask may exceed `top_k`, because it includes all ties with the last token. Unused capacity costs the sampler time
    at each token.
    """
    return {"sampling_mask_max_tokens": max(256, 4 * rollout.top_k)} if rollout.has_truncated_sampling else {}


def check_sampling(rollout: RolloutConfig) -> None:
    """Raise ConfigError for truncated sampling with settings under which SGLang does not report sampling masks.

    Without the masks the trainer could not compute the distribution that was sampled from.
    """
    is_set = {"top_p": rollout.top_p < 1, "top_k": rollout.top_k != -1, "min_p": rollout.min_p > 0}
    what = " and ".join(f"rollout.{name}={getattr(rollout, name):g}" for name in is_set if is_set[name])
    why = "the sampling masks that training needs"
    if rollout.top_k in (0, 1):
        remedy = "-1 for all tokens" if rollout.top_k == 0 else "2 or more, or rollout.temperature=0, which is greedy"
        raise ConfigError(f"{rollout.top_k=} leaves nothing to sample; set it to {remedy}")
    if not rollout.has_truncated_sampling:
        return
    if rollout.top_k < 0:
        raise ConfigError(
            f"{what} without rollout.top_k: SGLang does not return {why} unless their size is bounded; also set "
            f"rollout.top_k, for example to 1000"
        )
    if rollout.replay:
        return
    most = rollout.sglang.get("sampling_mask_max_tokens")
    if most is not None and rollout.top_k > most:
        raise ConfigError(
            f"{rollout.top_k=} is beyond rollout.sglang.sampling_mask_max_tokens={most}, the size up to which SGLang "
            f"returns {why}; remove the second"
        )
    if (backend := rollout.sglang.get("sampling_backend")) == "ascend":
        raise ConfigError(f"{what} with rollout.sglang.sampling_backend={backend}, which does not return {why}")
    if rollout.min_p and rollout.sglang.get("enable_deterministic_inference"):
        raise ConfigError(
            f"{what} with rollout.sglang.enable_deterministic_inference: SGLang's seeded sampler does not support "
            "min_p; set rollout.min_p to 0"
        )
