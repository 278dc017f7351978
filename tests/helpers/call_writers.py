"""Writers of tool calls in the format of each SGLang parser: (tool, arguments) -> text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Arguments = dict[str, Any]
Writer = Callable[[str, Arguments], str]


def render_value(value: Any) -> str:
    """Return strings unchanged and other values as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def tagged_format(prefix: str, argument: str, suffix: str) -> Writer:
    """Return a writer that replaces NAME, KEY and VALUE in the patterns."""

    def write(name: str, arguments: Arguments) -> str:
        body = "".join(argument.replace("KEY", key).replace("VALUE", render_value(v)) for key, v in arguments.items())
        return prefix.replace("NAME", name) + body + suffix

    return write


def typed_format(prefix: str, argument: str, suffix: str) -> Writer:
    """Return a writer of a format that marks strings: STRING becomes true or false, TYPE the name of the type."""

    def write(name: str, arguments: Arguments) -> str:
        body = ""
        for key, value in arguments.items():
            is_string = isinstance(value, str)
            part = argument.replace("STRING", str(is_string).lower()).replace("TYPE", "string" if is_string else "json")
            body += part.replace("KEY", key).replace("VALUE", render_value(value))
        return prefix.replace("NAME", name) + body + suffix

    return write


def wrapped_json(prefix: str, suffix: str, keys: tuple[str, str] = ("name", "arguments")) -> Writer:
    """Return a writer of JSON between two markers."""
    return lambda name, arguments: prefix + to_json({keys[0]: name, keys[1]: arguments}) + suffix


def named_json(prefix: str, suffix: str) -> Writer:
    """Return a writer of the arguments as JSON after a head with NAME."""
    return lambda name, arguments: prefix.replace("NAME", name) + to_json(arguments) + suffix


def pythonic_format(prefix: str, suffix: str) -> Writer:
    return lambda name, arguments: f"{prefix}[{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})]{suffix}"


def dsml_format(block: str, space: str = "") -> Writer:
    marker = f"｜DSML｜{space}"
    return typed_format(
        f'<｜DSML｜{block}>\n<{marker}invoke name="NAME">\n',
        f'<{marker}parameter name="KEY" string="STRING">VALUE</{marker}parameter>\n',
        f"</{marker}invoke>\n</｜DSML｜{block}>",
    )


_GLM = tagged_format("<tool_call>NAME\n", "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n", "</tool_call>")
_CODER = tagged_format(
    "<tool_call>\n<function=NAME>\n", "<parameter=KEY>\nVALUE\n</parameter>\n", "</function>\n</tool_call>"
)
_QWEN = wrapped_json("<tool_call>\n", "\n</tool_call>")
_NS = "]<]minimax[>["

UNTYPED: dict[str, Writer] = {
    **dict.fromkeys(("glm", "glm45", "ling3", "poolside_v1"), _GLM),
    "glm47": tagged_format("<tool_call>NAME", "<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>", "</tool_call>"),
    "spark25": tagged_format(
        "<tool_call>NAME\n", "<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>\n", "</tool_call>"
    ),
    "iquest_q1": tagged_format(
        "<iquest_tool_call>NAME", "<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>", "</iquest_tool_call>"
    ),
    "hunyuan": tagged_format(
        "<tool_calls>\n<tool_call>NAME<tool_sep>\n",
        "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
        "</tool_call>\n</tool_calls>",
    ),
    **dict.fromkeys(("qwen3_coder", "step3p5", "nanbeige"), _CODER),
    "mimo": tagged_format(
        "<tool_call>\n<function=NAME>\n", "<parameter=KEY>VALUE</parameter>\n", "</function>\n</tool_call>"
    ),
    "minimax-m2": tagged_format(
        '<minimax:tool_call>\n<invoke name="NAME">\n',
        '<parameter name="KEY">VALUE</parameter>\n',
        "</invoke>\n</minimax:tool_call>",
    ),
    "dots": tagged_format(
        '<dots_function_call>\n<invoke name="NAME">\n',
        '<parameter name="KEY">VALUE</parameter>\n',
        "</invoke>\n</dots_function_call>",
    ),
    "step3": tagged_format(
        '<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">\n',
        '<steptml:parameter name="KEY">VALUE</steptml:parameter>\n',
        "</steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>",
    ),
    "k2_horizon": tagged_format(
        "<ifm|tool_call>NAME\n",
        "<ifm|arg_key>KEY</ifm|arg_key>\n<ifm|arg_value>VALUE</ifm|arg_value>\n",
        "</ifm|tool_call>",
    ),
    "minicpm5": tagged_format('<function name="NAME">', '<param name="KEY"><![CDATA[VALUE]]></param>', "</function>"),
    "minimax-m3": tagged_format(
        f'{_NS}<tool_call>{_NS}<invoke name="NAME">', f"{_NS}<KEY>VALUE{_NS}</KEY>", f"{_NS}</invoke>{_NS}</tool_call>"
    ),
}
"""Formats whose arguments are untyped text."""
TYPED: dict[str, Writer] = {
    **dict.fromkeys(("qwen", "qwen25", "hermes", "trinity"), _QWEN),
    "llama3": wrapped_json("<|python_tag|>", "", ("name", "parameters")),
    "interns1": wrapped_json("<|action_start|> <|plugin|>\n", "<|action_end|>"),
    "mistral": lambda name, arguments: "[TOOL_CALLS] [" + to_json({"name": name, "arguments": arguments}) + "]",
    "apertus2509": lambda name, arguments: "<|tools_prefix|>[" + to_json({name: arguments}) + "]<|tools_suffix|>",
    "cohere_command4": lambda name, arguments: (
        "<|START_ACTION|>["
        + to_json({"tool_call_id": "0", "tool_name": name, "parameters": arguments})
        + "]<|END_ACTION|>"
    ),
    "inkling": lambda name, arguments: (
        f"<|message_model|>{name}<|content_invoke_tool_json|>"
        + to_json({"name": name, "args": arguments})
        + "<|end_message|>"
    ),
    "deepseekv3": named_json(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
        "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseekv31": named_json(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>", "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "kimi_k2": named_json(
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>",
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "deepseekv32": dsml_format("function_calls"),
    "deepseekv4": dsml_format("tool_calls"),
    "deepseekv41": dsml_format(" calls", " "),
    "gigachat35": typed_format(
        '<｜GCML｜tool_calls>\n<｜GCML｜invoke name="NAME">\n',
        '<｜GCML｜parameter name="KEY" string="STRING">VALUE</｜GCML｜parameter>\n',
        "</｜GCML｜invoke>\n</｜GCML｜tool_calls>",
    ),
    "kimi_k3": typed_format(
        '<|open|>tools<|sep|><|open|>call tool="NAME" index="1"<|sep|>',
        '<|open|>argument key="KEY" type="TYPE"<|sep|>VALUE<|close|>argument<|sep|>',
        "<|close|>call<|sep|><|close|>tools<|sep|>",
    ),
    "pythonic": pythonic_format("", ""),
    "lfm2": pythonic_format("<|tool_call_start|>", "<|tool_call_end|>"),
}
"""Formats that distinguish strings from numbers."""
WITHOUT_WRITER = {"beam", "gemma4", "gigachat3", "gpt-oss", "muse", "response_template"}
"""Parsers of whole turns, or of models outside the supported families."""
