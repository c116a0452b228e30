"""The items of a batch and their results; both can be sent to other processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from ...display.phrases import which_loading_runs
from ...display.plain import OMITTED, Key, Seconds, to_json
from ...display.report import Report
from ...manifest.manifest import Manifest, Total


class LedgerEntry(NamedTuple):
    """An entry of the ledger: the content of one line."""

    name: str  #: the name of the item
    key: str  #: a digest of everything that the output depends on; see `batches.fingerprints`
    #: `done`; `failed`, if a report of a failure was written; `begun`; or `undone`, if a begun
    #: change was not made.
    outcome: str
    #: of the output, as in `trees.Output`; not if a file was changed in place.
    nbytes: int = 0
    stamp: str = ""
    crc32: int = 0
    #: for a change in place that depends on the old devices, a digest of the devices: before the
    #: change in `begun`, after it in `done`.
    tags: str = ""
    #: as in `trees.Output`, if they were computed and are not too many
    digests: Mapping[str, str] = {}
    source_digests: Mapping[str, str] = {}  #: as in a result, with the same limit
    removed: bool = False  #: whether its source was removed, after its output was read again
    kind: str = ""  #: as in the item; so is the next
    format: str = ""


#: The outcome of an item; `busy`, which is internal, if another run is doing it.
OUTCOMES = ("done", "skipped", "left-out", "refused", "failed")
DONE, SKIPPED, LEFT_OUT, REFUSED, FAILED = OUTCOMES
BUSY = "busy"
#: What a dry run can't tell about an existing output, by how it will be treated.
UNSURE = {
    "compared": "exists; kept if it is identical, otherwise refused",
    "checked": "exists and will be read again to check it",
}


MISSING = "missing"
#: The kinds of items that can't be read.
UNREADABLE = ("unreadable", MISSING)


class Item(NamedTuple):
    """A checkpoint of a tree, or another file that is copied."""

    name: str  #: its path in the tree, with `/` between the parts
    path: str  #: the file or folder
    #: `file`, `folder` (of a model or a trainer), `index` (of the files beside it), `other` (no
    #: checkpoint, to be copied), `unreadable`, or `missing` (only in the tree that this one is
    #: compared with).
    kind: str
    files: tuple[str, ...]  #: for a folder or an index, all its files
    nbytes: int  #: the size of all its files
    stamp: str = ""  #: the stamp of its files when it was found; see `Tree.stamp_of`
    #: the output path; the file itself for a change in place; empty if nothing is written
    output: str = ""
    format: str = ""  #: from a first look; empty if unknown
    digests: Mapping[str, str] = {}  #: digests of its output, if an earlier run computed them
    source_digests: Mapping[str, str] = {}  #: digests of its own files, likewise


class Task(NamedTuple):
    """An item, and everything needed to do it."""

    item: Item  #: what is to be done
    verb: str  #: `inspect`, `relocate`, `convert`, `validate`
    options: Mapping[str, Any]  #: the options of the verb for this item
    request: str  #: a digest of everything common to all items; see `batches.fingerprints`
    ledger: str = ""  #: the path of the ledger; empty if there is none
    known: LedgerEntry | None = None  #: the ledger's entry of the item when the batch was planned
    since: int = 0  #: the ledger may have more from this offset on
    #: how an existing output is treated: `checked` by its checksum, `compared` with the new output,
    #: or `replaced`; empty if there is none.
    existing: str = ""
    obstacle: str = ""  #: why it will be refused, if that is known
    clash: str = ""  #: why it must not be done: another item has the same output
    verify: bool = False  #: whether to read a finished output again, even if nothing looks changed
    digests: bool = False  #: whether to compute digests of the output and the source
    delete_source: bool = False  #: whether to remove the source once it is done
    timeout: float | None = None  #: the most seconds that it may take
    patient: bool = False  #: whether to wait for another run that is doing the same item
    contents: bool = False  #: whether to return its contents too
    reference: str = ""  #: the stamp of the object in a store that it is compared with

    @property
    def in_place(self) -> bool:
        """Whether the source itself is changed."""
        return bool(self.options.get("in_place"))

    @property
    def by_tags(self) -> bool:
        """Whether the result depends on the devices in the file, so doing it twice is wrong."""
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
        """Summarize a manifest; each storage counts once."""
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
        source_stamp: the version of the source, from the file system or the store.
        digests: from each file of the output, by its name in DST, to its SHA-256, if it was
            computed.
        source_digests: from each file of the source, by its name in SRC, to its SHA-256, likewise.
        report: the report of the verb, as plain data; None if there is none.
        contents: what it holds, if that was asked for and could be read.
        folders: folders whose new entries are not yet synced to disk.
        entries: what is to be added to the ledger by the process that collects results.
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
    entries: Annotated[tuple[LedgerEntry, ...], OMITTED] = ()

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
    """Whether a dry run could not tell what would happen to an item."""
    return result.reason in UNSURE.values()


def skipped_result(item: Item, why: str, known: Item | LedgerEntry) -> Result:
    """Return the result of an item that is done already, with its known digests."""
    result = result_of(item, SKIPPED, why, output=item.output or None)
    return result._replace(digests=known.digests, source_digests=known.source_digests)


def result_of(item: Item, outcome: str, reason: str = "", **more: Any) -> Result:
    """Make a result for an item."""
    about = {"nbytes": item.nbytes, "source_stamp": item.stamp, **more}
    return Result(item.name, item.path, outcome, reason, **about)
