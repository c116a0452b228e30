"""Implements `ckptmove.relocate`: rewrite a checkpoint for another device."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import PurePath
from typing import Annotated, NamedTuple

from .. import formats
from ..device import parse
from ..errors import InputError, RefusedError, StrPath, UnsupportedError, UsageError, WriteError
from ..placement.place import Moves
from ..placement.place import place as place_tensors
from ..placement.rules import Device, rules_of
from ..plans.plan import Plan
from ..reports.relocate import RelocateReport
from ..sources import open_source, place_of
from ..sources.source import File, Source
from ..writing import destination_of
from ..writing.in_place.change import InPlace, check_in_place
from ..writing.in_place.undo import recover_if_interrupted
from ..writing.verify import Progress
from .options import DryRun, Option, Strict, declare_options
from .strict import refuse_unknown


@declare_options
@formats.uncollected()
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
    dry_run: DryRun = False,
    strict: Strict = False,
    progress: Progress | None = None,
) -> RelocateReport:
    """Rewrite a checkpoint for another device.

    Nothing in the file is executed, and no tensor is loaded. Neither torch nor the device nor the
    model's classes are needed. If several rules match a tensor, the first of these wins: `place`,
    `device_map`, `map`, `to`. What torch itself keeps on the CPU (RNG states, optimizer steps, …)
    stays there and is reported.

    Args:
        src: the checkpoint; it is not changed, unless `in_place` is set.
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
        RefusedError: the destination exists or cannot be written, the rules contradict each other,
            or the file cannot be changed in place.
        WriteError: writing or verifying failed.
    """
    started = time.monotonic()
    if in_place and dst is not None:
        raise UsageError("in place there is no other destination")
    rules = rules_of(to=to, map=map, place=place, device_map=device_map, all=all, values=values)
    if place_of(src).is_folder():
        hint = "relocate each file separately in it"
        raise UnsupportedError("is a directory", path=src, hint=hint)
    notes = recover_if_interrupted(src)
    with open_source(src) as source:
        before = formats.read(source)
        manifest, nbytes = before.manifest, source.nbytes
        moves = place_tensors(manifest, rules)
        change = _Change(source, before, moves, before.plan_relocate(moves), force)
        if strict:  # only now, since it could say that what can't be relocated would be copied
            refuse_unknown(manifest, otherwise="without --strict they are copied untouched")
        target = _target(source.path, dst, to, moves, in_place=in_place)
        copied, bytes_written = None, 0
        if target is None:
            pass
        elif dry_run:
            change.check(target, in_place=in_place)
        elif in_place:
            bytes_written = change.apply_in_place()
        else:
            copied, bytes_written = change.write(target, progress)
    return RelocateReport(
        source=source.path,
        destination=target,
        written=target is not None and not dry_run,
        method="none" if target is None else "in-place" if in_place else change.plan.method,
        copied=copied,
        moved=moves.totals(manifest),
        kept=tuple(moves.kept),
        **moves.values_by_outcome(manifest),
        rewritten_to=tuple(moves.values.values()),
        unknown_callables=manifest.unknown_callables,
        warnings=(*notes, *manifest.warnings, *moves.warnings),
        nbytes=nbytes,
        destination_nbytes=0 if target is None else change.plan.nbytes,
        bytes_written=bytes_written,
        seconds=time.monotonic() - started,
        in_place=in_place,
    )


class _Change(NamedTuple):
    """A planned change of a file, which is made in a new file or in place."""

    source: Source
    before: formats.Checkpoint
    moves: Moves
    plan: Plan
    force: bool

    def check(self, target: str, *, in_place: bool) -> None:
        """Raises RefusedError where it would be refused."""
        if in_place:
            check_in_place(self._file(), self.plan, force=self.force)
        else:
            destination = destination_of(target)
            destination.check_file([self.source], force=self.force)
            destination.check_room([self.plan], [self.source])

    def write(self, target: str, progress: Progress | None) -> tuple[str, int]:
        """Write, verify, commit; gives how the bytes were copied, and how many."""
        recover_if_interrupted(target)
        with destination_of(target).new_file([self.source], force=self.force) as made:
            copied = made.write(self.plan, progress)
            self._verify(made.open_written())
            made.commit()
        return copied, self.plan.nbytes

    def apply_in_place(self) -> int:
        """Change in place, verify, commit; gives how many bytes were written."""
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
        """Read back what was written, and compare it with what was meant."""
        try:
            with written:
                self.before.check_relocated(formats.read(written), self.moves)
        except InputError as error:
            message = f"what was written can't be read: {error}"
            raise WriteError(message, path=written.path) from error


def _target(
    source: str, dst: StrPath | None, to: Device | None, moves: Moves, *, in_place: bool
) -> str | None:
    """What is to be written, if anything is."""
    if dst is not None:
        return os.fspath(dst)
    if not moves:
        return None
    return source if in_place else _beside(source, to)


def _beside(source: str, to: Device | None) -> str:
    """The default destination: `in.pt` for cuda:0 → `in.cuda-0.pt`."""
    place = place_of(source)
    path = PurePath(place.name)
    label = "relocated" if to is None else parse(to).replace(":", "-")
    return place.parent.child(f"{path.stem}.{label}{path.suffix}").path
