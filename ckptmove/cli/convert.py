"""ckptmove convert"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from ..drafts.weights import WEIGHTS
from ..errors import UsageError
from ..render.convert import conversion
from ..verbs.convert import PRESETS
from ..verbs.convert import convert as convert_checkpoint
from ..words import which_loading_runs
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


def convert_options(exclude: str = "--exclude") -> Callable[[Function], Function]:
    """What says how to convert: the same for a file and for a tree.

    Args:
        exclude: the name of the option that leaves out tensors.
    """
    options = (
        click.option(
            "--format",
            metavar="FORMAT",
            help="safetensors, torch-zip or zip-bundle; else by DST's suffix.",
        ),
        click.option(
            "--preset",
            metavar="NAME",
            help=f"Options by name: {', '.join(PRESETS)}; see convert -h.",
        ),
        click.option(
            "--select",
            multiple=True,
            metavar="GLOB",
            help="Only what is so called, and below. Repeatable.",
        ),
        click.option(
            exclude, multiple=True, metavar="GLOB", help="All but what is so called. Repeatable."
        ),
        click.option("--root", metavar="NAME", help="Make what has this name all there is."),
        click.option(
            "--weights",
            type=click.Choice(WEIGHTS),
            help="The state dict of one model alone, or its averages (EMA, SWA).",
        ),
        click.option(
            "--rename",
            multiple=True,
            metavar="s/OLD/NEW/",
            help="Substitute in the keys of state dicts. Repeatable, in turn.",
        ),
        click.option(
            "--strip-prefix", metavar="PREFIX", help="Take it from the keys of state dicts."
        ),
        click.option(
            "--add-prefix", metavar="PREFIX", help="Put it before the keys of state dicts."
        ),
        click.option(
            "--dtype",
            "dtypes",
            multiple=True,
            metavar="[GLOB=]DTYPE",
            help="Cast the model's floating tensors, or those of these names. Repeatable.",
        ),
        click.option(
            "--keep-dtype", multiple=True, metavar="GLOB", help="Never cast these. Repeatable."
        ),
        click.option("--to", metavar="DEVICE", help="Tag tensors with a device, as relocate does."),
        click.option(
            "--shared",
            type=click.Choice(["keep", "duplicate", "error"]),
            help="What becomes of shared bytes: written once (the default), under each name, "
            "or refused.",
        ),
        click.option(
            "--bare", is_flag=True, default=None, help="Tensors alone, no tree to lead back."
        ),
        click.option(
            "--metadata",
            multiple=True,
            metavar="KEY=VALUE",
            help="Further text in the header. Repeatable.",
        ),
        click.option(
            "--max-shard-size", metavar="SIZE", help="A folder of files of at most, e.g., 5GB."
        ),
        click.option(
            "--drop", multiple=True, metavar="GLOB", help="Accept these losses. Repeatable."
        ),
        strict_option,
        click.option(
            "--trust-objects",
            is_flag=True,
            help="Write into a pickle what SRC could only name, such as classes of yours.",
        ),
        follow_links_option,
        click.option(
            "--force",
            is_flag=True,
            help="Replace an existing destination; allow more than eight times SRC's size.",
        ),
    )
    return lambda command: with_options(command, *options)


def convert_asked(given: Mapping[str, Any]) -> dict[str, Any]:
    """These options, as the verb takes them.

    Raises:
        UsageError: one is malformed.
    """
    asked = dict(given)
    dtypes = (text.rpartition("=") for text in asked.pop("dtypes"))
    asked["dtype"] = {glob: dtype for glob, _, dtype in dtypes}
    asked["metadata"] = dict(_metadata(text) for text in asked["metadata"])
    return asked


@click.command()
@source_argument
@click.argument("dst", type=click.Path(), required=False)
@convert_options()
@click.option("--dry-run", is_flag=True, help="Decide everything, write nothing.")
@output_options
def convert(
    src: str | None,
    dst: str | None,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    no_progress: bool,
    **given: Any,
) -> None:
    """Write a checkpoint in another form, losing nothing.

    That is safetensors, or what torch.save writes. Nothing in the file is executed. In safetensors
    the tensors of a model have the names that it
    gives them. All else (optimizer settings, epochs, objects, what shares memory) is kept as text
    in the header, so that the way back gives the same checkpoint. SRC is not changed; DST appears
    whole and verified, or not at all.

    SRC may be a folder of a model, or an index of several files: they are read as one. From a
    folder to a folder all is converted: what else is in it is copied, but for links to folders.
    Both may be in a store: s3://bucket/run.pt. There a folder appears file by file, once all was
    verified, its index last.

    GLOB speaks of dotted names, and of all that is below them; the name of a section (model, ema,
    optimizer, scheduler, rng) speaks of that too. Names whose keys hold dots are quoted where
    others would be the same.

    \b
    --preset lightning   --root state_dict --strip-prefix model
                         --rename 's/\\b_orig_mod\\.//g'
    --preset hf          --weights model --bare
                         --rename 's/^((module|_orig_mod)\\.)+|\\b_orig_mod\\.//g'
    --preset deploy      --weights model --bare --to cpu
                         --rename 's/^((module|_orig_mod)\\.)+|\\b_orig_mod\\.//g'

    \b
    ckptmove convert run.pt run.safetensors
    ckptmove convert run.safetensors again.pt
    ckptmove convert run.pt model.safetensors --preset hf --weights ema
    ckptmove convert run.pt shards/ --select model --dtype bf16 --max-shard-size 5GB
    ckptmove convert checkpoint-500/ smaller/ --dtype bf16
    """
    path = needs_source(src)
    if dst is None:
        raise UsageError("no destination is given", hint="ckptmove convert SRC DST")
    shown = not (quiet or no_progress or dry_run)
    with progress_bar("convert", path, shown=shown) as progress:
        report = convert_checkpoint(
            path,
            dst,
            dry_run=dry_run,
            progress=progress,
            **convert_asked(given),
        )
    if as_json:
        emit_json(report.to_json())
    elif not quiet:
        emit(conversion(report, full=verbose))
    if not quiet:
        warn(path, [*report.warnings, *which_loading_runs(report.unknown_callables)])


def _metadata(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UsageError(f"--metadata {text!r} is not of the form KEY=VALUE")
    return key, value
