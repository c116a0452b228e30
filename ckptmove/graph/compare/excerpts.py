"""Short texts of two values that differ, which show where they differ.

A value that is too long is shown by its size and by an excerpt at the first difference.
"""

from __future__ import annotations

import struct
from typing import Any

from ...pickles.nodes import Global, Node
from ...pickles.terms import Term
from ...reports.difference import first_apart
from ...sources.source import Readable

_CHUNK_NBYTES = 1 << 20
_SHOWN_NBYTES = 8  # of bytes, in hexadecimal
_SHOWN_BITS = 64  # of a number
_BEFORE, _AFTER = 20, 60  # characters of a text, around the first that differs
_LARGEST_TEXT = 1 << 20  # bytes of a record whose lines are compared
_MOST_LINES = 3  # of a record, from each side
_LONGEST_LINE = 120  # characters


def first_unlike(old: Readable, new: Readable) -> int | None:
    """Return the offset of the first byte that differs, or None if all are equal.

    If one is the start of the other, that is the length of the shorter one.
    """
    common = min(old.nbytes, new.nbytes)
    for at in range(0, common, _CHUNK_NBYTES):
        nbytes = min(_CHUNK_NBYTES, common - at)
        mine, other = old.read(at, nbytes), new.read(at, nbytes)
        if mine != other:
            return at + first_apart(mine, other)
    return None if old.nbytes == new.nbytes else common


def of_bytes(content: Readable, at: int) -> dict[str, Any]:
    """Show bytes by their size and an excerpt at an offset."""
    nbytes = min(_SHOWN_NBYTES, max(0, content.nbytes - at))
    said = content.read(at, nbytes).hex() if nbytes else ""
    return {"$": "bytes", "nbytes": content.nbytes, "at": at, "hex": said}


def of_scalars(old: Node, new: Node) -> tuple[Term, Term] | None:
    """Return texts for two different scalars with the same term; None for other scalars."""
    if isinstance(old, Global) and isinstance(new, Global):
        old, new = f"{old.module}:{old.name}", f"{new.module}:{new.name}"
    if isinstance(old, str) and isinstance(new, str):
        at = first_apart(old, new)
        start = max(0, at - _BEFORE)
        return _part(old, start, at), _part(new, start, at)
    if isinstance(old, float) and isinstance(new, float):
        return _bits(struct.pack(">d", old)), _bits(struct.pack(">d", new))
    if isinstance(old, int) and isinstance(new, int):
        unlike = old ^ new
        at = (unlike & -unlike).bit_length() // _SHOWN_BITS * _SHOWN_BITS
        return _number(old, at), _number(new, at)
    return None


def _part(text: str, start: int, at: int) -> dict[str, Any]:
    return {"$": "text", "length": len(text), "at": at, "part": str(text[start : at + _AFTER])}


def _bits(packed: bytes) -> dict[str, Any]:
    return {"$": "float", "hex": packed.hex()}


def _number(value: int, at: int) -> dict[str, Any]:
    part = value >> at & ((1 << _SHOWN_BITS) - 1)
    return {"$": "int", "bits": value.bit_length(), "at": at, "hex": f"{part:x}"}


# -- records -----------------------------------------------------------------------------------


def changed_lines(old: Readable, new: Readable) -> tuple[str, ...]:
    """Return some lines in which two texts differ, as in a unified diff; empty for binary data."""
    if max(old.nbytes, new.nbytes) > _LARGEST_TEXT:
        return ()
    try:
        texts = [each.read(0, each.nbytes).decode("utf-8") for each in (old, new)]
    except UnicodeDecodeError:
        return ()
    if any("\0" in text for text in texts):
        return ()
    mine, other = (text.split("\n") for text in texts)
    common = min(len(mine), len(other))
    start = next((n for n in range(common) if mine[n] != other[n]), common)
    end = 0
    while end < common - start and mine[-1 - end] == other[-1 - end]:
        end += 1
    removed, added = mine[start : len(mine) - end], other[start : len(other) - end]
    column = max(0, first_apart(removed[0], added[0]) - _BEFORE) if removed and added else 0
    counts = f"-{start + 1},{len(removed)} +{start + 1},{len(added)}"
    return (
        f"@@ {counts} @@",
        *_trim_lines("-", removed, column),
        *_trim_lines("+", added, column),
    )


def _trim_lines(sign: str, lines: list[str], column: int) -> list[str]:
    """Return the first lines, each shortened around the first difference."""
    shown = [
        sign + ("…" if column else "") + line[column : column + _LONGEST_LINE]
        for line in lines[:_MOST_LINES]
    ]
    more = len(lines) - len(shown)
    return [*shown, f"{sign}… {more:,} more"] if more > 0 else shown
