"""Find out what happened to a file that can't be read: cut short, a full disk, two writers.

Only the head, the tail and the first pickles of the file are read. The result is a guess from
these, not a proof.
"""

from __future__ import annotations

import re
import struct
from itertools import islice

from ..errors import CkptmoveError, CorruptError, InputError, UnsupportedError
from ..manifest.dtypes import STORAGE_CLASSES, storage_element_nbytes
from ..pickles.fetch import TruncatedPickle, fetch
from ..pickles.nodes import Global, List, Persistent, Tuple
from ..pickles.walk import Pickle, walk
from ..sources import place_of
from ..sources.budget import Excess
from ..sources.source import Memory, Readable, Source
from ..zips.archive import (
    DESCRIPTOR_MAGIC,
    END,
    END64,
    END_MAGIC,
    LOCAL,
    LOCAL_MAGIC,
    LOCATOR,
    LOCATOR_MAGIC,
)
from ..zips.found_records import has_two_layouts
from ..zips.in_a_row import zip_starts
from ..zips.members import MAX32
from .archives.tar_archive import BLOCK, starts_tar, walk_members
from .folders.parts import IncompleteError
from .safetensors.header import LENGTH_NBYTES, LONGEST
from .torch.legacy import starts

_HEAD, _TAIL = 512, (1 << 16) + END.size
_LONGEST_PICKLE = 64 << 20  # the pickle of a zip ends within so many bytes of the start
_ZEROS = 512  # more zeros at the end than any writer of zips leaves there
_MOST_ENDS = 100  # the most end records of a zip that are checked
_PAGE = 4096  # more zeros than the last elements of a tensor are likely to have
_MOST_ZEROS = 64 << 20  # zeros are counted only in so many bytes
_SALVAGE = "ckptmove salvage"
_SHARD = ".distcp"  # of torch.distributed.checkpoint: several zips in a row are normal there
_TWO_WRITERS = "two ranks wrote one file"
_SEVERAL_SAVES = "several saves went into one open file, one after the other"
_FULL_DISK = "a full disk while saving"
_NOT_ALL = "an interrupted upload: not all of its files are there"

#: Searched and not parsed: a header may have very many entries.
_END_OF_TENSOR = re.compile(
    rb'"data_offsets"\s{0,9}:\s{0,9}\[\s{0,9}\d{1,19}\s{0,9},\s{0,9}(\d{1,19})\b'
)


def explain(error: InputError, named: str, first: Source | None) -> None:
    """Add to an error what happened to its file and what can be done, if that is known.

    `named` is the path that the user named: a file, an index or a folder. `first` is the file that
    was opened first, or None.
    """
    if isinstance(error, Excess) or not isinstance(error, (CorruptError, UnsupportedError)):
        return
    if _SALVAGE in (error.hint or "") or not _is_of(error, named, first):
        return
    try:
        damage = _damage(error, named, first)
    except CkptmoveError:
        return
    if damage is None or (not damage and isinstance(error, UnsupportedError)):
        return
    rescued = place_of(named).parent.path if named.endswith(_SHARD) else named
    keeps = f"{_SALVAGE} {rescued} DST keeps what is left"
    if damage and damage.partition(":")[0] not in str(error):
        error.args = (f"{error}; it looks like {damage}",)
    error.hint = f"{error.hint}, or {keeps}" if damage and error.hint else error.hint or keeps


def _is_of(error: InputError, named: str, first: Source | None) -> bool:
    """Whether an error is of this checkpoint; two that are compared are both open."""
    if error.path is None or error.path == named:
        return True
    if first is not None and not first.read(0, min(_HEAD, first.nbytes)).lstrip().startswith(b"{"):
        return False  # it is no index, which other files belong to
    folder = named if first is None else place_of(named).parent.path
    return error.path.startswith(f"{folder.rstrip('/')}/")


def _damage(error: InputError, named: str, first: Source | None) -> str | None:
    """What happened to the file of an error; None if unknown, or if the file changed meanwhile."""
    if isinstance(error, IncompleteError):
        return _NOT_ALL
    if error.path is None or error.path == named:
        return None if first is None else _damage_unless_changed(first)
    with place_of(error.path).open() as source:
        return _damage_unless_changed(source)


def _damage_unless_changed(source: Source) -> str | None:
    source.check_unchanged()
    return damage_of(source)


