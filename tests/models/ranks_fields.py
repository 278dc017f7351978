"""Perturb every field of each family's config.json: the trainer computes what transformers computes, or refuses it.

Argument: a family of `tiny.HF` that transformers has. Prints the number of cases by outcome, and every case that fails:

    equal: both compute the same log-probs
    refused: one line of ConfigError
    invalid: transformers itself raises or gives NaN, and the table does not refuse
"""

from __future__ import annotations

import copy
import json
import logging
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "megatron"))
torch.set_num_threads(1)

import images  # noqa: E402
import reference  # noqa: E402
import tiny  # noqa: E402

from megarl.config import ConfigError  # noqa: E402
from megarl.models import qwen_vl  # noqa: E402
from megarl.models.layout_algebra import shard  # noqa: E402
from megarl.models.registry import family_of  # noqa: E402
from megarl.parallel import ranks as parallel_ranks  # noqa: E402

TOLERANCE = 1e-4
ABSENT = object()
IDENTITY = {"architectures", "model_type", "transformers_version", "_name_or_path"}
"""Keys that name the model rather than describe it."""

KNOWN: dict[str, list[Any]] = {
    "hidden_act": ["silu", "gelu", "gelu_pytorch_tanh", "relu"],
    "hidden_activation": ["silu", "gelu", "gelu_pytorch_tanh"],
    "scoring_func": ["softmax", "sigmoid"],
    "topk_method": ["greedy", "group_limited_greedy", "noaux_tc"],
    "rope_type": ["default", "linear", "dynamic", "yarn", "llama3", "longrope"],
    "dtype": ["float32", "bfloat16"],
    "quantization_config": [None],  # for stored weights
}
"""Other values of fields that have a fixed set of them."""
PLACES = {0: [(3, (2, 3)), (12, (2, 2))], 1: [(1, (1, 2))]}
"""Where the two sequences have images, for a model with a vision tower."""

ROPE: dict[str, Any] = dict(
    rope_type="yarn",
    rope_theta=2e4,
    factor=4.0,
    original_max_position_embeddings=8,
    beta_fast=4.0,
    beta_slow=0.5,
    mscale=1.0,
    mscale_all_dim=1.0,
    attention_factor=1.25,
    truncate=False,
    low_freq_factor=0.5,
    high_freq_factor=4.0,
    partial_rotary_factor=0.5,
    type="linear",
    mrope_section=[1, 1],
    long_factor=[1.0],
)
"""A value of each key of a rope block, to add to a block that lacks it."""
SCALED: list[dict[str, Any]] = [
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 0.5, "high_freq_factor": 3.0}
    | {"original_max_position_embeddings": 12},
]


def other_values(key: str, value: Any) -> list[Any]:
    """Return plausible other values of a field."""
    if key in ("rope_parameters", "rope_scaling"):
        return list(other_rope(value or {}))
    if key in KNOWN:
        others: list[Any] = KNOWN[key]
    elif isinstance(value, bool):
        others = [not value]
    elif isinstance(value, int):
        others = [value + 1, 2 * value + 2, value // 2, 0]
    elif isinstance(value, float):
        others = [0.5 * value, 2 * value + 0.25, 0.0]
    elif isinstance(value, str):
        others = ["another"]
    elif isinstance(value, list):
        others = [[], [0], value[::-1], value[:1], ["sliding_attention"] * len(value), ["full_attention"] * len(value)]
    elif isinstance(value, dict):
        others = [{}]
    else:
        others = [True, False, 1, 2, 0.5, "another", [], [0]]
    return [other for other in [*others, None] if other != value or type(other) is not type(value)]


def other_rope(block: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield other blocks: one key removed, null, changed or added to this block and to one of each scaled type."""
    yield {}
    yield from SCALED
    for start in (block, *SCALED):
        for key in start:
            yield {name: value for name, value in start.items() if name != key}
            for other in other_values(key, start[key]):
                yield start | {key: other}
        for key in sorted(ROPE.keys() - start.keys()):
            yield start | {key: ROPE[key]}


def full_config(family: str) -> dict[str, Any]:
    """Return the config.json that transformers writes for a tiny model, with every default."""
    values = copy.deepcopy(tiny.HF[family])
    written = json.loads(tiny.hf_config(values).to_json_string(use_diff=False))
    written["architectures"] = values["architectures"]
    if "vision_config" in values:
        known = qwen_vl.VISION_DEFAULTS[written["model_type"]]
        vision = {key: value for key, value in written.pop("vision_config").items() if key in known}
        written = written.pop("text_config") | written | {"vision_config": vision}
    # and what SGLang alone reads
    return {key: value for key, value in values.items() if key not in ("rope_theta", "rope_scaling")} | written


def cases(hf: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in sorted(hf.keys() - IDENTITY - {"vision_config"}):
        yield key, ABSENT
        for value in other_values(key, hf[key]):
            yield key, value
    for key, value in hf.get("vision_config", {}).items():
        for other in (ABSENT, *other_values(key, value)):
            yield f"vision_config.{key}", other
    if "rope_scaling" not in hf:  # the spelling of transformers 4
        for value in SCALED:
            yield "rope_scaling", value
    for key, value in {"rope_theta": 123.0, "partial_rotary_factor": 0.5}.items():
        if key not in hf:
            yield key, value


def changed(hf: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    block, _, inner = key.partition(".")
    if inner:
        return {**hf, block: changed(hf[block], inner, value)}
    result = copy.deepcopy({other: kept for other, kept in hf.items() if other != key})
    return result if value is ABSENT else result | {key: copy.deepcopy(value)}


def hf_model(hf: dict[str, Any]) -> Any:
    """Return transformers' model with weights that depend on nothing but their names and shapes."""
    from transformers.initialization import no_init_weights

    model_class = tiny.hf_class(hf)
    config = tiny.hf_config(hf) if "vision_config" in hf else model_class.config_class.from_dict(copy.deepcopy(hf))
    config._attn_implementation = "eager"
    with no_init_weights():
        model = model_class._from_config(config, dtype=torch.float32).eval()
    model.tie_weights()
    tiny.set_latent_eps(model)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator) + ("norm" in name))
    return model


