"""Blocks of text and tables that a report shows: as lines in a terminal, as HTML in a notebook.

The HTML loads nothing from elsewhere and uses the colors of the page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .text import printable, table

_CELL = "padding:.1em 1.2em .1em 0"


@dataclass(frozen=True)
class Block:
    """Lines, a table below them, and lines below that.

    Attributes:
        lines: above the table.
        head: what its columns are called; empty where they have no names.
        rows: of the table; none makes no table.
        right: the columns that are flushed right.
        after: lines below the table.
    """

    lines: Sequence[str] = ()
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    right: Sequence[int] = ()
    after: Sequence[str] = ()


def text_of(blocks: Iterable[Block]) -> Iterator[str]:
    """Blocks as lines, an empty one between two."""
    for n, block in enumerate(blocks):
        if n:
            yield ""
        yield from map(printable, block.lines)
        if block.rows:
            rows = [block.head, *block.rows] if block.head else block.rows
            yield from table(rows, right=block.right)
        yield from map(printable, block.after)


def html_of(blocks: Iterable[Block]) -> str:
    """Blocks as HTML; the first line of all is the title."""
    parts = [part for block in blocks for part in _html_of(block)]
    title = "".join(f'<div style="font-weight:bold">{part}</div>' for part in parts[:1])
    return f'<div style="line-height:1.45">{title}{"".join(parts[1:])}</div>'


def _html_of(block: Block) -> Iterator[str]:
    yield from map(_line, block.lines)
    if block.rows:
        head = "".join(_cells(block.head, block.right, "th", ";font-weight:normal;opacity:.65"))
        rows = "".join(f"<tr>{''.join(_cells(row, block.right))}</tr>" for row in block.rows)
        yield (
            '<table style="margin:.6em 0;font-variant-numeric:tabular-nums">'
            f"{f'<thead><tr>{head}</tr></thead>' if head else ''}<tbody>{rows}</tbody></table>"
        )
    yield from map(_line, block.after)


def _line(text: str) -> str:
    return f"<div>{_escaped(text)}</div>"


def _cells(
    row: Sequence[str], right: Sequence[int], tag: str = "td", style: str = ""
) -> Iterator[str]:
    for n, cell in enumerate(row):
        side = "right" if n in right else "left"
        yield f'<{tag} style="text-align:{side};{_CELL}{style}">{_escaped(cell.strip())}</{tag}>'


def _escaped(text: str) -> str:
    import html  # here, since few reports are shown so

    return html.escape(printable(text))
