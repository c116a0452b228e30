"""The journal of a change in place of several files in a folder: all their journals in one. No I/O.

    "ckptmove-undo-d\\n"  16 bytes; all numbers below are little-endian
    files                 8: the number of files, and for each
        nbytes 16: of its name, and of its journal
        name             UTF-8, relative to the folder, with `/` between its parts
        journal          as of a file that is changed alone: see `journal`
    seal                 32: SHA-256 of everything above

It is in the folder, under the name `.ckptmove-journal`. Removing this one file makes the changes of
all files final. Until then, an interruption undoes all.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Mapping

from ...errors import CorruptError, UnsupportedError
from .journal import HEAD_NBYTES, MAGIC, Journal, Read, check_head

_MAGIC = b"ckptmove-undo-d\n"
_HEAD = struct.Struct("<16sQ")
_FILE = struct.Struct("<QQ")
_SEAL_NBYTES = 32
_LONGEST_NAME = 4096  # bytes
_MOST_FILES = 100_000


def folder_journal(files: Mapping[str, Journal]) -> bytes:
    """Return the bytes of a folder's journal, made from the journals of its files by name."""
    import hashlib  # imported only here: it is slow, and most folders have no journal

    parts = [_HEAD.pack(_MAGIC, len(files))]
    for name, journal in files.items():
        raw, data = os.fsencode(name), journal.to_bytes()
        parts += (_FILE.pack(len(raw), len(data)), raw, data)
    whole = b"".join(parts)
    return whole + hashlib.sha256(whole).digest()


def names_in(read: Read, nbytes: int) -> list[str]:
    """Return the names of the files that a journal covers. Raises as `journals_in`."""
    return [name for name, _, _ in _table(read, nbytes)]


def journals_in(
    read: Read, nbytes: int, stat_of: Callable[[str], os.stat_result]
) -> Iterator[tuple[str, Journal]]:
    """Yield the name and the journal of each file, from a complete journal.

    `stat_of` returns the present state of a file; its journal is only read if it may belong to it.
    Raises CorruptError if it is damaged or belongs to other files; UnsupportedError if another
    version wrote it.
    """
    import hashlib

    digest, found, end = hashlib.sha256(), list[tuple[str, Journal]](), 0
    for name, at, length in _table(read, nbytes):
        about = stat_of(name)
        check_head(read(at, min(length, HEAD_NBYTES)), length, about.st_size, about.st_ino)
        data = read(at, length)
        digest.update(read(end, at - end))
        digest.update(data)
        found.append((name, Journal.from_bytes(data)))
        end = at + length
    digest.update(read(end, nbytes - _SEAL_NBYTES - end))
    if digest.digest() != read(nbytes - _SEAL_NBYTES, _SEAL_NBYTES):
        raise _damaged()
    return iter(found)


def _table(read: Read, nbytes: int) -> Iterator[tuple[str, int, int]]:
    """Return the name of each file, with the offset and the size of its journal."""
    head, end = read(0, _HEAD.size), nbytes - _SEAL_NBYTES
    magic = head[: len(_MAGIC)]
    if magic != _MAGIC and magic.startswith(MAGIC) and magic.endswith(b"\n"):
        raise UnsupportedError("its journal was written by another version of ckptmove")
    if magic != _MAGIC or len(head) < _HEAD.size:
        raise _damaged()
    count, at, names = _HEAD.unpack(head)[1], _HEAD.size, set[str]()
    if count > _MOST_FILES:
        raise _damaged()
    for _ in range(count):
        sizes = read(at, _FILE.size)
        if len(sizes) < _FILE.size:
            raise _damaged()
        name_nbytes, journal_nbytes = _FILE.unpack(sizes)
        at += _FILE.size
        if name_nbytes > _LONGEST_NAME or at + name_nbytes + journal_nbytes > end:
            raise _damaged()
        name = os.fsdecode(read(at, name_nbytes))
        if not {"", ".", ".."}.isdisjoint(name.split("/")) or "\0" in name or name in names:
            raise _damaged()
        names.add(name)
        at += name_nbytes
        yield name, at, journal_nbytes
        at += journal_nbytes
    if at != end:
        raise _damaged()


def _damaged() -> CorruptError:
    return CorruptError("its journal is damaged")
