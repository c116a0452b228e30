"""The command `ckptmove relocate`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from ..api.relocate import relocate as relocate_checkpoint
from ..errors import UsageError
from ..phrases import which_loading_runs
from ..reports.relocate import relocation
from .options import (
    Command,
    Function,
    dry_run_option,
    emit,
    emit_json,
    needs_source,
    option,
    output_options,
    progress_bar,
    source_argument,
    strict_option,
    warn,
    with_options,
)


def relocate_options(command: Function) -> Function:
    """Add the options that say how to relocate: the same for a file and for a tree."""
    devices, destination = "Devices", "Destination"
    return with_options(
        command,
        option(
            "--to",
            group=devices,
            metavar="DEVICE",
            help="Put every tensor on this device, for example cuda:0 or cpu.",
        ),
        option(
            "--map",
            "maps",
            group=devices,
            multiple=True,
            metavar="A=B",
            help="Move tensors from device A to device B. A may be cuda:* or *. Repeatable.",
        ),
        option(
            "--place",
            "places",
            group=devices,
            multiple=True,
            metavar="GLOB=DEVICE",
            help="Put tensors whose name matches GLOB on DEVICE. Repeatable; the last match wins.",
        ),
        option(
            "--device-map",
            group=devices,
            metavar="FILE",
            help="A JSON file with a device for each module name, as accelerate writes it; the "
            "longest matching name wins.",
        ),
        option(
            "--all",
            group=devices,
            is_flag=True,
            help="Also move tensors that torch keeps on the CPU.",
        ),
        option(
            "--values",
            group=devices,
            is_flag=True,
            help="Also rewrite your own values that name a moved device.",
        ),
        option(
            "--in-place",
            group=destination,
            is_flag=True,
            help="Change the device tags in SRC itself; write no new file.",
        ),
        option(
            "--force",
            group=destination,
            is_flag=True,
            help="Replace an existing destination. With --in-place: also change a symbolic link, "
            "a file with several hard links, or a file that another process has open for writing.",
        ),
        strict_option,
    )


def relocate_asked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the values of these options into arguments of the verb.

    Raises:
        UsageError: a value is malformed.
    """
    asked = dict(given)
    asked["map"] = _pairs("--map", asked.pop("maps"))
    asked["place"] = _pairs("--place", asked.pop("places"))
    return asked


@click.command(cls=Command)
@source_argument
@click.argument("dst", type=click.Path(), required=False)
@option("-o", "--output", group="Destination", metavar="DST", help="The same as DST.")
@relocate_options
@dry_run_option
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

    Nothing in the file is executed, and no tensor is loaded. Neither torch nor the device is
    needed. SRC is not changed. The new file appears complete and verified, or not at all. RNG
    states and optimizer steps stay on the CPU, because torch keeps them there for every device.

    SRC and DST may be in an object store: s3://bucket/run.pt.

    Without DST, the new file is written beside SRC: run.pt becomes run.cuda-0.pt with --to cuda:0,
    and run.relocated.pt without --to.

    With --in-place there is no new file: ckptmove changes only the device tags, inside SRC. First
    it saves the old bytes in a journal beside SRC. If it is interrupted, the next ckptmove command
    on SRC undoes the change; so does ckptmove recover. The bytes of tensors stay as they are, so
    processes that have SRC mapped are not affected. A process that reads the pickle during the
    change may fail, or see old and new tags.

    If several rules match a tensor, the first of these wins: --place, --device-map, --map, --to.

    \b
    ckptmove relocate run.pt --to cuda:0
    ckptmove relocate run.pt moved.pt --map cuda:1=cuda:0
    ckptmove relocate run.pt --to cuda:0 --place 'model.head.*=cuda:1'
    ckptmove relocate run.pt --to cpu --in-place
    ckptmove relocate run.pt s3://bucket/run.pt --to cpu
    """
    path = needs_source(src)
    if dst is not None and output is not None:
        raise UsageError("the destination is given twice, as DST and by -o")
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
            raise UsageError(f"{option} {text!r} does not have the form A=B")
        pairs.pop(left, None)  # given again, it counts from here
        pairs[left] = right
    return pairs
