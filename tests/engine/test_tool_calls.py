import json
from typing import Any

import pytest

from megarl.config import ConfigError
from megarl.config.server_args import tool_call_parsers
from megarl.engine.tool_calls import ParsedResponse, ToolCall, escape_text, parser_name
from megarl.engine.tool_calls import build_response as judge_guarded
from megarl.models.registry import FAMILIES

pytestmark = pytest.mark.alone

MARKER = "<tool_call>"


def judge(text: str, marker: str, answer: Any) -> ParsedResponse:
    return judge_guarded(text, [], escape_text(text, [], "hermes", marker), answer)


def found(*calls: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"tool_index": 0, "name": name, "parameters": json.dumps(arguments)} for name, arguments in calls]


def test_calls_and_the_text_around_them() -> None:
    reply = judge(f"so: {MARKER}...", MARKER, ("so:", found(("f", {"x": 1}))))
    assert reply.calls == (ToolCall("f", {"x": 1}),) and reply.text == "so:" and not reply.error


def test_text_without_a_call() -> None:
    reply = judge("the answer is 3", MARKER, ("the answer is 3", []))
    assert not reply.calls and not reply.error and reply.text == "the answer is 3"


@pytest.mark.parametrize("answer", [None, ("", []), ("", [{"name": "f", "parameters": "{"}])])
def test_a_marked_call_that_was_not_parsed_is_an_error(answer: Any) -> None:
    reply = judge(f"{MARKER}{{oops", MARKER, answer)
    assert "malformed" in reply.error and not reply.calls and reply.text == f"{MARKER}{{oops"


def test_one_broken_call_among_two_is_an_error_beside_the_good_one() -> None:
    reply = judge(f"{MARKER}good{MARKER}bad", MARKER, ("", found(("f", {}))))
    assert len(reply.calls) == 1 and "malformed" in reply.error


def test_one_marker_may_open_several_calls() -> None:
    assert not judge(MARKER, MARKER, ("", found(("f", {}), ("g", {})))).error


def test_a_parser_without_a_marker_trusts_sglang() -> None:
    assert not judge("[f(", "", ("[f(", [])).error


@pytest.mark.parametrize(
    "parameters",
    ["[" * 900 + "]" * 900, "[" * 100_000, '{"x": ' * 200 + "1" + "}" * 200, "1" * 5000],
    ids=["deep", "too deep for JSON", "deep objects", "a long number"],
)
def test_arguments_that_nobody_could_hold_are_malformed(parameters: str) -> None:
    reply = judge(MARKER, MARKER, ("", [{"name": "f", "parameters": parameters}]))
    assert "malformed" in reply.error and not reply.calls


def test_half_a_character_in_a_call_becomes_a_replacement() -> None:
    reply = judge(MARKER, MARKER, ("", [{"name": "f\udc00", "parameters": '{"\\ud83d": ["\\udfff", 1]}'}]))
    assert reply.calls == (ToolCall("f\ufffd", {"\ufffd": ["\ufffd", 1]}),)


def test_every_family_has_a_parser_that_sglang_has() -> None:
    assert {"qwen25", "glm45", "deepseekv3", "llama3", "kimi_k2", "pythonic"} <= set(tool_call_parsers())
    for architecture, family in FAMILIES.items():
        assert parser_name("", {"architectures": [architecture]}) == family.tool_call_parser in tool_call_parsers()
        assert set(family.parsers_by_type.values()) <= set(tool_call_parsers())
    assert parser_name("", {"architectures": ["Glm4MoeForCausalLM"]}) == "glm45"
    assert parser_name("", {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2"}) == "kimi_k2"
    assert parser_name("hermes", {"architectures": ["Qwen2ForCausalLM"]}) == "hermes"


def test_a_parser_that_sglang_does_not_have() -> None:
    with pytest.raises(ConfigError, match="tool_call_parser=qwen26 is not a parser of SGLang; did you mean qwen25"):
        parser_name("qwen26", {"architectures": ["Qwen2ForCausalLM"]})
