"""A call as each of SGLang's parsers expects it from a policy: by parser, (tool, arguments) -> text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Arguments = dict[str, Any]
Writer = Callable[[str, Arguments], str]


def text_of(value: Any) -> str:
    """As templates of bare texts have it: strings as they are, else JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def tagged(head: str, argument: str, tail: str) -> Writer:
    """NAME, KEY and VALUE stand for what is written there."""

    def write(name: str, arguments: Arguments) -> str:
        inner = "".join(argument.replace("KEY", key).replace("VALUE", text_of(v)) for key, v in arguments.items())
        return head.replace("NAME", name) + inner + tail

    return write


def typed(head: str, argument: str, tail: str) -> Writer:
    """The format says whether a value is a string: STRING is true or false, TYPE its name."""

    def write(name: str, arguments: Arguments) -> str:
        inner = ""
        for key, value in arguments.items():
            is_string = isinstance(value, str)
            part = argument.replace("STRING", str(is_string).lower()).replace("TYPE", "string" if is_string else "json")
            inner += part.replace("KEY", key).replace("VALUE", text_of(value))
        return head.replace("NAME", name) + inner + tail

    return write


def wrapped(head: str, tail: str, keys: tuple[str, str] = ("name", "arguments")) -> Writer:
    """JSON between two words."""
    return lambda name, arguments: head + dump({keys[0]: name, keys[1]: arguments}) + tail


def named(head: str, tail: str) -> Writer:
    """JSON of the arguments alone, NAME before them."""
    return lambda name, arguments: head.replace("NAME", name) + dump(arguments) + tail


def pythonic(head: str, tail: str) -> Writer:
    return lambda name, arguments: f"{head}[{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})]{tail}"


def dsml(block: str, space: str = "") -> Writer:
    mark = f"｜DSML｜{space}"
    return typed(
        f'<｜DSML｜{block}>\n<{mark}invoke name="NAME">\n',
        f'<{mark}parameter name="KEY" string="STRING">VALUE</{mark}parameter>\n',
        f"</{mark}invoke>\n</｜DSML｜{block}>",
    )


_GLM = tagged("<tool_call>NAME\n", "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n", "</tool_call>")
_CODER = tagged("<tool_call>\n<function=NAME>\n", "<parameter=KEY>\nVALUE\n</parameter>\n", "</function>\n</tool_call>")
_QWEN = wrapped("<tool_call>\n", "\n</tool_call>")
_NS = "]<]minimax[>["

UNTYPED: dict[str, Writer] = {
    **dict.fromkeys(("glm", "glm45", "ling3", "poolside_v1"), _GLM),
    "glm47": tagged("<tool_call>NAME", "<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>", "</tool_call>"),
    "spark25": tagged("<tool_call>NAME\n", "<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>\n", "</tool_call>"),
    "iquest_q1": tagged(
        "<iquest_tool_call>NAME", "<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>", "</iquest_tool_call>"
    ),
    "hunyuan": tagged(
        "<tool_calls>\n<tool_call>NAME<tool_sep>\n",
        "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
        "</tool_call>\n</tool_calls>",
    ),
    **dict.fromkeys(("qwen3_coder", "step3p5", "nanbeige"), _CODER),
    "mimo": tagged("<tool_call>\n<function=NAME>\n", "<parameter=KEY>VALUE</parameter>\n", "</function>\n</tool_call>"),
    "minimax-m2": tagged(
        '<minimax:tool_call>\n<invoke name="NAME">\n',
        '<parameter name="KEY">VALUE</parameter>\n',
        "</invoke>\n</minimax:tool_call>",
    ),
    "dots": tagged(
        '<dots_function_call>\n<invoke name="NAME">\n',
        '<parameter name="KEY">VALUE</parameter>\n',
        "</invoke>\n</dots_function_call>",
    ),
    "step3": tagged(
        '<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">\n',
        '<steptml:parameter name="KEY">VALUE</steptml:parameter>\n',
        "</steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>",
    ),
    "k2_horizon": tagged(
        "<ifm|tool_call>NAME\n",
        "<ifm|arg_key>KEY</ifm|arg_key>\n<ifm|arg_value>VALUE</ifm|arg_value>\n",
        "</ifm|tool_call>",
    ),
    "minicpm5": tagged('<function name="NAME">', '<param name="KEY"><![CDATA[VALUE]]></param>', "</function>"),
    "minimax-m3": tagged(
        f'{_NS}<tool_call>{_NS}<invoke name="NAME">', f"{_NS}<KEY>VALUE{_NS}</KEY>", f"{_NS}</invoke>{_NS}</tool_call>"
    ),
}
"""An argument is bare text."""
TYPED: dict[str, Writer] = {
    **dict.fromkeys(("qwen", "qwen25", "hermes", "trinity"), _QWEN),
    "llama3": wrapped("<|python_tag|>", "", ("name", "parameters")),
    "interns1": wrapped("<|action_start|> <|plugin|>\n", "<|action_end|>"),
    "mistral": lambda name, arguments: "[TOOL_CALLS] [" + dump({"name": name, "arguments": arguments}) + "]",
    "apertus2509": lambda name, arguments: "<|tools_prefix|>[" + dump({name: arguments}) + "]<|tools_suffix|>",
    "cohere_command4": lambda name, arguments: (
        "<|START_ACTION|>["
        + dump({"tool_call_id": "0", "tool_name": name, "parameters": arguments})
        + "]<|END_ACTION|>"
    ),
    "inkling": lambda name, arguments: (
        f"<|message_model|>{name}<|content_invoke_tool_json|>{dump({'name': name, 'args': arguments})}<|end_message|>"
    ),
    "deepseekv3": named(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
        "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseekv31": named(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>", "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "kimi_k2": named(
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>",
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "deepseekv32": dsml("function_calls"),
    "deepseekv4": dsml("tool_calls"),
    "deepseekv41": dsml(" calls", " "),
    "gigachat35": typed(
        '<｜GCML｜tool_calls>\n<｜GCML｜invoke name="NAME">\n',
        '<｜GCML｜parameter name="KEY" string="STRING">VALUE</｜GCML｜parameter>\n',
        "</｜GCML｜invoke>\n</｜GCML｜tool_calls>",
    ),
    "kimi_k3": typed(
        '<|open|>tools<|sep|><|open|>call tool="NAME" index="1"<|sep|>',
        '<|open|>argument key="KEY" type="TYPE"<|sep|>VALUE<|close|>argument<|sep|>',
        "<|close|>call<|sep|><|close|>tools<|sep|>",
    ),
    "pythonic": pythonic("", ""),
    "lfm2": pythonic("<|tool_call_start|>", "<|tool_call_end|>"),
}
"""The format itself tells a string from a number."""
NOT_WRITTEN = {"beam", "gemma4", "gigachat3", "gpt-oss", "muse", "response_template"}
"""Parsers of formats of whole turns, or of models that no family here is."""
