"""The report of a relocation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

from ..display.phrases import plural, which_loading_runs
from ..display.plain import OMITTED, Seconds
from ..display.text import first_names, size
from ..manifest.other_records import NamedDevice
from ..placement.move_totals import Kept, Moved
from .device_values import DeviceValuesReport, what_stays

_MOST_VALUES = 5
_MOST_FILES = 4
_HOW = {"clone": "as an exact copy", "patch": "as a patched clone", "relay": "with a new layout"}


class RelocatedFile(NamedTuple):
    """A file of a folder that was relocated.

    Attributes:
        name: its name within the folder.
        method: as the method of the report; `clone` for a file that was copied unchanged, `none`
            for a file that a change in place left alone.
        nbytes: its size, as it is written.
        stores_devices: whether it is a checkpoint whose format stores devices; safetensors files
            and files that are no checkpoints do not.
        is_unread: whether its name is that of a checkpoint, but it can't be read.
    """

    name: str
    method: str
    nbytes: int
    stores_devices: bool
    is_unread: bool = False


@dataclass(frozen=True)
class RelocateReport(DeviceValuesReport):
    """What a relocation did, or would do.

    Attributes:
        source: the checkpoint.
        destination: the new checkpoint; `source` after a change in place; None if there was nothing
            to write.
        written: whether it was written; False after a dry run.
        method: `patch` (a copy of the file with a new pickle of the same length), `relay` (the zip
            laid out again), `clone` (nothing had to change), `in-place` (a new pickle of the same
            length, over the old one) or `none` (nothing to write). Of a folder, the first of
            `in-place`, `relay`, `patch`, `clone` that one of its files has.
        copied: how the bytes were copied: `reflink`, `kernel` or `read`; `fetch` from an object
            store, `upload` to one; `store` if the store itself copied most of it from a source in
            it: no checksum of those bytes was computed, but the store confirmed by ETags that the
            source was unchanged and that the new object consists of its parts; None if nothing was
            copied.
        moved: from `cpu→cuda:0` to the totals of storages and bytes, and of tensors that store
            their own device.
        kept: tensors that the rules match and that stay, with the reason.
        values_naming_devices: your own values that name a device and were not changed.
        values_rewritten: values that were rewritten (with `values=True`), and devices in an
            exported program.
        rewritten_to: the new device of each of these.
        values_rewritable: values that were not changed and that `values=True` would rewrite.
        values_unchanged: values that name a moved device and that cannot be rewritten.
        unknown_callables: callables not known to be harmless that loading the file would import;
            they were copied unchanged.
        warnings: what the user should know, one sentence each.
        nbytes: the size of the source.
        destination_nbytes: the size of the destination, also after a dry run.
        bytes_written: the size of the destination; for a change in place, the bytes written to the
            file.
        seconds: how long it took.
        in_place: whether the source itself was to be changed.
        files: for a folder, what happens to each file; empty for a file.
    """

    source: str
    destination: str | None
    written: bool
    method: str
    copied: str | None
    moved: Mapping[str, Moved]
    kept: tuple[Kept, ...] = ()
    values_naming_devices: tuple[NamedDevice, ...] = ()
    values_rewritten: Annotated[tuple[NamedDevice, ...], OMITTED] = ()
    rewritten_to: Annotated[tuple[str, ...], OMITTED] = ()
    values_rewritable: tuple[NamedDevice, ...] = ()
    values_unchanged: tuple[NamedDevice, ...] = ()
    unknown_callables: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    nbytes: int = 0
    destination_nbytes: int = 0
    bytes_written: int = 0
    seconds: Seconds = field(default=0.0, compare=False)
    in_place: bool = False
    files: tuple[RelocatedFile, ...] = ()

    def remarks(self) -> list[str]:
        """Return the warnings, and that the file names unknown callables."""
        return [*self.warnings, *which_loading_runs(self.unknown_callables)]

    def blocks(self, *, full: bool = False) -> Iterator[str]:
        """Show what moved, what stayed and why, and where the result is."""
        for move, moved in self.moved.items():
            yield f"{move}: {_move_line(moved)}"
        yield from what_stays(self.kept, full=full)
        yield from _values(self, full)
        yield from _files(self, full)
        if self.destination is None and self.in_place:
            yield "nothing to move, so nothing was changed"
        elif self.destination is None:
            yield "nothing to move: no file was written (give DST to get a copy)"
        elif self.method == "in-place":
            yield _in_place(self)
        elif self.files:
            yield _folder(self)
        elif self.written:
            nothing = "nothing to move; " if self.method == "clone" else ""
            yield (
                f"{nothing}wrote {self.destination} {_HOW[self.method]}: "
                f"{size(self.bytes_written)} in {self.seconds:.2f} s, {_proof(self)}"
            )
        else:
            yield f"would write {self.destination} {_HOW[self.method]}"


def _in_place(report: RelocateReport) -> str:
    if not report.written:
        return f"would change {report.destination} in place"
    return (
        f"changed {report.destination} in place: {size(report.bytes_written)} of "
        f"{size(report.nbytes)} written in {report.seconds:.2f} s, verified"
    )


def _folder(report: RelocateReport) -> str:
    files = plural(len(report.files), "file")
    if not report.written:
        return f"would write {report.destination}: {files}"
    return (
        f"wrote {report.destination}: {files}, {size(report.bytes_written)} in "
        f"{report.seconds:.2f} s, {_proof(report)}"
    )


def _proof(report: RelocateReport) -> str:
    if report.copied != "store":
        return "verified"
    return "verified by its ETags: the store itself copied what does not change"


def _files(report: RelocateReport, full: bool) -> Iterator[str]:
    """Return lines on the files of a folder: which change, which do not, and why."""
    if report.destination is None and not any(each.stores_devices for each in report.files):
        if report.files:
            yield "no file in it stores devices"
        return
    changed = [each for each in report.files if each.method not in ("clone", "none")]
    same = [each for each in report.files if each.method in ("clone", "none")]
    rest = [each for each in same if not each.stores_devices]
    how = "not changed" if report.in_place or report.destination is None else "copied unchanged"
    for what, files in (
        ("new device tags", changed),
        (f"{how}, nothing in it moves", [each for each in same if each.stores_devices]),
        (f"{how}, stores no devices", [each for each in rest if not each.is_unread]),
        (f"{how}, can't be read", [each for each in rest if each.is_unread]),
    ):
        if files:
            names = [each.name for each in files]
            many = f"{plural(len(files), 'file')}, {size(sum(each.nbytes for each in files))}"
            yield f"{what}: {many} ({first_names(names, len(names) if full else _MOST_FILES)})"


def _move_line(moved: Moved) -> str:
    what = []
    if moved.storages:
        what.append(f"{plural(moved.storages, 'storage')}, {size(moved.nbytes)}")
    if moved.tensors:
        what.append(f"{plural(moved.tensors, 'tensor')} that store their own device")
    return ", ".join(what)


def _values(report: RelocateReport, full: bool) -> Iterator[str]:
    """Return other values that name a device: a count for a program, otherwise each."""
    places: Counter[str] = Counter()
    rewritten = []
    for value, device in zip(report.values_rewritten, report.rewritten_to, strict=True):
        if value.follows:
            places[f"{value.value}→{device}"] += 1
        if full or not value.follows:
            rewritten.append(f"{value.name} ({value.value}→{device})")
    for move, n in places.items():
        yield f"graph of the program: {plural(n, 'place')} {move}"
    follow, stay = (
        [f"{value.name} ({value.value})" for value in values if not value.kind.startswith("code")]
        for values in (report.values_rewritable, report.values_unchanged)
    )  # a warning mentions code
    for what, values in (
        ("rewrote values that name a device", rewritten),
        ("unchanged values that --values would rewrite", follow),
        ("unchanged values that can't be rewritten", stay),
    ):
        if values:
            yield f"{what}: {first_names(values, len(values) if full else _MOST_VALUES)}"
