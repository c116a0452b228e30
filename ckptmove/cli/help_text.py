"""How a help is laid out: names of options and formats are not broken at their hyphens."""

from __future__ import annotations

from collections.abc import Iterable

import click

_HYPHEN = "\N{NON-BREAKING HYPHEN}"  # only until the lines are broken


def _whole(text: str) -> str:
    return text.replace("-", _HYPHEN)


class _Formatter(click.HelpFormatter):
    """Breaks lines between words only."""

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        super().write_usage(_whole(prog), _whole(args), prefix)

    def write_text(self, text: str) -> None:
        super().write_text(_whole(text))

    def write_dl(
        self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2
    ) -> None:
        whole = [(_whole(name), _whole(text)) for name, text in rows]
        super().write_dl(whole, col_max, col_spacing)

    def getvalue(self) -> str:
        return super().getvalue().replace(_HYPHEN, "-")


class HelpContext(click.Context):
    """The context of a command whose help breaks lines between words only."""

    formatter_class = _Formatter
