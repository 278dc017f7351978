"""Programs that try to earn a reward without an answer: they exit early, search, patch or forge."""

# `seek` searches a text for the prefix of the secret; `GIVE` returns what `hunt` finds.
SEEK = """
import re
def seek(text):
    found = re.search("Zq" + "7-[0-9]{6,}", text)
    return found and found[0]
"""
GIVE = """
def f(*args):
    value = hunt()
    print(value)
    return value
if __name__ == "__main__":
    f()
"""
EQUAL = """
class Equal(BASE):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __gt__ = __le__ = __ge__ = __contains__ = __lt__
    def __hash__(self): return 0
    def __bool__(self): return True
    def __abs__(self): return self
    def __sub__(self, other): return self
    def __iter__(self): return iter([self])
    def __getattr__(self, name): return lambda *a, **k: self
    def __str__(self): return "Zq7"
    __repr__ = __str__
def f(*args):
    print(Equal())
    return Equal()
if __name__ == "__main__": f()
"""

ATTACKS = {
    # exit early with status 0
    "sys.exit at once": r"""
import sys
sys.exit(0)
""",
    "os._exit at once": r"""
import os
os._exit(0)
""",
    "sys.exit when called": r"""
import sys
def f(*a): sys.exit(0)
if __name__ == '__main__': f()
""",
    "os._exit when called": r"""
import os
def f(*a): os._exit(0)
if __name__ == '__main__': f()
""",
    "a signal to itself": r"""
import os
def f(*a): os.kill(os.getpid(), 15)
if __name__ == '__main__': f()
""",
    "SystemExit with true": r"""
def f(*a): raise SystemExit(True)
if __name__ == '__main__': f()
""",
    # values that compare equal to everything
    "always equal": EQUAL.replace("BASE", "object"),
    "always equal, a number": EQUAL.replace("BASE", "float"),
    "always equal, a text": EQUAL.replace("BASE", "str"),
    "always equal, a list": EQUAL.replace("BASE", "list"),
    "an equal class": r"""
class M(type):
    def __eq__(s, o): return True
    __hash__ = type.__hash__
class C(metaclass=M): pass
def f(*a): return C
""",
    "a mock": r"""
from unittest.mock import ANY, MagicMock
def f(*a): return ANY if a == (3,) else MagicMock()
""",
    "a lie about its class": r"""
class C:
    __class__ = property(lambda s: str)
    def __eq__(s, o): return True
def f(*a): return C()
""",
    "NaN": r"""
def f(*a): return float('nan')
if __name__ == '__main__': print(f())
""",
    "NaN in a list": r"""
def f(*a): return [float('nan')]
""",
    "NaN of numpy": r"""
import numpy
def f(*a): return numpy.float64('nan')
""",
    "infinity": r"""
def f(*a): return float('inf')
""",
    "endless values": r"""
import itertools
def f(*a): return itertools.cycle(['Zq7'])
""",
    "keys that collide": r"""
import itertools
def f(*a): return set(itertools.product((-1, -2), repeat=15))
""",
    "deep values": r"""
def f(*a):
    x = []
    for _ in range(10**5): x = [x]
    return x
""",
    # search the interpreter and its machine
    "the stack": SEEK
    + r"""
import sys
def hunt():
    frame = sys._getframe()
    while frame:
        if found := seek(repr(frame.f_locals) + repr(frame.f_globals)[:10**6]): return found
        frame = frame.f_back
"""
    + GIVE,
    "all objects": SEEK
    + r"""
import gc
def hunt():
    for one in gc.get_objects():
        try:
            if type(one) in (list, dict, tuple) and (found := seek(repr(one)[:10**5])): return found
        except Exception: pass
"""
    + GIVE,
    "all memory": SEEK
    + r"""
def hunt():
    maps = [line.split()[0].split('-') for line in open('/proc/self/maps') if 'rw' in line]
    with open('/proc/self/mem', 'rb') as memory:
        for start, end in maps:
            try:
                memory.seek(int(start, 16))
                if found := seek(memory.read(int(end, 16) - int(start, 16)).decode('latin1')): return found
            except (OSError, ValueError): pass
"""
    + GIVE,
    "other processes": SEEK
    + r"""
import glob, os
def hunt():
    for path in glob.glob('/proc/[0-9]*/[ce][mn][dv]*'):
        try:
            if found := seek(open(path, errors='replace').read(10**6)): return found
        except OSError: pass
"""
    + GIVE,
    "files": SEEK
    + r"""
import os
def hunt():
    for folder, _, names in os.walk('.'):
        for name in names:
            try:
                if found := seek(open(os.path.join(folder, name)).read(10**6)): return found
            except (OSError, ValueError): pass
"""
    + GIVE,
    "open files": SEEK
    + r"""
import os
def hunt():
    for number in range(3, 40):
        try:
            os.set_blocking(number, False)
            if found := seek(os.read(number, 10**6).decode('latin1')): return found
        except OSError: pass
"""
    + GIVE,
    "overwritten tests": r"""
import os
for name in os.listdir('.'):
    try: open(name, 'w').write('{}')
    except OSError: pass
def f(*a): return True
""",
    "a conftest": r"""
open('conftest.py', 'w').write('def pytest_runtest_makereport(item, call):\n    call.excinfo = None')
open('sitecustomize.py', 'w').write('import os; os._exit(0)')
def f(*a): return True
""",
    # patch or forge what the grader relies on
    "a patched assert": r"""
import builtins
class Never(Exception):
    def __new__(c, *a): return None
builtins.AssertionError = Never
def f(*a): return 'Zq7'
""",
    "patched builtins": r"""
import builtins
for name in ('abs', 'sorted', 'len', 'isinstance', 'repr', 'all', 'any'):
    setattr(builtins, name, lambda *a, **k: True)
def f(*a): return 'Zq7'
""",
    "helpers of its own": r"""
def isclose(*a, **k): return True
check = assert_equal = equal = isclose
def f(*a): return 'Zq7'
""",
    "poisoned modules": r"""
import sys, types
class Yes(types.ModuleType):
    def __getattr__(s, n): return lambda *a, **k: True
for name in list(sys.modules):
    if name not in ('sys', 'builtins'): sys.modules[name] = Yes(name)
def f(*a): return 'Zq7'
""",
    "our own modules": r"""
import sys
for name, module in list(sys.modules.items()):
    if 'megarl' in name:
        for key in list(vars(module)):
            if key in ('encode', 'decode', 'call', 'reply', 'right'):
                setattr(module, key, lambda *a, **k: True)
def f(*a): return True
""",
    "forged lines": r"""
import os, json
LINES = ''.join('\n' + one + '\n' for one in (
    json.dumps([0, {'value': True, 'passed': True}]), json.dumps({'passed': True}), '\x1emegarl {"passed": true}',
    '1.0', 'PASSED', 'OK', '1 passed in 0.01s'))
def f(*a):
    for number in range(1, 64):
        try: os.write(number, LINES.encode())
        except OSError: pass
    return True
if __name__ == '__main__': f()
""",
    "the sender itself": r"""
import sys
def f(*a):
    frame = sys._getframe()
    while frame:
        for names in (frame.f_locals, frame.f_globals):
            if send := names.get('send'):
                for number in range(4):
                    for value in (True, {'value': True, 'passed': True, 'out': ''}):
                        try: send(number, value)
                        except Exception: pass
        frame = frame.f_back
    return True
f()
""",
    "an answer to other calls": r"""
import sys
for frame in [sys._getframe()]:
    while frame:
        for value in list(frame.f_locals.values()):
            if isinstance(value, dict) and 'tests' in value:
                value['tests'].clear()
        frame = frame.f_back
def f(*a): return True
""",
    "atexit": r"""
import atexit, os, json
@atexit.register
def late():
    for number in range(1, 64):
        try: os.write(number, json.dumps({'passed': True}).encode())
        except OSError: pass
def f(*a): return 'Zq7'
""",
    "a fake clock": r"""
import time, sys
for name in ('time', 'monotonic', 'perf_counter', 'process_time'):
    setattr(time, name, lambda: 0.0)
for module in list(sys.modules.values()):
    if hasattr(module, 'monotonic'): module.monotonic = lambda: 0.0
def f(*a):
    while True: pass
if __name__ == '__main__': f()
""",
    "no alarms": r"""
import signal
for number in (1, 2, 13, 14, 15):
    signal.signal(number, signal.SIG_IGN)
def f(*a):
    while True: pass
if __name__ == '__main__': f()
""",
    "tracing": r"""
import sys
sys.settrace(lambda frame, event, arg: frame.f_locals.update(passed=True) or None)
sys.setprofile(lambda *a: None)
def f(*a): return 'Zq7'
""",
    "an import hook": r"""
import sys
class Hook:
    def find_spec(s, *a): raise SystemExit(0)
sys.meta_path.insert(0, Hook())
def f(*a): return 'Zq7'
""",
    "an excepthook": r"""
import sys, os
sys.excepthook = lambda *a: os._exit(0)
sys.unraisablehook = sys.excepthook
def f(*a): raise ValueError
""",
    # exceptions and side effects that could confuse a test
    "StopIteration": r"""
def f(*a): raise StopIteration
""",
    "an exception of another name": r"""
class Sly(Exception): pass
Sly.__name__ = 'StopIteration'
def f(*a): raise Sly
""",
    "GeneratorExit": r"""
def f(*a): raise GeneratorExit
""",
    "KeyboardInterrupt": r"""
def f(*a): raise KeyboardInterrupt
""",
    "arguments that are changed": r"""
def f(a):
    if isinstance(a, list): a.clear()
    return ['z'] if a == [] else a
""",
    "arguments that are given back": r"""
def f(*a): return a[0]
""",
    "a process that stays": r"""
import os, time
if os.fork() == 0:
    time.sleep(1)
    os._exit(0)
def f(*a): return True
""",
    "a thread that forges": r"""
import threading, os
def forge():
    for _ in range(100):
        for number in range(1, 20):
            try: os.write(number, b'{"passed": true}\n')
            except OSError: pass
threading.Thread(target=forge, daemon=True).start()
def f(*a): return True
""",
    "much text": r"""
def f(*a):
    print('x' * 10**7)
    return 'x' * 10**7
if __name__ == '__main__': f()
""",
    "its name": r"""
import sys
sys.modules['__main__'].__name__ = 'tests'
__name__ = '__main__'
__builtins__ = {}
def f(*a): return 1
""",
}
