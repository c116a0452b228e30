"""A tree on the local disk: list it, tell whether a file has changed, read small files.

Links to files are followed, links to folders are not. Temporary files of ckptmove itself are not
part of a tree. `remote_tree` has the same functions for object stores.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from ...errors import InputError
from ...writing.final_name import HIDDEN
from ...writing.in_place.journal import SUFFIX, UNFINISHED
from .ledger import LEDGER, MARKS

_T = TypeVar("_T")
_R = TypeVar("_R")
FILE, FOLDER, LINKED, NOTHING, UNREADABLE = "file", "folder", "linked", "nothing", "unreadable"
NAMELESS = "nameless"
_BUFFER = 1 << 20
_NOWHERE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}
_OURS = (HIDDEN, SUFFIX, SUFFIX + UNFINISHED)


class Listed(NamedTuple):
    """What is in a folder.

    Attributes:
        name: in the folder.
        path: the folder's, and the name.
        kind: `file`; `folder`; `linked`, a link to a folder; `nothing`, which is no file, or a link
            that leads nowhere; `unreadable`; or `nameless`, an object whose name is none of a file.
        nbytes: the size of a file.
        stamp: of a file, as `stamp_of` has it.
    """

    name: str
    path: str
    kind: str
    nbytes: int = 0
    stamp: str = ""


def each(call: Callable[[_T], _R], given: Iterable[_T]) -> Iterator[_R]:
    """What a call gives for each, in their order."""
    return map(call, given)


def listings(root: str) -> Callable[[str], list[Listed]]:
    """What says what is in a folder of a tree, as `listing` does."""
    return listing


def listing(folder: str) -> list[Listed]:
    """What is in a folder, but for what is ours, sorted.

    Raises:
        OSError: it can't be read.
    """
    with os.scandir(folder) as entries:
        found = [_listed(entry) for entry in entries if not is_ours(entry.name)]
    return sorted(each for each in found if each is not None)


def _listed(entry: os.DirEntry[str]) -> Listed | None:
    try:
        if entry.is_dir(follow_symlinks=False):
            return Listed(entry.name, entry.path, FOLDER)
        about = entry.stat()
    except OSError as error:
        if error.errno not in _NOWHERE:
            return Listed(entry.name, entry.path, UNREADABLE)
        return Listed(entry.name, entry.path, NOTHING) if entry.is_symlink() else None  # gone
    if stat.S_ISDIR(about.st_mode):
        return Listed(entry.name, entry.path, LINKED)
    if not stat.S_ISREG(about.st_mode):
        return Listed(entry.name, entry.path, NOTHING)
    return Listed(entry.name, entry.path, FILE, about.st_size, _stamp(about))


def is_ours(name: str) -> bool:
    """Whether ckptmove has left something so called, and will mind it."""
    return name in (LEDGER, MARKS) or (name.startswith(".") and name.endswith(_OURS))


def _stamp(about: os.stat_result) -> str:
    return f"{about.st_size}-{about.st_mtime_ns}-{about.st_ino}"


def stamp_of(files: Sequence[str], root: str = "") -> str:
    """A text that changes if one of these files does.

    Args:
        files: their paths.
        root: what their names don't count as far as.

    Raises:
        InputError: one is gone.
    """
    try:
        stamps = [_stamp(os.stat(path)) for path in files]
    except OSError as error:
        raise InputError(f"can't be read: {error.strerror}", path=error.filename) from error
    return as_one([(path[len(root) :], stamp) for path, stamp in zip(files, stamps, strict=True)])


def as_one(stamps: Sequence[tuple[str, str]]) -> str:
    """One stamp of those of files, with their names."""
    if len(stamps) == 1:
        return stamps[0][1]
    lines = [f"{name}:{stamp}" for name, stamp in stamps]
    return hashlib.sha256(os.fsencode("\n".join(lines))).hexdigest()[:32]


def inode_of(path: str) -> str:
    """What stays if a file is changed in place.

    Raises:
        InputError: it is gone.
    """
    nbytes, _, number = stamp_of([path]).split("-")
    return f"{nbytes}-{number}"


def files_of(path: str) -> Sequence[str]:
    """The file itself, or all files in a folder and below, sorted.

    Raises:
        InputError: a folder can't be read.
    """
    if not os.path.isdir(path):
        return (path,)
    found, todo = list[str](), [path]
    while todo:
        folder = todo.pop()
        try:
            inside = listing(folder)
        except OSError as error:
            raise InputError(f"can't be read: {error.strerror}", path=folder) from error
        todo += [each.path for each in inside if each.kind == FOLDER]
        found += [each.path for each in inside if each.kind not in (FOLDER, LINKED)]
    return sorted(found)


def nbytes_of(files: Iterable[str]) -> int:
    """The size of files together, without those that can't be found."""
    total = 0
    for path in files:
        try:
            total += os.stat(path).st_size
        except OSError:
            continue
    return total


