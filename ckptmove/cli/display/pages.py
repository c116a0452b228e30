"""Writes the report of a command as an HTML file, complete or not at all."""

from __future__ import annotations

from ...display.page import START
from ...errors import InputError, RefusedError, WriteError
from ...plans.plan import Plan, Write
from ...sources import open_source
from ...writing import destination_of


def check_page(path: str) -> None:
    """Raises RefusedError if the path has a file that is not a page of ckptmove."""
    try:
        destination_of(path).check_file([], force=_is_page(path))
    except RefusedError as error:
        error.hint = None  # most commands with pages have no --force
        raise


def write_page(path: str, text: str) -> None:
    """Write a page, verify it, and give it its name. Raises WriteError: what it shows is done."""
    data = text.encode("utf-8", "replace")
    plan = Plan("relay", len(data), (), (Write(0, data),))
    try:
        with destination_of(path).new_file([], force=_is_page(path)) as made:
            made.write(plan)
            made.commit()
    except RefusedError as error:
        raise WriteError(f"the page can't be written: {error}", path=path) from error


def _is_page(path: str) -> bool:
    """Whether a page that ckptmove wrote is there."""
    start = START.encode()
    try:
        with open_source(path) as source:
            return source.nbytes >= len(start) and source.read(0, len(start)) == start
    except InputError:
        return False
