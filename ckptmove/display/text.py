"""Format sizes, tables and names from files as text.

Text from a file is made printable: a name may hold line breaks or escape sequences.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import zip_longest

from . import phrases

_UNITS = ("kB", "MB", "GB", "TB", "PB")
_MOST_LISTED = 10
_LEAST = 12  # least characters of a cell that are shown
#: Most bytes of a line about a failure; a name in a file may have millions.
LONGEST_REASON = 299


def printable(text: str) -> str:
    """Return the text without characters that could act on a terminal or break the line."""
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


def cut(text: str, longest: int | None) -> str:
    """Cut out the middle of a text that is too long; None allows any length."""
    if longest is None or len(text) <= longest:
        return text
    head = (longest - 1) // 2
    return f"{text[:head]}…{text[len(text) - (longest - 1 - head) :]}"


def cut_to_bytes(text: str, most: int) -> str:
    """Cut out the middle of a text that is too long in UTF-8."""
    data = text.encode("utf-8", "surrogatepass")
    if len(data) <= most:
        return text
    kept = max(most - len("…".encode()), 0)
    head, tail = data[: kept - kept // 2], data[len(data) - kept // 2 :]
    return f"{head.decode('utf-8', 'ignore')}…{tail.decode('utf-8', 'ignore')}"


def one_line(where: str, what: str, hint: str, most: int) -> str:
    """`where: what (hint)` in at most `most` bytes.

    The longest words are shortened first, in their middle: names and paths, then the sentences.
    """
    place, cause, remedy = where, what, hint
    for longest in (most, 120, 80, 60, 40):
        place = cut_to_bytes(where, longest)
        cause, remedy = cut_words(what, longest), cut_words(hint, longest)
        line = _join_sentences(place, cause, remedy)
        if _nbytes(line) <= most:
            return line
    remedy = cut_to_bytes(remedy, most // 3)
    spare = most - _nbytes(_join_sentences(place, "", remedy))
    return _join_sentences(place, cut_to_bytes(cause, spare), remedy)


def cut_words(text: str, longest: int) -> str:
    """Cut out the middle of each word that is too long in UTF-8."""
    parts = re.split(r"(\s+)", text)
    return "".join(cut_to_bytes(part, longest) for part in parts)


def _nbytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _join_sentences(where: str, what: str, hint: str) -> str:
    return f"{f'{where}: ' if where else ''}{what}{f' ({hint})' if hint else ''}"


def table(
    rows: Iterable[Sequence[str]],
    right: Iterable[int] = (),
    *,
    gap: int = 2,
    widths: Sequence[int] = (),
    most: int | None = None,
    paint: Callable[[str, str], str] = lambda cell, text: text,
) -> Iterator[str]:
    """Return rows as aligned lines.

    `most` is the largest width of a line: to fit it, the widest columns of text are cut, in the
    middle of their cells. `paint` gets a cell and its text, and returns the text in color.

    `right` are the right-aligned columns, `gap` the blanks between columns, `widths` the minimum
    widths of the first columns.
    """
    given = [list(row) for row in rows]
    cells = [[printable(cell) for cell in row] for row in given]
    needed = [max(map(len, column)) for column in zip(*cells, strict=True)]
    widths = [max(pair) for pair in zip_longest(needed, widths[: len(needed)], fillvalue=0)]
    flushed = set(right)
    if most is not None:
        widths = _fitting(widths, flushed, most - gap * (len(widths) - 1))
    for originals, row in zip(given, cells, strict=True):
        parts = []
        for n, (cell, width) in enumerate(zip(row, widths, strict=True)):
            shown = cell if n in flushed else cut(cell, width)
            blanks = " " * ((width if n + 1 < len(row) else len(shown)) - len(shown))
            if n in flushed:
                blanks = " " * (width - len(shown))
            painted = paint(originals[n], shown)
            parts.append(blanks + painted if n in flushed else painted + blanks)
        yield (" " * gap).join(parts).rstrip()


def _fitting(widths: Sequence[int], fixed: Container[int], most: int) -> list[int]:
    """Reduce the largest widths until they fit, or no column can be cut any more."""
    found = list(widths)
    while sum(found) > most:
        free = [n for n in range(len(found)) if n not in fixed and found[n] > _LEAST]
        if not free:
            break
        widest = max(free, key=lambda n: found[n])
        step = max(1, (sum(found) - most) // (2 * len(free)))
        found[widest] = max(_LEAST, found[widest] - step)
    return found


def first_names(names: Sequence[str], most: int = _MOST_LISTED) -> str:
    """Join names with commas; of many, return the first and the number of the others."""
    return phrases.join_names(names, most)
