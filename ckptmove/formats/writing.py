"""The options that a format gets for writing, and the write plan that it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..errors import UsageError
from ..graph.tree_text import TREE
from ..plans.plan import Plan
from ..sources.source import Readable

if TYPE_CHECKING:
    from ..graph.draft import Pieces
    from ..graph.edit.callables import CallablePlace

#: The metadata key under which a file stores the folder that it was made from.
FOLDER = "ckptmove-folder"
#: The choices for bytes that tensors share.
_SHARED = ("keep", "duplicate", "error")
#: Checks written files.
Check = Callable[[Mapping[str, Readable]], None]


class WriteOptions(NamedTuple):
    """How to write a checkpoint."""

    stem: str  #: the name of the written file, without its suffix
    #: how to write bytes that tensors share: `keep`, `duplicate` or `error`
    shared: str = "keep"
    bare: bool = False  #: whether to write only tensors, without the tree that leads back
    metadata: Mapping[str, str] = {}  #: additional strings, for formats that can store them
    #: the most tensor bytes in one file; None for a single file
    max_shard_nbytes: int | None = None
    in_folder: bool = False  #: whether the files have their own names, in a folder
    most_nbytes: int | None = None  #: the most bytes of all files together, or None
    ranks: int = 1  #: the number of ranks to divide it among, if the format has ranks


class WritePlan(NamedTuple):
    """How a checkpoint will be written."""

    files: Mapping[str, Plan]  #: the plan of each file by its name; a single file is under ""
    tensors: int
    #: names of tensors whose bytes are written under another's → that name
    shared: Mapping[str, str]
    duplicates: tuple[str, ...]  #: names under which shared bytes are written again
    check: Check  #: raises WriteError unless the files, read again, hold the contents of the draft
    #: the pickle that loading the result unpickles; empty if loading runs nothing
    pickle: bytes = b""
    is_harmless: bool = False  #: whether the pickle surely holds no unknown callable
    #: byte strings that a library may unpickle, each with a callable in it that is not known to be
    #: harmless; the pickle names all of these callables
    places: tuple[CallablePlace, ...] = ()
    #: details that the format does not store and that hardly anybody misses
    warnings: tuple[str, ...] = ()
    #: raises CorruptError if the written bytes differ from the checksums of the sources; called
    #: once everything is written
    prove: Callable[[], None] = lambda: None
    #: like `check`, for files that are checked one by one, under "", as soon as each is written;
    #: they may be too many to open at once, and `check` does not get them
    checks: Mapping[str, Check] = {}


def assemble(nbytes: int, pieces: Pieces) -> Plan:
    """A plan made of pieces, each at its offset."""
    return Plan(
        method="relay",
        reads_all=True,
        nbytes=nbytes,
        copies=tuple(sorted(pieces.copies, key=lambda copy: copy.at)),
        writes=tuple(sorted(pieces.writes, key=lambda write: write.at)),
        checksums=tuple(sorted(pieces.checksums)),
        gathers=tuple(sorted(pieces.gathers, key=lambda gather: gather.at)),
        source_checksums=tuple(pieces.source_checksums),
    )


def move_plan(plan: Plan, by: int) -> Plan:
    """Shift a plan for a part of a larger file to its offset in that file."""
    return plan._replace(
        copies=tuple(each._replace(at=each.at + by) for each in plan.copies),
        writes=tuple(each._replace(at=each.at + by) for each in plan.writes),
        checksums=tuple(each._replace(at=each.at + by) for each in plan.checksums),
        gathers=tuple(each._replace(at=each.at + by) for each in plan.gathers),
        measures=tuple(each._replace(at=each.at + by) for each in plan.measures),
    )


def join_plans(outer: Plan, inner: Sequence[Plan]) -> Plan:
    """Join the plan of a file with the plans of its parts; the caller adds measures and seals."""
    plans = [outer, *inner]
    return outer._replace(
        copies=tuple(sorted((e for plan in plans for e in plan.copies), key=lambda e: e.at)),
        writes=tuple(sorted((e for plan in plans for e in plan.writes), key=lambda e: e.at)),
        checksums=tuple(sorted(e for plan in plans for e in plan.checksums)),
        gathers=tuple(sorted((e for plan in plans for e in plan.gathers), key=lambda e: e.at)),
        source_checksums=tuple(e for plan in plans for e in plan.source_checksums),
    )


def check_shared(shared: str) -> str:
    """Return the choice for shared bytes; UsageError if it is not a known choice."""
    if shared not in _SHARED:
        raise UsageError(f"shared is one of {', '.join(_SHARED)}, not {shared!r}")
    return shared


def check_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    """Check metadata for a file; UsageError if it is not text, or if a key is reserved."""
    found = dict(metadata or {})
    for key, value in found.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise UsageError(f"metadata must be strings; {key!r} is not")
        if key in (TREE, FOLDER):
            raise UsageError(f"the metadata key {key!r} is reserved for ckptmove")
    return found
