"""ckptmove validate"""

from __future__ import annotations

from typing import Any

import click

from ..errors import CheckFailed
from ..render.validate import validation
from ..verbs.validate import validate as validate_checkpoint
from .options import (
    Function,
    emit,
    emit_json,
    follow_links_option,
    needs_source,
    output_options,
    progress_bar,
    source_argument,
    strict_option,
    warn,
    with_options,
)
from .streams import stdout_kept


def validate_options(command: Function) -> Function:
    """What says what to check: the same for a file and for a tree."""
    return with_options(
        command,
        click.option(
            "--against", metavar="OTHER", help="What it must be equal to, but for devices."
        ),
        click.option(
            "--ignore-code", is_flag=True, help="Its code may differ from OTHER's, or be missing."
        ),
        click.option(
            "--part", is_flag=True, help="It may hold less than OTHER, under other names."
        ),
        click.option("--model", metavar="FACTORY", help="What makes the model; see below."),
        click.option(
            "--input",
            multiple=True,
            metavar="SPEC",
            help="What goes into the model. Repeatable, in turn.",
        ),
        click.option(
            "--step", type=click.Choice(["forward", "train"]), help="Take a step of this kind."
        ),
        click.option(
            "--optimizer", metavar="CLASS", help="Its class, if its state shouldn't tell."
        ),
        click.option(
            "--device",
            default="auto",
            metavar="DEVICE",
            help="Where; auto: where the checkpoint says.",
        ),
        click.option("--simulate", is_flag=True, help="Play the device if this machine lacks it."),
        click.option(
            "--trust-pickle",
            is_flag=True,
            help="Unpickle what the file holds, running whatever it says.",
        ),
        click.option(
            "--timeout",
            default=600.0,
            show_default="600",
            metavar="SECONDS",
            help="How long a model made of a file, or a simulation, may take.",
        ),
        strict_option,
        follow_links_option,
    )


@click.command()
@source_argument
@validate_options
@output_options
def validate(
    src: str | None,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    no_progress: bool,
    **given: Any,
) -> None:
    """Prove that a checkpoint is whole, equal to its source, loads, and trains; exit 1 if not.

    The checks, each passed, failed or skipped with its reason: every checksum of the file; equal to
    OTHER; loaded by torch itself; taken by the model, strictly; a step; and what that step did on
    which device. Nothing in the file is executed unless it is a program, TorchScript or .pt2, and
    asked for a step: one of torch's operators over tensors is run, and what holds anything else is
    refused, as pickles are, but for --trust-pickle. A model made of a file, trusted or not, runs in
    a process of its own, which is ended if it starts a process, opens a socket or writes a file
    outside of its temporary folder. FACTORY that is code of yours is run as it is.

    FACTORY is package.module:name, path/to/file.py:name, a Hugging Face folder, a TorchScript file
    or a .pt2. SPEC is float32[8,3,224,224], int64[2,128]<1000 or NAME=…, or the name of a function;
    Hugging Face's models get theirs by themselves.

    \b
    ckptmove validate moved.pt --against run.pt
    ckptmove validate run.pt --model train.py:Net --input 'float32[8,3,32,32]' --step train
    ckptmove validate run.cuda-0.pt --model hf-folder/ --step train --device cuda:0 --simulate
    """
    path = needs_source(src)
    shown = not (quiet or no_progress)
    with progress_bar("validate", path, shown=shown) as progress, stdout_kept():
        report = validate_checkpoint(path, progress=progress, **given)
    if as_json:
        emit_json(report.to_json())
    elif not quiet:
        emit(validation(report, full=verbose))
    if not quiet:
        warn(path, report.warnings)
    if quiet or as_json:
        report.raise_if_failed()
    elif not report.ok:
        raise CheckFailed("a check failed", path=path)
