"""`rollout.sglang` against SGLang's own ServerArgs, read from its source so that a rank need not import SGLang."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
from pathlib import Path
from typing import Any

from megarl.config import ConfigError

_OURS = {
    "model_path": "model.path",
    "dtype": "model.dtype",
    "tp_size": "rollout.tp",
    "ep_size": "rollout.ep",
    "random_seed": "run.seed",
    "host": "nothing, engines listen on 127.0.0.1",
    "port": "nothing, a free port is taken",
    "api_key": "nothing, each run has its own key",
    "nnodes": "parallel.ranks_per_node",
    "node_rank": "parallel.ranks_per_node",
    "dist_init_addr": "nothing, the launcher knows it",
    "weight_version": "nothing, the trainer counts",
    "custom_weight_loader": "nothing, MegaRL has its own",
    "device": "nothing, the machine decides",
    "enable_return_routed_experts": "train.replay_routing",
    "speculative_algorithm": "rollout.draft_tokens",
    "speculative_draft_model_path": "rollout.draft_tokens",
    "speculative_num_steps": "rollout.draft_tokens",
    "speculative_eagle_topk": "rollout.draft_tokens",
    "speculative_num_draft_tokens": "rollout.draft_tokens",
    "speculative_accept_threshold_single": "nothing, drafts must not change what the policy samples",
    "speculative_accept_threshold_acc": "nothing, drafts must not change what the policy samples",
}
"""Fields that MegaRL sets, and what sets them."""


@functools.cache
def known_fields() -> frozenset[str]:
    """Names of ServerArgs' fields in the installed SGLang. Raises ConfigError where SGLang is missing."""
    spec = importlib.util.find_spec("sglang")  # finds the package without running it
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("SGLang is not installed; run `bash launch/install.sh`")
    source = Path(spec.submodule_search_locations[0], "srt", "arg_groups", "field_order.py")
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "POSITIONAL_FIELD_ORDER":
            return frozenset(ast.literal_eval(node.value))
    raise ConfigError(f"{source} does not list ServerArgs' fields; MegaRL needs SGLang 0.5.23")


def check(settings: dict[str, Any]) -> None:
    """Raise ConfigError for a key of `rollout.sglang` that MegaRL sets itself, or that SGLang does not know."""
    for key in settings:
        if key in _OURS:
            raise ConfigError(f"rollout.sglang.{key} cannot be set; it is decided by {_OURS[key]}")
        if key not in known_fields():
            near = difflib.get_close_matches(key, known_fields(), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"rollout.sglang.{key} is not a field of SGLang's ServerArgs{hint}")


def speculative(draft_tokens: int) -> dict[str, Any]:
    """ServerArgs by which the model's own layer of multi-token prediction drafts so many tokens at a time."""
    if not draft_tokens:
        return {}
    return {
        "speculative_algorithm": "NEXTN",
        "speculative_num_steps": draft_tokens,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": draft_tokens + 1,
    }
