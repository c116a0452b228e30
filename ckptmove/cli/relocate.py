"""ckptmove relocate"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from ..errors import UsageError
from ..render.relocate import relocation
from ..verbs.relocate import relocate as relocate_checkpoint
from ..words import which_loading_runs
from .options import (
    Function,
    emit,
    emit_json,
    needs_source,
    output_options,
    progress_bar,
    source_argument,
    strict_option,
    warn,
    with_options,
)


def relocate_options(command: Function) -> Function:
    """What says how to relocate: the same for a file and for a tree."""
    return with_options(
        command,
        click.option(
            "--to", metavar="DEVICE", help="The device for everything, e.g. cuda:0 or cpu."
        ),
        click.option(
            "--map",
            "maps",
            multiple=True,
            metavar="A=B",
            help="What is on A goes to B; A may be cuda:* or *. Repeatable.",
        ),
        click.option(
            "--place",
            "places",
            multiple=True,
            metavar="GLOB=DEVICE",
            help="Tensors whose names match go to DEVICE. Repeatable; the last that matches "
            "decides.",
        ),
        click.option(
            "--device-map",
            metavar="FILE",
            help="JSON of module names and devices, as accelerate's: the longest name decides.",
        ),
        click.option("--all", is_flag=True, help="Move also what torch keeps on the CPU."),
        click.option(
            "--values", is_flag=True, help="Rewrite also values of yours that name a moved device."
        ),
        strict_option,
        click.option(
            "--in-place", is_flag=True, help="Change the tags in SRC itself; see recover."
        ),
        click.option(
            "--force",
            is_flag=True,
            help="Replace an existing destination; change in place also a symbolic link, a file "
            "with several names, or one that is open for writing elsewhere.",
        ),
    )


def relocate_asked(given: Mapping[str, Any]) -> dict[str, Any]:
    """These options, as the verb takes them.

    Raises:
        UsageError: one is malformed.
    """
    asked = dict(given)
    asked["map"] = _pairs("--map", asked.pop("maps"))
    asked["place"] = _pairs("--place", asked.pop("places"))
    return asked


@click.command()
@source_argument
@click.argument("dst", type=click.Path(), required=False)
@click.option("-o", "--output", metavar="DST", help="The same as DST.")
@relocate_options
@click.option("--dry-run", is_flag=True, help="Decide everything, write nothing.")
@output_options
def relocate(
    src: str | None,
    dst: str | None,
    output: str | None,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    no_progress: bool,
    **given: Any,
) -> None:
    """Rewrite a checkpoint for another device.

    Nothing in the file is executed, no tensor is loaded, and neither torch nor the device is
    needed. SRC is not changed; the new file appears whole and verified, or not at all. What
    torch keeps on the CPU whatever the device (RNG states, optimizer steps) stays there.

    SRC and DST may be objects in a store: s3://bucket/run.pt.

    Without DST the new file is beside SRC: run.pt becomes run.cuda-0.pt with --to cuda:0, and
    run.relocated.pt without --to.

    With --in-place there is no new file: only the tags are written, in SRC, after a journal beside
    it is on disk. If that is interrupted, the next command that meets SRC undoes it, and so does
    ckptmove recover. Tensors are not written: who has SRC mapped notices nothing, who reads its
    pickle in that moment may fail, or find old tags and new ones.

    Of several rules the first that speaks for a tensor decides: --place, --device-map, --map, --to.

    \b
    ckptmove relocate run.pt --to cuda:0
    ckptmove relocate run.pt moved.pt --map cuda:1=cuda:0
    ckptmove relocate run.pt --to cuda:0 --place 'model.head.*=cuda:1'
    ckptmove relocate run.pt --to cpu --in-place
    ckptmove relocate run.pt s3://bucket/run.pt --to cpu
    """
    path = needs_source(src)
    if dst is not None and output is not None:
        raise UsageError("the destination is given twice")
    shown = not (quiet or no_progress or dry_run or given["in_place"])
    with progress_bar("relocate", path, shown=shown) as progress:
        report = relocate_checkpoint(
            path,
            output if dst is None else dst,
            dry_run=dry_run,
            progress=progress,
            **relocate_asked(given),
        )
    if as_json:
        emit_json(report.to_json())
    elif not quiet:
        emit(relocation(report, full=verbose))
    if not quiet:
        warn(path, [*report.warnings, *which_loading_runs(report.unknown_callables)])


def _pairs(option: str, texts: tuple[str, ...]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts:
        left, equals, right = text.rpartition("=")
        if not equals or not left:
            raise UsageError(f"{option} {text!r} is not of the form A=B")
        pairs.pop(left, None)  # given again, it counts from here
        pairs[left] = right
    return pairs
