"""Parsed responses from the answers of SGLang's tool-call parsers."""

import json
from typing import Any

import pytest

from megarl.config import ConfigError
from megarl.engine.sglang.server_args import tool_call_parsers
from megarl.engine.tool_calls import ParsedResponse, ToolCall, build_response, escape_text, parser_name
from megarl.models.registry import FAMILIES

pytestmark = pytest.mark.alone

MARKER = "<tool_call>"


def build(text: str, marker: str, answer: Any) -> ParsedResponse:
    return build_response(text, [], escape_text(text, [], "hermes", marker), answer)


def make_calls(*calls: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"tool_index": 0, "name": name, "parameters": json.dumps(arguments)} for name, arguments in calls]


def test_calls_and_surrounding_text() -> None:
    response = build(f"so: {MARKER}...", MARKER, ("so:", make_calls(("f", {"x": 1}))))
    assert response.calls == (ToolCall("f", {"x": 1}),) and response.text == "so:" and not response.error


def test_text_without_calls() -> None:
    response = build("the answer is 3", MARKER, ("the answer is 3", []))
    assert not response.calls and not response.error and response.text == "the answer is 3"


@pytest.mark.parametrize("answer", [None, ("", []), ("", [{"name": "f", "parameters": "{"}])])
def test_marker_without_a_parsed_call_is_an_error(answer: Any) -> None:
    response = build(f"{MARKER}{{oops", MARKER, answer)
    assert "malformed" in response.error and not response.calls and response.text == f"{MARKER}{{oops"


def test_broken_call_beside_a_valid_one_keeps_the_valid_one() -> None:
    response = build(f"{MARKER}good{MARKER}bad", MARKER, ("", make_calls(("f", {}))))
    assert len(response.calls) == 1 and "malformed" in response.error


def test_one_marker_may_open_several_calls() -> None:
    assert not build(MARKER, MARKER, ("", make_calls(("f", {}), ("g", {})))).error


def test_parser_without_a_marker_trusts_sglang() -> None:
    assert not build("[f(", "", ("[f(", [])).error


@pytest.mark.parametrize(
    "parameters",
    ["[" * 900 + "]" * 900, "[" * 100_000, '{"x": ' * 200 + "1" + "}" * 200, "1" * 5000],
    ids=["deep", "too deep for JSON", "deep objects", "a long number"],
)
def test_oversized_arguments_are_malformed(parameters: str) -> None:
    response = build(MARKER, MARKER, ("", [{"name": "f", "parameters": parameters}]))
    assert "malformed" in response.error and not response.calls


def test_replaces_lone_surrogates_in_calls() -> None:
    response = build(MARKER, MARKER, ("", [{"name": "f\udc00", "parameters": '{"\\ud83d": ["\\udfff", 1]}'}]))
    assert response.calls == (ToolCall("f\ufffd", {"\ufffd": ["\ufffd", 1]}),)


def test_every_familys_parser_exists_in_sglang() -> None:
    assert {"qwen25", "glm45", "deepseekv3", "llama3", "kimi_k2", "pythonic"} <= set(tool_call_parsers())
    for architecture, family in FAMILIES.items():
        assert parser_name("", {"architectures": [architecture]}) == family.tool_call_parser in tool_call_parsers()
        assert set(family.parsers_by_type.values()) <= set(tool_call_parsers())
    assert parser_name("", {"architectures": ["Glm4MoeForCausalLM"]}) == "glm45"
    assert parser_name("", {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2"}) == "kimi_k2"
    assert parser_name("hermes", {"architectures": ["Qwen2ForCausalLM"]}) == "hermes"


def test_unknown_parser_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="tool_call_parser=qwen26 is not a parser of SGLang; did you mean qwen25"):
        parser_name("qwen26", {"architectures": ["Qwen2ForCausalLM"]})
