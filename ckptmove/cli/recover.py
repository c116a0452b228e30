"""The command `ckptmove recover`."""

from __future__ import annotations

import click

from ..api.recover import recover as recover_files
from .declare import Command
from .display.output import OutputOptions, needs_source, output_options


@click.command(cls=Command)
@click.argument("path", type=click.Path(), required=False)
@output_options
def recover(path: str | None, output: OutputOptions) -> None:
    """Undo an interrupted relocate --in-place; remove temporary files of killed commands.

    Before relocate --in-place changes a file, it saves the old bytes in a journal beside the file.
    A crash or kill -9 leaves the journal there. recover then restores the file, byte for byte, and
    removes the journal. If a journal does not belong to the file as it is now, recover refuses and
    keeps the journal.

    PATH is a file, or a folder: then recover looks at everything in it. Every other command first
    restores the file that you give it.

    A command that is killed while it writes PATH leaves a temporary file or folder beside it, whose
    name ends with .ckptmove-tmp. recover removes it. It keeps one that a process is still writing,
    or may be writing: some file systems can't tell.

    PATH may also be the destination of a batch in S3. If a process is killed while it uploads a
    large object, invisible parts of it are left, which cost money. recover removes them, and so
    does the next run of the batch. Parts that another machine was uploading less than 15 minutes
    ago are kept. The bucket's lifecycle rule AbortIncompleteMultipartUpload removes those of other
    commands.

    \b
    ckptmove recover run.pt
    ckptmove recover checkpoints/
    ckptmove recover s3://bucket/converted
    """
    report = recover_files(needs_source(path))
    output.show(report)
