"""`rollout.sglang` settings against the installed SGLang's ServerArgs."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from megarl.config import ConfigError, RolloutConfig, foreign_dataclasses
from megarl.engine.sglang import server_args

pytestmark = pytest.mark.alone


def test_reads_fields_of_the_installed_sglang() -> None:
    assert {
        "attention_backend",
        "max_total_tokens",
        "weight_version",
        "sleep_on_idle",
    } <= server_args.load_field_names()
    server_args.check({"attention_backend": "triton", "log_level": "info"})


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("atention_backend", "not a field of SGLang's ServerArgs; did you mean attention_backend?"),
        ("tp_size", "cannot be set; it is decided by rollout.tp"),
    ],
)
def test_rejects_unknown_and_reserved_keys(key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"rollout.sglang.{key} .*".replace(".", r"\.", 2)) as error:
        server_args.check({key: "x"})
    assert message in str(error.value)


def test_speculative_args() -> None:
    assert server_args.speculative_args(0) == {}
    args = server_args.speculative_args(3)
    assert (args["speculative_num_steps"], args["speculative_num_draft_tokens"]) == (3, 4)
    assert args.keys() <= server_args.load_field_names()
    for key in args:
        with pytest.raises(ConfigError, match="decided by rollout.num_speculative_tokens"):
            server_args.check({key: args[key]})


def test_defaults_pass_the_checks() -> None:
    """The checks must accept SGLang's own defaults."""
    for name, field in server_args.load_fields().items():
        if field.default is not ...:
            foreign_dataclasses.check_field_value(name, field.default, field)
        assert field.group, name


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("max_total_tokens", "lots", "must be a whole number, not 'lots'"),
        ("max_total_tokens", "1e6", "must be a whole number, not '1e6'; write 1000000"),
        ("max_total_tokens", -1, "must not be negative"),
        ("max_total_tokens", 0, "must be above 0"),
        ("max_total_tokens", float("nan"), "must be a finite number"),
        ("max_total_tokens", 1 << 70, "must be at most 2147483647"),
        ("max_total_tokens", [1], "must be a whole number, not [1]"),
        ("attention_backend", "flashh", "did you mean flashmla?"),
        ("sampling_backend", "torch", "must be one of"),
        ("deepep_mode", "slow", "must be one of auto, normal, low_latency"),
        ("mem_fraction_static", 1.2, "must be between 0 and 1"),
        ("disable_radix_cache", "yes", "must be true or false"),
        ("cuda_graph_bs_decode", [1, "2"], "must be a list, each a whole number"),
        ("extra_metric_labels", ["a"], "must be a mapping"),
        ("custom_sigquit_handler", "print", "which YAML cannot give"),
        ("tool_call_parser", "qwen25", "decided by rollout.tool_call_parser"),
    ],
)
def test_rejects_invalid_values(key: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        server_args.check({key: value})
    assert str(error.value).startswith(f"rollout.sglang.{key} ") and message in str(error.value)


def test_accepts_valid_values() -> None:
    server_args.check({"chunked_prefill_size": -1, "mem_fraction_static": 0.3, "schedule_conservativeness": 1})
    server_args.check({"attention_backend": None, "cuda_graph_bs_decode": [1, 2], "extra_metric_labels": {"a": "b"}})


def test_tool_call_parsers_match_the_installed_sglang() -> None:
    """Compare with the enum in SGLang's source."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    source = Path(spec.submodule_search_locations[0], "srt/function_call/function_call_parser.py").read_text()
    enum = source[source.index("ToolCallParserEnum") :]
    names = set(re.findall(r'^ {8}"([^"]+)": ', enum[: enum.index("\n    }")], re.M))
    assert {"qwen25", "deepseekv3", "glm45", "kimi_k2", "pythonic"} <= names
    assert names == set(server_args.tool_call_parsers())


def test_sampling_args_set_the_sampling_mask_size() -> None:
    assert server_args.sampling_args(RolloutConfig()) == {}
    assert server_args.sampling_args(RolloutConfig(top_k=20, temperature=0.0)) == {}
    args = server_args.sampling_args(RolloutConfig(top_k=1000))
    assert args == {"sampling_mask_max_tokens": 4000} and args.keys() <= server_args.load_field_names()
    assert server_args.sampling_args(RolloutConfig(top_k=20, top_p=0.9)) == {"sampling_mask_max_tokens": 256}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_k": 20},
        {"top_k": 2, "top_p": 0.9, "min_p": 0.1},
        {"top_p": 0.9, "top_k": 20, "num_speculative_tokens": 2},
        {"top_p": 0.9, "temperature": 0.0},  # greedy regardless of top_p
        {"top_k": 100, "sglang": {"sampling_mask_max_tokens": 100, "sampling_backend": "pytorch"}},
        {"top_k": 100, "sglang": {"enable_deterministic_inference": True}},
    ],
    ids=str,
)
def test_accepts_sampling_with_masks(settings: dict[str, Any]) -> None:
    server_args.check_sampling(RolloutConfig(**settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_p": 0.9}, "rollout.top_p=0.9 without rollout.top_k: SGLang does not return the sampling masks"),
        ({"min_p": 0.1}, "rollout.min_p=0.1 without rollout.top_k: .*; also set rollout.top_k, for example to 1000"),
        ({"top_k": 0}, "rollout.top_k=0 leaves nothing to sample; set it to -1 for all tokens"),
        ({"top_k": 1}, "rollout.top_k=1 leaves nothing to sample; .* or rollout.temperature=0, which is greedy"),
        ({"top_k": 20, "sglang": {"sampling_mask_max_tokens": 10}}, "rollout.top_k=20 is beyond rollout.sglang.sampl"),
        ({"top_k": 20, "sglang": {"sampling_backend": "ascend"}}, "sampling_backend=ascend, which does not return the"),
        (
            {"top_k": 20, "min_p": 0.1, "sglang": {"enable_deterministic_inference": True}},
            "rollout.top_k=20 and rollout.min_p=0.1 with .*enable_deterministic_inference: .* set rollout.min_p to 0",
        ),
    ],
    ids=str,
)
def test_rejects_sampling_without_masks(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        server_args.check_sampling(RolloutConfig(**settings))
