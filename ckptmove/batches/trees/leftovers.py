"""Find and remove temporary files that killed runs left in a destination."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterable, Iterator

from ...reports.batch_items import Item
from ...writing.final_name import HIDDEN, is_hidden
from ...writing.in_place.locked_file import is_open_for_writing
from .ledger import FileLedger


def remove_leftovers(folder: str, items: Iterable[Item], ledger: str) -> None:
    """As `Tree.remove_leftovers`; `ledger` is its path."""
    left = _leftovers(folder)
    if not left:
        return
    book = FileLedger(ledger)
    for hidden, whose in _whose(left, items):
        with contextlib.ExitStack() as locks:
            held = [locks.enter_context(book.lock(each.name, patient=False)) for each in whose]
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
