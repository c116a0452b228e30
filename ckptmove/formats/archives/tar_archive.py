"""Read the members of a tar strictly, and plan a new size for one of them.

Only regular files are accepted, with sizes within the file and unique names: what Python's tarfile
writes. These are ustar headers, and pax headers for times in microseconds and sizes from 8 GiB.
With `folders`, also folders and long names: in two fields, in pax headers, and in GNU's `L`
members. A block is a header if its checksum is right, as in tarfile, which torch uses.

Sources: POSIX.1-2017, pax, ustar Interchange Format; CPython's Lib/tarfile.py.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from ...errors import CorruptError, UnsupportedError
from ...sources.source import Readable

if TYPE_CHECKING:
    from ...plans.plan import Edit

BLOCK = 512
_SIZE, _CHECKSUM = slice(124, 136), slice(148, 156)  # fields of a header
_LARGEST = 8**11  # a size field holds only smaller sizes
_TYPE_AT = 156
_PREFIX = slice(345, 500)
_REGULAR, _PAX, _FOLDER, _LONG_NAME = (b"0", b"\0"), b"x", b"5", b"L"
_MAGIC, _POSIX = slice(257, 263), b"ustar\0"  # GNU tar stores other data in place of the prefix
_USUAL_END = 20 * BLOCK  # bytes: tar fills its last record with zeros
_PAX_RECORD = rb"(\d{1,6}) ([^=]+)="
_HARMLESS = (b"mtime", b"atime", b"ctime", b"uid", b"gid", b"uname", b"gname")
_LONGEST_PAX = 1 << 16  # bytes
_LONGEST_NAME = 4096  # bytes, as Linux allows
_MOST_MEMBERS = 1000


class Size(NamedTuple):
    """A size in a pax header: its text, and its offset in the file."""

    at: int
    text: bytes


class _Header(NamedTuple):
    """The fields of an extra header, which apply to the next member."""

    name: str | None = None
    size: Size | None = None


class TarMember(NamedTuple):
    """A file in the tar."""

    name: str
    header_at: int  #: offset of its own header, after any extra header
    start: int  #: offset of its content
    nbytes: int
    size: Size | None  #: the size in its pax header, or None

    @property
    def end(self) -> int:
        """The offset where its content ends; padding follows."""
        return self.start + self.nbytes


def members_of(source: Readable) -> tuple[dict[str, TarMember], int]:
    """The members of a tar by name, in order, and the offset where they end.

    UnsupportedError if one of them is not a regular file.
    """
    members: dict[str, TarMember] = {}
    end = 0
    for member in walk_members(source):
        if member.name in members:
            raise CorruptError(f"the tar has two members {member.name!r:.100}")
        members[member.name] = member
        end = _pad_to_block(member.end)
    return members, end


def walk_members(
    source: Readable, *, folders: bool = False, broken: bool = False
) -> Iterator[TarMember]:
    """The members of a tar, one by one; names may repeat.

    `folders`: also return folders, whose names end in a slash, and accept long names. If `broken`,
    the last member may be cut short; it is returned before the error is raised.
    """
    at, count, said = 0, 0, None  # said: by a header that waits for its member
    while at + BLOCK <= source.nbytes:
        header = source.read(at, BLOCK)
        if not any(header) and count and said is None:
            return
        if not has_checksum(header):
            raise CorruptError(f"the tar header at offset {at:,} is damaged")
        start, nbytes = at + BLOCK, _number(header[_SIZE])
        kind = header[_TYPE_AT : _TYPE_AT + 1]
        says_more = said is None and (kind == _PAX or (folders and kind == _LONG_NAME))
        has_prefix = folders and header[_MAGIC] == _POSIX
        name = _name(header) if said is None or said.name is None else said.name
        is_folder = folders and kind == _FOLDER and name.endswith("/")
        # other readers would see another name or kind
        odd = not is_folder and (name.endswith("/") or kind not in _REGULAR)
        if (odd and not says_more) or (any(header[_PREFIX]) and not has_prefix):
            raise UnsupportedError(f"is a tar archive in which {name!r:.100} is not a regular file")
        if said is not None and said.size is not None:
            nbytes = int(said.size.text)
        if nbytes < 0 or start + nbytes > source.nbytes or (is_folder and nbytes):
            if broken and start + nbytes > source.nbytes and not says_more:
                yield TarMember(name, at, start, source.nbytes - start, said and said.size)
            raise CorruptError(f"the member {name!r:.100} of the tar is truncated")
        if says_more:
            said = _said_by(source, start, nbytes, is_pax=kind == _PAX)
            if said.name is not None and not folders:
                raise UnsupportedError(f"is a tar with a long name: {said.name!r:.100}")
        elif count == _MOST_MEMBERS:
            raise UnsupportedError(f"is a tar of more than {_MOST_MEMBERS:,} members")
        else:
            yield TarMember(name, at, start, nbytes, said and said.size)
            count += 1
            said = None
        at = _pad_to_block(start + nbytes)
    raise CorruptError("the tar is truncated: its end is missing")


def bytes_behind(source: Readable, end: int) -> list[str]:
    """A warning if more bytes than usual follow the members of a tar."""
    behind = source.nbytes - end
    return [f"{behind:,} bytes follow the end of the tar"] if behind > _USUAL_END else []


def starts_tar(head: bytes) -> bool:
    """Whether torch takes the file for a tar: its first block is a header, by magic or checksum."""
    return len(head) == BLOCK and (head[257:262] == b"ustar" or has_checksum(head))


def _said_by(source: Readable, start: int, nbytes: int, *, is_pax: bool) -> _Header:
    """The fields in a pax header, or in a GNU long name."""
    if nbytes > _LONGEST_PAX:
        raise UnsupportedError("is a tar with an overlong pax header")
    content = source.read(start, nbytes)
    if not is_pax:
        return _Header(_long(content.partition(b"\0")[0]))
    name = None
    size, at = None, 0
    while at < len(content):
        found = re.compile(_PAX_RECORD).match(content, at)
        end = at + int(found[1]) if found else 0
        if not found or content[end - 1 : end] != b"\n" or end <= found.end():
            raise CorruptError("a pax header of the tar is damaged")
        value = content[found.end() : end - 1]
        if found[2] == b"size" and value.isdigit() and len(value) < 20:
            size = Size(start + found.end(), value)
        elif found[2] == b"path":
            name = _long(value)
        elif found[2] not in _HARMLESS:
            raise UnsupportedError("is a tar with a pax header of a kind that is not known")
        at = end
    return _Header(name, size)


def edits_to_resize(source: Readable, member: TarMember, nbytes: int) -> list[Edit]:
    """The changes in a member's header and padding for a new size.

    UnsupportedError if the size does not fit into the header.
    """
    from ...plans.plan import Edit

    padding = bytes(_pad_to_block(nbytes) - nbytes)
    changes = [Edit(member.end, _pad_to_block(member.end), padding)]
    at, old = member.size or Size(0, b"")
    new = b"%0*d" % (len(old), nbytes)
    if old and len(old) == len(new):
        changes.append(Edit(at, at + len(old), new))
    elif old or nbytes >= _LARGEST:
        raise UnsupportedError(f"the member {member.name!r:.100} would outgrow its tar header")
    else:
        header = bytearray(source.read(member.header_at, BLOCK))
        header[_SIZE] = b"%011o\0" % nbytes
        header[_CHECKSUM] = b" " * 8
        header[_CHECKSUM] = b"%06o\0 " % sum(header)
        changes.append(Edit(member.header_at, member.header_at + BLOCK, bytes(header)))
    return changes


def has_checksum(header: bytes) -> bool:
    """Whether the checksum of a tar header is right, as computed by tarfile, which torch uses."""
    rest = header[: _CHECKSUM.start] + header[_CHECKSUM.stop :]
    signed = sum(struct.unpack(f"{len(rest)}b", rest))
    return _number(header[_CHECKSUM]) - 8 * ord(" ") in (sum(rest), signed)


def _number(field: bytes) -> int:
    """A number in a tar header: octal, or base 256; -1 if it is invalid."""
    if field[0] in (0x80, 0xFF):
        value = int.from_bytes(field[1:], "big")
        return value if field[0] == 0x80 else value - 256 ** (len(field) - 1)
    try:
        return int(_text(field).strip() or "0", 8)
    except ValueError:
        return -1


def _name(header: bytes) -> str:
    """The name in a tar header, with the prefix of folders."""
    name, prefix = _text(header[:100]), _text(header[_PREFIX])
    return f"{prefix}/{name}" if prefix else name


def _long(name: bytes) -> str:
    if not name or len(name) > _LONGEST_NAME or b"\0" in name:
        raise UnsupportedError(f"is a tar with a name of {len(name):,} bytes")
    return name.decode("utf-8", "replace")


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "replace")


def _pad_to_block(at: int) -> int:
    return -(-at // BLOCK) * BLOCK
