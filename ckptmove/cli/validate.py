"""The command `ckptmove validate`."""

from __future__ import annotations

from typing import Any

import click

from ..api.validate import validate as validate_checkpoint
from ..errors import CheckFailed
from ..reports.validate import validation
from .options import (
    Command,
    Function,
    emit,
    emit_json,
    follow_links_option,
    needs_source,
    option,
    output_options,
    progress_bar,
    source_argument,
    strict_option,
    warn,
    with_options,
)
from .streams import stdout_kept


def validate_options(command: Function) -> Function:
    """Add the options that say what to check: the same for a file and for a tree."""
    return with_options(
        command,
        option(
            "--against",
            group="Comparison",
            metavar="OTHER",
            help="Require that SRC equals this checkpoint; devices may differ.",
        ),
        option(
            "--subset",
            group="Comparison",
            former=["--part"],
            is_flag=True,
            help="Allow SRC to hold only a part of OTHER, under other names.",
        ),
        option(
            "--ignore-code",
            group="Comparison",
            is_flag=True,
            help="Allow the code in SRC to differ from OTHER's, or to be missing.",
        ),
        option(
            "--model",
            group="Model",
            metavar="FACTORY",
            help="Load the weights into the model that FACTORY makes.",
        ),
        option(
            "--input",
            group="Model",
            multiple=True,
            metavar="SPEC",
            help="An input of the model. Repeatable, in order.",
        ),
        option(
            "--step",
            group="Model",
            type=click.Choice(["forward", "train"]),
            help="Run one step of this kind.",
        ),
        option(
            "--optimizer",
            group="Model",
            metavar="CLASS",
            help="The class of the optimizer, if it cannot be recognized from its state.",
        ),
        option(
            "--device",
            group="Model",
            default="auto",
            show_default=True,
            metavar="DEVICE",
            help="Load and run on this device; auto is the device that the checkpoint names, or "
            "the CPU if this machine does not have it.",
        ),
        option(
            "--simulate",
            group="Model",
            is_flag=True,
            help="Simulate the device if this machine does not have it.",
        ),
        option(
            "--trust-pickle",
            group="Safety",
            is_flag=True,
            help="Allow unpickling the file, which runs any code that it holds.",
        ),
        option(
            "--timeout",
            group="Model",
            type=float,
            default=600,
            show_default=True,
            metavar="SECONDS",
            help="Stop a model made from a file, or a simulation, after this time.",
        ),
        strict_option,
        follow_links_option,
    )


@click.command(cls=Command)
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
    its temporary folder. A FACTORY in your own code runs without these limits.

    FACTORY is package.module:name, path/to/file.py:name, a Hugging Face folder, a TorchScript file
    or a .pt2 file. SPEC is float32[8,3,224,224], int64[2,128]<1000 (values below 1000), NAME=SPEC,
    or the name of a function that returns the inputs. Models of Hugging Face need no SPEC.

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
