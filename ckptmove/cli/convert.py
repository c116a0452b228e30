"""The command `ckptmove convert`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from ..api.convert import PRESETS
from ..api.convert import convert as convert_checkpoint
from ..errors import UsageError
from ..graph.edit.model_weights import WEIGHTS
from ..phrases import which_loading_runs
from ..reports.convert import conversion
from .options import (
    Command,
    Function,
    dry_run_option,
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


def convert_options(former_excludes: Sequence[str] = ()) -> Callable[[Function], Function]:
    """Add the options that say how to convert: the same for a file and for a tree.

    Args:
        former_excludes: former names of `--exclude-tensors` that the command still accepts.
    """
    what, how, names, types = "What to write", "Format", "Keys of state dicts", "Dtype and device"
    options = (
        option(
            "--select",
            group=what,
            multiple=True,
            metavar="GLOB",
            help="Write only entries whose name matches GLOB, and everything below them. "
            "Repeatable.",
        ),
        option(
            "--exclude-tensors",
            group=what,
            former=former_excludes,
            multiple=True,
            metavar="GLOB",
            help="Exclude entries whose name matches GLOB, and everything below them. Repeatable.",
        ),
        option(
            "--root",
            group=what,
            metavar="NAME",
            help="Write only the entry with this name, as the top of the new checkpoint.",
        ),
        option(
            "--weights",
            group=what,
            type=click.Choice(WEIGHTS),
            help="Write only the state dict of one model, or its averaged weights (EMA, SWA).",
        ),
        option(
            "--preset",
            group=what,
            metavar="NAME",
            help=f"Use a set of options: {', '.join(PRESETS)}.",
        ),
        option(
            "--format",
            group=how,
            metavar="FORMAT",
            help="safetensors, torch-zip or zip-bundle.  [default: by the suffix of DST]",
        ),
        option(
            "--shared",
            group=how,
            type=click.Choice(["keep", "duplicate", "error"]),
            help="What to do with bytes that tensors share: write them once and note the other "
            "names, write them under each name, or refuse.  [default: keep]",
        ),
        option(
            "--bare",
            group=how,
            is_flag=True,
            default=None,
            help="Write tensors only; the result cannot be converted back.",
        ),
        option(
            "--metadata",
            group=how,
            multiple=True,
            metavar="KEY=VALUE",
            help="Add text to the header of safetensors. Repeatable.",
        ),
        option(
            "--max-shard-size",
            group=how,
            metavar="SIZE",
            help="Write a folder of files of at most SIZE, for example 5GB.",
        ),
        option(
            "--rename",
            group=names,
            multiple=True,
            metavar="s/OLD/NEW/",
            help="Substitute in keys. OLD is a regular expression. Repeatable, applied in order.",
        ),
        option(
            "--strip-prefix", group=names, metavar="PREFIX", help="Remove this prefix from keys."
        ),
        option("--add-prefix", group=names, metavar="PREFIX", help="Add this prefix to keys."),
        option(
            "--dtype",
            "dtypes",
            group=types,
            multiple=True,
            metavar="[GLOB=]DTYPE",
            help="Cast the model's floating-point tensors, or those whose name matches GLOB. "
            "Repeatable.",
        ),
        option(
            "--keep-dtype",
            group=types,
            multiple=True,
            metavar="GLOB",
            help="Do not cast tensors whose name matches GLOB. Repeatable.",
        ),
        option(
            "--to",
            group=types,
            metavar="DEVICE",
            help="Tag the tensors with a device, as relocate does.",
        ),
        option(
            "--drop",
            group="Safety",
            multiple=True,
            metavar="GLOB",
            help="Drop entries whose name matches GLOB if the target cannot store them. "
            "Repeatable.",
        ),
        strict_option,
        option(
            "--trust-objects",
            group="Safety",
            is_flag=True,
            help="Allow the new pickle to name callables not known to be harmless, such as "
            "your own classes, when SRC is a format that runs nothing.",
        ),
        follow_links_option,
        option(
            "--force",
            group="Destination",
            is_flag=True,
            help="Replace an existing destination; allow a result more than eight times the size "
            "of SRC.",
        ),
    )
    return lambda command: with_options(command, *options)


def convert_asked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the values of these options into arguments of the verb.

    Raises:
        UsageError: a value is malformed.
    """
    asked = dict(given)
    dtypes = (text.rpartition("=") for text in asked.pop("dtypes"))
    asked["dtype"] = {glob: dtype for glob, _, dtype in dtypes}
    asked["metadata"] = dict(_metadata(text) for text in asked["metadata"])
    return asked


@click.command(cls=Command)
@source_argument
@click.argument("dst", type=click.Path(), required=False)
@convert_options(former_excludes=["--exclude"])
@dry_run_option
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
    """Convert a checkpoint to safetensors, or back to a file of torch.save.

    Nothing in the file is executed. In safetensors, the tensors of a model keep the names that the
    model gives them. Everything else (optimizer settings, epochs, objects, which tensors share
    memory) goes as text into the header, so that you can convert back to the same checkpoint. SRC
    is not changed. DST appears complete and verified, or not at all.

    SRC may be a model folder, or an index of several files: they are read as one checkpoint. From
    folder to folder, the other files are copied too, except links to folders. SRC and DST may be in
    an object store: s3://bucket/run.pt. There, the files of a folder appear one by one after all
    are verified, the index last.

    GLOB matches dotted names as inspect --tensors lists them, and everything below a match. If no
    name matches, it may be the name of a section: model, ema, optimizer, scheduler, rng. A key that
    contains a dot is quoted where its name would otherwise be ambiguous.

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
        raise UsageError("the destination is missing", hint="ckptmove convert SRC DST")
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
        raise UsageError(f"--metadata {text!r} does not have the form KEY=VALUE")
    return key, value
