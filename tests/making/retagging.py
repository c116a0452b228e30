"""Pickles of the C++ pickler with other locations, as it would have written them.

It memoizes strings by value, in the order of their first use: one slot for a location, an equal
string of the user's, and the argument of an equal `torch.device`. So another location moves the
memo of the whole stream.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

TagOf = Callable[[str], str]

GETS = ("BINGET", "LONG_BINGET")
PUTS = ("BINPUT", "LONG_BINPUT")


class Said(NamedTuple):
    """An opcode, with the memo slot that it fetches or that the next one stores it in."""

    raw: bytes
    text: str | None = None  # of a string, spelled out or fetched
    put: int | None = None
    get: int | None = None


def retag(pickled: bytes, tag_of: TagOf) -> bytes:
    """`pickled` with `tag_of(storage key)` for the locations in its persistent ids."""
    said = list(_read(pickled))
    for index, each in enumerate(said):
        if each.text == "storage" and said[index - 1].raw == b"(":
            key = said[index + 2].text
            assert key is not None, "a storage's key is a string"
            said[index + 3] = Said(b"", tag_of(key), 0)
    return _spell(said)


def _read(pickled: bytes) -> Iterator[Said]:
    strings: dict[int, str] = {}
    ops: list[tuple[pickletools.OpcodeInfo, Any, Any]] = list(pickletools.genops(pickled))
    ends = [at for _, _, at in ops[1:]] + [len(pickled)]
    for index, ((op, arg, at), end) in enumerate(zip(ops, ends, strict=True)):
        raw = pickled[at:end]
        following, slot, _ = ops[index + 1] if index + 1 < len(ops) else (op, None, 0)
        put = slot if following.name in PUTS else None
        if op.name in GETS:
            yield Said(raw, strings.get(arg), get=arg)
        elif op.name == "BINUNICODE":
            assert put is not None, "each string is put"
            strings[put] = arg
            yield Said(raw, arg, put)
        elif op.name not in PUTS:
            yield Said(raw, None, put)


def _spell(said: list[Said]) -> bytes:
    strings: dict[str, int] = {}
    moved: dict[int, int] = {}
    out, slots = [], 0
    for each in said:
        if each.text is not None and each.text in strings:
            out.append(_slot(b"hj", strings[each.text]))
        elif each.text is not None:
            data = each.text.encode()
            out += [b"X", struct.pack("<I", len(data)), data, _slot(b"qr", slots)]
            strings[each.text] = slots
            slots += 1
        elif each.get is not None:
            out.append(_slot(b"hj", moved[each.get]))
        elif each.put is not None:
            out += [each.raw, _slot(b"qr", slots)]
            moved[each.put] = slots
            slots += 1
        else:
            out.append(each.raw)
    return b"".join(out)


def _slot(codes: bytes, slot: int) -> bytes:
    """A GET or a PUT, in its short or its long form."""
    short = slot < 256
    return codes[:1] + bytes([slot]) if short else codes[1:] + struct.pack("<I", slot)
