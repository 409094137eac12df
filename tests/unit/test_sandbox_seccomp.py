"""The system call filter, run on made-up calls by an interpreter of its few instructions. No filter is installed."""

from __future__ import annotations

import errno
import struct

import pytest

from sandbox.inside import seccomp

ALLOWED = 0x7FFF0000
REFUSED = 0x00050000 | errno.EPERM
ABSENT = 0x00050000 | errno.ENOSYS
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# read, write, execve, exit_group, wait4, socket, openat, prlimit64, pidfd_open
HARMLESS = {"x86_64": (0, 1, 59, 231, 61, 41, 257, 302, 434), "aarch64": (63, 64, 221, 94, 260, 198, 56, 261, 434)}
CLONE = {"x86_64": 56, "aarch64": 220}


def verdict(machine: str, number: int, first_argument: int = 0, architecture: int | None = None) -> int:
    """What the kernel would make of a call."""
    code = seccomp.program(machine)
    assert code is not None
    called = struct.pack(
        "=IIQQ", number, ARCHITECTURES[machine] if architecture is None else architecture, 0, first_argument
    )
    instructions = list(struct.iter_unpack("=HBBI", code))
    at, value = 0, 0
    while True:
        kind, yes, no, operand = instructions[at]
        at += 1
        if kind == 0x20:
            (value,) = struct.unpack_from("=I", called, operand)
        elif kind == 0x06:
            return operand
        else:
            met = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[kind]
            at += yes if met else no


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_what_is_refused_is_refused_and_what_programs_need_is_not(machine):
    column = list(ARCHITECTURES).index(machine)
    for number in [*seccomp._COMMON.values(), *(both[column] for both in seccomp._BY_ARCHITECTURE.values())]:
        assert verdict(machine, number) == REFUSED, number
    for number in HARMLESS[machine]:
        assert verdict(machine, number) == ALLOWED, number


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_processes_and_threads_may_be_made_but_no_namespaces(machine):
    threads = 0x003D0F00  # as the C library makes them
    for flags in (17, threads, 0x4111):
        assert verdict(machine, CLONE[machine], flags) == ALLOWED
    for namespace in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert verdict(machine, CLONE[machine], namespace | 17) == REFUSED
    assert verdict(machine, 435) == ABSENT  # its flags cannot be seen


def test_other_instruction_sets_are_no_way_around():
    assert verdict("x86_64", 3, architecture=0x40000003) == REFUSED  # i386
    assert verdict("x86_64", 0x40000000 | 101) == ABSENT  # x32
    assert verdict("aarch64", 3, architecture=0x40000028) == REFUSED  # 32-bit arm


def test_a_machine_whose_numbers_are_unknown_has_no_filter():
    assert seccomp.program("riscv64") is None
