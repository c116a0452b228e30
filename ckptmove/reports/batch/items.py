"""The items of a batch and their results; both can be sent to other processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from ...manifest.manifest import Manifest, Total
from ..display.phrases import which_loading_runs
from ..display.plain import OMITTED, Key, Seconds, to_json
from ..display.report import Report


class Entry(NamedTuple):
    """What a line says."""

    name: str  #: of the item
    key: str  #: a digest of all that what was made of it depends on; see `batches.fingerprints`
    #: `done`; `failed`, where a report of a failure was written; `begun`; or `undone`, where that
    #: came to nothing.
    outcome: str
    #: of the output, as `trees.Output` has them; not where a file was changed in place.
    nbytes: int = 0
    stamp: str = ""
    crc32: int = 0
    #: where a file is changed in place by the devices that it names, a digest of these: as they
    #: were when it was begun, as they are since it was done.
    tags: str = ""
    #: as `trees.Output` has them, where they were computed and are not too many
    digests: Mapping[str, str] = {}
    source_digests: Mapping[str, str] = {}  #: as a result has them, and as few
    removed: bool = False  #: whether its source was removed, after its output was read again
    kind: str = ""  #: as the item has it, and so the next
    format: str = ""


#: What becomes of an item; `busy` if another run is at it, and is never told to anyone.
OUTCOMES = ("done", "skipped", "left-out", "refused", "failed")
DONE, SKIPPED, LEFT_OUT, REFUSED, FAILED = OUTCOMES
BUSY = "busy"
#: What a dry run can't tell of an output that is there, by how it will be treated.
UNSURE = {
    "compared": "exists; kept if it is identical, otherwise refused",
    "checked": "exists and will be read again to check it",
}


MISSING = "missing"
#: The kinds of items of which nothing can be read.
UNREADABLE = ("unreadable", MISSING)


class Item(NamedTuple):
    """A checkpoint of a tree, or another file that is copied."""

    name: str  #: its path in the tree, with `/` between the parts
    path: str  #: the file or folder
    #: `file`, `folder` (of a model or a trainer), `index` (of the files beside it), `other` (no
    #: checkpoint, to be copied), `unreadable`, or `missing` (only in the tree that this one is
    #: compared with).
    kind: str
    files: tuple[str, ...]  #: of a folder or an index, all its files
    nbytes: int  #: of all that belongs to it
    stamp: str = ""  #: of what it is made of, when it was found; see `Tree.stamp_of`
    #: what is written; the file itself if it is changed in place, and empty if nothing is.
    output: str = ""
    format: str = ""  #: by a first look; empty if that does not tell it
    digests: Mapping[str, str] = {}  #: of its output, where an earlier run computed them
    source_digests: Mapping[str, str] = {}  #: of itself, likewise


class Task(NamedTuple):
    """An item, and all that it takes to do it."""

    item: Item  #: what is to be done
    verb: str  #: `inspect`, `relocate`, `convert`, `validate`
    options: Mapping[str, Any]  #: of the verb, for this item
    request: str  #: a digest of what is the same for all items; see `batches.fingerprints`
    ledger: str = ""  #: the path of the ledger; empty if there is none
    known: Entry | None = None  #: what the ledger said of the item when the batch was planned
    since: int = 0  #: from which offset on it may say more
    #: what becomes of an output that is there already: it is `checked` by its checksum, `compared`
    #: with what would be written, or `replaced`; empty if nothing is there.
    there: str = ""
    obstacle: str = ""  #: why it will be refused, if that is known
    clash: str = ""  #: why it must not be done: its output would be another item's too
    verify: bool = False  #: whether to read an output that is done, even if nothing looks changed
    digests: bool = False  #: whether to compute digests of the output and the source
    delete_source: bool = False  #: whether to remove the source once it is done
    timeout: float | None = None  #: the most seconds that it may take
    patient: bool = False  #: whether to wait for another run that is at the same item
    contents: bool = False  #: whether to tell what it holds, too

    @property
    def in_place(self) -> bool:
        """Whether the source itself is changed."""
        return bool(self.options.get("in_place"))

    @property
    def by_tags(self) -> bool:
        """Whether what it becomes depends on the devices that it names, so that twice is wrong."""
        return self.in_place and bool(self.options.get("map"))


class Contents(NamedTuple):
    """What a checkpoint holds, in a few numbers.

    Attributes:
        format: its format.
        devices: the bytes of tensors by device, the largest first; `not stored` counts those whose
            format stores no devices.
        dtypes: the bytes of tensors by dtype, the largest first.
        tensors: how many there are.
        warnings: what is unusual about it, one sentence each.
    """

    format: str
    devices: Mapping[str, int]
    dtypes: Mapping[str, int]
    tensors: int
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(cls, manifest: Manifest, format: str) -> Contents:
        """What a manifest tells; each storage counts once."""
        return cls(
            format,
            _nbytes(manifest.devices),
            _nbytes(manifest.totals(lambda entry: entry.dtype)),
            sum(entry.part_of is None for entry in manifest.tensors),
            manifest.warnings,
        )


def _nbytes(totals: Mapping[str, Total]) -> dict[str, int]:
    return {name: total.nbytes for name, total in totals.items()}


class Result(NamedTuple):
    """The result of one item of a batch.

    Attributes:
        name, path: as the item has them.
        outcome: `done`; `skipped` (done by an earlier run); `left-out` (weights were asked for, and
            it has none that could be meant, such as the state of an optimizer or a data loader);
            `refused` (it cannot or must not be done); `failed` (the item is damaged, a check or
            writing failed, or its process died).
        reason: why, in one line; empty if it was done.
        hint: what to do next, or None.
        output: what was written, or None.
        nbytes: the size of the source.
        bytes_written: the bytes written; in a dry run, those that would be.
        copied: whether nothing in it was to change: it was copied, or in place left as it is.
        source_removed: whether the source was removed, after the output was read again.
        seconds: how long it took.
        source_stamp: what the file system or the store tells of the version of the source.
        digests: from each file of the output, by its name in DST, to its SHA-256, if it was
            computed.
        source_digests: from each file of the source, by its name in SRC, to its SHA-256, likewise.
        report: the report of the verb, as plain data; None if there is none.
        contents: what it holds, if that was asked for and could be read.
        folders: folders whose new entries are not yet synced to disk.
        entries: what is to be added to the ledger by who collects results.
    """

    name: str
    path: Annotated[str, Key("source")]
    outcome: str
    reason: str = ""
    hint: str | None = None
    output: Annotated[str | None, Key("destination")] = None
    nbytes: int = 0
    bytes_written: int = 0
    copied: bool = False
    source_removed: bool = False
    seconds: Seconds = 0.0
    source_stamp: str = ""
    digests: Mapping[str, str] = {}
    source_digests: Mapping[str, str] = {}
    report: Mapping[str, Any] | None = None
    contents: Annotated[Contents | None, OMITTED] = None
    folders: Annotated[tuple[str, ...], OMITTED] = ()
    entries: Annotated[tuple[Entry, ...], OMITTED] = ()

    @property
    def ok(self) -> bool:
        """Whether the item is done, or there is nothing to do."""
        return self.outcome in (DONE, SKIPPED, LEFT_OUT)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know, one sentence each."""
        report = self.report or {}
        unknown = which_loading_runs(report.get("unknown_callables", ()))
        return (*report.get("warnings", ()), *unknown)

    @property
    def schema(self) -> int:
        """The version of the JSON."""
        return Report.schema

    def to_json(self) -> dict[str, Any]:
        """Return plain data: the same as a line of `--log`."""
        return to_json(self)


def is_unsure(result: Result) -> bool:
    """Whether a dry run could not tell what becomes of an item."""
    return result.reason in UNSURE.values()


def skipped_result(item: Item, why: str, known: Item | Entry) -> Result:
    """The result of an item that is done already, with the digests that are known of it."""
    result = result_of(item, SKIPPED, why, output=item.output or None)
    return result._replace(digests=known.digests, source_digests=known.source_digests)


def result_of(item: Item, outcome: str, reason: str = "", **more: Any) -> Result:
    """A result for an item."""
    about = {"nbytes": item.nbytes, "source_stamp": item.stamp, **more}
    return Result(item.name, item.path, outcome, reason, **about)
