"""Pickles and zips built by hand, opcode by opcode and field by field, so that rules can be broken.

Nothing here shares code with ckptmove: the layouts are PKWARE's APPNOTE and `pickletools`.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import signal
import struct
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch

CODES = {opcode.name: opcode.code.encode("latin-1") for opcode in pickletools.opcodes}


def opcodes_of(data: bytes) -> Counter[str]:
    return Counter(opcode.name for opcode, _, _ in pickletools.genops(data))


# Pickles as torch.save makes them


@dataclass(eq=False)
class Stored:
    """What the pickler of torch.save knows of a storage."""

    key: str
    location: str
    numel: int = 4


class _StoragesAside:
    """Pickles a storage as a persistent id, as torch.save does."""

    def persistent_id(self, obj: object) -> tuple[object, ...] | None:
        if not isinstance(obj, Stored):
            return None
        return ("storage", torch.FloatStorage, obj.key, obj.location, obj.numel)


class _CPickler(_StoragesAside, pickle.Pickler):
    """In C, as torch.save uses it."""


class _PythonPickler(_StoragesAside, pickle._Pickler):
    """In Python, which other libraries hand to torch.save."""


def dumps(saved: object, protocol: int = 2, *, python: bool = False) -> bytes:
    """Pickle `saved`, with `Stored`s for storages."""
    file = io.BytesIO()
    pickler = _PythonPickler(file, protocol) if python else _CPickler(file, protocol)
    pickler.dump(saved)
    return file.getvalue()


class Loaded(NamedTuple):
    """What unpickling gave."""

    tree: object  #: each storage is a tuple `("storage", type, key, numel)`
    locations: list[str]  #: of each persistent id, in the order of the pickle


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.locations: list[str] = []

    def persistent_load(self, pid: Any) -> object:
        kind, storage_type, key, location, numel = pid
        self.locations.append(location)
        return (kind, storage_type, key, numel)


def loads(data: bytes) -> Loaded:
    """Unpickle the output of `dumps`."""
    unpickler = _Unpickler(data)
    return Loaded(unpickler.load(), unpickler.locations)


# Zips

LOCAL = "<4s5H3I2H"
CENTRAL = "<4s6H3I5H2I"
END = "<4s4H2IH"
END64 = "<4sQ2H2I4Q"
LOCATOR = "<4sIQI"
Fields = Mapping[str, int | bytes]


@dataclass
class Part:
    """A record of a zip; `local` and `central` replace fields after everything is computed."""

    name: str  #: in both headers, unless a field `name` replaces it in one
    content: bytes = b""
    method: int = 0  #: 0 stored, 8 deflated
    flags: int = 0x0800  #: general purpose flags; with 8, sizes and checksum follow in a descriptor
    #: the stored bytes, if they are not what `method` would make of the content
    raw: bytes | None = None
    wide: bool = False  #: sizes and offset go to a zip64 extra field, though they would fit
    unsigned: bool = False  #: the descriptor starts with the checksum
    extra: bytes = b""
    extra_central: bytes = b""
    gap: bytes = b""  #: bytes before the local header
    local: Fields = field(default_factory=dict)
    central: Fields = field(default_factory=dict)
    descriptor: Fields = field(default_factory=dict)

    @property
    def stored(self) -> bytes:
        if self.raw is not None:
            return self.raw
        return deflate(self.content) if self.method == 8 else self.content


def deflate(content: bytes) -> bytes:
    """Raw deflate, as zip stores it: without zlib's header."""
    machine = zlib.compressobj(9, zlib.DEFLATED, -15)
    return machine.compress(content) + machine.flush()


def extra_field(kind: int, content: bytes) -> bytes:
    return struct.pack("<HH", kind, len(content)) + content


