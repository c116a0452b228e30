"""Rows of numbers, read many at once, are what they are when they are read one by one.

The reference is the same machine without rows, and Python's own unpickler. The rows have lengths
around those at which more is looked at together; all opcodes may come between, or damage them.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ckptmove.errors import InputError
from ckptmove.pickles.fetch import fetch
from ckptmove.pickles.nodes import Node, Text
from ckptmove.pickles.opcodes.machine import Machine
from ckptmove.sources.source import Memory
from tests.making.building import CODES


class _OneByOne(Machine):
    """Reads each opcode by itself."""

    def repeat(self, value: Node) -> None:
        self.push(value)

    def push_numbers(self, width: int) -> None:
        pass

    def recall_again(self, width: int) -> None:
        pass


class _Unpickler(pickle._Unpickler):
    """Notes what it would import."""

    def __init__(self, data: bytes) -> None:
        self.file = io.BytesIO(data)
        super().__init__(self.file, encoding="utf-8")
        self.names: list[tuple[str, str]] = []

    def find_class(self, module: str, name: str) -> Any:
        self.names.append((module, name))
        return lambda *_: None

    def get_extension(self, code: int) -> None:
        if code <= 0:  # as Python says; a number of four bytes has a sign
            raise pickle.UnpicklingError("EXT specifies code <= 0")
        self.names.append(("copyreg extension", str(code)))
        self.append(lambda *_: None)  # type: ignore[attr-defined]

    def persistent_load(self, pid: Any) -> Any:
        return pid


def _row(parts: tuple[bytes, int, int]) -> bytes:
    code, count, seed = parts
    width = {b"K": 1, b"M": 2, b"J": 4, b"G": 8}.get(code, 0)
    return b"".join(
        code + (seed + n * 0x9E3779B97F4A7C15 & (1 << 64) - 1).to_bytes(8, "little")[:width]
        for n in range(count)
    )


LENGTHS = st.sampled_from([1, 2, 3, 4, 14, 15, 16, 17, 18, 19, 33, 270, 271, 272, 273, 274])
ROWS = st.tuples(
    st.sampled_from([b"K", b"M", b"J", b"G", b"N", b"\x88", b"\x89", b")"]),
    LENGTHS,
    st.integers(0, (1 << 64) - 1),
).map(_row)
#: A list, a text, a device and a name are in the slots that some of these recall.
FILLED = b"]q\0X\1\0\0\0aqK0X\3\0\0\0cpuq\1" + b"0cKK\nMM\nr\2\0\0\0"
RECALLS = st.tuples(
    st.sampled_from([b"h\0", b"hK", b"h\1", b"h\2", b"j\0\0\0\0", b"jK\0\0\0", b"j\1\0\0\0"]),
    LENGTHS,
).map(lambda parts: parts[0] * parts[1])
BETWEEN = st.sampled_from(
    [
        *(b"(", b"]", b"}", b"t", b"l", b"e", b"a", b"0", b"1", b"2", b"\x85", b"\x86", b"\x87"),
        *(b"q\0", b"h\0", b"qK", b"hK", b"r\1\0\0\0", b"j\1\0\0\0", b"p2\n", b"g2\n", b"\x94"),
        *(b"\x8a\1K", b"\x8a\3KKK", b"\x8b\2\0\0\0MM", b"I7\n", b"L8L\n", b"F1.5\n"),
        *(b"X\3\0\0\0KKK", b"\x8c\2NN", b"U\2GG", b"C\3JJJ", b"VK\n", b"S'K'\n"),
        *(b"\x82\1", b"\x83K\0", b"\x84K\0\0\0", b"cKK\nMM\n", b"cos\nsystem\n"),
        *(b"\x8c\2os\x8c\6system\x93", b"R", b"\x81", b"b", b"\x80\2", b"\x80\4", b"Q", b"."),
    ]
)


def _framed(parts: tuple[bytes, int]) -> bytes:
    content, more = parts
    return b"\x95" + struct.pack("<Q", max(0, len(content) + more)) + content


PIECES = st.lists(ROWS | RECALLS | st.just(FILLED) | BETWEEN, max_size=8).map(b"".join)
FRAMES = st.tuples(PIECES, st.sampled_from([0, 0, 0, -1, -2, 1])).map(_framed)
CONTENTS = st.lists(PIECES | FRAMES, min_size=1, max_size=4).map(b"".join)
CHANGES = st.lists(
    st.tuples(
        st.integers(0, 1 << 16),
        st.integers(0, 3),
        st.sampled_from([b"", b"\0", b"K", b"M", b"J", b"G", b"N", b".", b"(", *CODES.values()]),
    ),
    max_size=2,
)


def _damaged(content: bytes, changes: list[tuple[int, int, bytes]]) -> bytes:
    data = bytearray(b"(" + content + b"t.")
    for place, gone, new in changes:
        at = place % len(data)
        data[at : at + gone] = new
    return bytes(data) + b"."


def _spelled(root: Node) -> str:
    """A graph in full, with the places of its nodes; what was met before is a number."""
    met: dict[int, int] = {}
    todo: list[Any] = [root]
    text = list[str]()
    while todo:
        node = todo.pop()
        kinds = type(node).__mro__
        slots = [slot for kind in kinds for slot in getattr(kind, "__slots__", ())]
        if type(node) is list or type(node) is tuple:
            text.append(f"{len(node)} of")
            todo += reversed(node)
        elif not slots:
            text.append(repr(node))
        elif isinstance(node, Text):
            text.append(f"{node!r} at {node.at}")
        elif id(node) in met:
            text.append(f"#{met[id(node)]}")
        else:
            met[id(node)] = len(met)
            text.append(type(node).__name__)
            todo += [getattr(node, slot) for slot in reversed(slots)]
    return " ".join(text)


def _told(machine: Machine) -> tuple[object, ...] | None:
    """All that is known after a walk; None where the pickle is refused."""
    try:
        root = machine.run()
    except (InputError, IndexError, struct.error, UnicodeError):
        return None
    calls = [(each.opcode, each.at) for each in machine.calls]
    return _spelled(root), machine.position, _names(machine), calls


def _names(machine: Machine) -> list[tuple[str, str]]:
    return [(each.module, each.name) for each in machine.globals]


@pytest.mark.filterwarnings("ignore:invalid escape sequence:DeprecationWarning")  # Python's
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(content=CONTENTS, changes=CHANGES)
@example(b"M\xff\xff" * 40, [])
@example(b"\x95\6\0\0\0\0\0\0\0" + b"K\1" * 40, [])
@example(b"\x95\5\0\0\0\0\0\0\0" + b"K\1" * 40, [])
@example(b"\x95\5\0\0\0\0\0\0\0" + b"N" * 40, [])
@example(b"\x95\5\0\0\0\0\0\0\0N.K\0K\0K\0", [])
@example(b"\x84\0\0\0\xff", [])
@example(b"S'\\J'\n", [])
@example(FILLED + b"h\0" * 40 + b"hK" * 40 + b"h\1" * 40 + b"h\2" * 40, [])
@example(FILLED + b"\x95\5\0\0\0\0\0\0\0" + b"h\0" * 40, [])
@example(FILLED + b"h\0" * 40 + b"a" * 3 + b"j\0\0\0\0" * 40, [(250, 1, b"")])
def test_rows_are_read_as_one_by_one(content: bytes, changes: list[tuple[int, int, bytes]]) -> None:
    whole = _damaged(content, changes)
    try:
        data = fetch(Memory(whole, "x"), 0).data
    except InputError:
        return
    with suppress(ValueError):  # it decodes what it reads
        *_, (_, _, stop) = pickletools.genops(whole)
        assert data == whole[: (stop or 0) + 1]
    machine = Machine(data)
    told = _told(machine)
    assert told == _told(_OneByOne(data))
    if told is None:
        return
    unpickler = _Unpickler(whole)
    try:
        unpickler.load()
    except (TypeError, AttributeError, ValueError, pickle.UnpicklingError):
        # Values, not structure; what was imported by then is listed all the same.
        assert unpickler.names == _names(machine)[: len(unpickler.names)]
    else:
        assert unpickler.names == _names(machine)
        assert unpickler.file.tell() == machine.position == len(data)
