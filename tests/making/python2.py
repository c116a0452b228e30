"""Pickles as Python 2's cPickle wrote them, which no Python 3 pickler writes."""

from __future__ import annotations

import copyreg
import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn

PersistentId = Callable[[object], object]

_Pickler: Any = pickle._Pickler  # Python's own, not the C one


class Unicode(str):
    """A string that Python 2 had as `unicode`; any other is its `str`."""


class Long(int):
    """A number that Python 2 had as `long`, as sizes of storages were."""


class Pickler(_Pickler):
    """cPickle's opcodes: byte strings for str and bytes, memo from 1, tuples not memoized.

    cPickle skips the memo for objects with one reference, which nearly all tuples are.
    """

    dispatch: ClassVar[dict[type, Callable[..., None]]] = dict(_Pickler.dispatch)

    def __init__(self, file: io.BytesIO, protocol: int, persistent_id: PersistentId) -> None:
        super().__init__(file, protocol)
        self._persistent_id = persistent_id

    def persistent_id(self, obj: object) -> object:
        return self._persistent_id(obj)

    def memoize(self, obj: object) -> None:
        """Number from 1, and leave tuples out."""
        if not isinstance(obj, tuple):
            index = len(self.memo) + 1
            self.write(self.put(index))
            self.memo[id(obj)] = index, obj

    def reducer_override(self, obj: object) -> Any:
        """An OrderedDict as a list of pairs that are lists; parameters as of torch 0.1 to 0.3."""
        if isinstance(obj, nn.Parameter):
            return reduce_variable(obj)
        if type(obj) is OrderedDict:
            return OrderedDict, ([list(pair) for pair in obj.items()],)
        return NotImplemented

    def save_byte_string(self, obj: str | bytes) -> None:
        """SHORT_BINSTRING, BINSTRING, or in protocol 0 a quoted STRING."""
        data = obj.encode() if isinstance(obj, str) else obj
        if self.proto == 0:
            self.write(b"S" + repr(data)[1:].encode() + b"\n")
        elif len(data) < 256:
            self.write(b"U" + bytes([len(data)]) + data)
        else:
            self.write(b"T" + struct.pack("<i", len(data)) + data)
        self.memoize(obj)

    def save_unicode(self, obj: Unicode) -> None:
        """BINUNICODE, or in protocol 0 a line."""
        data = obj.encode("raw-unicode-escape") if self.proto == 0 else obj.encode()
        header = b"V" if self.proto == 0 else b"X" + struct.pack("<I", len(data))
        self.write(header + data + (b"\n" if self.proto == 0 else b""))
        self.memoize(obj)

    def save_long_integer(self, obj: Long) -> None:
        """LONG1, or a line that ends in L."""
        data = pickle.encode_long(obj)
        line = b"L" + str(int(obj)).encode() + b"L\n"
        self.write(b"\x8a" + bytes([len(data)]) + data if self.proto >= 2 else line)

    dispatch |= {str: save_byte_string, bytes: save_byte_string}
    dispatch |= {Unicode: save_unicode, Long: save_long_integer}


def reduce_variable(parameter: nn.Parameter) -> tuple[object, ...]:
    """As torch 0.1 to 0.3: an empty one and data, creator, hooks, requires_grad, volatile."""
    state = (parameter.data, None, OrderedDict[int, object](), parameter.requires_grad, False)
    return copyreg.__newobj__, (type(parameter),), state  # type: ignore[attr-defined]


def text_or_bytes(value: bytes) -> str | bytes:
    """What a byte string of Python 2 is read as: text if it is UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def no_persistent_id(_: object) -> None:
    """Nothing is stored elsewhere."""


def dumps(obj: object, protocol: int, persistent_id: PersistentId = no_persistent_id) -> bytes:
    """`cPickle.dumps(obj, protocol)`, for objects that Python 2 could have held."""
    file = io.BytesIO()
    Pickler(file, protocol, persistent_id).dump(obj)
    return file.getvalue()
