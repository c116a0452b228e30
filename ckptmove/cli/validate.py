"""The command `ckptmove validate`."""

from __future__ import annotations

from typing import Any

from ..api.validate import validate as validate_checkpoint
from ..errors import CheckFailed
from .display.output import OutputOptions, html_option, needs_source, source_argument, verb_command
from .display.streams import stdout_kept


@verb_command(validate_checkpoint, source_argument, html_option)
def validate(src: str | None, output: OutputOptions, **options: Any) -> None:
    """Check that a checkpoint is intact, equals its source, loads and trains; exit 1 if not.

    There are six checks. Each one passes, fails, or is skipped for a stated reason.

    \b
    container  every checksum of the file is right
    against    the checkpoint equals OTHER
    reload     torch itself loads it
    model      the model takes every tensor, by name and shape
    step       one step of inference or training works
    trace      in that step, no operation ran on another device

    Nothing in the file is executed, with one exception: a step of a program (TorchScript or .pt2)
    runs the program. It runs only if it holds nothing but operators of torch over tensors;
    otherwise it is refused unless you give --trust-pickle. A model made from a file runs in its own
    process. That process is stopped if it starts another process, opens a socket, or writes outside
    its temporary folder. A FACTORY in your own code runs without these limits. Models of
    Hugging Face need no SPEC.

    \b
    ckptmove validate moved.pt --against run.pt
    ckptmove validate run.pt --model train.py:Net --input 'float32[8,3,32,32]' --step train
    ckptmove validate run.cuda-0.pt --model hf-folder/ --step train --device cuda:0 --simulate
    """
    path = needs_source(src)
    with output.progress_bar("validate", path) as progress, stdout_kept():
        report = validate_checkpoint(path, progress=progress, **options)
    output.show(report, path)
    if output.quiet or output.as_json:
        report.raise_if_failed()
    elif not report.ok:
        raise CheckFailed("a check failed", path=path)
