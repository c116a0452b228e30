"""The base of every report: fields that are its JSON, and blocks that are its text and HTML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from .blocks import Block, html_of, text_of
from .plain import Plain

if TYPE_CHECKING:
    from .columns import PageBlock


class Report(Plain):
    """What a verb returns. `print` shows it as the command line does, and notebooks as HTML.

    A report is a frozen dataclass. Its fields are the keys of its JSON (see `plain`); `blocks` is
    its text.
    """

    #: The version of the JSON. New keys do not change it.
    schema = 1

    def blocks(self, *, full: bool = False) -> Iterator[Block]:
        """Return what it shows, line by line; `full` shortens nothing."""
        raise NotImplementedError

    def lines(self, *, full: bool = False) -> Iterator[str]:
        """Return the lines that the command line prints; `full` shortens nothing."""
        return text_of(self.blocks(full=full))

    def remarks(self) -> Sequence[str]:
        """Return further remarks for the user: the command line prints them to stderr."""
        warnings: Sequence[str] = getattr(self, "warnings", ())
        return warnings

    def page(self) -> Iterator[PageBlock]:
        """Return what a page shows: everything, with the remarks."""
        yield from self._with_remarks(full=True)

    def to_html(self, title: str | None = None) -> str:
        """Return one HTML file that shows everything. It loads nothing and needs no network.

        Args:
            title: the title of the page; by default the name of the report.
        """
        from .page import page_of  # imported only here: few reports are shown as pages

        return page_of(f"{title or type(self).__name__} - ckptmove", self.page())

    def __str__(self) -> str:
        return "\n".join(text_of(self._with_remarks()))

    def _repr_html_(self) -> str:
        return html_of(self._with_remarks())

    def _with_remarks(self, *, full: bool = False) -> Iterator[Block]:
        yield from self.blocks(full=full)
        remarks = self.remarks()
        if remarks:
            yield from ("", "notes:", *(f"  - {each}" for each in remarks))
