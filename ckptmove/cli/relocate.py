"""The command `ckptmove relocate`."""

from __future__ import annotations

from typing import Any

from ..api.relocate import relocate as relocate_checkpoint
from ..errors import UsageError
from .declare import option
from .display.output import (
    OutputOptions,
    destination_argument,
    needs_source,
    source_argument,
    verb_command,
)


@verb_command(relocate_checkpoint, source_argument, destination_argument)
@option("-o", "--output", "other_dst", group="Destination", metavar="DST", help="The same as DST.")
def relocate(
    src: str | None, dst: str | None, other_dst: str | None, output: OutputOptions, **options: Any
) -> None:
    """Rewrite a checkpoint for another device.

    Nothing in the file is executed, and no tensor is loaded. Neither torch nor the device is
    needed. SRC is not changed. The new file appears complete and verified, or not at all. RNG
    states and optimizer steps stay on the CPU, because torch keeps them there for every device.

    SRC and DST may be in an object store: s3://bucket/run.pt. Within one S3 store, the store itself
    copies the unchanged parts; for these, only the store's ETags are checked, and no checksum of
    the bytes is computed.

    Without DST, the new file is written beside SRC: run.pt becomes run.cuda-0.pt with --to cuda:0,
    and run.relocated.pt without --to.

    With --in-place there is no new file: ckptmove changes only the device tags, inside SRC. First
    it saves the old bytes in a journal beside SRC. If it is interrupted, the next ckptmove command
    on SRC undoes the change; so does ckptmove recover. The bytes of tensors stay as they are, so
    processes that have SRC mapped are not affected. A process that reads the pickle during the
    change may fail, or see old and new tags.

    If several rules match a tensor, the first of these wins: --place, --device-map, --map, --to.

    \b
    ckptmove relocate run.pt --to cuda:0
    ckptmove relocate run.pt moved.pt --map cuda:1=cuda:0
    ckptmove relocate run.pt --to cuda:0 --place 'model.head.*=cuda:1'
    ckptmove relocate run.pt --to cpu --in-place
    ckptmove relocate run.pt s3://bucket/run.pt --to cpu
    """
    path = needs_source(src)
    if dst is not None and other_dst is not None:
        raise UsageError("the destination is given twice, as DST and by -o")
    dst = other_dst if dst is None else dst
    shown = not (options["dry_run"] or options["in_place"])
    with output.progress_bar("relocate", path, shown=shown) as progress:
        report = relocate_checkpoint(path, dst, progress=progress, **options)
    output.show(report, path)
