"""The command `ckptmove doctor`."""

from __future__ import annotations

from typing import Any

import click

from ..api.doctor import doctor as examine
from ..errors import CheckFailed
from .display.output import OutputOptions, html_option, verb_command
from .display.streams import stdout_kept


@verb_command(examine, click.argument("args", nargs=-1), html_option)
def doctor(output: OutputOptions, **options: Any) -> None:
    """Find out why a model trains on the CPU or fails on the GPU, and how to fix it.

    Without options, doctor checks the machine and the build of torch. With --model, it builds the
    model, moves it to the device and trains it for one step. With --script, it runs your training
    script for some steps. It watches every operation: which device it runs on, what is copied
    between devices, and when the host waits. Each root cause comes with its fix. If a run ends
    early, the result says so.

    The exit code is 1 if something is wrong, if the script failed, or if it called no model.
    ckptmove itself writes nothing.

    Arguments after -- go to the script. The output of the script goes to stderr.

    \b
    ckptmove doctor
    ckptmove doctor --model train.py:Net --input 'float32[8,3,32,32]' --device cuda:0 --simulate
    ckptmove doctor --script train.py --steps 2 -- --epochs 1
    """
    with stdout_kept():
        found = examine(quiet=output.quiet, **options)
    output.show(found)
    if output.quiet or output.as_json:
        found.raise_if_wrong()
    elif not found.ok:
        wrong = "no model was called" if found.called_no_model else "something is wrong"
        raise CheckFailed(wrong, path=found.subject or None)
