"""ckptmove doctor"""

from __future__ import annotations

import click

from ..errors import CheckFailed
from ..render.doctor import diagnosis
from ..verbs.doctor import doctor as examine
from .options import emit, emit_json, output_options
from .streams import stdout_kept


@click.command()
@click.option("--model", metavar="FACTORY", help="What makes the model; see below.")
@click.option(
    "--input", multiple=True, metavar="SPEC", help="What goes into the model. Repeatable, in turn."
)
@click.option("--optimizer", metavar="CLASS", help="What trains the model; AdamW.")
@click.option("--script", metavar="FILE", help="Run this training script, and watch it.")
@click.option("--steps", type=int, metavar="N", help="Steps the script is watched for; 2.")
@click.option(
    "--timeout",
    default=600.0,
    show_default="600",
    metavar="SECONDS",
    help="How long a script, or a simulation, may take.",
)
@click.option(
    "--device", default="auto", metavar="DEVICE", help="Where; auto: the best the machine has."
)
@click.option("--simulate", is_flag=True, help="Play the device if this machine lacks it.")
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
    """Say why a model trains on the CPU, or fails on the GPU, and what to do; exit 1 if it does.

    Looks at the machine and the build of torch; then a model is built, moved and stepped, or your
    training script is run for some steps, while every operation is watched: what is where, what is
    copied, what the host waits for. Each root cause comes with its fix. A run that ends before all
    was watched says so, and is wrong if the script failed. ckptmove writes nothing.

    FACTORY is package.module:name, path/to/file.py:name or a Hugging Face folder. SPEC is
    float32[8,3,224,224], int64[2,128]<1000 or NAME=…, or the name of a function. What follows --
    goes to the script; what it prints goes to stderr.

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
