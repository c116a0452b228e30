"""Find and remove temporary files that killed runs left in a destination."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator

from ...reports.data.batch_items import Item
from ...sources import place_of
from ...writing.final_name import HIDDEN, hidden_name, is_hidden
from ...writing.in_place.locked_file import is_open_for_writing
from .ledger import LEDGER, Ledger


@contextlib.contextmanager
def beside(path: str) -> Iterator[str]:
    """A folder beside what has this path, that is gone at the end; gives the same name within.

    Raises:
        OSError: it can't be made.
    """
    if not place_of(path).opens_by_path:  # what is only compared need not be there
        with tempfile.TemporaryDirectory() as here:
            yield os.path.join(here, place_of(path).name)
        return
    folder, name = os.path.split(path.rstrip("/"))
    hidden = os.path.join(folder, hidden_name(name))
    try:
        os.mkdir(hidden, 0o700)
        yield os.path.join(hidden, name)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def remove_leftovers(folder: str, items: Iterable[Item], ledger: str = "") -> None:
    """Remove what killed runs left of these items, but not of those that others are at.

    Args:
        folder: where to look, and below.
        items: of which to remove it.
        ledger: the path of the ledger, if it is not in this folder.

    Raises:
        RefusedError, WriteError: the ledger can't be used.
    """
    if not place_of(folder).opens_by_path:
        return
    left = _leftovers(folder)
    if not left:
        return
    book = Ledger(ledger or os.path.join(folder, LEDGER))
    for hidden, whose in _whose(left, items):
        with contextlib.ExitStack() as locks:
            held = [locks.enter_context(book.held(each.name, patient=False)) for each in whose]
            if all(held):
                _clear(hidden, whose[0].output)


def _leftovers(folder: str) -> list[str]:
    found = list[str]()
    for inside, folders, names in os.walk(folder):
        hidden = [name for name in folders if name.endswith(HIDDEN)]
        found += [os.path.join(inside, name) for name in (*names, *hidden) if name.endswith(HIDDEN)]
        folders[:] = [name for name in folders if name not in hidden]
    return found


def _whose(left: Iterable[str], items: Iterable[Item]) -> Iterator[tuple[str, list[Item]]]:
    """Of which items something may be left; of several, if their names are long and begin alike."""
    inside: dict[str, list[Item]] = {}
    for item in items:
        inside.setdefault(os.path.dirname(item.output), []).append(item)
    for hidden in left:
        folder, name = os.path.split(hidden)
        whose = [
            item
            for item in inside.get(folder, ())
            if is_hidden(name, os.path.basename(item.output))
        ]
        if whose:
            yield hidden, whose


def _clear(hidden: str, output: str) -> None:
    """Remove temporary files, unless another process still writes them.

    A folder stays while there is no output: it may be what was there before.
    """
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(os.lstat(hidden).st_mode):
            if os.path.lexists(output):
                shutil.rmtree(hidden)
        elif not _is_written(hidden):
            os.unlink(hidden)


def _is_written(path: str) -> bool:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        return is_open_for_writing(fd)
    finally:
        os.close(fd)
