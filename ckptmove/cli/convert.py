"""The command `ckptmove convert`."""

from __future__ import annotations

from typing import Any

from ..api.convert import convert as convert_checkpoint
from .display.output import (
    OutputOptions,
    destination_argument,
    needs_source,
    source_argument,
    verb_command,
)


@verb_command(convert_checkpoint, source_argument, destination_argument)
def convert(src: str | None, dst: str | None, output: OutputOptions, **options: Any) -> None:
    """Convert a checkpoint to safetensors, or back to a file of torch.save.

    Nothing in the file is executed. In safetensors, the tensors of a model keep the names that the
    model gives them. Everything else (optimizer settings, epochs, objects, which tensors share
    memory) goes as text into the header, so that you can convert back to the same checkpoint. SRC
    is not changed. DST appears complete and verified, or not at all; without it, run.pt becomes
    run.safetensors beside it, and run.safetensors becomes run.pt.

    SRC may be a folder, or an index of several files: they are read as one checkpoint. From folder
    to folder, every checkpoint is converted by itself, also in subfolders: weights get the names
    that libraries load, optimizer.pt becomes optimizer.pt.safetensors. Options about names and
    dtypes apply to the weights; config.json gets their dtype. Other files are copied, except links
    to folders. A pickle that can't be converted is copied and named; the exit code is then 1. SRC
    and DST may be in an object store: s3://bucket/run.pt. There, the files of a folder appear one
    by one after all are verified, the index last.

    \b
    --preset lightning   --root state_dict --weights model --strip-prefix model
                         --rename 's/\\b_orig_mod\\.//g'
    --preset hf          --weights model --bare
                         --rename 's/^((module|_orig_mod)\\.)+|\\b_orig_mod\\.//g'
    --preset deploy      --weights model --bare --to cpu
                         --rename 's/^((module|_orig_mod)\\.)+|\\b_orig_mod\\.//g'

    \b
    ckptmove convert run.pt
    ckptmove convert run.safetensors again.pt
    ckptmove convert run.pt model.safetensors --preset hf --weights ema
    ckptmove convert run.pt shards/ --select model --dtype bf16 --max-shard-size 5GB
    ckptmove convert checkpoint-500/ smaller/ --dtype bf16
    ckptmove convert checkpoint-500/ for-the-hub/ --preset hf
    ckptmove convert checkpoint-500/ one.safetensors
    ckptmove convert one.safetensors checkpoint-500-again/
    ckptmove convert smaller/ again/ --format torch-zip
    """
    path = needs_source(src)
    with output.progress_bar("convert", path, shown=not options["dry_run"]) as progress:
        report = convert_checkpoint(path, dst, progress=progress, **options)
    output.show(report, path)
    if report.failure is not None:
        raise report.failure