def damage_of(source: Readable) -> str | None:
    """What happened to a file: empty if nothing shows, None if the file has no known format.

    The text continues the phrase "it looks like".
    """
    head = source.read(0, min(_HEAD, source.nbytes))
    if not head:
        return None
    zeros = _zeros_at_end(source)
    if zeros == source.nbytes:
        return f"{_FULL_DISK}: all of its bytes are zeros"
    is_zip = head.startswith(LOCAL_MAGIC)
    is_safe = head[LENGTH_NBYTES:].lstrip()[:1] == b"{"
    is_tar = starts_tar(head)
    if not (is_zip or is_safe or is_tar or starts(head) or head[:1] == b"\x80"):
        return None
    try:
        if is_tar:
            return _of_tar(source, zeros)
        if is_zip and source.path.endswith(_SHARD):
            return _of_items(source, zeros)
        if is_zip:
            return _of_zip(source, zeros)
        if starts(head):
            return _by_size(source, _legacy_nbytes(source), zeros)
        if is_safe:
            return _by_size(source, _safetensors_nbytes(source), zeros)
        return _of_pickle(source, zeros)
    except (InputError, struct.error, IndexError):
        return _full_disk(zeros)


def data_end(source: Readable) -> int:
    """Where the written data seems to end; the zeros that a full disk leaves do not count."""
    zeros = _zeros_at_end(source)
    return source.nbytes - (zeros if zeros >= _PAGE else 0)


def ending_in_zeros(source: Readable) -> str:
    """What happened to a readable file, judged by the zeros at its end; empty if there are few."""
    return _full_disk(_zeros_at_end(source))


def _full_disk(zeros: int, least: int = _PAGE) -> str:
    if zeros < least:
        return ""
    return f"{_FULL_DISK}: it ends in {zeros:,} zeros"


def cut_short(source: Readable, nbytes: int | None, *, at_least: bool = False) -> str:
    """What happened to a file that should have `nbytes` bytes but has fewer."""
    known = nbytes is not None and nbytes > source.nbytes
    more = "" if not known else f" of {'at least ' if at_least else ''}{nbytes:,}"
    return f"an interrupted upload: the file is cut short after {source.nbytes:,}{more} bytes"


def _by_size(source: Readable, nbytes: int | None, zeros: int) -> str:
    """What happened to a file that should have `nbytes` bytes; None means it is cut short."""
    if nbytes is None or nbytes > source.nbytes:
        return cut_short(source, nbytes)
    if nbytes < source.nbytes:
        return _follow_its_end(source.nbytes - nbytes)
    return _full_disk(zeros)


def _follow_its_end(nbytes: int) -> str:
    return f"{_TWO_WRITERS}: {nbytes:,} bytes follow its end"


def _zeros_at_end(source: Readable) -> int:
    count = 0
    for step in (1 << n for n in range(9, 27)):
        nbytes = min(step, source.nbytes - count)
        part = source.read(source.nbytes - count - nbytes, nbytes)
        left = len(part.rstrip(b"\0"))
        count += nbytes - left
        if left or count >= min(source.nbytes, _MOST_ZEROS):
            break
    return count


# -- zips ----------------------------------------------------------------------------------------


def _of_zip(source: Readable, zeros: int) -> str:
    start = max(0, source.nbytes - _TAIL)
    tail = source.read(start, source.nbytes - start)
    end = tail.rfind(END_MAGIC)
    if end < 0 or end + END.size > len(tail):
        full = _full_disk(zeros, _ZEROS)
        return full or cut_short(source, _zip_nbytes(source), at_least=True)
    if len(zip_starts(source)) > 1:
        return _SEVERAL_SAVES
    if not _is_in_place(source, tail, start, end):
        return _TWO_WRITERS
    others = (found.start() for found in islice(re.finditer(END_MAGIC, tail[:end]), _MOST_ENDS))
    if any(_is_in_place(source, tail, start, other) for other in others):
        return _TWO_WRITERS
    behind = len(tail) - end - END.size - int.from_bytes(tail[end + END.size - 2 :][:2], "little")
    if has_two_layouts(source):
        return _full_disk(zeros) or _TWO_WRITERS
    return _full_disk(zeros) or (_follow_its_end(behind) if behind > 0 else "")


def _of_items(source: Readable, zeros: int) -> str:
    """What happened to a file of several zips in a row."""
    tail = source.read(max(0, source.nbytes - END.size), min(source.nbytes, END.size))
    if tail.startswith(END_MAGIC):
        return ""
    return _full_disk(zeros, _ZEROS) or cut_short(source, None)