def allocated_nbytes(path: str) -> int:
    """What a file takes without its holes, or raise OSError."""
    return os.stat(path).st_blocks * 512


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


def output_of(path: str, *, summed: bool) -> Output:
    """What is there: a file, or a folder.

    Args:
        path: of it.
        summed: whether to read it.

    Raises:
        InputError, OSError: nothing is, or it can't be read.
    """
    files = files_of(path)
    stamp = stamp_of(files, path)
    return Output(nbytes_of(files), stamp, _crc32(files, path) if summed else 0)


def _crc32(files: Sequence[str], root: str) -> int:
    """One sum over all files, and over their names if there may be several."""
    crc32 = 0
    buffer = bytearray(_BUFFER)
    for path in files:
        crc32 = zlib.crc32(os.fsencode(path[len(root) :]), crc32)
        with _opened(path) as file:
            while nbytes := file.readinto(buffer):
                crc32 = zlib.crc32(memoryview(buffer)[:nbytes], crc32)
    return crc32


def sizes_of(path: str) -> dict[str, int]:
    """The size of each file of what is there, by its name within; -1 of what is none.

    Raises:
        InputError: it can't be read.
    """
    return {
        each[len(path) :].lstrip("/"): os.stat(each).st_size if os.path.isfile(each) else -1
        for each in files_of(path)
    }


def same(one: str, other: str) -> bool:
    """Whether two files, or two folders with all that is in them, are equal byte for byte.

    Raises:
        InputError, OSError: one can't be read.
    """
    if sizes_of(one) != sizes_of(other):
        return False
    return all(_same_bytes(*pair) for pair in zip(files_of(one), files_of(other), strict=True))


def _same_bytes(one: str, other: str) -> bool:
    with _opened(one) as first, _opened(other) as second:
        while part := first.read(_BUFFER):
            if part != second.read(_BUFFER):
                return False
        return not second.read(1)


def _opened(path: str) -> io.FileIO:
    """A file, open for reading; nothing else, which might have us wait."""
    file = io.FileIO(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "is no file", path)
    return file


def holds(path: str, data: bytes) -> bool:
    """Whether there is a file with just these bytes.

    Raises:
        InputError, OSError: it can't be read.
    """
    if os.path.isdir(path) or sizes_of(path)[""] != len(data):
        return False
    with _opened(path) as file:
        return file.read(len(data)) == data


def is_taken(path: str) -> bool:
    """Whether something is there that would have to be replaced.

    Raises:
        OSError: it is a folder that can't be read.
    """
    if os.path.isdir(path) and not os.path.islink(path):
        return bool(os.listdir(path))
    return os.path.lexists(path)


def make_folder(path: str) -> None:
    """Make a folder, unless it is there, and those above it; or raise OSError."""
    if not os.path.isdir(path):
        try:
            os.makedirs(path, exist_ok=True)
        except FileExistsError as error:  # something else
            number = errno.ENOTDIR
            raise NotADirectoryError(number, os.strerror(number), error.filename) from error
