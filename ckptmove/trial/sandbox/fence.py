"""Restrict a process that runs code of a file by means of the kernel, whatever the language.

On Linux 5.13 and newer, Landlock lets the process write only below its folder and to compute
devices, and execute no program. Newer kernels also forbid TCP (6.7) and signals to other processes
(6.12). A filter of system calls, on x86-64 and 64-bit ARM, ends the process when it starts a
process or opens a network socket, and refuses other calls that reach outside. If the kernel has
neither, and on other systems, only the audit hook of `guard` remains.

Landlock applies to the thread that asks for it and the threads that it starts. Threads that
libraries started earlier compute parts of operators; the filter of system calls applies to them
too.

Sources: the kernel's userspace-api/landlock.rst and seccomp_filter.rst; linux/landlock.h,
linux/seccomp.h, linux/filter.h, linux/audit.h; asm/unistd_64.h and asm-generic/unistd.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
import struct
import sys
from pathlib import Path
from typing import Any, NamedTuple

#: What the process ends by, if the filter of system calls ends it.
ENDING = -int(getattr(signal, "SIGSYS", 0)) or None
_MOST_WRITTEN = 1 << 30  # bytes of a file
_NO_NEW_PRIVILEGES = 38  # of prctl

#: What computes, and is written to for that, in /dev: GPUs of NVIDIA, AMD and Intel; NPUs.
_DEVICES = (
    *("null", "nvidia*", "nvidia-caps/*", "dri/*", "kfd", "dxg"),
    *("accel/*", "accel*", "davinci*", "devmm_svm", "hisi_hdc"),
)

# -- Landlock --------------------------------------------------------------------------------------

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_VERSION = 1
_BENEATH = 1
_EXECUTE, _WRITE_FILE, _TRUNCATE = 1 << 0, 1 << 1, 1 << 14
_REMOVE = 1 << 4 | 1 << 5  # of folders and files
_MAKE = 1 << 7 | 1 << 8 | 1 << 12  # folders, files, links
_MAKE_OTHERS = 1 << 6 | 1 << 9 | 1 << 10 | 1 << 11  # devices, sockets, pipes
_REFER = 1 << 13  # a name in another folder
_TCP = 1 << 0 | 1 << 1  # bind, connect
_SCOPES = 1 << 0 | 1 << 1  # abstract sockets, signals


def enclose(folder: str) -> None:
    """Have the kernel refuse, from now on, what reaches out of this process.

    It can't be taken back. Where the kernel lacks a part of it, the rest holds.

    Args:
        folder: where it may write.
    """
    _limit()
    if sys.platform != "linux" or struct.calcsize("P") != 8:
        return
    with contextlib.suppress(OSError, AttributeError):
        libc: Any = ctypes.CDLL(None, use_errno=True)
        libc.syscall.restype = ctypes.c_long
        if libc.prctl(_NO_NEW_PRIVILEGES, *map(ctypes.c_ulong, (1, 0, 0, 0))) == 0:
            _restrict_files(libc.syscall, folder)
            _restrict_calls(libc.syscall)


def _limit() -> None:
    """Write no core and no endless file; and be the first to go when memory is short."""
    with contextlib.suppress(ImportError):
        import resource

        for kind, most in (
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_FSIZE, _MOST_WRITTEN),
        ):
            _, hard = resource.getrlimit(kind)
            least = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(kind, (least, least))
    # Its memory isn't limited: how much a right model needs can't be known.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _restrict_files(syscall: Any, folder: str) -> None:
    version = syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)
    if version < 1:
        return
    refer = _REFER if version >= 2 else 0
    truncate = _TRUNCATE if version >= 3 else 0
    within = _WRITE_FILE | truncate | _REMOVE | _MAKE | refer
    handled = struct.pack(
        "=QQQ",
        within | _MAKE_OTHERS | _EXECUTE,
        _TCP if version >= 4 else 0,
        _SCOPES if version >= 6 else 0,
    )
    rules = syscall(_CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), 0)
    if rules < 0:  # an older kernel takes a longer structure only if the rest is zeros, as it is
        return
    try:
        _allow(syscall, rules, folder, within)
        for device in (found for each in _DEVICES for found in Path("/dev").glob(each)):
            if not device.is_dir():
                _allow(syscall, rules, os.fspath(device), _WRITE_FILE | truncate)
        syscall(_RESTRICT_SELF, rules, 0)
    finally:
        os.close(rules)


def _allow(syscall: Any, rules: int, path: str, access: int) -> None:
    with contextlib.suppress(OSError):
        place = os.open(path, getattr(os, "O_PATH", 0) | os.O_CLOEXEC)
        try:
            syscall(_ADD_RULE, rules, _BENEATH, struct.pack("=Qi", access, place), 0)
        finally:
            os.close(place)


# -- system calls ----------------------------------------------------------------------------------


class _Machine(NamedTuple):
    """How system calls are numbered.

    Attributes:
        arch: what the kernel calls it.
        other: what it calls the 32-bit one, by which a process could get around the filter.
        seccomp, clone, clone3, socket, sendto: numbers of those that are looked at further.
        signalling: those whose first argument is a process.
        ending: those that end the process.
        refused: those that fail.
    """

    arch: int
    other: int
    seccomp: int
    clone: int
    clone3: int
    socket: int
    sendto: int
    signalling: tuple[int, ...]
    ending: tuple[int, ...]
    refused: tuple[int, ...]


#: The same on both: pidfd_send_signal, pidfd_getfd, io_uring_setup (by which others could be
#: made), fchmodat2, setxattrat, removexattrat, file_setattr.
_NEWER = (424, 438, 425, 452, 463, 466, 469)
_MACHINES = {
    "x86_64": _Machine(
        arch=0xC000003E,
        other=0x40000003,
        seccomp=317,
        clone=56,
        clone3=435,
        socket=41,
        sendto=44,
        signalling=(62, 234),  # kill, tgkill
        # execve, execveat, fork, vfork, ptrace, process_vm_writev
        ending=(59, 322, 57, 58, 101, 311),
        refused=(
            *(42, 46, 307),  # connect, sendmsg, sendmmsg
            *(200, 129, 297),  # tkill, rt_sigqueueinfo, rt_tgsigqueueinfo
            *(90, 91, 268, 92, 93, 94, 260),  # chmod, chown and their kin
            *(188, 189, 190, 197, 198, 199),  # setxattr, removexattr
            *(132, 235, 261, 280),  # utime and its kin
            *(29, 64, 68, 240, 241),  # memory, semaphores and queues that are shared by a name
            *(161, 165, 166, 155, 272, 308),  # chroot, mount, namespaces
            *(164, 227, 159, 170, 171),  # time, names
            *(169, 167, 175, 313, 246, 321),  # reboot, swapon, modules, kexec, bpf
            *(248, 249, 250),  # keys
            *_NEWER,
        ),
    ),
    "aarch64": _Machine(
        arch=0xC00000B7,
        other=0x40000028,
        seccomp=277,
        clone=220,
        clone3=435,
        socket=198,
        sendto=206,
        signalling=(129, 131),
        ending=(221, 281, 117, 271),
        refused=(
            *(203, 211, 269),
            *(130, 138, 240),
            *(52, 53, 54, 55),
            *(5, 6, 7, 14, 15, 16),
            88,
            *(194, 190, 186, 180, 181),
            *(51, 40, 39, 41, 97, 268),
            *(170, 112, 171, 161, 162),
            *(142, 224, 105, 273, 104, 280),
            *(217, 218, 219),
            *_NEWER,
        ),
    ),
}
_FILTER, _ALL_THREADS = 1, 1
_LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_NUMBER, _ARCH = 0, 4  # of what a filter sees, in bytes
_END, _ALLOW, _FAIL = 0x80000000, 0x7FFF0000, 0x00050000
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97
_A_THREAD = 0x10000  # CLONE_THREAD
_UNIX, _INET, _INET6 = 1, 2, 10
_X32 = 0x40000000  # numbers of a third way, from here


def _restrict_calls(syscall: Any) -> None:
    machine = _MACHINES.get(platform.machine())
    if machine is None or sys.byteorder != "little":
        return
    steps = b"".join(_filter(machine, os.getpid()))
    code = ctypes.create_string_buffer(steps, len(steps))
    program = struct.pack("=HxxxxxxQ", len(steps) // 8, ctypes.addressof(code))
    # Threads in a filter of their own can't be brought under this one: then it is ours alone.
    if syscall(machine.seccomp, _FILTER, _ALL_THREADS, program) != 0:
        syscall(machine.seccomp, _FILTER, 0, program)


def _step(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    """One instruction; where it jumps, by so many instructions more."""
    return struct.pack("=HBBI", code, then, otherwise, value)


def _argument(which: int, *, high: bool = False) -> bytes:
    """Look at a half of an argument."""
    return _step(_LOAD, 16 + 8 * which + (4 if high else 0))


def _filter(machine: _Machine, process: int) -> list[bytes]:
    """The filter, in the kernel's code for such: it goes forward only, and returns what to do."""
    end, allow, fail = _step(_RETURN, _END), _step(_RETURN, _ALLOW), _step(_RETURN, _FAIL | _EPERM)
    steps = [
        _step(_LOAD, _ARCH),
        _step(_EQUAL, machine.other, 0, 1),
        end,
        # Any other is an emulator's, whose numbers aren't known.
        _step(_EQUAL, machine.arch, 1, 0),
        allow,
        _step(_LOAD, _NUMBER),
        _step(_AT_LEAST, _X32, 0, 1),
        end,
    ]
    for number in machine.ending:
        steps += [_step(_EQUAL, number, 0, 1), end]
    for number in machine.refused:
        steps += [_step(_EQUAL, number, 0, 1), fail]
    # Its flags are in memory, where they can't be looked at. Who finds it missing takes `clone`.
    steps += [_step(_EQUAL, machine.clone3, 0, 1), _step(_RETURN, _FAIL | _ENOSYS)]
    steps += [_step(_EQUAL, machine.clone, 0, 4), _argument(0)]
    steps += [_step(_ANY_BIT, _A_THREAD, 0, 1), allow, end]
    steps += [_step(_EQUAL, machine.socket, 0, 7), _argument(0)]
    steps += [_step(_EQUAL, _INET, 2, 0), _step(_EQUAL, _INET6, 1, 0)]
    steps += [_step(_EQUAL, _UNIX, 1, 2), end, allow, _step(_RETURN, _FAIL | _EAFNOSUPPORT)]
    for number in machine.signalling:
        steps += [_step(_EQUAL, number, 0, 4), _argument(0)]
        steps += [_step(_EQUAL, process, 0, 1), allow, fail]
    # To an address; what is connected by `socketpair` needs none.
    steps += [_step(_EQUAL, machine.sendto, 0, 6), _argument(4), _step(_EQUAL, 0, 0, 3)]
    steps += [_argument(4, high=True), _step(_EQUAL, 0, 0, 1), allow, fail]
    return [*steps, allow]
