"""The seccomp filter's system call numbers and logic, run by a small BPF interpreter."""

import ctypes
import ctypes.util
import errno
import functools
import struct

import pytest

from megarl.sandbox import seccomp

pytestmark = pytest.mark.alone

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, KILL = "allow", "kill"


@functools.cache
def read_instructions(machine):
    program = seccomp.build_filter(machine)
    return [struct.unpack_from("=HBBI", program, position) for position in range(0, len(program), 8)]


def run_filter(machine, number, *arguments, architecture=None):
    """Return the verdict on a call: allow, kill, or the name of an error."""
    code = read_instructions(machine)
    data = struct.pack("<IIQ6Q", number, architecture or MACHINES[machine], 0, *arguments, *[0] * (6 - len(arguments)))
    position = accumulator = 0
    while True:
        kind, jump_true, jump_false, k = code[position]
        position += 1
        if kind == 0x20:
            accumulator = struct.unpack_from("<I", data, k)[0]
        elif kind == 0x54:
            accumulator &= k
        elif kind == 0x06:
            return {0x7FFF0000: ALLOW, 0x80000000: KILL}.get(k) or errno.errorcode[k & 0xFFFF]
        else:
            position += (
                jump_true
                if {0x15: accumulator == k, 0x25: accumulator > k, 0x45: bool(accumulator & k)}[kind]
                else jump_false
            )


@pytest.mark.parametrize("machine", MACHINES)
def test_denies_every_listed_call(machine):
    column = list(MACHINES).index(machine)
    for numbers in seccomp.DENIED.values():
        if numbers[column] is not None:
            assert run_filter(machine, numbers[column]) == "EPERM"


@pytest.mark.parametrize("machine", MACHINES)
def test_numbers_match_libseccomp(machine):
    name = ctypes.util.find_library("seccomp")
    if name is None:
        pytest.skip("there is no libseccomp on this machine to ask")
    resolve = ctypes.CDLL(name).seccomp_syscall_resolve_name_arch
    resolve.argtypes = [ctypes.c_uint32, ctypes.c_char_p]
    column = list(MACHINES).index(machine)
    other_syscalls = {"clone": 56, "clone3": 435, "socket": 41, "ioctl": 16, "mmap": 9} if column == 0 else {}
    for call, number in {**{name: row[column] for name, row in seccomp.DENIED.items()}, **other_syscalls}.items():
        result = resolve(MACHINES[machine], call.encode())
        assert (result if result >= 0 else None) == number, call


def test_filters_by_arguments():
    def x86(number, *arguments):
        return run_filter("x86_64", number, *arguments)

    assert (
        x86(0) == x86(39) == x86(59) == x86(56, 17) == x86(56, 0x3D0F00) == ALLOW
    )  # read, getpid, execve, fork, a thread
    for flag in (0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert x86(56, flag | 17) == "EPERM"
    assert x86(435) == "ENOSYS"
    assert x86(41, 1, 1) == x86(53, 1, 1) == ALLOW
    for family in (0, 2, 10, 16, 17, 40, 1 << 32 | 2):
        assert x86(41, family) == x86(53, family) == "EAFNOSUPPORT"
    assert (
        x86(16, 0, 0x5401) == ALLOW
        and x86(16, 0, 0x5412) == x86(16, 0, 0x541C) == x86(16, 0, 7 << 32 | 0x5412) == "EPERM"
    )
    assert x86(72, 0, 1) == ALLOW and x86(72, 0, 1031) == "EPERM"
    assert x86(54, 0, 1, 2) == x86(54, 0, 6, 7) == ALLOW and x86(54, 0, 1, 7) == x86(54, 0, 1, 33) == "EPERM"
    assert x86(9, 0, 0, 3, 0x22) == x86(9, 0, 0, 3, 0x01) == ALLOW
    assert x86(9, 0, 0, 3, 0x21) == x86(9, 0, 0, 3, 0x23) == x86(9, 0, 0, 3, 0x4021) == "EPERM"


def test_filters_other_architectures_and_unknown_calls():
    assert run_filter("x86_64", 39, architecture=0x40000003) == KILL  # 32 bits
    assert run_filter("x86_64", 0x40000000 | 39) == run_filter("x86_64", 462) == run_filter("aarch64", 451) == "ENOSYS"


def test_has_no_filter_for_other_machines():
    assert seccomp.build_filter("riscv64") is None