def _is_in_place(source: Readable, tail: bytes, start: int, end: int) -> bool:
    """Whether an end record lies right behind the directory that it describes."""
    _, _, _, _, _, nbytes, at, _ = END.unpack_from(tail, end)
    locator, directory_end = end - LOCATOR.size, start + end
    if locator >= 0 and tail.startswith(LOCATOR_MAGIC, locator):
        directory_end = LOCATOR.unpack_from(tail, locator)[2]
        if directory_end + END64.size <= source.nbytes:
            wide = END64.unpack(source.read(directory_end, END64.size))
            nbytes, at = wide[8], wide[9]
    return bool(at == MAX32 or at + nbytes == directory_end)


def _zip_nbytes(source: Readable) -> int | None:
    """The least size of a zip whose first record names the storages that follow; or None."""
    *_, name_nbytes, extra_nbytes = LOCAL.unpack(source.read(0, LOCAL.size))
    data_at: int = LOCAL.size + name_nbytes + extra_nbytes
    if not source.read(LOCAL.size, name_nbytes).endswith(b"data.pkl"):
        return None
    head = source.read(data_at, min(_LONGEST_PICKLE, source.nbytes - data_at))
    found = _walked(Memory(head, source.path), 0)
    end = head.find(DESCRIPTOR_MAGIC, found.nbytes)
    if end < 0:
        return None
    return data_at + end + sum(_storages(found).values())


def _of_tar(source: Readable, zeros: int) -> str:
    """What happened to a tar, which should end in two blocks of zeros."""
    end = 0
    try:
        for member in walk_members(source, folders=True, broken=True):
            end = max(end, member.end)
    except InputError:
        is_cut = end + BLOCK > source.nbytes
        return _full_disk(zeros) or (cut_short(source, None) if is_cut else _TWO_WRITERS)
    behind = source.nbytes - -(-end // BLOCK) * BLOCK
    if zeros < min(behind, _MOST_ZEROS):
        return _TWO_WRITERS
    return _full_disk(zeros, source.nbytes - end + _PAGE)


# -- pickles and safetensors ---------------------------------------------------------------------


def _of_pickle(source: Readable, zeros: int) -> str:
    try:
        fetch(source, 0)
    except TruncatedPickle:
        return _full_disk(zeros) or cut_short(source, None)
    return ""


def _legacy_nbytes(source: Readable) -> int | None:
    """The right size of a torch-legacy file; None if its pickles are cut short."""
    try:
        at, wanted = 0, dict[str, int]()
        for n in range(5):
            fetched = fetch(source, at)
            if n > 2:
                gaps = {where: gap.nbytes for where, gap in fetched.gaps.items()}
                found = walk(fetched.data, gaps=gaps)
                wanted = wanted or _storages(found)
            at += fetched.nbytes
    except TruncatedPickle:
        return None
    keys = found.root.items if isinstance(found.root, List) else []
    return at + sum(8 + wanted.get(str(key), 0) for key in keys)


def _walked(source: Readable, at: int) -> Pickle:
    fetched = fetch(source, at)
    return walk(fetched.data, gaps={where: gap.nbytes for where, gap in fetched.gaps.items()})


def _storages(found: Pickle) -> dict[str, int]:
    """Key of each storage that a pickle names → its size in bytes."""
    return dict(filter(None, map(_storage, found.persistents)))


def _storage(node: Persistent) -> tuple[str, int] | None:
    items = node.pid.items if isinstance(node.pid, Tuple) else []
    if len(items) < 5 or not isinstance(items[1], Global) or not isinstance(items[4], int):
        return None
    dtype = STORAGE_CLASSES.get(items[1].name)
    element = 1 if dtype is None else storage_element_nbytes(dtype)
    return str(items[2]), max(0, items[4]) * element


def _safetensors_nbytes(source: Readable) -> int | None:
    """The right size of a safetensors file; None if its header is cut short."""
    length = int.from_bytes(source.read(0, LENGTH_NBYTES), "little")
    data_at = LENGTH_NBYTES + length
    if length > LONGEST:
        raise CorruptError("its header is damaged")
    if data_at > source.nbytes:
        return None
    header = source.read(LENGTH_NBYTES, length)
    if not header.rstrip().endswith(b"}"):
        raise CorruptError("its header is damaged")
    return data_at + max((int(found[1]) for found in _END_OF_TENSOR.finditer(header)), default=0)
