"""The command `ckptmove doctor`."""

from __future__ import annotations

import click

from ..api.doctor import doctor as examine
from ..errors import CheckFailed
from ..reports.doctor import diagnosis
from .options import Command, emit, emit_json, option, output_options
from .streams import stdout_kept


@click.command(cls=Command)
@option(
    "--model",
    group="What to run",
    metavar="FACTORY",
    help="Build, move and train the model that FACTORY makes.",
)
@option(
    "--input",
    group="What to run",
    multiple=True,
    metavar="SPEC",
    help="An input of the model. Repeatable, in order.",
)
@option(
    "--optimizer",
    group="What to run",
    metavar="CLASS",
    help="Train the model with this optimizer.  [default: torch.optim:AdamW]",
)
@option(
    "--script", group="What to run", metavar="FILE", help="Run this training script and watch it."
)
@option(
    "--steps",
    group="What to run",
    type=int,
    metavar="N",
    help="Watch this many steps of the script.  [default: 2]",
)
@option(
    "--timeout",
    group="What to run",
    type=float,
    default=600,
    show_default=True,
    metavar="SECONDS",
    help="Stop a script or a simulation after this time.",
)
@option(
    "--device",
    group="What to run",
    default="auto",
    show_default=True,
    metavar="DEVICE",
    help="The device to train on; auto is the best one of this machine.",
)
@option(
    "--simulate",
    group="What to run",
    is_flag=True,
    help="Simulate the device if this machine does not have it.",
)
@output_options
@click.argument("args", nargs=-1)
def doctor(
    model: str | None,
    input: tuple[str, ...],
    optimizer: str | None,
    script: str | None,
    steps: int | None,
    timeout: float,
    device: str,
    simulate: bool,
    args: tuple[str, ...],
    as_json: bool,
    quiet: bool,
    verbose: bool,
    no_progress: bool,
) -> None:
    """Find out why a model trains on the CPU or fails on the GPU, and how to fix it.

    Without options, doctor checks the machine and the build of torch. With --model, it builds the
    model, moves it to the device and trains it for one step. With --script, it runs your training
    script for some steps. It watches every operation: which device it runs on, what is copied
    between devices, and when the host waits. Each root cause comes with its fix. If a run ends
    early, the result says so.

    The exit code is 1 if something is wrong, or if the script failed. ckptmove itself writes
    nothing.

    FACTORY is package.module:name, path/to/file.py:name or a Hugging Face folder. SPEC is
    float32[8,3,224,224], int64[2,128]<1000 (values below 1000), NAME=SPEC, or the name of a
    function that returns the inputs. Arguments after -- go to the script. The output of the script
    goes to stderr.

    \b
    ckptmove doctor
    ckptmove doctor --model train.py:Net --input 'float32[8,3,32,32]' --device cuda:0 --simulate
    ckptmove doctor --script train.py --steps 2 -- --epochs 1
    """
    with stdout_kept():
        found = examine(
            model=model,
            input=input,
            optimizer=optimizer,
            script=script,
            args=args,
            steps=steps,
            device=device,
            simulate=simulate,
            timeout=timeout,
            quiet=quiet,
        )
    if as_json:
        emit_json(found.to_json())
    elif not quiet:
        emit(diagnosis(found, full=verbose))
    if quiet or as_json:
        found.raise_if_wrong()
    elif not found.ok:
        raise CheckFailed("something is wrong", path=found.subject or None)
