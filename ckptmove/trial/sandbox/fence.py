"""Restrict a process that runs code from a file through the kernel, whatever the language.

On Linux 5.13 and newer, Landlock lets the process write only below its folder and to compute
devices, and execute no program. Newer kernels also forbid TCP (6.7), other devices (6.10) and
signals to other processes (6.12). On x86-64 and 64-bit ARM, a filter of system calls ends the
process when it starts a process or opens a network socket, and allows only the calls in
`system_calls`. `enclose` returns the parts that the kernel lacks; then only the audit hook of
`guard` remains, and C code can bypass it.

Before Linux 7.0, Landlock applies to the thread that requests it and the threads that it starts
later. So libraries are kept from starting threads earlier (`guard.environment`); a driver may still
do so. The filter of system calls applies to all threads.

Sources: the kernel's userspace-api/landlock.rst and seccomp_filter.rst; linux/landlock.h,
linux/seccomp.h, linux/filter.h, linux/audit.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
import struct
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from ...system.files import READ
from . import system_calls

#: The return code of the process if the filter of system calls ends it.
ENDING = -int(getattr(signal, "SIGSYS", 0)) or None
_MOST_WRITTEN = 1 << 30  # bytes of a file
_NO_NEW_PRIVILEGES = 38  # an option of prctl

#: Files in /dev that are written in order to compute: GPUs of NVIDIA, AMD and Intel; NPUs; null.
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
_REFER = 1 << 13  # link or rename to another folder
_TCP = 1 << 0 | 1 << 1  # bind, connect
_IOCTL = 1 << 15  # on devices
_SCOPES = 1 << 0 | 1 << 1  # abstract sockets, signals
_ALL_THREADS_TOO = 1 << 3  # LANDLOCK_RESTRICT_SELF_TSYNC


def enclose(folder: str) -> tuple[str, ...]:
    """Have the kernel refuse, from now on, actions that reach outside this process.

    It can't be undone. If the kernel lacks a part of it, the other parts still apply.

    Args:
        folder: where the process may write.

    Returns:
        The parts that the system lacks: `Landlock`, `seccomp`.
    """
    _limit()
    files = calls = False
    if sys.platform == "linux" and struct.calcsize("P") == 8:
        with contextlib.suppress(OSError, AttributeError):
            libc: Any = ctypes.CDLL(None, use_errno=True)
            libc.syscall.restype = ctypes.c_long
            if libc.prctl(_NO_NEW_PRIVILEGES, *map(ctypes.c_ulong, (1, 0, 0, 0))) == 0:
                files = _restrict_files(libc.syscall, folder)
                calls = _restrict_calls(libc.syscall)
    return (*(["Landlock"] if not files else []), *(["seccomp"] if not calls else []))


def _limit() -> None:
    """Forbid core dumps and huge files; if memory runs out, the kernel ends this process first."""
    with contextlib.suppress(ImportError):
        resource: Any = import_module("resource")  # Windows has none
        for kind, most in (
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_FSIZE, _MOST_WRITTEN),
        ):
            _, hard = resource.getrlimit(kind)
            least = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(kind, (least, least))
    # Memory is not limited, because it is unknown how much a valid model needs.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _restrict_files(syscall: Any, folder: str) -> bool:
    version = syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)
    if version < 1:
        return False
    refer = _REFER if version >= 2 else 0
    truncate = _TRUNCATE if version >= 3 else 0
    command = _IOCTL if version >= 5 else 0
    within = _WRITE_FILE | truncate | _REMOVE | _MAKE | refer
    handled = struct.pack(
        "=QQQ",
        within | _MAKE_OTHERS | _EXECUTE | command,
        _TCP if version >= 4 else 0,
        _SCOPES if version >= 6 else 0,
    )
    rules = syscall(_CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), 0)
    if rules < 0:  # an older kernel also accepts the longer structure, since the rest is zeros
        return False
    try:
        _allow(syscall, rules, folder, within)
        for device in (found for each in _DEVICES for found in Path("/dev").glob(each)):
            if not device.is_dir():
                _allow(syscall, rules, os.fspath(device), _WRITE_FILE | truncate | command)
        if version >= 8 and syscall(_RESTRICT_SELF, rules, _ALL_THREADS_TOO) == 0:
            return True
        return bool(syscall(_RESTRICT_SELF, rules, 0) == 0)
    finally:
        os.close(rules)


def _allow(syscall: Any, rules: int, path: str, access: int) -> None:
    with contextlib.suppress(OSError):
        place = os.open(path, READ | getattr(os, "O_PATH", 0))
        try:
            syscall(_ADD_RULE, rules, _BENEATH, struct.pack("=Qi", access, place), 0)
        finally:
            os.close(place)


# -- system calls ----------------------------------------------------------------------------------

#: The kernel's number of an architecture, and of its 32-bit mode, which could bypass the filter.
_MACHINES = {"x86_64": (0xC000003E, 0x40000003), "aarch64": (0xC00000B7, 0x40000028)}
_FILTER, _ALL_THREADS = 1, 1
_LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_AND = 0x54
_NUMBER, _ARCH = 0, 4  # byte offsets in the data that a filter sees
_END, _ALLOW, _FAIL = 0x80000000, 0x7FFF0000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_A_THREAD = 0x10000  # CLONE_THREAD
_INET, _INET6 = 2, 10
_X32 = 0x40000000  # from here, the numbers of the x32 interface


def _restrict_calls(syscall: Any) -> bool:
    machine = platform.machine()
    if machine not in _MACHINES or sys.byteorder != "little":
        return False
    steps = b"".join(_filter(machine, os.getpid()))
    code = ctypes.create_string_buffer(steps, len(steps))
    program = struct.pack("=HxxxxxxQ", len(steps) // 8, ctypes.addressof(code))
    # Threads with another filter can't get this one; then it applies to this thread only.
    number = system_calls.SECCOMP[machine]
    return any(syscall(number, _FILTER, flags, program) == 0 for flags in (_ALL_THREADS, 0))


def _step(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    """One instruction; for a jump, the numbers of instructions to skip if true and if false."""
    return struct.pack("=HBBI", code, then, otherwise, value)


def _argument(which: int, *, high: bool = False) -> bytes:
    """Load one half of an argument."""
    return _step(_LOAD, 16 + 8 * which + (4 if high else 0))


_ENDS, _ALLOWS = _step(_RETURN, _END), _step(_RETURN, _ALLOW)
_FAILS, _LACKS = _step(_RETURN, _FAIL | _EPERM), _step(_RETURN, _FAIL | _ENOSYS)


def _among(values: Iterable[int], then: bytes) -> list[bytes]:
    """Run the instruction `then` if the loaded value is one of `values`."""
    return [step for each in values for step in (_step(_EQUAL, each, 0, 1), then)]


def _filter(machine: str, process: int) -> list[bytes]:
    """The filter as BPF instructions, which only jump forward and return an action."""
    arch, other = _MACHINES[machine]
    steps = [
        _step(_LOAD, _ARCH),
        _step(_EQUAL, other, 0, 1),
        _ENDS,
        # Any other architecture is that of an emulator, whose numbers are unknown.
        _step(_EQUAL, arch, 1, 0),
        _ALLOWS,
        _step(_LOAD, _NUMBER),
        _step(_AT_LEAST, _X32, 0, 1),
        _ENDS,
        *_among(system_calls.ending(machine), _ENDS),
    ]
    looks = _looks(process)
    for name, number in system_calls.calls_by_arguments(machine).items():
        steps += [_step(_EQUAL, number, 0, len(looks[name])), *looks[name]]
    for first, last in _ranges(system_calls.allowed_calls(machine)):
        steps += [_step(_AT_LEAST, first, 0, 2), _step(_AT_LEAST, last + 1, 1, 0), _ALLOWS]
    # `clone3` is one of the newer calls: its flags are in memory, where a filter can't read them.
    # Libraries that find it missing use `clone`.
    return [*steps, _step(_AT_LEAST, system_calls.NEWER, 0, 1), _LACKS, _FAILS]


def _looks(process: int) -> dict[str, list[bytes]]:
    """Name of a call → the instructions that decide by its arguments."""
    itself = [_argument(0), *_among([process], _ALLOWS), _FAILS]
    # Fails: O_WRONLY and O_RDWR together, which is undefined, and O_TRUNC without a write mode.
    opening = [
        *(_step(_ANY_BIT, os.O_WRONLY, 0, 2), _step(_ANY_BIT, os.O_RDWR, 0, 1), _FAILS),
        *(_step(_ANY_BIT, os.O_WRONLY | os.O_RDWR, 1, 0), _step(_ANY_BIT, os.O_TRUNC, 1, 0)),
        *(_ALLOWS, _FAILS),
    ]
    # The commands of davinci devices are not published, so all are allowed where there is one.
    devices = _ALLOWS if any(Path("/dev").glob("davinci*")) else _FAILS
    return {
        "clone": [_argument(0), _step(_ANY_BIT, _A_THREAD, 0, 1), _ALLOWS, _ENDS],
        "kill": itself,
        "tgkill": itself,
        "socket": [_argument(0), *_among((_INET, _INET6), _ENDS), _FAILS],
        # Allowed without an address: sockets of a `socketpair` need none.
        "sendto": [*_is_zero(4), _FAILS],
        "open": [_argument(1), *opening],
        "openat": [_argument(2), *opening],
        "fcntl": [_argument(1), *_among(system_calls.OWNERS, _FAILS), _ALLOWS],
        "ioctl": [
            *(_argument(1), *_among(system_calls.COMMANDS, _ALLOWS), _step(_AND, 0xFF00)),
            *(*_among((each << 8 for each in system_calls.TYPES), _ALLOWS), devices),
        ],
        "prctl": [_argument(0), *_among(system_calls.OPTIONS, _ALLOWS), _FAILS],
        # Allowed only to read its own limits.
        "prlimit64": [
            *(_argument(0), _step(_EQUAL, 0, 2, 0), _step(_EQUAL, process, 1, 0), _FAILS),
            *(*_is_zero(2), _FAILS),
        ],
        "sched_setaffinity": [_argument(0), *_among((0, process), _ALLOWS), _FAILS],
    }


def _is_zero(which: int) -> list[bytes]:
    """Allow the call if an argument is zero."""
    low, high = _argument(which), _argument(which, high=True)
    return [low, _step(_EQUAL, 0, 0, 3), high, _step(_EQUAL, 0, 0, 1), _ALLOWS]


def _ranges(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """The first and last number of each run of consecutive numbers; `numbers` are sorted."""
    first = last = numbers[0]
    for each in numbers[1:]:
        if each != last + 1:
            yield first, last
            first = each
        last = each
    yield first, last