def description(hf: dict[str, Any]) -> str:
    """Return everything that the trainer's model derives from config.json."""
    family = family_of(hf)
    tower = None if family.vision is None else family.vision.config(hf)
    return repr((family.params(hf, 1), family.megatron_config(hf), family.gpt_kwargs(hf), family.extras(hf), tower))


class Trainer:
    """The trainer's log-probs; models that are described alike are built once."""

    def __init__(self, batch: Any) -> None:
        self.batch, self.known = batch, dict[str, torch.Tensor]()

    def logprobs(self, hf: dict[str, Any]) -> torch.Tensor:
        from megarl.megatron.trainer_model import MegatronModel

        key = description(hf)
        if key not in self.known:
            settings: dict[str, Any] = {"train": {"max_tokens_per_gpu": 64}}
            if (vision := family_of(hf).vision) is not None:
                settings["model"] = {"path": images.processor_folder(vision.config(hf)["patch_size"])}
            config = tiny.config(**settings)
            model = MegatronModel(hf, config, RANKS, "actor", trains=False)
            tensors = tiny.hf_tensors(hf_model(hf))
            model.load_shards(lambda param, tp, rank: shard(param, tensors, tp, rank))
            self.known[key] = model.forward(self.batch)["logprobs"]
        return self.known[key]


def outcome(hf: dict[str, Any], trainer: Trainer) -> str:
    """Return the outcome of a case: `equal`, `refused`, `invalid`, or what is wrong."""
    try:
        with torch.no_grad():
            expected, _ = reference.policy(hf_model(hf), trainer.batch)
        error = "" if torch.isfinite(expected).all() else "NaN"
    except Exception as raised:  # transformers and torch raise many types
        error = f"{type(raised).__name__}: {raised}"
    try:
        description(hf)
        if error:
            return "invalid"
        actual = trainer.logprobs(hf)
    except ConfigError as refusal:
        return "refused" if "\n" not in str(refusal) else f"refused in several lines: {refusal}"
    except Exception as raised:
        return f"crashed with {type(raised).__name__}: {raised}"[:300]
    gap = float((actual - expected).abs().max())
    return "equal" if gap < TOLERANCE else f"log-probs differ by {gap:.3g}"


def check(family: str) -> dict[str, Any]:
    hf, batch = full_config(family), tiny.batch((26, 9))
    if "vision_config" in hf:
        batch = images.add(batch, hf["vision_config"]["patch_size"], PLACES)
    trainer = Trainer(batch)
    counts: dict[str, int] = {"equal": 0, "refused": 0, "invalid": 0}
    failures = {} if (base := outcome(hf, trainer)) == "equal" else {"unchanged": base}
    for key, value in cases(hf):
        result = outcome(changed(hf, key, value), trainer)
        if result in counts:
            counts[result] += 1
        else:
            failures[f"{key}={'absent' if value is ABSENT else json.dumps(value)}"] = result
    return {"counts": counts, "built": len(trainer.known), "failures": failures}


if __name__ == "__main__":
    logging.getLogger("transformers").setLevel(logging.CRITICAL)  # it warns of most of these configs
    RANKS = parallel_ranks.initialize(tiny.config().parallel, timeout_s=120)
    print("RESULT " + json.dumps(check(sys.argv[1])))
    parallel_ranks.shutdown()
