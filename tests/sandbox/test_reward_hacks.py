"""Programs that want a reward for nothing: a grader that has the answers outside, and believes results only, gives none."""

import sys
import time
from pathlib import Path

import pytest

from megarl.sandbox.results import Limits

sys.path.append(str(Path(__file__).parent))
from boxes import Boxes, needs_boxes  # noqa: E402

pytestmark = needs_boxes
INPUTS, ANSWERS = [[2, 3], [10, -4], [0, 0]], [5, 6, 0]
HARNESS = """
import json
program, inputs = json.load(open("task.json"))
names = {"__name__": "solution"}
exec(program, names)
for number, arguments in enumerate(inputs):
    send(number, names["add"](*arguments))
"""
HONEST = "def add(a, b): return a + b"
HACKS = {
    "exits with 0": "import sys\nsys.exit(0)",
    "exits with 0 at once": "import os\nos._exit(0)",
    "exits in the function": "def add(a, b):\n    import sys\n    sys.exit(0)",
    "exits at once in the function": "def add(a, b):\n    import os\n    os._exit(0)",
    "equals everything": (
        "class Yes(int):\n    def __eq__(self, other): return True\n    def __hash__(self): return 0\n"
        "    def __repr__(self): return 'True'\n    __str__ = __repr__\ndef add(a, b): return Yes(7)"
    ),
    "equals everything as text": (
        "class Yes(str):\n    def __eq__(self, other): return True\n    __hash__ = str.__hash__\ndef add(a, b): return Yes('5')"
    ),
    "prints results": "import json\nfor n in range(3): print(n, json.dumps(5))\nprint('RESULT', [5, 6, 0], 'ok', 'PASSED', flush=True)\nimport os; os._exit(0)",
    "forges lines without the nonce": (
        "import os\nfor n, v in enumerate([5, 6, 0]): os.write(3, f'{\"0\" * 32} {n} {v}\\n'.encode())\nos._exit(0)"
    ),
    "is never compared": "def add(a, b): return float('nan')",
    "is infinite": "def add(a, b): return float('inf')",
    "answers true": "def add(a, b): return True",
    "answers all at once": "def add(a, b): return [5, 6, 0]",
    "patches assert and unittest": (
        "import builtins, unittest\nunittest.TestCase.assertEqual = lambda *a: None\nbuiltins.AssertionError = type('E', (), {})\n"
        "def add(a, b): return 0"
    ),
    "leaves a conftest": (
        "open('conftest.py', 'w').write('def pytest_runtest_makereport(item, call): call.excinfo = None')\n"
        "open('sitecustomize.py', 'w').write('import os; os._exit(0)')\ndef add(a, b): return 0"
    ),
    "fakes the clock": "import time\ntime.time = time.monotonic = time.perf_counter = lambda: 0.0\ndef add(a, b):\n    while time.time() < 1: pass",
    "poisons json": "import sys, json\njson.dumps = lambda *a, **k: '5'\nsys.modules['json'] = None\ndef add(a, b): return 0",
    "poisons builtins": "import builtins\nbuiltins.compile = builtins.exec = builtins.print = lambda *a, **k: 5\ndef add(a, b): return None",
    "writes at its exit": (
        "import atexit, gc, os\ndef again():\n    for n, v in enumerate([5, 6, 0]): os.write(3, f'{n} {v}\\n'.encode())\natexit.register(again)\n"
        "def add(a, b): return 0"
    ),
    "walks the stack": (
        "import sys, json\ndef add(a, b):\n    frame, seen = sys._getframe(), []\n    while frame:\n        seen += [v for v in frame.f_locals.values()"
        " if isinstance(v, (list, dict))]\n        frame = frame.f_back\n    for v in seen:\n        if isinstance(v, dict) and 'expected' in v or v == [5, 6, 0]: return 5\n    return 0"
    ),
    "searches memory": (
        "import gc\ndef add(a, b):\n    for o in gc.get_objects():\n        if isinstance(o, list) and len(o) == 3 and all(type(x) is int for x in o) and o == [5, 6, 0][:]\\\n"
        "           and o is not ANSWER: return 5\n    return 0\nANSWER = [5, 6, 0]\n"
    ),
    "reads the tests": (
        "import os\nfound = ''\nfor folder, _, files in os.walk('/tmp'):\n    for f in files: found += open(os.path.join(folder, f), errors='replace').read()\n"
        "def add(a, b): return 5 if '[5, 6, 0]' in found.replace(open('task.json').read(), '') else 0"
    ),
    "overwrites the tests": (
        "import json\njson.dump(['', []], open('task.json', 'w'))\nfor n in ('harness', 'inside_harness.py'): open(n, 'w').write('')\ndef add(a, b): return 0"
    ),
    "changes its arguments": "def add(a, b):\n    import sys\n    sys._getframe(1).f_locals['inputs'].clear()\n    return 5",
    "sends a flood": "import os\ndef add(a, b):\n    while True: os.write(3, b'x' * 65536)",
    "sends a deep value": "def add(a, b):\n    v = 5\n    for _ in range(500): v = [v]\n    return v",
    "sends a huge value": "def add(a, b): return 10 ** 4000",
    "cannot be sent": "def add(a, b): return {1, 2}",
    "never answers": "def add(a, b):\n    while True: pass",
    "answers the first only": "def add(a, b):\n    if a == 2: return 5\n    raise ValueError",
    "closes the channel": "import os\nos.close(3)\ndef add(a, b): return 5",
}
# It can find the nonce, for it runs in the same process; and gains nothing that it did not work out itself.
INSIDER = """
import sys, gc
def nonce():
    for o in gc.get_objects():
        if callable(o) and getattr(o, "__name__", "") == "send": return o.__closure__
    return None
def add(a, b):
    for cell in nonce() or ():
        if isinstance(cell.cell_contents, str):
            import os
            for n, v in enumerate(FORGED): os.write(3, f"{cell.cell_contents} {n} {v}\\n".encode())
    os._exit(0)
"""


