"""The command `ckptmove salvage`."""

from __future__ import annotations

from typing import Any

from ..api.salvage import salvage as salvage_checkpoint
from ..errors import CheckFailed, UsageError
from .display.output import (
    OutputOptions,
    destination_argument,
    needs_source,
    source_argument,
    verb_command,
)


@verb_command(salvage_checkpoint, source_argument, destination_argument)
def salvage(src: str | None, dst: str | None, output: OutputOptions, **options: Any) -> None:
    """Save what can still be read of a broken checkpoint; exit 1 if that is not all, or unproven.

    SRC is a file that was cut short, partly overwritten or damaged, or an index or folder of
    which a file is missing or damaged, such as one of torch.distributed.checkpoint. salvage
    writes its tensors by name to DST, and a report to DST.salvage.json: each tensor is whole,
    unproven, in part, damaged or lost.

    A tensor is whole only if a checksum of the file proves it, as files of torch.save have since
    torch 1.6. safetensors, older files and pickles have no checksums: their tensors are unproven at
    best. Nothing in the file is executed, and SRC is not changed. Values that are not tensors
    are not written.

    \b
    ckptmove salvage run.pt rescued.safetensors
    ckptmove salvage run.pt rescued.pt --partial zeros
    ckptmove salvage model-folder/ rescued.safetensors --json
    """
    path = needs_source(src)
    if dst is None:
        raise UsageError("the destination is missing", hint="ckptmove salvage SRC DST")
    with output.progress_bar("salvage", path, shown=not options["dry_run"]) as progress:
        report = salvage_checkpoint(path, dst, progress=progress, **options)
    output.show(report, path)
    if not report.complete:
        raise CheckFailed(report.shortfall, path=path)
