import importlib.util
import re
from pathlib import Path

import pytest

from megarl import annotated
from megarl.config import ConfigError
from megarl.rollout import server_args


def test_fields_of_the_installed_sglang() -> None:
    assert {"attention_backend", "max_total_tokens", "weight_version", "sleep_on_idle"} <= server_args.known_fields()
    server_args.check({"attention_backend": "triton", "log_level": "info"})


@pytest.mark.parametrize(
    ("key", "complaint"),
    [
        ("atention_backend", "not a field of SGLang's ServerArgs; did you mean attention_backend?"),
        ("tp_size", "cannot be set; it is decided by rollout.tp"),
    ],
)
def test_wrong_keys(key: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=f"rollout.sglang.{key} .*".replace(".", r"\.", 2)) as caught:
        server_args.check({key: "x"})
    assert complaint in str(caught.value)


def test_how_sglang_is_told_to_draft() -> None:
    assert server_args.speculative(0) == {}
    told = server_args.speculative(3)
    assert (told["speculative_num_steps"], told["speculative_num_draft_tokens"]) == (3, 4)
    assert told.keys() <= server_args.known_fields()
    for key in told:
        with pytest.raises(ConfigError, match="decided by rollout.draft_tokens"):
            server_args.check({key: told[key]})


def test_every_default_fits_its_own_field() -> None:
    """So that what is refused is not what SGLang takes by itself."""
    for name, field in server_args.fields().items():
        if field.default is not ...:
            annotated.check(name, field.default, field)
        assert field.group, name


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
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
        ("mem_fraction_static", 1.2, "must lie between 0 and 1"),
        ("disable_radix_cache", "yes", "must be true or false"),
        ("cuda_graph_bs_decode", [1, "2"], "must be a list, each a whole number"),
        ("extra_metric_labels", ["a"], "must be a mapping"),
        ("custom_sigquit_handler", "print", "which YAML cannot give"),
        ("tool_call_parser", "qwen25", "decided by rollout.tool_call_parser"),
    ],
)
def test_wrong_values(key: str, value: object, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        server_args.check({key: value})
    assert str(caught.value).startswith(f"rollout.sglang.{key} ") and complaint in str(caught.value)


def test_values_that_fit() -> None:
    server_args.check({"chunked_prefill_size": -1, "mem_fraction_static": 0.3, "schedule_conservativeness": 1})
    server_args.check({"attention_backend": None, "cuda_graph_bs_decode": [1, 2], "extra_metric_labels": {"a": "b"}})


def test_parsers_of_tool_calls_are_those_of_the_installed_sglang() -> None:
    """The list that is read is of the parsers that there are; SGLang's own test of it is not part of the package."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    source = Path(spec.submodule_search_locations[0], "srt/function_call/function_call_parser.py").read_text()
    enum = source[source.index("ToolCallParserEnum") :]
    names = set(re.findall(r'^ {8}"([^"]+)": ', enum[: enum.index("\n    }")], re.M))
    assert {"qwen25", "deepseekv3", "glm45", "kimi_k2", "pythonic"} <= names
    assert names == set(server_args.parsers())