def build_zip(
    parts: Sequence[Part],
    *,
    wide: bool = False,
    comment: bytes = b"",
    before_end: bytes = b"",
    after: bytes = b"",
    end: Fields | None = None,
    end64: Fields | None = None,
    locator: Fields | None = None,
) -> bytes:
    """A zip file; `wide` writes the zip64 end record and its locator, as torch always does.

    `before_end` lies between the directory (or its zip64 end record) and what follows it, `after`
    at the end. `end`, `end64` and `locator` replace fields.
    """
    out, entries = b"", b""
    for part in parts:
        out += part.gap
        entries += _central(part, len(out))
        out += _record(part, len(out))
    at = len(out)
    out += entries
    if wide:
        end64_at = len(out)
        counts = {"here": len(parts), "entries": len(parts), "nbytes": len(entries), "at": at}
        names64 = "magic size made needed disk first here entries nbytes at"
        fixed: Fields = {"magic": b"PK\6\6", "size": 44, "made": 798, "needed": 45}
        out += _pack(END64, names64, {**fixed, "disk": 0, "first": 0, **counts}, end64)
        out += before_end
        where: Fields = {"magic": b"PK\6\7", "disk": 0, "end64_at": end64_at, "disks": 1}
        out += _pack(LOCATOR, "magic disk end64_at disks", where, locator)
    else:
        out += before_end
    plain: Fields = {
        **{"magic": b"PK\5\6", "disk": 0, "first": 0, "here": len(parts), "entries": len(parts)},
        **{"nbytes": len(entries), "at": at, "comment": len(comment)},
    }
    out += _pack(END, "magic disk first here entries nbytes at comment", plain, end)
    return out + comment + after


def _record(part: Part, at: int) -> bytes:
    stored, crc = part.stored, zlib.crc32(part.content)
    later = part.flags & 8
    sizes = (0, 0, 0) if later else (crc, len(stored), len(part.content))
    extra = part.extra
    if part.wide and not later:
        sizes = (crc, 0xFFFFFFFF, 0xFFFFFFFF)
        extra = extra_field(1, struct.pack("<QQ", len(part.content), len(stored))) + extra
    fields = _fields(part, part.local, sizes, extra)
    names = "magic needed flags method time date crc stored nbytes name_nbytes extra_nbytes"
    header = _pack(LOCAL, names, {"magic": b"PK\3\4", **fields}, part.local)
    told: Fields = {"magic": b"PK\7\x08", "crc": crc, "stored": len(stored)}
    told = {**told, "nbytes": len(part.content)}
    shape = "<4sIQQ" if part.wide else "<4sIII"
    tail = _pack(shape, "magic crc stored nbytes", told, part.descriptor) if later else b""
    tail = tail[4:] if part.unsigned else tail
    return header + _name(part, part.local) + extra + stored + tail


def _central(part: Part, at: int) -> bytes:
    crc, stored = zlib.crc32(part.content), len(part.stored)
    sizes, where, extra = (crc, stored, len(part.content)), at, part.extra_central
    if part.wide:
        extra = extra_field(1, struct.pack("<QQQ", sizes[2], stored, at)) + extra
        sizes, where = (crc, 0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFF
    fixed: Fields = {"magic": b"PK\1\2", "made": 0, "comment": 0, "disk": 0}
    more: Fields = {"inside": 0, "outside": 0, "at": where}
    fields: Fields = {**fixed, **more, **_fields(part, part.central, sizes, extra)}
    names = "magic made needed flags method time date crc stored nbytes name_nbytes extra_nbytes"
    head = _pack(CENTRAL, f"{names} comment disk inside outside at", fields, part.central)
    return head + _name(part, part.central) + extra


def _fields(
    part: Part, own: Fields, sizes: tuple[int, int, int], extra: bytes
) -> dict[str, int | bytes]:
    crc, stored, nbytes = sizes
    name_nbytes = len(_name(part, own))
    return {
        **{"needed": 0, "flags": part.flags, "method": part.method, "time": 0, "date": 0},
        **{"crc": crc, "stored": stored, "nbytes": nbytes},
        **{"name_nbytes": name_nbytes, "extra_nbytes": len(extra)},
    }


def _name(part: Part, own: Fields) -> bytes:
    name = own.get("name", part.name.encode("utf-8"))
    assert isinstance(name, bytes)
    return name


def _pack(shape: str, names: str, fields: Fields, replaced: Fields | None) -> bytes:
    merged = {**fields, **(replaced or {})}
    return struct.pack(shape, *(merged[name] for name in names.split()))


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Fail instead of hanging if the code inside takes more time of the processor than that.

    How busy the machine is doesn't count.
    """

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise TimeoutError(f"still at it after {seconds} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
