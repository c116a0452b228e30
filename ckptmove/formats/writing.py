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
    from ..graph.edit.callables import Place

#: The key of metadata under which a file tells of the folder that it was made of.
FOLDER = "ckptmove-folder"
#: What can become of bytes that tensors share.
_SHARED = ("keep", "duplicate", "error")
#: Looks at files that were written.
Check = Callable[[Mapping[str, Readable]], None]


class WriteOptions(NamedTuple):
    """How a checkpoint is to be written."""

    stem: str  #: of the file that it is written to, without its suffix
    #: what becomes of bytes that tensors share: `keep`, `duplicate` or `error`
    shared: str = "keep"
    bare: bool = False  #: whether to write tensors alone, without the tree that leads back
    metadata: Mapping[str, str] = {}  #: further strings, for formats that have room for them
    #: the most bytes of tensors in one file, or None for one file
    max_shard_nbytes: int | None = None
    in_folder: bool = False  #: whether files have names of their own, in a folder
    most_nbytes: int | None = None  #: how large all files together may be, or None
    ranks: int = 1  #: among how many processes it is divided, in a format of ranks


class WritePlan(NamedTuple):
    """How a checkpoint is written."""

    files: Mapping[str, Plan]  #: what is written: of a folder by name, of a single file under ""
    tensors: int
    #: names of tensors whose bytes are written under another's → that name
    shared: Mapping[str, str]
    duplicates: tuple[str, ...]  #: names under which shared bytes are written once more
    check: Check  #: raises WriteError unless files, read again, hold what the draft does
    pickle: bytes = b""  #: what loading it unpickles; empty where that runs nothing
    is_harmless: bool = False  #: whether the pickle is sure to hold no unknown callable
    #: values that are bytes here, and that a library may unpickle, with a callable in each that is
    #: not known to be harmless; the pickle names all of these
    places: tuple[Place, ...] = ()
    warnings: tuple[str, ...] = ()  #: what the format does not store, and hardly anybody misses
    #: raises CorruptError if what was written is not what its sources say; called once all is
    prove: Callable[[], None] = lambda: None
    #: as `check`, of files that are checked one by one, under "", as soon as each is written; they
    #: may be more than can be open at once, and `check` does not get them
    checks: Mapping[str, Check] = {}


def assemble(nbytes: int, pieces: Pieces) -> Plan:
    """A plan made of pieces, each in its place."""
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
    """A plan for a part of a larger file, from an offset of that on."""
    return plan._replace(
        copies=tuple(each._replace(at=each.at + by) for each in plan.copies),
        writes=tuple(each._replace(at=each.at + by) for each in plan.writes),
        checksums=tuple(each._replace(at=each.at + by) for each in plan.checksums),
        gathers=tuple(each._replace(at=each.at + by) for each in plan.gathers),
        measures=tuple(each._replace(at=each.at + by) for each in plan.measures),
    )


def join_plans(outer: Plan, inner: Sequence[Plan]) -> Plan:
    """The plan of a file, and those of what is in it; measures and seals are left to the caller."""
    plans = [outer, *inner]
    return outer._replace(
        copies=tuple(sorted((e for plan in plans for e in plan.copies), key=lambda e: e.at)),
        writes=tuple(sorted((e for plan in plans for e in plan.writes), key=lambda e: e.at)),
        checksums=tuple(sorted(e for plan in plans for e in plan.checksums)),
        gathers=tuple(sorted((e for plan in plans for e in plan.gathers), key=lambda e: e.at)),
        source_checksums=tuple(e for plan in plans for e in plan.source_checksums),
    )


def check_shared(shared: str) -> str:
    """The choice of what becomes of shared bytes; UsageError if there is no such choice."""
    if shared not in _SHARED:
        raise UsageError(f"shared is one of {', '.join(_SHARED)}, not {shared!r}")
    return shared


def check_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    """Text for the header of a file; UsageError if it is none, or under a name with a meaning."""
    found = dict(metadata or {})
    for key, value in found.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise UsageError(f"metadata must be strings; {key!r} is not")
        if key in (TREE, FOLDER):
            raise UsageError(f"the metadata key {key!r} is reserved for ckptmove")
    return found
