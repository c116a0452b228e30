"""Implements `ckptmove.relocate`: rewrite a checkpoint for another device."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import PurePath

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
from ..writing.in_place.change import InPlace, check_in_place, recover_if_interrupted
from ..writing.verify import Progress
from .strict import refuse_unknown


@formats.uncollected()
def relocate(
    src: StrPath,
    dst: StrPath | None = None,
    *,
    to: Device | None = None,
    map: Mapping[str, Device] | None = None,
    place: Mapping[str, Device] | None = None,
    device_map: Mapping[str, Device] | StrPath | None = None,
    all: bool = False,
    values: bool = False,
    strict: bool = False,
    in_place: bool = False,
    dry_run: bool = False,
    force: bool = False,
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
        to: put every tensor on this device: a string, or an object such as `torch.device` whose
            `str()` is one.
        map: from an old device to a new one, for example `{"cuda:1": "cuda:0"}`; a key may be
            `cuda:*` or `*`.
        place: from a glob on tensor names to a device; if several match, the last one wins.
        device_map: from a module name to a device, or a JSON file of that, as accelerate writes it.
            The longest matching name wins; a number n means `cuda:n`.
        all: also move tensors that torch keeps on the CPU.
        values: also rewrite your own values that name a moved device: `torch.device` objects, and
            strings that equal one.
        strict: refuse files that name callables not known to be harmless (`UntrustedError`).
        in_place: change the device tags in `src` itself; write no new file. A change that fails is
            undone at once; after a crash, the next command on the file undoes it (or `recover`).
            The bytes of tensors are never written, so processes that have the file mapped are not
            affected. A process that reads the pickle during the change may fail, or see old and new
            tags.
        dry_run: decide everything; write nothing.
        force: replace an existing destination. With `in_place`: also change a symbolic link, a file
            with several hard links, or a file that another process has open for writing.
        progress: a function that is called with the number of bytes copied and verified since the
            last call; they add up to the size of `dst`. It is not called for a change in place.

    Returns:
        What moved, what stayed, and why.

    Raises:
        UsageError: the rules make no sense (`DeviceError`: the name of a device is not valid).
        InputError: the source cannot be read, or is refused.
        RefusedError: the destination exists or cannot be written, the rules contradict each other,
            or the file cannot be changed in place.
        WriteError: writing or verifying failed.
    """
    started = time.monotonic()
    if in_place and dst is not None:
        raise UsageError("in place there is no other destination")
    rules = rules_of(to=to, map=map, place=place, device_map=device_map, all=all, values=values)
    if place_of(src).is_folder():
        raise UnsupportedError(
            "is a directory", path=src, hint="relocate each file separately in it"
        )
    notes = recover_if_interrupted(src)
    with open_source(src) as source:
        before = formats.read(source)
        manifest = before.manifest
        moves = place_tensors(manifest, rules)
        plan = before.plan_relocate(moves)
        if strict:  # only now, since it could say that what can't be relocated would be copied
            refuse_unknown(manifest, otherwise="without --strict they are copied untouched")
        target = _target(source.path, dst, to, moves, in_place=in_place)
        copied, bytes_written = None, 0
        if target is None:
            pass
        elif in_place:
            if not isinstance(source, File):
                raise RefusedError("is in an object store, where files cannot be changed in place")
            if dry_run:
                check_in_place(source, plan, force=force)
            else:
                bytes_written = _change(source, before, moves, plan, force)
        elif dry_run:
            destination_of(target).check_file([source], force=force)
            destination_of(target).check_room([plan], [source])
        else:
            recover_if_interrupted(target)
            copied = _write(source, before, moves, plan, target, force, progress)
            bytes_written = plan.nbytes
        nbytes = source.nbytes
    named = manifest.values_naming_devices
    return RelocateReport(
        source=source.path,
        destination=target,
        written=target is not None and not dry_run,
        method="none" if target is None else "in-place" if in_place else plan.method,
        copied=copied,
        moved=moves.totals(manifest),
        kept=tuple(moves.kept),
        values_naming_devices=tuple(v for n, v in enumerate(named) if n not in moves.values),
        values_rewritten=tuple(named[n] for n in moves.values),
        rewritten_to=tuple(moves.values.values()),
        values_rewritable=tuple(named[n] for n in moves.rewritable),
        values_unchanged=tuple(named[n] for n in moves.unchanged),
        unknown_callables=manifest.unknown_callables,
        warnings=(*notes, *manifest.warnings, *moves.warnings),
        nbytes=nbytes,
        bytes_written=bytes_written,
        seconds=time.monotonic() - started,
        in_place=in_place,
    )


def _write(
    source: Source,
    before: formats.Checkpoint,
    moves: Moves,
    plan: Plan,
    target: str,
    force: bool,
    progress: Progress | None,
) -> str:
    """Write, verify, commit; gives how the bytes were copied."""
    with destination_of(target).new_file([source], force=force) as made:
        copied = made.write(plan, progress)
        _check(made.reopen(), before, moves)
        made.commit()
    return copied


def _change(source: File, before: formats.Checkpoint, moves: Moves, plan: Plan, force: bool) -> int:
    """Change in place, verify, commit; gives how many bytes were written."""
    with InPlace(source, plan, force=force) as changed:
        bytes_written = changed.write()
        _check(changed.reopen(), before, moves)
        changed.commit()
    return bytes_written


def _check(written: Source, before: formats.Checkpoint, moves: Moves) -> None:
    """Read back what was written, and compare it with what was meant."""
    try:
        with written:
            before.check_relocated(formats.read(written), moves)
    except InputError as error:
        raise WriteError(f"what was written can't be read: {error}", path=written.path) from error


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
