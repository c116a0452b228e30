"""ckptmove recover"""

from __future__ import annotations

import click

from ..render.recover import recovery
from ..verbs.recover import recover as recover_files
from .options import emit, emit_json, needs_source, output_options


@click.command()
@click.argument("path", type=click.Path(), required=False)
@output_options
def recover(path: str | None, as_json: bool, quiet: bool, verbose: bool, no_progress: bool) -> None:
    """Undo a change in place that was interrupted.

    What relocate --in-place is about to change is in a journal beside the file until it is done.
    Where a journal was left, by a crash or kill -9, the file becomes again what it was, byte for
    byte. A journal that is not that of the file as it is now is refused and kept.

    PATH is a file, or a directory for all that is in it and below. Every other command does the
    same first, for the file it is given.

    \b
    ckptmove recover run.pt
    ckptmove recover checkpoints/
    """
    report = recover_files(needs_source(path))
    if as_json:
        emit_json(report.to_json())
    elif not quiet:
        emit(recovery(report))
