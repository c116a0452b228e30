"""The command `ckptmove diff`."""

from __future__ import annotations

from typing import Any

import click

from ..api.diff import diff as diff_checkpoints
from ..errors import UsageError
from .display.output import OutputOptions, html_option, needs_source, verb_command


@verb_command(
    diff_checkpoints,
    click.argument("a", type=click.Path(), required=False),
    click.argument("b", type=click.Path(), required=False),
    html_option,
)
def diff(a: str | None, b: str | None, output: OutputOptions, **options: Any) -> None:
    """Show what differs between two checkpoints of any formats; exit 1 if they differ.

    Nothing in the files is executed. Numbers are compared bit by bit. Tensors are compared by their
    elements, everything else by its content. A tensor with the same bytes under another name counts
    as renamed. Code and other files inside a checkpoint count too. If only one of the two formats
    can hold something, the result lists it as not compared, and the exit code is 1.

    \b
    ckptmove diff before.pt after.pt
    ckptmove diff run.pt run.safetensors
    ckptmove diff run.pt on-cpu.pt --ignore-devices
    ckptmove diff run.pt half.safetensors --select model --cast
    """
    first = needs_source(a)
    if b is None:
        raise UsageError("the second checkpoint is missing", hint="ckptmove diff A B")
    with output.progress_bar("diff", first) as progress:
        found = diff_checkpoints(first, b, progress=progress, **options)
    output.show(found)
    found.raise_if_different()
