"""The system calls that are allowed in a process that runs code from a file, in groups by reason.

This is a list of allowed calls: a call that a newer kernel adds is refused until somebody has read
what it does. The two numbers are those of x86-64 and 64-bit ARM; `-` means no such call.

Sources: asm/unistd_64.h, asm-generic/unistd.h; linux/fcntl.h, prctl.h; the ioctls of linux/fs.h,
asm-generic/ioctls.h, drm.h, kfd_ioctl.h, habanalabs_accel.h, and of NVIDIA's open kernel modules.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping

_TEXTS = (
    # The memory of the process.
    """
    brk 12 214, mmap 9 222, munmap 11 215, mprotect 10 226, mremap 25 216, madvise 28 233,
    mincore 27 232, msync 26 227, mlock 149 228, munlock 150 229, mlock2 325 284,
    memfd_create 319 279, membarrier 324 283, get_mempolicy 239 236, set_mempolicy 238 237,
    mbind 237 235, pkey_alloc 330 289, pkey_free 331 290, pkey_mprotect 329 288, mseal 462 462
    """,
    # Threads of the process, and waiting for them; the filter checks how one is started (`clone`).
    """
    futex 202 98, futex_waitv 449 449, futex_wake 454 454, futex_wait 455 455,
    futex_requeue 456 456, set_robust_list 273 99, set_tid_address 218 96, rseq 334 293,
    gettid 186 178, exit 60 93, exit_group 231 94, sched_yield 24 124, sched_getaffinity 204 123,
    sched_getscheduler 145 120, sched_getparam 143 121, sched_get_priority_max 146 125,
    sched_get_priority_min 147 126, getcpu 309 168, arch_prctl 158 -, restart_syscall 219 128
    """,
    # Signals to itself; the filter checks `kill` and `tgkill`.
    """
    rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigsuspend 130 133,
    rt_sigpending 127 136, rt_sigtimedwait 128 137, sigaltstack 131 132, pause 34 -, alarm 37 -,
    getitimer 36 102, setitimer 38 103, timer_create 222 107, timer_settime 223 110,
    timer_gettime 224 108, timer_getoverrun 225 109, timer_delete 226 111
    """,
    # The time.
    """
    clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115, nanosleep 35 101,
    gettimeofday 96 169, time 201 -, times 100 153, timerfd_create 283 85,
    timerfd_settime 286 86, timerfd_gettime 287 87
    """,
    # Reading files: the data can't leave the process, except in the output that the user sees.
    """
    read 0 63, pread64 17 67, readv 19 65, preadv 295 69, preadv2 327 286, lseek 8 62,
    close 3 57, close_range 436 436, dup 32 23, dup2 33 -, dup3 292 24, stat 4 -, lstat 6 -,
    fstat 5 80, newfstatat 262 79, statx 332 291, access 21 -, faccessat 269 48,
    faccessat2 439 439, readlink 89 -, readlinkat 267 78, getdents 78 -, getdents64 217 61,
    statfs 137 43, fstatfs 138 44, getcwd 79 17, getxattr 191 8, lgetxattr 192 9,
    fgetxattr 193 10, listxattr 194 11, llistxattr 195 12, flistxattr 196 13,
    fadvise64 221 223, readahead 187 213, flock 73 32
    """,
    # Writing to open files, and changing names: Landlock decides where. The filter checks how files
    # are opened (`open`, `openat`).
    """
    creat 85 -, write 1 64, pwrite64 18 68, writev 20 66, pwritev 296 70, pwritev2 328 287,
    ftruncate 77 46, fallocate 285 47, fsync 74 82, fdatasync 75 83, mkdir 83 -, mkdirat 258 34,
    unlink 87 -, unlinkat 263 35, rmdir 84 -, rename 82 -, renameat 264 38, renameat2 316 276,
    link 86 -, linkat 265 37, symlink 88 -, symlinkat 266 36, umask 95 166, sendfile 40 71,
    copy_file_range 326 285
    """,
    # Descriptors that connect the process to itself.
    """
    pipe 22 -, pipe2 293 59, eventfd 284 -, eventfd2 290 19, poll 7 -, ppoll 271 73, select 23 -,
    pselect6 270 72, epoll_create 213 -, epoll_create1 291 20, epoll_ctl 233 21,
    epoll_wait 232 -, epoll_pwait 281 22, epoll_pwait2 441 441, socketpair 53 199,
    recvfrom 45 207, recvmsg 47 212, shutdown 48 210, getsockname 51 204, getpeername 52 205,
    getsockopt 55 209
    """,
    # Facts about the process and the machine.
    """
    uname 63 160, sysinfo 99 179, getrlimit 97 163, getrusage 98 165, getrandom 318 278,
    getpid 39 172, getppid 110 173, getuid 102 174, geteuid 107 175, getgid 104 176,
    getegid 108 177, getresuid 118 148, getresgid 120 150, getgroups 115 158, getpgid 121 155,
    getpgrp 111 -, getsid 124 156, getpriority 140 141, capget 125 90, wait4 61 260,
    waitid 247 95
    """,
)
#: Calls that end the process: they start another process, or reach into one.
_ENDING = """
    execve 59 221, execveat 322 281, fork 57 -, vfork 58 -, ptrace 101 117,
    process_vm_writev 311 271
    """
#: Calls that are allowed or refused by their arguments; see `fence`.
_BY_ARGUMENTS = """
    clone 56 220, kill 62 129, tgkill 234 131, socket 41 198, sendto 44 206, open 2 -,
    openat 257 56, fcntl 72 25, ioctl 16 29, prctl 157 167, prlimit64 302 261,
    sched_setaffinity 203 122
    """
SECCOMP = {"x86_64": 317, "aarch64": 277}
#: From here, numbers are the same on every architecture, and libraries work without these calls.
NEWER = 424

#: Commands of `fcntl` that cause signals to another process: F_SETOWN, F_SETOWN_EX.
OWNERS = (8, 15)
#: Allowed options of `prctl`: names of threads and of memory; reading permissions; huge pages,
#: timers, and the length of vectors.
OPTIONS = (3, 15, 16, 21, 23, 29, 30, 38, 39, 41, 42, 51, 64, 0x53564D41)
#: Allowed commands of `ioctl`: whether it is a terminal, its size and group; the number of bytes to
#: read; flags of the descriptor. The command that types into the terminal is not allowed.
COMMANDS = (0x5401, 0x540F, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
#: Allowed types of commands, with which drivers compute: NVIDIA (0 is unified memory), DRM, AMD,
#: the Windows subsystem, and processors of Habana and Huawei. None is of a file system.
TYPES = (0, *map(ord, "FdKGHM"))


def _numbers(text: str, machine: str) -> dict[str, int]:
    rows = [each.split() for each in text.split(",")]
    at = 1 if machine == "x86_64" else 2
    return {row[0]: int(row[at]) for row in rows if row[at] != "-"}


def allowed_calls(machine: str) -> list[int]:
    """The sorted numbers of calls that are allowed whatever their arguments are."""
    return sorted(n for text in _TEXTS for n in _numbers(text, machine).values())


def ending(machine: str) -> list[int]:
    """The sorted numbers of calls that end the process."""
    return sorted(_numbers(_ENDING, machine).values())


def calls_by_arguments(machine: str = platform.machine()) -> Mapping[str, int]:
    """Name → number of the calls that are allowed or refused by their arguments."""
    return _numbers(_BY_ARGUMENTS, machine)
