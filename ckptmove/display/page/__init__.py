"""A report as one HTML file, which loads nothing and runs no script but its own.

Text of a checkpoint may be hostile: it is escaped, and the content security policy of the page lets
the browser run one script and use one style sheet, by their hashes.
"""

from __future__ import annotations

import html
import json
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from importlib import resources

from ..blocks import Table, Wrong
from ..columns import Columns, PageBlock
from ..text import printable

#: The start of every page; only a file with this start is overwritten by a page.
START = "<!doctype html>\n<!-- a report of ckptmove -->\n"
_MOST_IN_HTML = 200  # rows of an HTML table; longer tables are data, and the script shows some rows


def page_of(title: str, blocks: Iterable[PageBlock]) -> str:
    """Return a page with these blocks; if the first is a line, it is the heading."""
    style, script = _asset("page.css"), _asset("page.js")
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    body = "\n".join(_body_of(title, blocks))
    return (
        f'{START}<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{_escaped(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f"<main>\n{body}\n</main>\n<script>{script}</script>\n</body>\n</html>\n"
    )


def _asset(name: str) -> str:
    return (resources.files(__name__) / name).read_text("utf-8")


def _hash(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


def _body_of(title: str, blocks: Iterable[PageBlock]) -> Iterator[str]:
    shown = [block for block in blocks if block]
    if not (shown and isinstance(shown[0], str)):
        shown.insert(0, title)
    for n, block in enumerate(shown):
        if isinstance(block, str):
            tag = "p" if n else "h1"
            laid = block.startswith("  ")  # a line of a table that was laid out as text
            text = block if laid else block.strip()
            yield f"<{tag}{_class_of(block, laid=laid)}>{_escaped(text)}</{tag}>"
        elif isinstance(block, Columns):
            yield _data_of(block, f"columns-{n}")
        elif len(block.rows) > _MOST_IN_HTML:
            yield _data_of(_columns_of(block), f"columns-{n}")
        elif block.rows:
            yield _table_of(block)


def _columns_of(table: Table) -> Columns:
    """Convert a long table to columns; the lines below a row become its last column."""
    count = max(map(len, (table.head, *table.rows)))
    head = [*table.head, *[""] * (count - len(table.head))]
    columns: list[Sequence[str]] = [
        [row[n].strip() if n < len(row) else "" for row in table.rows] for n in range(count)
    ]
    if table.details:
        head.append("")
        columns.append([" · ".join(table.details.get(n, ())) for n in range(len(table.rows))])
    return Columns(head, columns, right=table.right)


def _table_of(table: Table) -> str:
    head = _row_of(table.head, table.right, "th") if any(table.head) else ""
    rows = []
    for n, row in enumerate(table.rows):
        rows.append(_row_of(row, table.right, "td"))
        below = "<br>".join(map(_escaped, table.details.get(n, ())))
        if below:
            rows.append(f'<tr class="below"><td colspan="{len(row)}">{below}</td></tr>')
    start = f"<thead>{head}</thead>" if head else ""
    return f'<div class="wide"><table>{start}<tbody>{"".join(rows)}</tbody></table></div>'


def _row_of(row: Sequence[str], right: Sequence[int], tag: str) -> str:
    cells = (
        f"<{tag}{_class_of(cell, is_right=n in right)}>{_escaped(cell.strip())}</{tag}>"
        for n, cell in enumerate(row)
    )
    return f"<tr>{''.join(cells)}</tr>"


def _class_of(text: str, *, is_right: bool = False, laid: bool = False) -> str:
    """Return the class attribute of a cell that is right-aligned, laid out, or names a fault."""
    names = ["right"] * is_right + ["laid"] * laid + ["wrong"] * isinstance(text, Wrong)
    return f' class="{" ".join(names)}"' if names else ""


def _data_of(columns: Columns, name: str) -> str:
    """Return columns as JSON for the page; its script makes the table, and draws any sizes."""
    data = {
        "head": list(columns.head),
        "right": list(columns.right),
        "bars": list(columns.bars),
        "counts": list(columns.counts),
        "columns": [_encoded(column) for column in columns.columns],
        "what": columns.what,
        "map": columns.drawn and columns.drawn._asdict(),
        "drawn": type(columns.drawn).__name__,
    }
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<script type="application/json" id="{name}">{text}</script>\n'
        f'<section class="columns" data-of="{name}"></section>'
        f"<noscript><p>{len(columns.columns[0]):,} {columns.what}: the table needs scripts.</p>"
        "</noscript>"
    )


def _encoded(column: Sequence[str | float | None]) -> dict[str, object]:
    """Encode a column compactly: numbers, each text once, or each text's new part.

    The shared start is counted in UTF-16 units, as the script counts.
    """
    if column and not isinstance(column[0], str):
        return {"numbers": list(column)}
    texts = [printable(str(each)) for each in column]
    places = {text: n for n, text in enumerate(dict.fromkeys(texts))}
    if 2 * len(places) <= len(texts):
        return {"texts": list(places), "at": [places[text] for text in texts]}
    coded: list[object] = []
    before = ""
    for text in texts:
        shared = _shared_start(before, text)
        coded += (len(text[:shared].encode("utf-16-le")) // 2, text[shared:])
        before = text
    return {"front": coded}


def _shared_start(one: str, other: str) -> int:
    """Return the length of the common start of two texts."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _escaped(text: str) -> str:
    return html.escape(printable(text))
