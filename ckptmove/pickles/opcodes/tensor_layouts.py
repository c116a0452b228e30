"""The bytes of a plain tensor's opcodes in a pickle: what they hold, and where.

Similar tensors have the same layout: their opcodes differ only in the slots that they fill, and in
the number of the storage.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from ..nodes import Node
from .plain_tensors import Form, OpcodeOffsets, StorageForm

_GET, _PUT = rb"(?:h.|j....)", rb"(q.|r....|)"
_INT = rb"(?:K.|M..|J....|\x8a\x05.....)"
_SIZES = rb"(?:\)|\(?" + _INT + rb"{1,12}[\x85-\x87t])"
SEQUENCE = re.compile(
    rb"(\(\(" + _GET + _GET + rb")"  # 1 word and class
    + rb"(?:X(....)([0-9]{1,12})" + _PUT + rb"|(" + _GET + rb"))"  # key: 2 length, 3, 4; or 5
    + rb"(" + _GET + rb"|X.\0\0\0[a-z]{2,12}(?::[0-9]{1,4})?)" + _PUT  # 6, 7 location
    + rb"(" + _INT + rb")t" + _PUT + rb"()Q"  # 8, 9 elements; 10 where BINPERSID is
    + rb"(" + _INT + _SIZES + rb")" + _PUT  # 11, 12 offset and shape
    + rb"(" + _SIZES + rb")" + _PUT  # 13, 14 stride
    + rb"([\x88\x89]" + _GET + rb"\)R)" + _PUT  # 15, 16 gradient and hooks
    + rb"t" + _PUT + rb"()R" + _PUT,  # 17 arguments; 18 where REDUCE is, 19
    re.DOTALL,
)  # fmt: skip
KEY_NBYTES, KEY, KEY_PUT, _RECALLED_KEY, LOCATION, LOCATION_PUT = range(2, 8)
PID_PUT, _PERSID, ARGS_PUT, _CALL = 9, 10, 17, 18
#: Groups that are the same in similar tensors: head, location, elements, sizes and hooks.
ALIKE = (1, 6, 8, 11, 13, 15)
#: The PUT groups, in order; `WITHIN` has those whose node is not yet created, and `IN_ARGS` the
#: index of those among the arguments.
PUTS = (KEY_PUT, LOCATION_PUT, PID_PUT, 12, 14, 16, ARGS_PUT, 19)
WITHIN = PUTS[:-1]
IN_ARGS = {12: 2, 14: 3, 16: 5}
GETS = re.compile(_GET, re.DOTALL)
INTS = re.compile(_INT, re.DOTALL)
_KEY_HEAD = 5  # bytes before the number of a storage: BINUNICODE and its length
_LONG_BINPUT = b"r\0\0\0\0"
_SLOT_NBYTES, _PUT_NBYTES = 4, 5
TRUE, _MARK, BINUNICODE, _LONG1 = 0x88, ord("("), ord("X"), 0x8A


class Usual(NamedTuple):
    """The parsed values of a sequence; valid as long as its GETs recall the same nodes."""

    form: Form
    storage: StorageForm
    #: the slots of the GETs, and their nodes
    recalled: tuple[tuple[int, Node], ...]
    location: str


class SequenceLayout(NamedTuple):
    """The layout of similar sequences, which differ only in the storage's number and the slots."""

    usual: Usual
    nbytes: int
    #: returns all bytes at an offset: constant and variable parts in turn
    unpack: Callable[[bytes, int], tuple[Any, ...]]
    same: tuple[bytes, ...]
    #: whether the number of the storage is written out, not recalled
    has_key: bool
    #: whether the tensor is put into a slot
    is_put: bool
    places: OpcodeOffsets
    #: the same after a key; None if a slot takes one byte, or the number of the storage is recalled
    after_key: AfterKey | None


class AfterKey(NamedTuple):
    """The layout of what follows a key in a dict: its PUT, the GET of the function, the sequence.

    All bytes are read as one number. If the slots count up from `first`, it is
    `form + first * slots`, apart from the digits of the storage's number, which `mask` leaves out.
    """

    nbytes: int
    form: int
    slots: int
    mask: int
    #: how many slots it fills
    filled: int
    #: where the number of the storage is
    key: slice


def sizes_of(raw: bytes) -> tuple[int, ...] | None:
    """The numbers of a tuple; None if its opcodes make something else, or one is below zero."""
    if raw == b")":
        return ()
    numbers = tuple(map(integer_of, INTS.findall(raw)))
    width = {0x85: 1, 0x86: 2, 0x87: 3}.get(raw[-1])
    right = width is None if raw[0] == _MARK else width == len(numbers)
    return numbers if right and min(numbers) >= 0 else None


def layout_of(found: re.Match[bytes], usual: Usual, get: bytes) -> SequenceLayout:
    """The layout of a sequence that matched; `get` is the GET of the function before it."""
    start, end = found.span()
    layout, same, at = "", [], start
    key = KEY if found[KEY] is not None else _RECALLED_KEY
    for group in (key, *PUTS):
        first, after = found.span(group)
        if first == after:
            continue
        if group == KEY:
            form = f"{after - first}s"
        else:  # a GET or PUT: its slot
            first, form = first + 1, "B" if after - first == 2 else "I"
        layout += f"{first - at}s{form}"
        same.append(found.string[at:first])
        at = after
    layout += f"{end - at}s"
    same.append(found.string[at:end])
    return SequenceLayout(
        usual=usual,
        nbytes=end - start,
        unpack=_struct(f"<{layout}").unpack_from,
        same=tuple(same),
        has_key=key == KEY,
        is_put=bool(found[PUTS[-1]]),
        after_key=_after_key(found, get),
        places=OpcodeOffsets(
            key=found.start(KEY) - _KEY_HEAD - start,
            location=found.start(LOCATION) - start,
            id=found.start(_PERSID) - start,
            call=found.start(_CALL) - start,
        ),
    )


def _after_key(found: re.Match[bytes], get: bytes) -> AfterKey | None:
    """The layout of a sequence that matched, and of what is before it in a dict."""
    puts = [found.span(group) for group in PUTS if found[group]]
    if found[KEY] is None or any(after - at != _PUT_NBYTES for at, after in puts):
        return None
    content = bytearray(_LONG_BINPUT + get + found[0])
    start = len(content) - len(found[0]) - found.start()
    slots = [1, *(start + at + 1 for at, _ in puts)]
    key = slice(start + found.start(KEY), start + found.end(KEY))
    for part in (key, *(slice(at, at + _SLOT_NBYTES) for at in slots)):
        content[part] = bytes(part.stop - part.start)
    digits = int.from_bytes(b"\xff" * len(found[KEY]), "little") << 8 * key.start
    return AfterKey(
        nbytes=len(content),
        form=int.from_bytes(content, "little") + sum(n << 8 * at for n, at in enumerate(slots)),
        slots=sum(1 << 8 * at for at in slots),
        mask=(1 << 8 * len(content)) - 1 ^ digits,
        filled=len(slots),
        key=key,
    )


_struct = cache(struct.Struct)


def slot_of(opcode: bytes) -> int:
    """The slot of a GET or PUT."""
    return opcode[1] if len(opcode) == 2 else int.from_bytes(opcode[1:], "little")


def integer_of(opcode: bytes) -> int:
    """The number that an opcode pushes."""
    if len(opcode) == 2:
        return opcode[1]
    if opcode[0] == _LONG1:
        return int.from_bytes(opcode[2:], "little", signed=True)
    return int.from_bytes(opcode[1:], "little", signed=len(opcode) == 5)
