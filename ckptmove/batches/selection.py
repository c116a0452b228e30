"""Select items of a tree: by name, share, size, age or format, or from a log of failures."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime
from fnmatch import fnmatchcase

from ..api.conversion.target import nbytes_of
from ..errors import InputError, StrPath, UsageError
from ..formats import FORMATS

#: The names of formats that a file or folder can have.
FORMAT_NAMES = tuple(dict.fromkeys(each.name for each in FORMATS))
_SETTLED = ("done", "skipped", "left-out")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_WILD = re.compile(r"[*?[]")


class ItemFilter:
    """Decides which items of a tree are wanted; by name first, before a file is opened."""

    def __init__(
        self,
        include: str | Iterable[str] = (),
        exclude: str | Iterable[str] = (),
        *,
        shard_of: str | None = None,
        retry: StrPath | None = None,
        formats: str | Iterable[str] = (),
        newer: str | None = None,
        min_size: int | str | None = None,
        max_size: int | str | None = None,
    ) -> None:
        """As the options of `batch`. Raises UsageError, or InputError for the log of `retry`."""
        self._include, self._exclude = _several(include), _several(exclude)
        self._share = share_of(shard_of)
        self._only = None if retry is None else names_to_retry(retry)
        self._formats = _several(formats)
        self._since = -math.inf if newer is None else time_of(newer, time.time())
        self._least = 0 if min_size is None else nbytes_of(min_size)
        self._most = None if max_size is None else nbytes_of(max_size)
        for each in self._formats:
            if each not in FORMAT_NAMES:
                hint = f"one of {', '.join(FORMAT_NAMES)}"
                raise UsageError(f"{each!r} is no format that can be read", hint=hint)

    def excludes(self, name: str) -> bool:
        """Whether a file, or a folder with its contents, is excluded."""
        return _matches(name, self._exclude)

    def includes(self, *names: str) -> bool:
        """Whether an item with any of these names is included, regardless of shares."""
        return not self._include or any(_matches(name, self._include) for name in names)

    def may_include_in(self, folder: str) -> bool:
        """Whether an unreadable folder might contain included items."""
        if not self.selects(folder):
            return False
        return not self._include or any(_may_match_in(f"{folder}/", each) for each in self._include)

    def selects(self, name: str) -> bool:
        """Whether an item is in the share, and in the log of items to retry."""
        return self.is_in_share(name) and (self._only is None or is_below(name, self._only))

    def is_in_share(self, name: str) -> bool:
        """Whether an item is in the share, done or not."""
        return self._share is None or is_in_share(name, *self._share)

    def fits(self, nbytes: int, mtime: float) -> bool:
        """Whether an item with this size and modification time is wanted."""
        return self._least <= nbytes <= (nbytes if self._most is None else self._most) and (
            mtime >= self._since
        )

    def accepts_format(self, format: str) -> bool:
        """Whether an item of this format is wanted; the name is empty if unknown."""
        return not self._formats or format in self._formats


def _several(given: str | Iterable[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


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
    """Return the names of refused or failed items from a log of `--log`.

    The last line about an item counts; an incomplete line is ignored.
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
    """Parse `i/N`: share i of N. Raises UsageError."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise UsageError(f"{text!r} does not have the form I/N with I from 1 to N", hint="e.g. 1/8")
    return int(found[1]), int(found[2])


def is_in_share(name: str, number: int, count: int) -> bool:
    """Whether an item belongs to a share; does not depend on other items."""
    digest = hashlib.sha256(os.fsencode(name)).digest()
    return int.from_bytes(digest[:8], "big") % count == number - 1


def time_of(text: str, now: float) -> float:
    """Parse a date, or an age such as `7d`, as seconds since 1970. Raises UsageError."""
    age = re.fullmatch(r"(\d{1,9})([smhdw])", text)
    if age is not None:
        return now - int(age[1]) * _SECONDS[age[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError) as error:
        raise UsageError(
            f"{text!r} is neither a date nor an age", hint="e.g. 2026-11-01, 36h or 7d"
        ) from error
