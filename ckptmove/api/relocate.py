"""Implements `ckptmove.relocate`: rewrite a checkpoint for another device."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Protocol

from .. import formats
from ..errors import InputError, RefusedError, StrPath, UsageError, WriteError
from ..formats.checkpoint import Checkpoint
from ..manifest.device import Device, parse
from ..placement.place import Moves
from ..placement.place import place as place_tensors
from ..placement.rules import Rules, rules_of
from ..reports.relocate import RelocatedFile, RelocateReport
from ..sources import open_source, place_of
from ..sources.file import File
from ..sources.source import Source
from ..writing import destination_of
from ..writing.in_place import recover_if_interrupted
from ..writing.verify import Progress
from .options import DryRun, FollowLinks, Option, Strict, declare_options
from .strict import refuse_unknown

#: Suffixes of files; a relocated folder can't have them.
_SUFFIXES = (".pt", ".pth", ".ckpt", ".safetensors")


@declare_options
@formats.pause_collection()
def relocate(
    src: StrPath,
    dst: StrPath | None = None,
    *,
    to: Annotated[
        Device | None,
        Option(
            "Put every tensor on this device, for example cuda:0 or cpu.",
            "DEVICE",
            "Devices",
            python="It may be an object such as `torch.device` whose `str()` is a device.",
        ),
    ] = None,
    map: Annotated[
        Mapping[str, Device] | None,
        Option("Move tensors from device A to device B. A may be cuda:* or *.", "A=B"),
    ] = None,
    place: Annotated[
        Mapping[str, Device] | None,
        Option(
            "Put tensors whose name matches GLOB on DEVICE; the last match wins.", "GLOB=DEVICE"
        ),
    ] = None,
    device_map: Annotated[
        Mapping[str, Device] | StrPath | None,
        Option(
            "A JSON file with a device for each module name, as accelerate writes it; the longest "
            "matching name wins.",
            "FILE",
            python="Or a mapping of that form. A number n means `cuda:n`.",
        ),
    ] = None,
    all: Annotated[bool, Option("Also move tensors that torch keeps on the CPU.")] = False,
    values: Annotated[
        bool,
        Option(
            "Also rewrite your own values that name a moved device.",
            python="These are `torch.device` objects, and strings that equal one.",
        ),
    ] = False,
    allow_unmatched: Annotated[
        bool, Option("Accept --map and --place that match nothing; otherwise they are refused.")
    ] = False,
    in_place: Annotated[
        bool,
        Option(
            "Change the device tags in SRC itself; write no new file.",
            group="Destination",
            python="A change that fails is undone at once; after a crash, the next command on the "
            "file undoes it (or `recover`). The bytes of tensors are never written, so processes "
            "that have the file mapped are not affected. A process that reads the pickle during "
            "the change may fail, or see old and new tags.",
        ),
    ] = False,
    force: Annotated[
        bool,
        Option(
            "Replace an existing destination. With --in-place: also change a symbolic link, a file "
            "with several hard links, or a file that another process has open for writing."
        ),
    ] = False,
    follow_links: FollowLinks = False,
    dry_run: DryRun = False,
    strict: Strict = False,
    progress: Progress | None = None,
) -> RelocateReport:
    """Rewrite a checkpoint for another device.

    Nothing in the file is executed, and no tensor is loaded. Neither torch nor the device nor the
    model's classes are needed. If several rules match a tensor, the first of these wins: `place`,
    `device_map`, `map`, `to`. What torch itself keeps on the CPU (RNG states, optimizer steps, …)
    stays there and is reported.

    Within one S3 store, the store itself copies the unchanged parts, and only the changed parts are
    downloaded; the report says so. For copied parts, only the store's ETags are checked; no
    checksum of the bytes is computed.

    If `src` is a folder, every file is written: each checkpoint in its own format; other files, and
    files that store no devices (safetensors), unchanged. The rules apply to the whole folder, with
    the names that `inspect` shows. With `in_place`, all files change or none.

    Args:
        src: the checkpoint, a file or a folder; it is not changed, unless `in_place` is set.
        dst: the new checkpoint. It appears complete and verified, or not at all. `src` and `dst`
            may be URLs of objects in a store. Default: beside `src`, as `in.cuda-0.pt` with
            `to="cuda:0"`, or `in.relocated.pt` without `to`; nothing is written if no tensor moves.
        progress: a function that is called with the number of bytes copied and verified since the
            last call; they add up to the size of `dst`. It is not called for a change in place.

    Returns:
        What moved, what stayed, and why.

    Raises:
        UsageError: the rules make no sense (`DeviceError`: the name of a device is not valid).
        InputError: the source cannot be read, or is refused (`UntrustedError`: it names unknown
            callables, and `strict` is set).
        RefusedError: the destination exists or cannot be written, a rule of `map` or `place`
            matches nothing, the rules contradict each other, or the file cannot be changed in
            place.
        WriteError: writing or verifying failed.
    """
    started = time.monotonic()
    if in_place and dst is not None:
        raise UsageError("in place there is no other destination")
    rules = rules_of(to=to, map=map, place=place, device_map=device_map, all=all, values=values)
    if place_of(src).is_folder():
        opened = _folder_change(src, rules, force=force, follow_links=follow_links)
    else:
        opened = _file_change(src, rules, force=force)
    with opened as change:
        manifest, moves = change.before.manifest, change.moves
        if moves.unmatched and not allow_unmatched:
            raise RefusedError(
                "; ".join(moves.unmatched),
                path=change.path,
                hint="ckptmove inspect lists names and devices; --allow-unmatched accepts that",
            )
        if strict:  # not earlier: its hint would promise to copy a file that can't be relocated
            refuse_unknown(manifest, otherwise="without --strict they are copied untouched")
        target = _target(change, dst, to, in_place=in_place)
        copied, bytes_written = None, 0
        if target is None:
            pass
        elif dry_run and in_place:
            change.check_in_place()
        elif dry_run:
            change.check(target)
        elif in_place:
            bytes_written = change.apply_in_place()
        else:
            copied, bytes_written = change.write(target, progress)
        return RelocateReport(
            source=change.path,
            destination=target,
            written=target is not None and not dry_run,
            method="none" if target is None else "in-place" if in_place else change.method,
            copied=copied,
            moved=moves.totals(manifest),
            kept=tuple(moves.kept),
            **moves.values_by_outcome(manifest),
            rewritten_to=tuple(moves.values.values()),
            unknown_callables=manifest.unknown_callables,
            warnings=(*change.notes, *manifest.warnings, *moves.unmatched, *moves.warnings),
            nbytes=change.nbytes,
            destination_nbytes=0 if target is None else change.new_nbytes,
            bytes_written=bytes_written,
            seconds=time.monotonic() - started,
            in_place=in_place,
            files=change.report(in_place=in_place),
        )


class _Change(Protocol):
    """A planned change of a file or a folder, made in a new one or in place."""

    path: str
    moves: Moves
    notes: Sequence[str]
    is_folder: bool

    @property
    def before(self) -> Checkpoint:
        """The checkpoint to change."""

    @property
    def method(self) -> str:
        """How the output is written, in one word."""

    @property
    def nbytes(self) -> int:
        """The size of the source."""

    @property
    def new_nbytes(self) -> int:
        """The size of the output."""

    def report(self, *, in_place: bool) -> tuple[RelocatedFile, ...]:
        """Report what happens to each file of a folder."""

    def check(self, target: str) -> None:
        """Raises RefusedError if the destination would be refused."""

    def check_in_place(self) -> None:
        """Raises RefusedError where a change in place would be refused."""

    def write(self, target: str, progress: Progress | None) -> tuple[str | None, int]:
        """Write, verify and commit; return how the bytes were copied, and how many."""

    def apply_in_place(self) -> int:
        """Change in place, verify and commit; return how many bytes were written."""


@contextmanager
def _file_change(src: StrPath, rules: Rules, *, force: bool) -> Iterator[_Change]:
    notes = recover_if_interrupted(src)
    with open_source(src) as source:
        yield _FileChange(source, rules, notes, force=force)


@contextmanager
def _folder_change(
    src: StrPath, rules: Rules, *, force: bool, follow_links: bool
) -> Iterator[_Change]:
    from .folders.relocate import FolderChange

    with formats.open_whole_folder(src, follow_links=follow_links, by_rank=True) as before:
        yield FolderChange(before, rules, force=force, follow_links=follow_links)


class _FileChange:
    """A planned change of a file."""

    is_folder = False

    def __init__(self, source: Source, rules: Rules, notes: Sequence[str], *, force: bool) -> None:
        """Plan the change. Raises as `place`."""
        self.path, self.source, self.notes, self.force = source.path, source, notes, force
        self.nbytes = source.nbytes
        self.before = formats.read(source)
        self.moves = place_tensors(self.before.manifest, rules)
        self.plan = self.before.plan_relocate(self.moves)
        self.method, self.new_nbytes = self.plan.method, self.plan.nbytes

    def report(self, *, in_place: bool) -> tuple[RelocatedFile, ...]:
        return ()

    def check(self, target: str) -> None:
        destination = destination_of(target)
        destination.check_file([self.source], force=self.force)
        destination.check_room([self.plan], [self.source])

    def check_in_place(self) -> None:
        from ..writing.in_place.change import check_in_place

        check_in_place(self._file(), self.plan, force=self.force)

    def write(self, target: str, progress: Progress | None) -> tuple[str | None, int]:
        recover_if_interrupted(target)
        with destination_of(target).new_file([self.source], force=self.force) as made:
            copied = made.write(self.plan, progress)
            self._verify(made.open_written())
            made.commit()
        return copied, self.plan.nbytes

    def apply_in_place(self) -> int:
        from ..writing.in_place.change import InPlace

        with InPlace(self._file(), self.plan, force=self.force) as changed:
            bytes_written = changed.write()
            self._verify(changed.open_written())
            changed.commit()
        return bytes_written

    def _file(self) -> File:
        if not isinstance(self.source, File):
            raise RefusedError("is in an object store, where files cannot be changed in place")
        return self.source

    def _verify(self, written: Source) -> None:
        """Read the written file back and compare it with the plan."""
        try:
            with written:
                if self.plan.method == "patch" and self.before.check_patched(written, self.moves):
                    return
                self.before.check_relocated(formats.read(written), self.moves)
        except InputError as error:
            message = f"what was written can't be read: {error}"
            raise WriteError(message, path=written.path) from error


def _target(
    change: _Change, dst: StrPath | None, to: Device | None, *, in_place: bool
) -> str | None:
    """Return the destination, if anything is written."""
    if dst is not None:
        if change.is_folder and os.path.splitext(place_of(dst).name)[1] in _SUFFIXES:
            raise UsageError(
                f"{os.fspath(dst)!r} is called like a file, and a folder becomes a folder",
                hint="ckptmove convert makes one file of a folder",
            )
        return os.fspath(dst)
    if in_place:
        return change.path if change.moves else None
    beside = _beside(change.path, to, is_folder=change.is_folder)
    if change.moves:
        return beside
    if place_of(beside).exists():  # the old file would be mistaken for a new one
        raise RefusedError(
            "exists, and nothing would move, so it is not written again",
            path=beside,
            hint="give it as DST with --force to make a copy",
        )
    return None


def _beside(source: str, to: Device | None, *, is_folder: bool) -> str:
    """The default destination: `in.pt` → `in.cuda-0.pt`, the folder `run` → `run.cuda-0`."""
    place = place_of(source.rstrip("/"))
    if place.name in ("", ".", ".."):  # such as the current folder
        place = place_of(place.absolute())
    stem, suffix = os.path.splitext(place.name)
    label = "relocated" if to is None else parse(to).replace(":", "-")
    new = f"{place.name}.{label}" if is_folder else f"{stem}.{label}{suffix}"
    return place.parent.child(new).path
