"""relocate: rewrite a checkpoint for another device."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from .. import formats
from ..errors import InputError, RefusedError, StrPath, UnsupportedError, UsageError, WriteError
from ..manifest.device import parse
from ..manifest.manifest import NamedDevice
from ..placement.place import Kept, Moved, Moves
from ..placement.place import place as place_tensors
from ..placement.rules import Device, rules_of
from ..plans.plan import Plan
from ..sources import folder_of, is_folder, is_url, joined, open_source
from ..sources.source import File, Source
from ..writing import check_destination, check_room, staged
from ..writing.in_place.change import InPlace, check_in_place, settle
from ..writing.verify import Progress
from .strict import refuse_unknown

SCHEMA = 1


@dataclass(frozen=True)
class RelocateReport:
    """What a relocation did, or would do.

    Attributes:
        source: the checkpoint.
        destination: the new one, itself if it was changed in place, or None where nothing had to be
            written.
        written: whether it was; not so in a dry run.
        method: `patch` (a clone of the file with another pickle of the same length), `relay` (the
            zip laid out anew), `clone` (nothing had to change), `in-place` (a pickle of the same
            length, written over the old one), or `none` (nothing to write).
        copied: how the bytes came over: `reflink`, `kernel` or `read`; `fetch` from a store,
            `upload` to one; None where they didn't.
        moved: `cpu→cuda:0` → storages and bytes, and tensors that store their own device.
        kept: tensors that the rules named and that stay, with the reason.
        values_naming_devices: the user's own values that name a device and were left as they are.
        values_rewritten: those that were rewritten (`values=True`), and what an exported program
            names.
        rewritten_to: the new device of each of these.
        values_rewritable: those that were left and that `values=True` would have rewritten.
        values_unchanged: those that name a device that moved and that it can't rewrite.
        unknown_callables: names that loading the file would import, and that are not known to be
            harmless; they were copied untouched.
        warnings: what the user should know, a sentence each.
        nbytes: the size of the source.
        bytes_written: the size of the destination; in place, what of it was written.
        seconds: how long it took.
        in_place: whether the source itself was to be changed.
    """

    source: str
    destination: str | None
    written: bool
    method: str
    copied: str | None
    moved: Mapping[str, Moved]
    kept: tuple[Kept, ...] = ()
    values_naming_devices: tuple[NamedDevice, ...] = ()
    values_rewritten: tuple[NamedDevice, ...] = ()
    rewritten_to: tuple[str, ...] = ()
    values_rewritable: tuple[NamedDevice, ...] = ()
    values_unchanged: tuple[NamedDevice, ...] = ()
    unknown_callables: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    nbytes: int = 0
    bytes_written: int = 0
    seconds: float = field(default=0.0, compare=False)
    in_place: bool = False

    @property
    def values_could_follow(self) -> tuple[NamedDevice, ...]:
        """The former name of `values_rewritable`."""
        return self.values_rewritable

    @property
    def values_left_behind(self) -> tuple[NamedDevice, ...]:
        """The former name of `values_unchanged`."""
        return self.values_unchanged

    def to_json(self) -> dict[str, Any]:
        """The report as plain data, the same as `ckptmove relocate --json` prints."""
        return {
            "schema": SCHEMA,
            "source": self.source,
            "destination": self.destination,
            "written": self.written,
            "method": self.method,
            "copied": self.copied,
            "moved": {
                name: {
                    "storages": moved.storages,
                    "nbytes": moved.nbytes,
                    "tensors": moved.tensors,
                }
                for name, moved in self.moved.items()
            },
            "kept": [{"name": k.name, "device": k.device, "why": k.why} for k in self.kept],
            "values_naming_devices": [value.to_json() for value in self.values_naming_devices],
            "values_rewritten": [
                {**value.to_json(), "to": device}
                for value, device in zip(self.values_rewritten, self.rewritten_to, strict=True)
            ],
            "values_rewritable": [value.to_json() for value in self.values_rewritable],
            "values_unchanged": [value.to_json() for value in self.values_unchanged],
            "values_could_follow": [value.to_json() for value in self.values_rewritable],  # former
            "values_left_behind": [value.to_json() for value in self.values_unchanged],  # names
            "unknown_callables": list(self.unknown_callables),
            "warnings": list(self.warnings),
            "nbytes": self.nbytes,
            "bytes_written": self.bytes_written,
            "seconds": round(self.seconds, 3),
            "in_place": self.in_place,
        }


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
    """Rewrite a checkpoint so that its tensors load on other devices.

    The file is never unpickled and no tensor is loaded: neither torch nor the device nor the
    model's classes are needed. Rules are asked in the order `place`, `device_map`, `map`, `to`.
    What torch itself keeps on the CPU (RNG states, optimizer steps, …) stays there and is reported.

    Args:
        src: the checkpoint; it is never changed, but for `in_place`.
        dst: the new one. By default it is beside the source: `in.cuda-0.pt` with `to="cuda:0"`,
            `in.relocated.pt` without `to`, and nothing if nothing moves. It appears whole and
            verified, or not at all. Both may be URLs of objects in a store.
        to: the device for everything: a string, or what spells itself like one (`torch.device`).
        map: device → device, e.g. `{"cuda:1": "cuda:0"}`; a key may hold `*`.
        place: glob on tensor names → device; of several that match, the last decides.
        device_map: module name → device, or a JSON file of it, in accelerate's form: the longest
            prefix wins, a number n means `cuda:n`.
        all: move also what torch keeps on the CPU.
        values: rewrite also `torch.device` values and strings equal to a moved device.
        strict: refuse a file that names callables that are not known to be harmless
            (`UntrustedError`).
        in_place: write no new file, but change the tags where they lie in this one. It is undone
            if it fails, and after a crash by the next command that meets the file (`recover`).
            The bytes of tensors are never written: who has the file mapped notices nothing, who
            reads its pickle in that moment may fail, or find old tags and new ones.
        dry_run: decide everything, write nothing.
        force: replace an existing destination; change in place also a file that is a symbolic
            link, has several names, or is open for writing elsewhere.
        progress: called with the bytes copied and verified since the last call; they add up to the
            size of the destination. Not called in place.

    Raises:
        UsageError: the rules make no sense (`DeviceError`: a device does not).
        InputError: the source can't be read, or is refused.
        RefusedError: the destination exists or can't be written; the rules contradict each other;
            the file can't be changed in place.
        WriteError: writing or verifying failed.
    """
    started = time.monotonic()
    if in_place and dst is not None:
        raise UsageError("in place there is no other destination")
    rules = rules_of(to=to, map=map, place=place, device_map=device_map, all=all, values=values)
    if is_folder(src):
        raise UnsupportedError(
            "is a directory", path=src, hint="relocate each file separately in it"
        )
    notes = settle(src)
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
            check_destination(target, [source], force=force)
            check_room(target, [plan], [source])
        else:
            settle(target)
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
    with staged(target, [source], force=force) as made:
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
    path = PurePath(source)
    label = "relocated" if to is None else parse(to).replace(":", "-")
    name = f"{path.stem}.{label}{path.suffix}"
    return joined(folder_of(source), name) if is_url(source) else str(path.with_name(name))
