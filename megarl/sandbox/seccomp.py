"""System calls available to a box: a BPF program for `bwrap --seccomp`, built without libseccomp.

A deny-list on top of what an unprivileged process in its own namespaces may do, so ordinary programs do not notice it.
Calls newer than this list fail as nonexistent.
"""

from __future__ import annotations

import errno
import re
import struct
from collections.abc import Sequence

_EPERM, _ENOSYS = errno.EPERM, errno.ENOSYS

# Each call with its number on x86_64, and on aarch64 or - if that lacks it.
_CALLS = """
# namespaces and mounts
unshare 272 97              setns 308 268               mount 165 40                umount2 166 39
pivot_root 155 41           chroot 161 51               open_tree 428 428           move_mount 429 429
fsopen 430 430              fsconfig 431 431            fsmount 432 432             fspick 433 433
mount_setattr 442 442       open_by_handle_at 304 265   name_to_handle_at 303 264
# other processes
ptrace 101 117              process_vm_readv 310 270    process_vm_writev 311 271   process_madvise 440 440
pidfd_getfd 438 438         kcmp 312 272
# calls with a history of exploits
bpf 321 280                 perf_event_open 298 241     userfaultfd 323 282         io_uring_setup 425 425
io_uring_enter 426 426      io_uring_register 427 427   io_setup 206 0              fanotify_init 300 262
add_key 248 217             request_key 249 218         keyctl 250 219
# the machine
kexec_load 246 104          kexec_file_load 320 294     init_module 175 105         finit_module 313 273
delete_module 176 106       reboot 169 142              swapon 167 224              swapoff 168 225
syslog 103 116              acct 163 89                 quotactl 179 60             quotactl_fd 443 443
settimeofday 164 170        clock_settime 227 112       clock_adjtime 305 266       adjtimex 159 171
sethostname 170 161         setdomainname 171 162       vhangup 153 58              personality 135 92
# old calls
lookup_dcookie 212 18       nfsservctl 180 42           iopl 172 -                  ioperm 173 -
modify_ldt 154 -            uselib 134 -                ustat 136 -                 _sysctl 156 -
# memory that no process accounts for
mbind 237 235               set_mempolicy 238 237       migrate_pages 256 238       set_mempolicy_home_node 450 450
move_pages 279 239          memfd_create 319 279        memfd_secret 447 447        shmget 29 194
shmat 30 196                shmctl 31 195               semget 64 190               msgget 68 186
msgsnd 69 189               mq_open 240 180             vmsplice 278 75
"""
DENIED: dict[str, tuple[int | None, int | None]] = {
    name: (int(x86_64), None if aarch64 == "-" else int(aarch64))
    for name, x86_64, aarch64 in re.findall(r"(\w+) (\d+) (\d+|-)", _CALLS)
}
_MAX_SYSCALL = 450
"""Later calls fail with ENOSYS in a box; C libraries have fallbacks."""
# Calls that are allowed only with certain arguments.
_CLONE, _CLONE3, _SOCKET, _SOCKETPAIR = (56, 220), (435, 435), (41, 198), (53, 199)
_IOCTL, _FCNTL, _SETSOCKOPT, _MMAP = (16, 29), (72, 25), (54, 208), (9, 222)
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

_NAMESPACES = 0x7E020000 | 0x80  # CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET,TIME}
_SHARED_ANONYMOUS = 0x21
_AF_UNIX, _SOL_SOCKET = 1, 1
_BUFFERS = (7, 8, 32, 33)  # SO_SNDBUF, SO_RCVBUF, and by force
_TIOCSTI, _TIOCLINUX, _F_SETPIPE_SZ = 0x5412, 0x541C, 1031

_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_EQUAL, _GREATER, _ANY_BIT = 0x15, 0x25, 0x45
_KILL, _ALLOW, _ERROR = 0x80000000, 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16

Instruction = tuple[int, int, int, int]


def build_filter(machine: str) -> bytes | None:
    """Return the filter in the kernel's format; None for a machine whose syscall numbers are unknown here."""
    if machine not in _MACHINES:
        return None
    column, architecture = _MACHINES[machine]
    code: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        *_refuse(_GREATER, _MAX_SYSCALL, _ENOSYS),  # includes x32's, whose numbers begin at 2**30
        *_refuse(_EQUAL, _CLONE3[column], _ENOSYS),  # its flags are in memory, out of a filter's reach
    ]
    for numbers in DENIED.values():
        number = numbers[column]
        if number is not None:
            code += _refuse(_EQUAL, number, _EPERM)
    code += _when(_CLONE[column], [_argument(0), *_refuse(_ANY_BIT, _NAMESPACES, _EPERM)])
    for call in (_SOCKET, _SOCKETPAIR):
        family = [_argument(0), (_EQUAL, 1, 0, _AF_UNIX), (_RETURN, 0, 0, _ERROR | errno.EAFNOSUPPORT)]
        code += _when(call[column], family)
    terminal = [_argument(1), *_refuse(_EQUAL, _TIOCSTI, _EPERM), *_refuse(_EQUAL, _TIOCLINUX, _EPERM)]
    code += _when(_IOCTL[column], terminal)
    code += _when(_FCNTL[column], [_argument(1), *_refuse(_EQUAL, _F_SETPIPE_SZ, _EPERM)])
    sizes = [step for name in _BUFFERS for step in _refuse(_EQUAL, name, _EPERM)]
    options = [_argument(1), (_EQUAL, 0, 1 + len(sizes), _SOL_SOCKET), _argument(2), *sizes]
    code += _when(_SETSOCKOPT[column], options)
    shared = [_argument(3), (_AND, 0, 0, _SHARED_ANONYMOUS), *_refuse(_EQUAL, _SHARED_ANONYMOUS, _EPERM)]
    code += _when(_MMAP[column], shared)
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *step) for step in code)


def _argument(number: int) -> Instruction:
    """Load the lower half of an argument, which is all that the kernel reads of an int."""
    return (_LOAD, 0, 0, _ARGUMENTS + 8 * number)


def _refuse(test: int, value: int, error: int) -> list[Instruction]:
    return [(test, 0, 1, value), (_RETURN, 0, 0, _ERROR | error)]


def _when(number: int, block: Sequence[Instruction]) -> list[Instruction]:
    """Run a block for one call, and allow the call at its end."""
    return [(_EQUAL, 0, len(block) + 1, number), *block, (_RETURN, 0, 0, _ALLOW)]
