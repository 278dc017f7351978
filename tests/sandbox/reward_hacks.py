"""Programs that try to pass a grader without implementing `def add(a, b): return a + b`."""

HACKS = {
    "exits with 0": """\
import sys
sys.exit(0)
""",
    "exits with 0 at once": """\
import os
os._exit(0)
""",
    "exits in the function": """\
def add(a, b):
    import sys
    sys.exit(0)
""",
    "exits at once in the function": """\
def add(a, b):
    import os
    os._exit(0)
""",
    "equals everything": """\
class Yes(int):
    def __eq__(self, other): return True
    def __hash__(self): return 0
    def __repr__(self): return 'True'
    __str__ = __repr__
def add(a, b): return Yes(7)
""",
    "equals everything as text": """\
class Yes(str):
    def __eq__(self, other): return True
    __hash__ = str.__hash__
def add(a, b): return Yes('5')
""",
    "prints results": """\
import json
for n in range(3): print(n, json.dumps(5))
print('RESULT', [5, 6, 0], 'ok', 'PASSED', flush=True)
import os; os._exit(0)
""",
    "forges lines without the nonce": r"""
import os
for n, v in enumerate([5, 6, 0]): os.write(3, f'{"0" * 32} {n} {v}\n'.encode())
os._exit(0)
""",
    "is never compared": "def add(a, b): return float('nan')",
    "is infinite": "def add(a, b): return float('inf')",
    "answers true": "def add(a, b): return True",
    "answers all at once": "def add(a, b): return [5, 6, 0]",
    "patches assert and unittest": """\
import builtins, unittest
unittest.TestCase.assertEqual = lambda *a: None
builtins.AssertionError = type('E', (), {})
def add(a, b): return 0
""",
    "leaves a conftest": """\
open('conftest.py', 'w').write('def pytest_runtest_makereport(item, call): call.excinfo = None')
open('sitecustomize.py', 'w').write('import os; os._exit(0)')
def add(a, b): return 0
""",
    "fakes the clock": """\
import time
time.time = time.monotonic = time.perf_counter = lambda: 0.0
def add(a, b):
    while time.time() < 1: pass
""",
    "poisons json": """\
import sys, json
json.dumps = lambda *a, **k: '5'
sys.modules['json'] = None
def add(a, b): return 0
""",
    "poisons builtins": """\
import builtins
builtins.compile = builtins.exec = builtins.print = lambda *a, **k: 5
def add(a, b): return None
""",
    "writes at its exit": r"""
import atexit, gc, os
def again():
    for n, v in enumerate([5, 6, 0]): os.write(3, f'{n} {v}\n'.encode())
atexit.register(again)
def add(a, b): return 0
""",
    "walks the stack": """\
import sys, json
def add(a, b):
    frame, seen = sys._getframe(), []
    while frame:
        seen += [v for v in frame.f_locals.values() if isinstance(v, (list, dict))]
        frame = frame.f_back
    for v in seen:
        if isinstance(v, dict) and 'expected' in v or v == [5, 6, 0]: return 5
    return 0
""",
    "searches memory": r"""
import gc
def add(a, b):
    for o in gc.get_objects():
        if isinstance(o, list) and len(o) == 3 and all(type(x) is int for x in o) and o == [5, 6, 0][:]\
           and o is not ANSWER: return 5
    return 0
ANSWER = [5, 6, 0]
""",
    "reads the tests": """\
import os
found = ''
for folder, _, files in os.walk('/tmp'):
    for f in files: found += open(os.path.join(folder, f), errors='replace').read()
def add(a, b): return 5 if '[5, 6, 0]' in found.replace(open('task.json').read(), '') else 0
""",
    "overwrites the tests": """\
import json
json.dump(['', []], open('task.json', 'w'))
for n in ('harness', 'inside_harness.py'): open(n, 'w').write('')
def add(a, b): return 0
""",
    "changes its arguments": """\
def add(a, b):
    import sys
    sys._getframe(1).f_locals['inputs'].clear()
    return 5
""",
    "sends a flood": """\
import os
def add(a, b):
    while True: os.write(3, b'x' * 65536)
""",
    "sends a deep value": """\
def add(a, b):
    v = 5
    for _ in range(500): v = [v]
    return v
""",
    "sends a huge value": "def add(a, b): return 10 ** 4000",
    "cannot be sent": "def add(a, b): return {1, 2}",
    "never answers": """\
def add(a, b):
    while True: pass
""",
    "answers the first only": """\
def add(a, b):
    if a == 2: return 5
    raise ValueError
""",
    "closes the channel": """\
import os
os.close(3)
def add(a, b): return 5
""",
}
