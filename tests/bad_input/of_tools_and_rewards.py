"""Modules of tools and rewards that break while they are loaded, or that hold something else than what is wanted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from case import Case

MUTE = "class Odd(Exception):\n    def __str__(self): return 1 / 0\nraise Odd"
HEAD = "from megarl.rollout.tools import Tool\n"


def module(text: str, name: str = "mine") -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / f"{name}.py").write_text(text, encoding="utf-8")

    return write


def tool(name: str, text: str, *says: str, spec: str = "mine:f") -> Case:
    return Case(f"tool: {name}", ("rollout.tools", *says), (f"rollout.tools=[{spec}]",), module(text))


def schema(name: str, described: str, *says: str, function: str = "lambda: '1'") -> Case:
    text = f"{HEAD}f = Tool({described}, {function})"
    return tool(f"schema: {name}", text, "mine:f", *says)


def described(inside: str) -> str:
    return f'{{"type": "function", "function": {{"name": "f", {inside}}}}}'


def reward(name: str, text: str, *says: str, specs: str = "mine:f") -> Case:
    return Case(f"reward: {name}", ("reward.functions", *says), (f"reward.functions=[{specs}]",), module(text))


TAKES_X = described('"parameters": {"properties": {"x": {"type": "number"}}, "required": ["x"]}')
CALCULATOR = "megarl.rollout.tools:calculator"

CASES = [
    tool("raises", "raise RuntimeError('no licence\\nhere')", "cannot import mine", "RuntimeError: no licence here"),
    tool("syntax error", "def f(:\n", "cannot import mine", "SyntaxError"),
    tool("bad indentation", "if True:\npass\n", "cannot import mine", "IndentationError"),
    tool("null byte", "x = '\0'\n", "cannot import mine"),
    tool("imports what is not there", "import nothing_of_that_name", "ModuleNotFoundError", "nothing_of_that_name"),
    tool("imports itself", "from mine import f", "cannot import mine", "ImportError"),
    tool("sys.exit", "import sys; sys.exit(0)", "cannot import mine", "SystemExit"),
    tool("sys.exit with words", "import sys; sys.exit('bye')", "SystemExit: bye"),
    tool("os._exit", "import os; os._exit(0)", "loads mine:f", "exit status 0", "ends the interpreter"),
    tool("os._exit with a status", "import os; os._exit(7)", "loads mine:f", "exit status 7"),
    tool("abort", "import os; os.abort()", "loads mine:f", "exit status 134"),
    tool("kills itself", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "loads mine:f", "exit status 137"),
    tool("KeyboardInterrupt", "raise KeyboardInterrupt", "cannot import mine", "KeyboardInterrupt"),
    tool("BaseException", "class Odd(BaseException): pass\nraise Odd('x')", "cannot import mine", "Odd: x"),
    tool("mute error", MUTE, "cannot import", "Odd"),
    tool("recursion", "def g(): g()\ng()", "cannot import mine", "RecursionError"),
    tool("closes all files", "import os; os.closerange(0, 99)", "mine:f"),
    tool("prints and is a number", "print('{\"tools\": []}'); import os; os.write(1, b'x\\n'); f = 3", "f is a int"),
    tool("leaves a daemon", "import subprocess; subprocess.Popen(['sleep', '99'], start_new_session=True)", "has no f"),
    tool("nothing in it", "", "mine has no f"),
    tool("None", "f = None", "mine has no f"),
    tool("a plain function", "def f(x): return x", "mine:f is a function", "not a megarl.rollout.tools.Tool"),
    tool("the class", "from megarl.rollout.tools import Tool as f", "mine:f is a type"),
    tool("attribute that raises", "def __getattr__(name): raise OSError('far away')", "cannot import", "far away"),
    tool("no colon", "", "'mine' is not of the form module:name", spec="mine"),
    tool("no name", "", "is not of the form module:name", spec='"mine:"'),
    tool("no module", "", "is not of the form module:name", spec='":f"'),
    tool("relative", "", "is not of the form module:name", spec='".mine:f"'),
    tool("a path", "", "cannot import", spec='"some/mine.py:f"'),
    tool("missing module", "", "cannot import no_such_module", spec="no_such_module:f"),
    tool("another name", "", "has no slide_rule", spec="megarl.rollout.tools:slide_rule"),
    tool("twice", "", "both called calculator", spec=f"{CALCULATOR},{CALCULATOR}"),
    tool(
        "two of one name",
        f"{HEAD}from megarl.rollout.tools import calculator\nf = Tool(calculator.schema, lambda expression: '1')",
        "both called calculator",
        spec=f"{CALCULATOR},mine:f",
    ),
    schema("empty", "{}", "type=function"),
    schema("none", "None", "type=function"),
    schema("another type", '{"type": "retrieval"}', "type=function"),
    schema("without function", '{"type": "function"}', "`function` must be a mapping"),
    schema("without name", '{"type": "function", "function": {}}', "its name must be"),
    schema("control tokens", '{"type": "function", "function": {"name": "<|im_end|>"}}', "its name must be"),
    schema("spaces", '{"type": "function", "function": {"name": "my tool"}}', "its name must be"),
    schema("number as description", described('"description": 3'), "`description` must be text"),
    schema("list of parameters", described('"parameters": ["x"]'), "`parameters` must be a mapping"),
    schema("types as text", described('"parameters": {"properties": {"x": "number"}}'), "`properties` must map"),
    schema("required is text", described('"parameters": {"required": "x"}'), "`required` must be a list"),
    schema("required what is not there", described('"parameters": {"required": ["x"]}'), "which is not among"),
    schema("NaN", described('"parameters": {"properties": {"x": {"maximum": float("nan")}}}'), "JSON cannot hold it"),
    schema("a set", described('"parameters": {"properties": {"x": {"enum": {1}}}}'), "JSON cannot hold it"),
    schema("function is text", TAKES_X, "is a str", function="'calculate'"),
    schema("function without the argument", TAKES_X, "cannot be called with the schema's arguments (x)"),
    schema("function wants more", TAKES_X, "missing a required argument: 'y'", function="lambda x, y: '1'"),
    schema("positional only", TAKES_X, "cannot be called", function="lambda x, /: '1'"),
    schema("coroutine", TAKES_X, "is a coroutine", function="__import__('asyncio').sleep"),
    reward("raises", "raise RuntimeError('no licence\\nhere')", "cannot import mine", "RuntimeError: no licence here"),
    reward("syntax error", "def f(rollout) return 1", "cannot import mine", "SyntaxError"),
    reward("imports what is not there", "import nothing_of_that_name", "ModuleNotFoundError"),
    reward("sys.exit", "import sys; sys.exit(0)", "cannot import mine", "SystemExit: 0"),
    reward("sys.exit without a word", "import sys; sys.exit()", "cannot import mine", "SystemExit"),
    reward("BaseException", "class Odd(BaseException): pass\nraise Odd('x')", "cannot import mine", "Odd: x"),
    reward("mute error", MUTE, "cannot import", "Odd"),
    reward("nothing in it", "", "mine has no 'f'", "it has no function"),
    reward("another name", "def g(rollout): return 1", "mine has no 'f'", "it has g"),
    reward("a number", "f = 0.5", "mine:f is a float, not a function"),
    reward("a module", "import json as f", "mine:f is a module, not a function"),
    reward("no argument", "def f(): return 1", "mine:f must take a Rollout and nothing else"),
    reward("two arguments", "def f(rollout, answer): return 1", "missing a required argument: 'answer'"),
    reward("a keyword", "def f(rollout, *, scale): return 1", "missing a required argument: 'scale'"),
    reward("a method", "class C:\n    def f(self, rollout): return 1\nf = C.f", "required argument: 'rollout'"),
    reward("generator", "def f(rollout): yield 1", "is a generator"),
    reward("generator of coroutines", "async def f(rollout): yield 1", "is a generator"),
    reward("a class", "class f:\n    def __init__(self, rollout): pass", "mine:f is a class"),
    reward("twice", "def f(rollout): return 1", "mine:f is listed twice", specs="mine:f,mine:f"),
    reward("twice among others", "", "sum_reward:even is listed twice", specs="sum_reward:even,mine:g,sum_reward:even"),
    reward("no colon", "", "'mine' is not of the form module:name", specs="mine"),
    reward("dots for a colon", "", "is not of the form module:name", specs="sum_reward.even"),
    reward("missing module", "", "cannot import no_such_module", specs="no_such_module:f"),
]
