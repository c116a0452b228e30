"""Implements `ckptmove.salvage`: write what can still be read of a broken checkpoint."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Literal

from .. import formats
from ..display.json_text import json_text
from ..display.phrases import plural
from ..errors import CorruptError, RefusedError, StrPath, UsageError
from ..formats.diagnosis import damage_of
from ..formats.salvage import NamedTensor, Remains, remains_of
from ..formats.salvage.draft import draft_of, room_for
from ..formats.writing import WriteOptions, WritePlan, assemble
from ..graph.draft import Pieces
from ..graph.parts import allowed_name
from ..reports.salvage import Fate, SalvagedTensor, SalvageReport
from ..sources import place_of
from ..sources.joined import JoinedFiles
from ..sources.source import Source
from ..writing import destination_of
from ..writing.verify import Progress
from .conversion.plan import check_size
from .conversion.target import PlannedPart, Target, target_of
from .options import DryRun, FollowLinks, ForceLarger, Format, Option, declare_options

#: The suffix that the name of the report adds to the name of the file.
REPORT = ".salvage.json"
_KEY = "salvaged"


@declare_options
@formats.pause_collection()
def salvage(
    src: StrPath,
    dst: StrPath,
    *,
    partial: Annotated[
        Literal["drop", "zeros"],
        Option(
            "What to do with tensors that have missing or wrong bytes: leave them out (drop), or "
            "write them with zeros for what is missing, and wrong bytes as they are (zeros).",
            group="What to write",
        ),
    ] = "drop",
    format: Format = None,
    follow_links: FollowLinks = False,
    force: ForceLarger = False,
    dry_run: DryRun = False,
    progress: Progress | None = None,
) -> SalvageReport:
    """Write the tensors that can still be read of a truncated, overwritten or bit-flipped file.

    Nothing in the file is executed. The tensors are written by name, as a plain dict; other values
    are not. A tensor is whole only if a checksum of the file proves it: formats without checksums
    (safetensors, files of torch before 1.6, pickles) have unproven tensors at best. The result is
    not the whole checkpoint unless the report is `complete`.

    Args:
        src: the checkpoint; it is not changed. It may be a file, an index of several files, or a
            folder of which a file is missing or damaged.
        dst: the file to write. The report is written beside it, as `DST.salvage.json`.
        progress: a function that is called with the number of bytes copied and verified since the
            last call.

    Returns:
        What is left of each tensor, and the likely cause of the damage.

    Raises:
        UsageError: the options make no sense.
        InputError: the file cannot be read, or nothing in it names a tensor.
        RefusedError: a destination exists, or the result would be far larger than its source.
        WriteError: writing or verifying failed.
    """
    started = time.monotonic()
    if partial not in ("drop", "zeros"):
        raise UsageError(f"partial is drop or zeros, not {partial!r}")
    target = target_of(dst, format)
    if target.is_folder:
        raise UsageError("salvage writes one file", hint="name it, e.g. rescued.safetensors")
    with remains_of(src, follow_links=follow_links) as remains:
        if not remains.tensors:
            raise CorruptError("nothing in it names a tensor any more", path=src)
        tensors, chosen = _choose_tensors(remains, zeros=partial == "zeros")
        report = SalvageReport(
            source=os.fspath(src),
            destination=target.path,
            report=None,
            format=remains.format,
            damage=_damage(remains),
            tensors=tensors,
            names_proven=remains.names_proven,
            names_complete=remains.names_complete,
            written=False,
            warnings=(*remains.warnings, *_new_names(target, chosen)),
        )
        kept = sum(each.written for each in tensors)
        said = f"{kept:,} of {plural(len(tensors), 'tensor')} of a broken checkpoint"
        draft = draft_of(remains, chosen, target.path, {} if report.complete else {_KEY: said})
        options = WriteOptions(target.stem)
        if losses := target.format.losses(draft, options):
            name, why = losses[0].name, losses[0].why
            raise RefusedError(f"would lose {name}, which {why}", path=target.path)
        plan = target.format.plan_write(draft, options)
        if not force:
            nbytes = sum(file.nbytes for file in plan.files.values())
            check_size(nbytes, sum(each.nbytes for each in remains.files))
        report = replace(report, shared=plan.shared)
        if not dry_run:
            report = _write(target, plan, report, draft.sources, force=force, progress=progress)
        for source in draft.sources[len(remains.files) :]:
            source.close()
    return replace(report, seconds=time.monotonic() - started)


def _choose_tensors(
    remains: Remains, *, zeros: bool
) -> tuple[tuple[SalvagedTensor, ...], list[NamedTensor]]:
    """Return the state of each tensor, and the tensors to write."""
    told, chosen, names = list[SalvagedTensor](), list[NamedTensor](), set[str]()
    wanted = {Fate.WHOLE, Fate.UNPROVEN, *((Fate.PART, Fate.DAMAGED) if zeros else ())}
    for tensor in remains.tensors:
        fate, present, why = remains.judge(tensor)
        written = fate in wanted
        if written:
            no_room = room_for(tensor, names)
            written, why = not no_room, no_room or why
        if written:
            names.add(tensor.name)
            chosen.append(tensor)
        name, dtype, dims = tensor.name, tensor.dtype, tensor.shape
        told.append(SalvagedTensor(name, fate, dtype, dims, tensor.nbytes, present, written, why))
    return tuple(told), chosen


def _new_names(target: Target, chosen: Sequence[NamedTensor]) -> Iterator[str]:
    """Return new names for tensors whose names the format can't hold."""
    if target.format.name != "safetensors":
        return
    for each in chosen:
        new = allowed_name(each.name)
        if new != each.name:
            yield f"{each.name!r} is written as {new!r}: only a .pt file can hold this name"


def _damage(remains: Remains) -> str:
    """Describe the damage of each file in turn; empty if no cause is recognized."""
    found = dict(remains.damage)
    files = [each for each in remains.files if not isinstance(each, JoinedFiles)]
    for each in files:
        name = place_of(each.path).name
        if name not in found:
            found[name] = damage_of(each) or ""
    if len(files) == 1:
        return next(iter(found.values()), "")
    return "; ".join(f"{damage} ({name})" for name, damage in found.items() if damage)


def _write(
    target: Target,
    plan: WritePlan,
    report: SalvageReport,
    sources: Sequence[Source],
    *,
    force: bool,
    progress: Progress | None,
) -> SalvageReport:
    """Write the salvaged tensors, if any, and the report beside them; return the report."""
    nbytes = sum(file.nbytes for file in plan.files.values()) if plan.tensors else 0
    path = target.path + REPORT
    report = replace(report, report=path, written=bool(plan.tensors), bytes_written=nbytes)
    text = json_text(report.to_json()).encode() + b"\n"
    pieces = Pieces()
    pieces.write(0, text)
    with destination_of(path).new_file([], force=force) as made:
        made.write(assemble(len(text), pieces), None)
        if plan.tensors:
            part = PlannedPart(plan, sources, {name: name for name in plan.files})
            target.write([part], force=force, progress=progress)
        made.commit()
    return report
