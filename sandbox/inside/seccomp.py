"""A system call filter for all that runs in a box, on top of the engine's own where there is one.

It refuses what no honest cell needs and what would reach further than a box, or outlive an episode where a reset does not
look: keyrings, message queues, I/O priorities, namespaces, mounts, tracing, io_uring, BPF and performance counters. The
refused call fails with EPERM; nothing is killed. Inherited over fork and exec, and never to be taken off again.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

_INSTRUCTION = struct.Struct("=HBBI")  # struct sock_filter
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_ALLOW = 0x7FFF0000
_FAIL = 0x00050000  # plus the errno
_X32_BIT = 0x40000000
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEW* that clone takes
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2

# Same number on every architecture: newer calls.
_COMMON = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "pidfd_getfd": 438,
    "process_madvise": 440,
    "mount_setattr": 442,
    "quotactl_fd": 443,
}
# x86-64, aarch64
_BY_ARCHITECTURE = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "mq_open": (240, 180),
    "ioprio_set": (251, 30),
    "sched_setattr": (314, 274),
}
_CLONE3 = 435
# machine → audit architecture, column above, number of clone
_MACHINES = {"x86_64": (0xC000003E, 0, 56), "aarch64": (0xC00000B7, 1, 220)}


def program(machine: str) -> bytes | None:
    """The filter in classic BPF, or None for a machine whose numbers are not known here."""
    if machine not in _MACHINES:
        return None
    architecture, column, clone = _MACHINES[machine]
    code: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _FAIL | errno.EPERM),  # another instruction set counts otherwise
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        code += [(_AT_LEAST, 0, 1, _X32_BIT), (_RETURN, 0, 0, _FAIL | errno.ENOSYS)]
    for number in sorted([*_COMMON.values(), *(numbers[column] for numbers in _BY_ARCHITECTURE.values())]):
        code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _FAIL | errno.EPERM)]
    # A filter cannot look behind a pointer, so clone3 is not there, and the C library takes clone.
    code += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _FAIL | errno.ENOSYS)]
    code += [(_EQUAL, 0, 3, clone), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
    code += [(_ANY_BIT, 0, 1, _NEW_NAMESPACES), (_RETURN, 0, 0, _FAIL | errno.EPERM)]
    code += [(_RETURN, 0, 0, _ALLOW)]
    return b"".join(_INSTRUCTION.pack(*instruction) for instruction in code)


def install() -> bool:
    """Put the filter on this process and all that it will start. False where the kernel or the machine has none.
    Raises OSError where it is refused for another reason."""
    filter_code = program(os.uname().machine)
    if filter_code is None:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS) failed")
    code = ctypes.create_string_buffer(filter_code, len(filter_code))
    length = len(filter_code) // _INSTRUCTION.size
    described = ctypes.create_string_buffer(struct.pack("HxxxxxxP", length, ctypes.addressof(code)))
    if libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, described, 0, 0) != 0:
        problem = ctypes.get_errno()
        if problem in (errno.EINVAL, errno.ENOSYS):
            return False
        raise OSError(problem, "prctl(PR_SET_SECCOMP) failed")
    return True
