import json
from typing import Any

import pytest

from megarl.rollout.tool_calls import Call, judge

MARKER = "<tool_call>"


def found(*calls: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"tool_index": 0, "name": name, "parameters": json.dumps(arguments)} for name, arguments in calls]


def test_calls_and_the_text_around_them() -> None:
    reply = judge(f"so: {MARKER}...", MARKER, ("so:", found(("f", {"x": 1}))))
    assert reply.calls == (Call("f", {"x": 1}),) and reply.text == "so:" and not reply.error


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
