"""Attacks on the sandbox. They run one by one in a single sandbox, each in its own process.

Each function returns what it obtained, or a falsy value if the sandbox contained it.
"""

PRELUDE = r"""
import ctypes, errno, os, platform, resource, signal, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
X86 = platform.machine() == "x86_64"


def worked(call, *arguments):
    # Truthy unless a call of the C library was refused; EFAULT and EINVAL do not count as refusals.
    ctypes.set_errno(0)
    result = getattr(libc, call)(*arguments)
    refused = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EAFNOSUPPORT, errno.ESRCH)
    return (result, ctypes.get_errno()) if result != -1 or ctypes.get_errno() not in refused else None


def system_call(x86, arm, *arguments):
    return worked("syscall", x86 if X86 else arm, *arguments)


def readable(path):
    try:
        if os.path.isdir(path):
            return os.listdir(path)
        with open(path, "rb") as file:
            return file.read(64)
    except OSError:
        return None


def writable(path, data="1"):
    try:
        with open(path, "w") as file:
            file.write(data)
    except OSError:
        return None
    return path
"""

ATTACKS = r"""
def reads_users(): return readable("/etc/passwd") or readable("/etc/shadow")
def reads_checkpoints(): return readable(CHECKPOINTS) or readable(os.path.dirname(CHECKPOINTS))
def reads_ssh_keys(): return readable("/root/.ssh") or readable(os.path.expanduser("~/.ssh")) or readable("/home")
def reads_host_files():
    return [p for p in ("/var", "/run", "/work", "/home", "/mnt", "/opt", "/srv", "/sys") if readable(p)]
def sees_the_environment(): return [k for k in os.environ if "SECRET" in k or "MEGARL" in k]

def sees_environments_of_processes():
    found = b"".join(open(f"/proc/{p}/environ", "rb").read() for p in os.listdir("/proc") if p.isdecimal())
    return SECRET.encode() in found or b"MEGARL" in found

def sees_the_arguments_of_bubblewrap():
    cmdline = open("/proc/1/cmdline", "rb").read()
    return b"bind" in cmdline or b"/tmp/megarl" in cmdline

def inherits_files():
    names = {}
    for end in os.listdir("/proc/self/fd"):
        try: names[int(end)] = os.readlink(f"/proc/self/fd/{end}")
        except OSError: pass
    return {n: t for n, t in names.items() if n > 3 and not t.startswith("/proc/") and n not in (out, into)}

def finds_files_of_init():
    # Its standard files are those of this sandbox, and an eventfd of bubblewrap.
    ends = [os.readlink(f"/proc/1/fd/{end}") for end in os.listdir("/proc/1/fd")]
    own = os.readlink("/proc/self/fd/3")
    return [end for end in ends if end.startswith("socket:") and end != own or end.startswith("/")]

def opens_the_root_of_init():
    # The last three are links into /tmp.
    own = "usr bin sbin lib lib32 lib64 etc root packages proc dev tmp app logs tests".split()
    return [n for n in os.listdir("/proc/1/root") if n not in own + PYTHON]

def writes_to_usr(): return writable("/usr/evil") or writable("/usr/bin/python3") or writable(os.__file__)
def writes_to_the_root(): return writable("/evil") or writable("/etc/evil") or writable("/packages/evil")
def writes_to_dev(): return writable("/dev/evil")
def links_into_proc():
    try: os.symlink("/proc/1/root/etc/passwd", "/tmp/passwd")
    except OSError: return None
    return readable("/tmp/passwd")

def connects_to_the_engine():
    try: return socket.create_connection(("127.0.0.1", PORT), 1)
    except OSError: return None
def connects_by_bash():
    return os.system(f"bash -c 'exec 5<>/dev/tcp/127.0.0.1/{PORT}' 2>/dev/null") == 0
def sends_udp():
    try: return socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("8.8.8.8", 53))
    except OSError: return None
def resolves_hostnames():
    try: return socket.gethostbyname("example.com")
    except OSError: return None
def reaches_cloud_metadata():
    try: return socket.create_connection(("169.254.169.254", 80), 1)
    except OSError: return None
def connects_to_an_abstract_socket():
    try:
        end = socket.socket(socket.AF_UNIX)
        return end.connect(ABSTRACT) or "connected"
    except OSError: return None
def opens_other_socket_families():
    # vsock, netlink, packet, alg and raw sockets, also with upper bits set in the argument
    found = [f for f in (2, 10, 16, 17, 38, 40, 1 << 32 | 2) if system_call(41, 198, ctypes.c_ulong(f), 1, 0)]
    return found or system_call(53, 199, 2, 1, 0, (ctypes.c_int * 2)())

def uses_ptrace(): return system_call(101, 117, 16, 1, 0, 0) or system_call(101, 117, 0, 0, 0, 0)
def reads_memory_of_others(): return system_call(310, 270, 1, None, 0, None, 0, 0)
def writes_memory_of_others(): return system_call(311, 271, 1, None, 0, None, 0, 0)
def finds_an_unconfined_init():
    # An attack may write to the memory of init, so init must be confined as tightly.
    with open("/proc/1/status") as file:
        status = dict(line.split(":\t", 1) for line in file.read().splitlines())
    confined = status["Seccomp"] == "2" and status["NoNewPrivs"] == "1"
    return not confined or [k for k, v in status.items() if k.startswith("Cap") and int(v, 16)]
def duplicates_files_of_init(): return system_call(438, 438, 3, 0, 0)
def unshares(): return [f for f in (0x10000000, 0x20000, 0x40000000, 0x20000000, 0x8000000) if worked("unshare", f)]
def clones_a_namespace(): return system_call(56, 220, 0x10000000 | 17, 0, 0, 0, 0)
def clones_by_clone3(): return system_call(435, 435, (ctypes.c_ulong * 11)(0x10000000), 88)
def enters_a_namespace():
    end = os.open("/proc/1/ns/mnt", os.O_RDONLY)
    return worked("setns", end, 0)
def mounts(): return worked("mount", b"none", b"/tmp", b"tmpfs", 0, None) or worked("umount2", b"/tmp", 2)
def remounts(): return worked("mount", b"none", b"/usr", None, 32 | 4096, None)
def uses_new_mount_calls(): return [n for n in (428, 429, 430, 431, 432, 433, 442) if system_call(n, n, 0, 0, 0, 0, 0)]
def pivots(): return system_call(155, 41, b"/tmp", b"/tmp") or worked("chroot", b"/tmp")
def loads_bpf(): return system_call(321, 280, 5, None, 0)
def uses_io_uring(): return [n for n in (425, 426, 427) if system_call(n, n, 1, (ctypes.c_char * 200)(), 0)]
def uses_userfaultfd(): return system_call(323, 282, 1)
def uses_perf_events(): return system_call(298, 241, None, 0, -1, -1, 0)
def uses_keys(): return system_call(250, 219, 0, -3, 1) or system_call(248, 217, b"user", b"k", b"v", 1, -2)
def opens_by_handle(): return system_call(304, 265, 3, None, 0)
def loads_modules(): return system_call(175, 105, None, 0, b"") or system_call(313, 273, 0, b"", 0)
def sets_the_clock(): return worked("settimeofday", (ctypes.c_long * 2)(), None)
def sets_the_hostname(): return worked("sethostname", b"evil", 4)
def changes_the_personality(): return worked("personality", 0x0040000)
def reboots(): return system_call(169, 142, 0, 0, 0, 0)
def reads_the_kernel_log(): return worked("klogctl", 3, ctypes.create_string_buffer(64), 64) or readable("/dev/kmsg")
def writes_core_pattern(): return writable("/proc/sys/kernel/core_pattern", "|/tmp/x")
def writes_sysctls(): return writable("/proc/sys/kernel/hostname") or writable("/proc/sys/vm/overcommit_memory")
def triggers_sysrq(): return writable("/proc/sysrq-trigger", "h")
def raises_the_namespace_limit(): return writable("/proc/sys/user/max_user_namespaces", "100")
def injects_terminal_input():
    import fcntl
    found = []
    for request in (0x5412, 0x541C, 1 << 32 | 0x5412):
        if system_call(16, 29, 0, ctypes.c_ulong(request), ctypes.c_char_p(b"x")):
            found.append(request)
    return found
def takes_the_terminal():
    try: return os.open("/dev/tty", os.O_RDWR)
    except OSError: return None
def opens_a_pseudo_terminal():
    try: return os.openpty()
    except OSError: return None
def raises_limits():
    found = []
    for name in ("AS", "NPROC", "CPU", "FSIZE", "NOFILE", "CORE"):
        kind = getattr(resource, f"RLIMIT_{name}")
        if name == "NPROC" and resource.getrlimit(kind)[1] == -1: continue  # the watchdog counts processes instead
        try:
            resource.setrlimit(kind, (resource.RLIM_INFINITY,) * 2)
            found.append(name)
        except (OSError, ValueError): pass
    return found
def becomes_root():
    found = []
    for call in (os.setuid, os.setgid, lambda i: os.setgroups([i])):
        try: found.append(call(0))
        except OSError: pass
    return found
def runs_setuid_programs():
    import subprocess
    for path in ("/usr/bin/su", "/usr/bin/mount", "/usr/bin/passwd", "/usr/bin/newgrp"):
        if os.path.exists(path):
            done = subprocess.run([path, "-c", "id -u"], capture_output=True, stdin=subprocess.DEVNULL)
            if done.returncode == 0 or b"uid=0" in done.stdout: return path
def makes_a_device():
    try: return os.mknod("/tmp/disk", 0o660 | 0o060000, os.makedev(254, 0)) or "made"
    except OSError: return None
def makes_a_setuid_file():
    # The file may exist, but the file system is mounted with nosuid.
    open("/tmp/s", "w").close(); os.chmod("/tmp/s", 0o4755)
    return not os.statvfs("/tmp").f_flag & os.ST_NOSUID
def raises_priority():
    try: return os.nice(-5)
    except OSError: return None
def runs_in_real_time():
    try: return os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10)) or "set"
    except OSError: return None
def kills_init(): os.kill(1, signal.SIGKILL); time.sleep(0.1); return not os.path.exists("/proc/1")
def stops_init():
    os.kill(1, signal.SIGSTOP)
    time.sleep(0.1)
    return "T" in open("/proc/1/stat").read().rsplit(")")[1][:3]
def sees_other_processes(): return [p for p in os.listdir("/proc") if p.isdecimal() and int(p) > 1000]
def uses_32_bit_system_calls():
    # The filter does not know 32-bit system call numbers: the kernel must kill the caller.
    if not X86: return None
    pid = os.fork()
    if pid == 0:
        code = bytes([0xB8, 20, 0, 0, 0, 0xCD, 0x80, 0xC3])  # getpid by int 0x80
        page = libc.mmap(None, 4096, 7, 0x22, -1, 0)
        ctypes.memmove(page, code, len(code))
        ctypes.CFUNCTYPE(ctypes.c_int)(page)()
        os._exit(42)
    return os.waitpid(pid, 0)[1] == 42 << 8
def uses_x32_system_calls(): return X86 and worked("syscall", 0x40000000 | 39)
def uses_unknown_system_calls(): return [n for n in range(451, 500) if worked("syscall", n, 0, 0, 0, 0, 0, 0)]

# Memory that no process is charged for.
def shares_anonymous_memory():
    page = libc.mmap(None, 1 << 20, 3, 0x21, -1, 0)
    return page not in (None, ctypes.c_void_p(-1).value)
def opens_dev_zero():
    try: end = os.open("/dev/zero", os.O_RDWR)
    except OSError: return None
    return "opened"
def makes_memory_files(): return system_call(319, 279, b"m", 0) or system_call(447, 447, 0)
def makes_shared_segments(): return system_call(29, 194, 0, 1 << 20, 0o1600)
def makes_queues(): return system_call(68, 186, 0, 0o1600) or worked("mq_open", b"/q", 66, 0o600, None)
def makes_semaphores(): return system_call(64, 190, 0, 4, 0o1600)
def splices_pages(): return system_call(278, 75, 1, None, 0, 8)
def enlarges_pipes():
    import fcntl
    try: return fcntl.fcntl(os.pipe()[0], 1031, 1 << 20)
    except OSError: return None
def enlarges_sockets():
    a, b = socket.socketpair()
    found = []
    for option in (7, 8, 32, 33):
        try: found.append(a.setsockopt(1, option, 1 << 24))
        except OSError: pass
    return found
def uses_asynchronous_io(): return system_call(206, 0, 1024, (ctypes.c_ulong * 1)())
def dumps_core(): return resource.getrlimit(resource.RLIMIT_CORE)[1]
"""

RUN_ATTACKS = r"""
began = int(open("/proc/1/stat").read().rpartition(") ")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
results = {"age": float(open("/proc/uptime").read().split()[0]) - began}
names = [name for name, value in list(globals().items()) if name not in before and callable(value)]
for name in names:
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            got = globals()[name]()
        except BaseException as error:
            got = f"raised {error!r}"
        os.write(into, repr(got)[:500].encode() if got else b"-")
        os._exit(0)
    os.close(into)
    output = os.read(out, 1000).decode()
    os.close(out)
    os.waitpid(pid, 0)
    results[name] = output
send(0, results)
"""
