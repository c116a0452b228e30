"""Lines and tables that a report shows: as text in a terminal, as HTML in a notebook.

The HTML loads nothing from elsewhere and uses the colors of the page.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from .text import printable, table

_CELL = "padding:.1em 1.2em .1em 0"


class Table(NamedTuple):
    """Rows of cells, and a head; without both it shows nothing."""

    rows: Sequence[Sequence[str]]
    head: Sequence[str] = ()  #: the names of its columns; empty if they have no names
    right: Sequence[int] = ()  #: the right-aligned columns
    indent: int = 0  #: the indent of each line of text
    gap: int = 2  #: blanks between two columns of text
    widths: Sequence[int] = ()  #: minimum widths of the first columns, for text
    #: from the number of a row to lines below it
    details: Mapping[int, Sequence[str]] = {}


class Wrong(str):
    """A line or a cell that names a fault; colored if the terminal shows colors."""

    __slots__ = ()


class Terminal(NamedTuple):
    """The properties of the output for a text."""

    width: int | None = None  #: letters; tables are cut to fit
    color: bool = False


_PIPE = Terminal()


#: A line, or a table. An empty line divides a text into paragraphs.
Block = str | Table
_DETAIL = 4  # blanks before a line below a row


def text_of(blocks: Iterable[Block], terminal: Terminal = _PIPE) -> Iterator[str]:
    """Render blocks as lines of text."""
    for block in blocks:
        if isinstance(block, str):
            yield paint(block, printable(block)) if terminal.color else printable(block)
        elif block.head or block.rows:
            yield from _text_of(block, terminal)


def paint(said: str, shown: str) -> str:
    """Return a text in red and bold if it names a fault, otherwise unchanged."""
    return f"\x1b[1;31m{shown}\x1b[0m" if isinstance(said, Wrong) and shown else shown


def _text_of(shown: Table, terminal: Terminal) -> Iterator[str]:
    rows = [shown.head, *shown.rows] if shown.head else shown.rows
    lines = table(
        rows,
        right=shown.right,
        gap=shown.gap,
        widths=shown.widths,
        most=None if terminal.width is None else terminal.width - shown.indent,
        paint=paint if terminal.color else lambda said, text: text,
    )
    blank = " " * shown.indent
    for n, line in enumerate(lines, -1 if shown.head else 0):
        yield f"{blank}{line}"
        yield from (f"{blank}{'':{_DETAIL}}{printable(each)}" for each in shown.details.get(n, ()))


def html_of(blocks: Iterable[Block]) -> str:
    """Render blocks as HTML; the first line is the title."""
    parts = [part for block in blocks for part in _html_of(block)]
    title = "".join(f'<div style="font-weight:bold">{part}</div>' for part in parts[:1])
    return f'<div style="line-height:1.45">{title}{"".join(parts[1:])}</div>'


def _html_of(block: Block) -> Iterator[str]:
    if isinstance(block, str):
        if block:
            yield f"<div>{_escaped(block)}</div>"
        return
    if block.rows:
        head = "".join(_cells(block.head, block.right, "th", ";font-weight:normal;opacity:.65"))
        rows = "".join(_html_row(block, n, row) for n, row in enumerate(block.rows))
        yield (
            '<table style="margin:.6em 0;font-variant-numeric:tabular-nums">'
            f"{f'<thead><tr>{head}</tr></thead>' if head else ''}<tbody>{rows}</tbody></table>"
        )


def _html_row(shown: Table, n: int, row: Sequence[str]) -> str:
    below = "<br>".join(map(_escaped, shown.details.get(n, ())))
    more = f'<tr><td colspan="{len(row)}" style="{_CELL}">{below}</td></tr>' if below else ""
    return f"<tr>{''.join(_cells(row, shown.right))}</tr>{more}"


def _cells(
    row: Sequence[str], right: Sequence[int], tag: str = "td", style: str = ""
) -> Iterator[str]:
    for n, cell in enumerate(row):
        side = "right" if n in right else "left"
        yield f'<{tag} style="text-align:{side};{_CELL}{style}">{_escaped(cell.strip())}</{tag}>'


def _escaped(text: str) -> str:
    import html  # imported only here: few reports are shown as HTML

    return html.escape(printable(text))