def same(given, expected):
    return type(given) is type(expected) and given == expected


def solved(found):
    """How many answers are right, where each test has sent one."""
    if not found.complete:
        return 0
    return sum(same(found.results[number], answer) for number, answer in enumerate(ANSWERS))


@pytest.fixture(scope="module")
def graded():
    import json

    boxes = Boxes(processes=4)
    limits = Limits(seconds=3, output_bytes=1 << 18)
    programs = {"honest": HONEST, **HACKS, "insider": "FORGED = [1, 2, 3]" + INSIDER}
    began = time.monotonic()
    found = boxes.all(
        {
            name: boxes.sandbox.collect(
                HARNESS, 3, {"task.json": json.dumps([program, INPUTS]).encode()}, limits=limits
            )
            for name, program in programs.items()
        }
    )
    assert time.monotonic() - began < 300
    yield found
    boxes.end()


def test_the_honest_program_is_right(graded):
    assert solved(graded["honest"]) == 3 and graded["honest"].run.ok


@pytest.mark.parametrize("name", HACKS)
def test_it_is_not_rewarded(graded, name):
    assert solved(graded[name]) < 3, graded[name]


def test_exit_status_0_says_nothing(graded):
    found = graded["exits at once in the function"]
    assert found.run.ok and found.run.status == 0 and not found.complete and found.results == {}


def test_subclasses_arrive_as_plain_values(graded):
    assert graded["equals everything"].results == {0: 7, 1: 7, 2: 7}
    assert type(graded["equals everything as text"].results[0]) is str


def test_an_insider_can_only_send_what_it_knows(graded):
    assert graded["insider"].results == {0: 1, 1: 2, 2: 3} or graded["insider"].results == {}
    assert solved(graded["insider"]) == 0


def test_what_was_printed_is_no_result(graded):
    assert graded["prints results"].results == {} == graded["forges lines without the nonce"].results
    assert b"PASSED" in graded["prints results"].run.stdout
