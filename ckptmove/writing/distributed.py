"""Hand the parts of a large file to other processes that write them (Ray tasks)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import NamedTuple

from ..plans.plan import Plan
from ..sources.source import File, Source


class Part(NamedTuple):
    """A part of a file in the making, that anybody who sees the file can write.

    Attributes:
        file: the name of the file for the time being.
        path: what it will be, for messages.
        plan: what to write.
        sources: path, size and time of change of each.
    """

    file: str
    path: str
    plan: Plan
    sources: tuple[tuple[str, int, int], ...]


class RemoteParts(NamedTuple):
    """Hands the parts of a large file to other processes (Ray tasks).

    Attributes:
        nbytes: how large the parts are to be.
        write: has all of them written, as by `write_part`; gives what that gave, in order.
    """

    nbytes: int
    write: Callable[[Sequence[Part]], Sequence[Sequence[int]]]


#: Who takes parts of large files, if anybody.
SPREAD: ContextVar[RemoteParts | None] = ContextVar("SPREAD", default=None)


def parts_of(
    plans: Sequence[Plan], fd: int, path: str, sources: Sequence[Source]
) -> list[Part] | None:
    """Parts of an open file, to be sent elsewhere; None if others would not read the same sources.

    Args:
        plans: what to write in each.
        fd: the file.
        path: what it will be.
        sources: what they copy from.
    """
    seen = tuple(seen_of(source) for source in sources if isinstance(source, File))
    if len(seen) < len(sources) or not all(each.same_file(each.path) for each in sources):
        return None
    file = os.readlink(f"/proc/self/fd/{fd}")
    return [Part(file, path, _sendable(plan), seen) for plan in plans]


def seen_of(source: File) -> tuple[str, int, int]:
    """What tells others whether they see the same source."""
    return os.path.abspath(source.path), source.nbytes, os.fstat(source.fd).st_mtime_ns


def _sendable(plan: Plan) -> Plan:
    """The same, with bytes for what is a view of memory here."""
    return plan._replace(
        writes=tuple(each._replace(data=bytes(each.data)) for each in plan.writes),
        gathers=tuple(
            each if each.content is None else each._replace(content=bytes(each.content))
            for each in plan.gathers
        ),
    )
