"""What lies on disk: how it can be known to be the same as before, and what was left over of it."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ..destination import HIDDEN, hidden_name, is_hidden
from ..held import is_open_for_writing

_BUFFER = 1 << 20


class Output(NamedTuple):
    """What was written, as the ledger knows it.

    Attributes:
        nbytes: its size, of all files together.
        stamp: changes with any file of it, or when it is moved elsewhere; tells nothing about what
            is in it.
        crc32: of its bytes; of a folder also of names. 0 where it was not asked for.
    """

    nbytes: int
    stamp: str
    crc32: int = 0


def stamp_of(files: Iterable[str], root: str = "") -> tuple[int, str]:
    """The size of files, and a text that changes if one of them does.

    Args:
        files: their paths.
        root: what their names don't count as far as.

    Raises:
        OSError: one is gone.
    """
    total, lines = 0, list[str]()
    for path in files:
        about = os.stat(path)
        total += about.st_size
        name = path[len(root) :]
        lines.append(f"{name}:{about.st_size}-{about.st_mtime_ns}-{about.st_ino}")
    if len(lines) == 1:
        return total, lines[0].rpartition(":")[2]
    import hashlib  # only here: it takes a while to import

    text = os.fsencode("\n".join(lines))
    return total, hashlib.sha256(text).hexdigest()[:32]


def output_of(path: str, *, summed: bool) -> Output:
    """What is there.

    Args:
        path: a file, or a folder.
        summed: whether to read it.

    Raises:
        OSError: nothing is, or it can't be read.
    """
    files = files_of(path)
    nbytes, stamp = stamp_of(files, path)
    return Output(nbytes, stamp, _crc32(files, path) if summed else 0)


def files_of(path: str) -> Sequence[str]:
    """The file itself, or all files in a folder and below, sorted."""
    if not os.path.isdir(path):
        return (path,)
    found = list[str]()
    for folder, folders, names in os.walk(path):
        folders.sort()
        found += [os.path.join(folder, name) for name in sorted(names)]
    return found


def _crc32(files: Sequence[str], root: str) -> int:
    """One sum over all files, and over their names if there may be several."""
    crc32 = 0
    buffer = bytearray(_BUFFER)
    for path in files:
        crc32 = zlib.crc32(os.fsencode(path[len(root) :]), crc32)
        with open(path, "rb", buffering=0) as file:
            while nbytes := file.readinto(buffer):
                crc32 = zlib.crc32(memoryview(buffer)[:nbytes], crc32)
    return crc32


def same(one: str, other: str) -> bool:
    """Whether two files, or two folders with all that is in them, are equal byte for byte."""
    theirs, ours = files_of(one), files_of(other)
    if [each[len(one) :] for each in theirs] != [each[len(other) :] for each in ours]:
        return False
    return all(_same_bytes(*pair) for pair in zip(theirs, ours, strict=True))


def _same_bytes(one: str, other: str) -> bool:
    if not (os.path.isfile(one) and os.path.isfile(other)):
        return False
    with open(one, "rb") as first, open(other, "rb") as second:
        if os.fstat(first.fileno()).st_size != os.fstat(second.fileno()).st_size:
            return False
        while part := first.read(_BUFFER):
            if part != second.read(_BUFFER):
                return False
    return True


@contextlib.contextmanager
def beside(path: str) -> Iterator[str]:
    """A folder beside what has this path, that is gone at the end; gives the same name within."""
    folder, name = os.path.split(path.rstrip("/"))
    hidden = os.path.join(folder, hidden_name(name))
    try:
        os.mkdir(hidden, 0o700)
        yield os.path.join(hidden, name)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def is_taken(path: str) -> bool:
    """Whether something is there that would have to be replaced."""
    if os.path.isdir(path) and not os.path.islink(path):
        return bool(os.listdir(path))
    return os.path.lexists(path)


def leftovers(folder: str) -> list[str]:
    """What killed processes may have left in a folder and below, under names for the time being."""
    found = list[str]()
    for inside, folders, names in os.walk(folder):
        hidden = [name for name in folders if name.endswith(HIDDEN)]
        found += [os.path.join(inside, name) for name in (*names, *hidden) if name.endswith(HIDDEN)]
        folders[:] = [name for name in folders if name not in hidden]
    return found


def is_left_of(hidden: str, output: str) -> bool:
    """Whether it would have become this output."""
    folder, name = os.path.split(output.rstrip("/"))
    return os.path.dirname(hidden) == folder and is_hidden(os.path.basename(hidden), name)


def clear(hidden: str, output: str) -> None:
    """Remove what was left over, unless somebody still writes it.

    A folder stays while there is no output: it may be what was there before.
    """
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(os.lstat(hidden).st_mode):
            if os.path.lexists(output):
                shutil.rmtree(hidden)
        elif not _is_written(hidden):
            os.unlink(hidden)


def _is_written(path: str) -> bool:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return is_open_for_writing(fd)
    finally:
        os.close(fd)
