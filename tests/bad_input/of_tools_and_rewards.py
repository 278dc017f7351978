"""Modules of tools, environments and rewards that fail to load or lack the required interface."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from case import Case

GAME = """
class Own:
    def reset(self, board): pass
    def reward(self): return 1.0
class Other(Own):
    def look(self) -> str:
        'Look around.'
"""
MUTE = "class Odd(Exception):\n    def __str__(self): return 1 / 0\nraise Odd"
HEAD = "from megarl.environments.tools import Tool\n"


def module(text: str, name: str = "mine") -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / f"{name}.py").write_text(text, encoding="utf-8")

    return write


def tool(name: str, text: str, *expected: str, spec: str = "mine:f") -> Case:
    return Case(f"tool: {name}", ("rollout.tools", *expected), (f"rollout.tools=[{spec}]",), module(text))


def schema(name: str, described: str, *expected: str, function: str = "lambda: '1'") -> Case:
    text = f"{HEAD}f = Tool({described}, {function})"
    return tool(f"schema: {name}", text, "mine:f", *expected)


def described(inside: str) -> str:
    return f'{{"type": "function", "function": {{"name": "f", {inside}}}}}'


def environment(name: str, text: str, *expected: str, specs: str = "mine:Own", overrides: tuple[str, ...] = ()) -> Case:
    return Case(f"environment: {name}", expected, (f"rollout.environments=[{specs}]", *overrides), module(text))


def row(name: str, column: str, *expected: str) -> Case:
    """A case with an invalid `column` in the third prompt, for an environment whose reset needs it."""

    def write(folder: Path) -> None:
        module(GAME)(folder)
        file = folder / "train.jsonl"
        lines = [json.loads(line) | {"board": "x"} for line in file.read_text().splitlines()]
        lines[2] = {key: value for key, value in (lines[2] | json.loads(column)).items() if value != "gone"}
        file.write_text("\n".join(map(json.dumps, lines)) + "\n")

    return Case(
        f"environment: {name}", ("prompt train-2", *expected), ("rollout.environments=[mine:Own,mine:Other]",), write
    )


def reward(name: str, text: str, *expected: str, specs: str = "mine:f") -> Case:
    return Case(f"reward: {name}", ("reward.functions", *expected), (f"reward.functions=[{specs}]",), module(text))


TAKES_X = described('"parameters": {"properties": {"x": {"type": "number"}}, "required": ["x"]}')
CALCULATOR = "megarl.environments.ready.calculator:calculator"

CASES = [
    tool("raises", "raise RuntimeError('no licence\\nhere')", "cannot import mine", "RuntimeError: no licence here"),
    tool("syntax error", "def f(:\n", "cannot import mine", "SyntaxError"),
    tool("bad indentation", "if True:\npass\n", "cannot import mine", "IndentationError"),
    tool("null byte", "x = '\0'\n", "cannot import mine"),
    tool("imports a missing module", "import nothing_of_that_name", "ModuleNotFoundError", "nothing_of_that_name"),
    tool("imports itself", "from mine import f", "cannot import mine", "ImportError"),
    tool("sys.exit", "import sys; sys.exit(0)", "cannot import mine", "SystemExit"),
    tool("sys.exit with a message", "import sys; sys.exit('bye')", "SystemExit: bye"),
    tool("os._exit", "import os; os._exit(0)", "loading mine:f", "exit status 0", "ends the interpreter"),
    tool("os._exit with a status", "import os; os._exit(7)", "loading mine:f", "exit status 7"),
    tool("abort", "import os; os.abort()", "loading mine:f", "SIGABRT"),
    tool("kills its process", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "loading mine:f", "SIGKILL"),
    tool("KeyboardInterrupt", "raise KeyboardInterrupt", "cannot import mine", "KeyboardInterrupt"),
    tool("BaseException", "class Odd(BaseException): pass\nraise Odd('x')", "cannot import mine", "Odd: x"),
    tool("exception that cannot be printed", MUTE, "cannot import", "Odd"),
    tool("recursion", "def g(): g()\ng()", "cannot import mine", "RecursionError"),
    tool("closes all files", "import os; os.closerange(0, 99)", "mine:f"),
    tool("prints, then a number", "print('{\"tools\": []}'); import os; os.write(1, b'x\\n'); f = 3", "f is a int"),
    tool("leaves a daemon", "import subprocess; subprocess.Popen(['sleep', '99'], start_new_session=True)", "has no f"),
    tool("empty module", "", "mine has no 'f'", "it has no function"),
    tool("None", "f = None", "mine has no 'f'"),
    tool("a function without a docstring", "def f(x): return x", "mine:f needs a docstring"),
    tool("a function without type hints", "def f(x):\n    'It.'", "the argument x needs a type hint, such as x: str"),
    tool("a coroutine function without type hints", "async def f(x):\n    'It.'", "the argument x needs a type hint"),
    tool(
        "a generator of coroutines", "async def f(x: int):\n    'It.'\n    yield x", "the function of mine:f is a gen"
    ),
    tool("the class Tool", "from megarl.environments.tools import Tool as f", "mine:f is a type"),
    tool("attribute that raises", "def __getattr__(name): raise OSError('far away')", "cannot import", "far away"),
    tool("no colon", "", "'mine' is not of the form module:name", spec="mine"),
    tool("no name", "", "is not of the form module:name", spec='"mine:"'),
    tool("no module", "", "is not of the form module:name", spec='":f"'),
    tool("relative", "", "is not of the form module:name", spec='".mine:f"'),
    tool("a path", "", "cannot import", spec='"some/mine.py:f"'),
    tool("missing module", "", "cannot import no_such_module", spec="no_such_module:f"),
    tool(
        "a name that does not exist", "", "has no 'slide_rule'", spec="megarl.environments.ready.calculator:slide_rule"
    ),
    tool("loaded twice", "", "both called calculator", spec=f"{CALCULATOR},{CALCULATOR}"),
    tool(
        "two with one name",
        f"{HEAD}from megarl.environments.ready.calculator import calculator\n"
        "f = Tool(calculator.schema, lambda expression: '1')",
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
    schema("required as text", described('"parameters": {"required": "x"}'), "`required` must be a list"),
    schema("required names an unknown parameter", described('"parameters": {"required": ["x"]}'), "which is not among"),
    schema("NaN", described('"parameters": {"properties": {"x": {"maximum": float("nan")}}}'), "it is not JSON"),
    schema("a set", described('"parameters": {"properties": {"x": {"enum": {1}}}}'), "it is not JSON"),
    schema("function as text", TAKES_X, "is a str", function="'calculate'"),
    schema("function without the argument", TAKES_X, "cannot be called with the schema's arguments (x)"),
    schema(
        "function with a further argument", TAKES_X, "missing a required argument: 'y'", function="lambda x, y: '1'"
    ),
    schema("positional only", TAKES_X, "cannot be called", function="lambda x, /: '1'"),
    schema("coroutine", TAKES_X, "is a generator", function="lambda x: (yield x)"),
    environment("raises", "raise RuntimeError('no licence')", "rollout.environments: cannot import mine", "no licence"),
    environment(
        "ends its process", "import os; os._exit(3)", "rollout.environments: loading mine:Own", "exit status 3"
    ),
    environment("empty module", "", "rollout.environments: mine has no 'Own'"),
    environment("no colon", "", "rollout.environments: 'mine' is not of the form module:name", specs="mine"),
    environment("a number", "Own = 3", "mine:Own is a int, neither a class nor a coroutine function"),
    environment("a function", "def Own(row): pass", "mine:Own is a function, neither a class nor a coroutine function"),
    environment("an agent", "async def Own(row): pass", "mine:Own must take row, base_url and api_key"),
    environment("empty", "class Own: pass", "mine:Own is not an environment"),
    environment(
        "constructor with an argument",
        "class Own:\n    def __init__(self, x): pass",
        "its constructor must take no arguments",
    ),
    environment(
        "no type hint", "class Own:\n    def f(self, x):\n        'It.'", "mine:Own.f: the argument x needs a type hint"
    ),
    environment("no docstring", "class Own:\n    def f(self, x: int): pass", "mine:Own.f needs a docstring"),
    environment(
        "unsupported type hint",
        "class Own:\n    def f(self, x: bytes):\n        'It.'",
        "mine:Own.f",
        "has the hint bytes",
    ),
    environment("generator", "class Own:\n    def f(self):\n        yield 1", "mine:Own.f is a generator"),
    environment(
        "call without tools", "class Own:\n    def call(self, name, arguments): pass", "a method call but not tools"
    ),
    environment(
        "reward with an unknown argument",
        "class Own:\n    def reward(self, x): pass",
        "mine:Own.reward takes x; available arguments are",
    ),
    environment("timeout", GAME + "Own.timeout = -1", "its `timeout` must be a number of seconds"),
    environment("positional", "class Own:\n    def reset(self, x, /): pass", "mine:Own.reset: the argument x"),
    environment("loaded twice", GAME, "mine:Own and mine:Own are both called Own", specs="mine:Own,mine:Own"),
    environment(
        "named like a tool",
        "class Own:\n    def calculator(self, x: int):\n        'It.'",
        "mine:Own has a tool calculator, and so has rollout.tools, megarl.environments.ready.calculator:calculator",
        overrides=(f"rollout.tools=[{CALCULATOR}]",),
    ),
    environment(
        "no reward",
        "class Own:\n    def reset(self): pass",
        "rollout.environments: mine:Own has no `reward`, and there are no reward.functions",
        overrides=("reward.functions=[]",),
    ),
    environment("an adapter", "", "nowhere.json", specs='"mcp:nowhere.json"'),
    row(
        "an unknown environment",
        '{"environment": "Othre"}',
        "'Othre', is not in rollout.environments; did you mean Other?",
    ),
    row("a number as environment", '{"environment": 3}', "'3', is not in rollout.environments"),
    row(
        "without a column that reset needs", '{"board": "gone"}', "has no column 'board', which reset of mine:Own needs"
    ),
    row(
        "with another's tool",
        '{"tools": ["look"]}',
        "asks for the tool look",
        "and the environment mine:Own does not have",
    ),
    reward("raises", "raise RuntimeError('no licence\\nhere')", "cannot import mine", "RuntimeError: no licence here"),
    reward("syntax error", "def f(rollout) return 1", "cannot import mine", "SyntaxError"),
    reward("imports a missing module", "import nothing_of_that_name", "ModuleNotFoundError"),
    reward("sys.exit", "import sys; sys.exit(0)", "cannot import mine", "SystemExit: 0"),
    reward("sys.exit without a message", "import sys; sys.exit()", "cannot import mine", "SystemExit"),
    reward("BaseException", "class Odd(BaseException): pass\nraise Odd('x')", "cannot import mine", "Odd: x"),
    reward("exception that cannot be printed", MUTE, "cannot import", "Odd"),
    reward("empty module", "", "mine has no 'f'", "it has no function"),
    reward("a name that does not exist", "def g(rollout): return 1", "mine has no 'f'", "it has g"),
    reward("a number", "f = 0.5", "mine:f is a float, not a function"),
    reward("a module", "import json as f", "mine:f is a module, not a function"),
    reward("no argument", "def f(): return 1", "mine:f must take a Rollout and nothing else"),
    reward("two arguments", "def f(rollout, answer): return 1", "missing a required argument: 'answer'"),
    reward("a keyword", "def f(rollout, *, scale): return 1", "missing a required argument: 'scale'"),
    reward("a method", "class C:\n    def f(self, rollout): return 1\nf = C.f", "required argument: 'rollout'"),
    reward("generator", "def f(rollout): yield 1", "is a generator"),
    reward("generator of coroutines", "async def f(rollout): yield 1", "is a generator"),
    reward("a class", "class f:\n    def __init__(self, rollout): pass", "mine:f is a class"),
    reward("loaded twice", "def f(rollout): return 1", "mine:f is listed twice", specs="mine:f,mine:f"),
    reward("twice among others", "", "sum_reward:even is listed twice", specs="sum_reward:even,mine:g,sum_reward:even"),
    reward("no colon", "", "'mine' is not of the form module:name", specs="mine"),
    reward("dots instead of a colon", "", "is not of the form module:name", specs="sum_reward.even"),
    reward("missing module", "", "cannot import no_such_module", specs="no_such_module:f"),
]
