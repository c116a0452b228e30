"""Select items of a tree: by globs, by shares, or from a log of failures."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase

from ..errors import InputError, StrPath, UsageError

_SETTLED = ("done", "skipped")
_WILD = re.compile(r"[*?[]")


class ItemFilter:
    """Which names in a tree are wanted."""

    def __init__(self, include: Iterable[str], exclude: Iterable[str]) -> None:
        """Accept names that match a glob of `include`, if there is any, and none of `exclude`."""
        self._include, self._exclude = tuple(include), tuple(exclude)

    def excludes(self, name: str) -> bool:
        """Whether a file is excluded, or a folder with all that is in it."""
        return _matches(name, self._exclude)

    def includes(self, *names: str) -> bool:
        """Whether what goes by any of these names is included."""
        return not self._include or any(_matches(name, self._include) for name in names)

    def may_include_in(self, folder: str) -> bool:
        """Whether something in a folder that can't be read might be included."""
        return not self._include or any(_may_match_in(f"{folder}/", each) for each in self._include)


def _matches(name: str, globs: Sequence[str]) -> bool:
    """Whether a name matches one of the globs, by the rules in the docstring of `batch`."""
    last = name.rpartition("/")[2]
    return any(
        fnmatchcase(name, glob[1:]) or fnmatchcase(name, f"{glob[1:]}/*")
        if glob.startswith("/")
        else fnmatchcase(name, glob) or ("/" not in glob and fnmatchcase(last, glob))
        for glob in globs
    )


def is_below(name: str, names: Collection[str]) -> bool:
    """Whether an item is one of these, or in a folder that is."""
    while name:
        if name in names:
            return True
        name = name.rpartition("/")[0]
    return False


def _may_match_in(inside: str, glob: str) -> bool:
    start = _WILD.split(glob.removeprefix("/"), maxsplit=1)[0]
    return "/" not in glob or inside.startswith(start) or start.startswith(inside)


def names_to_retry(log: StrPath) -> frozenset[str]:
    """The names of items that were refused or failed, by a log that `--log` wrote.

    Of several lines about an item, the last counts; a torn line is ignored.
    """
    outcomes: dict[str, str] = {}
    try:
        with open(log, "rb") as lines:
            for line in lines:
                with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
                    said = json.loads(line)
                    outcomes[str(said["name"])] = str(said["outcome"])
    except OSError as error:
        raise InputError(f"the log can't be read: {error.strerror}", path=log) from error
    if not outcomes and os.path.getsize(log):
        raise InputError("is not a log of ckptmove batch", path=log)
    return frozenset(name for name, outcome in outcomes.items() if outcome not in _SETTLED)


def share_of(text: str | None) -> tuple[int, int] | None:
    """Parse `i/N`: which of how many shares. Raises UsageError."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise UsageError(f"{text!r} does not have the form I/N with I from 1 to N", hint="e.g. 1/8")
    return int(found[1]), int(found[2])


def is_in_share(name: str, number: int, count: int) -> bool:
    """Whether an item belongs to a share of the tree, whatever else is in it."""
    digest = hashlib.sha256(os.fsencode(name)).digest()
    return int.from_bytes(digest[:8], "big") % count == number - 1
