"""relocate: rewrite a checkpoint for another device."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from .. import formats
from ..device import parse
from ..errors import InputError, StrPath, WriteError
from ..manifest import Manifest, NamedDevice
from ..placement import Kept, Moved, Moves
from ..placement import place as place_tensors
from ..plan import Plan
from ..rules import Device, rules_of
from ..sink import Staged, check_destination, check_room
from ..source import Source
from ..verifier import Progress

SCHEMA = 1


@dataclass(frozen=True)
class RelocateReport:
    """What a relocation did, or would do.

    Attributes:
        source: the checkpoint.
        destination: the new one, or None where nothing had to be written.
        written: whether it was; not so in a dry run.
        method: `patch` (a clone of the file with another pickle of the same length), `relay` (the
            zip laid out anew), `clone` (nothing had to change), or `none` (nothing to write).
        copied: `reflink`, `kernel` or `read`: how the bytes came over; None where they didn't.
        moved: `cpu→cuda:0` → storages and bytes.
        kept: tensors that the rules named and that stay, with the reason.
        values_naming_devices: the user's own values that name a device and were left as they are.
        values_rewritten: those that were rewritten (`values=True`).
        unknown_callables: names that loading the file would import, and that are not known to be
            harmless; they were copied untouched.
        warnings: what the user should know, a sentence each.
        bytes_written: the size of the destination.
        seconds: how long it took.
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
    unknown_callables: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    bytes_written: int = 0
    seconds: float = field(default=0.0, compare=False)

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
                name: {"storages": moved.storages, "nbytes": moved.nbytes}
                for name, moved in self.moved.items()
            },
            "kept": [{"name": k.name, "device": k.device, "why": k.why} for k in self.kept],
            "values_naming_devices": [value.to_json() for value in self.values_naming_devices],
            "values_rewritten": [value.to_json() for value in self.values_rewritten],
            "unknown_callables": list(self.unknown_callables),
            "warnings": list(self.warnings),
            "bytes_written": self.bytes_written,
            "seconds": round(self.seconds, 3),
        }


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
    dry_run: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> RelocateReport:
    """Rewrite a checkpoint so that its tensors load on other devices.

    The file is never unpickled and no tensor is loaded: neither torch nor the device nor the
    model's classes are needed. Rules are asked in the order `place`, `device_map`, `map`, `to`.
    What torch itself keeps on the CPU (RNG states, optimizer steps, …) stays there and is reported.

    Args:
        src: the checkpoint; it is never changed.
        dst: the new one. By default it is beside the source: `in.cuda-0.pt` with `to="cuda:0"`,
            `in.relocated.pt` without `to`, and nothing if nothing moves. It appears whole and
            verified, or not at all.
        to: the device for everything: a string, or what spells itself like one (`torch.device`).
        map: device → device, e.g. `{"cuda:1": "cuda:0"}`; a key may hold `*`.
        place: glob on tensor names → device; of several that match, the last decides.
        device_map: module name → device, or a JSON file of it, in accelerate's form: the longest
            prefix wins, a number n means `cuda:n`.
        all: move also what torch keeps on the CPU.
        values: rewrite also `torch.device` values and strings equal to a moved device.
        strict: refuse a file that names callables that are not known to be harmless.
        dry_run: decide everything, write nothing.
        force: replace an existing destination.
        progress: called with the bytes copied and verified since the last call; they add up to the
            size of the destination.

    Raises:
        UsageError: the rules make no sense (`DeviceError`: a device does not).
        InputError: the source can't be read, or is refused.
        RefusedError: the destination exists or can't be written; the rules contradict each other.
        WriteError: writing or verifying failed.
    """
    started = time.monotonic()
    rules = rules_of(to=to, map=map, place=place, device_map=device_map, all=all, values=values)
    with Source.open(src) as source:
        before = formats.read(source)
        if strict:
            _refuse_unknown(before.manifest)
        moves = place_tensors(before.manifest, rules)
        plan = before.plan_relocate(moves)
        target = os.fspath(dst) if dst is not None else None
        if target is None and moves:
            target = _beside(source.path, to)
        copied = None
        if target is not None and dry_run:
            check_destination(target, source, force=force)
            check_room(target, plan, source)
        elif target is not None:
            copied = _write(source, before, moves, plan, target, force, progress)
    manifest = before.manifest
    values_named = enumerate(manifest.values_naming_devices)
    return RelocateReport(
        source=source.path,
        destination=target,
        written=copied is not None,
        method="none" if target is None else plan.method,
        copied=copied,
        moved=moves.totals(manifest.storages),
        kept=tuple(moves.kept),
        values_naming_devices=tuple(v for n, v in values_named if n not in moves.values),
        values_rewritten=tuple(manifest.values_naming_devices[n] for n in moves.values),
        unknown_callables=manifest.unknown_callables,
        warnings=(*manifest.warnings, *moves.warnings),
        bytes_written=plan.nbytes if copied else 0,
        seconds=time.monotonic() - started,
    )


def _refuse_unknown(manifest: Manifest) -> None:
    if manifest.unknown_callables:
        raise InputError(
            f"names unknown callables: {', '.join(manifest.unknown_callables[:3])}",
            hint="loading it would run them; without --strict they are copied untouched",
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
    with Staged(target, source, force=force) as staged:
        copied = staged.write(plan, progress)
        try:
            with staged.reopen() as written:
                before.check_relocated(formats.read(written), moves)
        except InputError as error:
            raise WriteError(f"what was written can't be read: {error}", path=target) from error
        staged.commit()
    return copied


def _beside(source: str, to: Device | None) -> str:
    """The default destination: `in.pt` for cuda:0 → `in.cuda-0.pt`."""
    path = PurePath(source)
    label = "relocated" if to is None else parse(to).replace(":", "-")
    return str(path.with_name(f"{path.stem}.{label}{path.suffix}"))
