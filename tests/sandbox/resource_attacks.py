"""Programs that exceed resource limits. Each runs in its own sandbox, since most of them end it."""

from megarl.sandbox.results import Limits

RESOURCE_ATTACKS: dict[str, tuple[str, Limits, tuple[str, ...]]] = {
    "fork bomb": (
        """\
import os
while True:
    try: os.fork()
    except OSError: pass
""",
        Limits(seconds=1.5),
        ("time",),
    ),
    "fork bomb of a shell": (
        """\
import os
os.execlp('bash', 'bash', '-c', ':(){ :|:& };: ; sleep 9')
""",
        Limits(seconds=1.5),
        ("time", "exit", "output"),
    ),
    "thread bomb": (
        """\
import threading, time
n = 0
try:
    while True: threading.Thread(target=time.sleep, args=(9,), daemon=True).start(); n += 1
except RuntimeError: print(n); import os; os._exit(0 if n < 64 else 1)
""",
        Limits(seconds=5),
        ("",),
    ),
    "memory of one process": (
        """\
a = bytearray(1 << 31)
for i in range(0, len(a), 4096): a[i] = 1
""",
        Limits(seconds=8, memory_mb=100),
        ("memory",),
    ),
    "memory of many processes": (
        """\
import os, time
for _ in range(5): os.fork()
a = b'x' * (20 << 20)
time.sleep(9)
""",
        Limits(seconds=8, memory_mb=150, processes=64),
        ("memory",),
    ),
    "address space": ("a = bytearray(1 << 40)", Limits(seconds=5), ("exit",)),
    "memory freed and allocated": (
        """\
while True:
    a = b'x' * (1 << 28)
    del a
""",
        Limits(seconds=8, memory_mb=100),
        ("memory",),
    ),
    "files that fill the disk": (
        """\
try:
    for i in range(99):
        with open(f'f{i}', 'wb') as f: f.write(b'x' * (1 << 20))
except OSError as e: print(e.errno); raise SystemExit(0)
raise SystemExit(9)
""",
        Limits(seconds=5, disk_mb=8),
        ("",),
    ),
    "one large file": (
        """\
f = open('f', 'wb')
while True: f.write(b'x' * (1 << 20)); f.flush()
""",
        Limits(seconds=5, disk_mb=8),
        ("exit", "signal"),
    ),
    "files in /dev/shm": (
        """\
try:
    for i in range(99):
        with open(f'/dev/shm/f{i}', 'wb') as f: f.write(b'x' * (1 << 20))
except OSError as e: print(e.errno); raise SystemExit(0)
raise SystemExit(9)
""",
        Limits(seconds=5, disk_mb=8),
        ("",),
    ),
    "inodes": (
        """\
import os
try:
    for i in range(99999): os.close(os.open(f'i{i}', os.O_CREAT))
except OSError as e: print(i); raise SystemExit(0 if i < 300 else 9)
raise SystemExit(9)
""",
        Limits(seconds=5, files=256),
        ("",),
    ),
    "stdout": (
        """\
import os
while True: os.write(1, b'x' * 65536)
""",
        Limits(seconds=5),
        ("output",),
    ),
    "stderr": (
        """\
import os
while True: os.write(2, b'x' * 65536)
""",
        Limits(seconds=5),
        ("output",),
    ),
    "endless loop": ("while True: pass", Limits(seconds=1), ("time",)),
    "sleep": (
        """\
import time
time.sleep(99)
""",
        Limits(seconds=1),
        ("time",),
    ),
    "wait for input": (
        """\
import signal
signal.pause()
""",
        Limits(seconds=1),
        ("time",),
    ),
    "open files": (
        """\
import os
n = 3
try:
    while True: n = os.open('/usr', 0)
except OSError: raise SystemExit(n > 63)
""",
        Limits(seconds=5, open_files=64),
        ("",),
    ),
    "huge integer": ("print(len(str(10 ** 10 ** 9)))", Limits(seconds=1.5), ("time", "memory", "exit")),
    "regular expression": (
        """\
import re
re.match('(a+)+$', 'a' * 40 + 'b')
""",
        Limits(seconds=1),
        ("time",),
    ),
    "zip bomb": (
        """\
import zlib, io, zipfile
b = io.BytesIO()
z = zipfile.ZipFile(b, 'w', 8)
z.writestr('a', bytes(1 << 26))
z.close()
a = zipfile.ZipFile(b).read('a') * 99
""",
        Limits(seconds=8, memory_mb=128),
        ("memory", "exit"),
    ),
    "kill all": (
        """\
import os, signal
os.kill(-1, 9)
""",
        Limits(seconds=2),
        ("", "signal", "exit"),
    ),
    "kill the parent": (
        """\
import os, signal
os.kill(os.getppid(), 9)
print('alive')
""",
        Limits(seconds=2),
        ("",),
    ),
    "daemon": (
        """\
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(99)
        open('/tmp/late', 'w')
    os._exit(0)
""",
        Limits(seconds=5),
        ("",),
    ),
    "ignored signals": (
        """\
import signal, time
for n in range(1, 32):
    try: signal.signal(n, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: time.sleep(1)
""",
        Limits(seconds=1),
        ("time",),
    ),
    "stopped": (
        """\
import os, signal
os.kill(os.getpid(), signal.SIGSTOP)
""",
        Limits(seconds=1),
        ("time",),
    ),
    "stopped with children": (
        """\
import os, signal
for _ in range(3): os.fork()
os.kill(os.getpid(), signal.SIGSTOP)
""",
        Limits(seconds=1),
        ("time",),
    ),
    "cpu time of many processes": (
        """\
import os, time
for _ in range(5): os.fork()
while True: pass
""",
        Limits(seconds=1, processes=40),
        ("time",),
    ),
    "closed standard files": (
        """\
import os, time
os.closerange(0, 99)
time.sleep(99)
""",
        Limits(seconds=1),
        ("time",),
    ),
    "socket buffers": (
        """\
import socket
pairs = []
try:
    while True:
        a, b = socket.socketpair()
        a.setblocking(False)
        pairs += [a, b]
        try:
            while True: a.send(b'x' * 4096)
        except BlockingIOError: pass
except OSError: pass
import time; time.sleep(0.5); print(len(pairs))
""",
        Limits(seconds=5, memory_mb=64, open_files=1024),
        ("", "memory"),
    ),
    "deep folders": (
        """\
import os
try:
    while True: os.mkdir('d'); os.chdir('d')
except OSError: pass
""",
        Limits(seconds=5, files=2000),
        ("",),
    ),
    "crash": (
        """\
import ctypes
ctypes.string_at(0)
""",
        Limits(seconds=5),
        ("signal",),
    ),
    "queued signals": (
        """\
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {40})
import ctypes
libc = ctypes.CDLL(None)
n = 0
while n < 99999 and libc.sigqueue(os.getpid(), 40, None) == 0: n += 1
print(n)
raise SystemExit(n > 2000)
""",
        Limits(seconds=5),
        ("",),
    ),
}
"""Source, limits and accepted reasons for the end of each program; "" means that it exits with status 0."""
