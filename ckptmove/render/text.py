"""Words, sizes and tables.

Whatever comes out of a file is made printable first: a name may hold line breaks or the escape
sequences of a terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from .. import words

_UNITS = ("kB", "MB", "GB", "TB", "PB")
_MOST_LISTED = 10


def printable(text: str) -> str:
    """The text without anything that could act on a terminal or break the line."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def size(nbytes: int) -> str:
    """`12.7 MB`: decimal units, as file systems and model hubs count."""
    if nbytes < 1000:
        return f"{nbytes} B"
    power = 1
    while nbytes >= 999.95 * 1000**power and power < len(_UNITS):
        power += 1
    return f"{nbytes / 1000**power:.1f} {_UNITS[power - 1]}"


def shape(dims: Sequence[int]) -> str:
    """`[768, 3072]`; `?` for a dimension that differs."""
    return "[" + ", ".join("?" if n < 0 else str(n) for n in dims) + "]"


def cut(text: str, longest: int) -> str:
    """The text, with its middle left out if it is too long."""
    if len(text) <= longest:
        return text
    head = (longest - 1) // 2
    return f"{text[:head]}…{text[len(text) - (longest - 1 - head) :]}"


def table(rows: Iterable[Sequence[str]], right: Iterable[int] = ()) -> Iterator[str]:
    """Rows as aligned lines; the columns in `right` are flushed right."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    flushed = set(right)
    for row in cells:
        parts = (
            cell.rjust(width) if n in flushed else cell.ljust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(parts).rstrip()


def listed(names: Sequence[str], most: int = _MOST_LISTED) -> str:
    """Names with commas between them; of many the first, and how many more."""
    return words.listed([*map(printable, names[:most]), *names[most:]], most)
