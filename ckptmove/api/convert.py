"""Implements `ckptmove.convert`: write a checkpoint in another format."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from inspect import signature
from pathlib import PurePath
from typing import Annotated, Any, Literal, NamedTuple

from .. import formats
from ..errors import RefusedError, StrPath
from ..formats.checkpoint import Folder
from ..formats.writing import WriteOptions, WritePlan
from ..graph.draft import CheckpointGraph
from ..graph.edit.cast import Dtype
from ..graph.patterns import covers
from ..pickles.terms import TooLong
from ..placement.rules import Device
from ..reports.convert import ConvertReport, Loss
from ..sources import place_of
from ..writing.verify import Progress
from .edits import PRESETS, Changes, Edits, texts
from .folder_files import Companion, check_apart, companions_of
from .options import (
    BARE,
    DryRun,
    FollowLinks,
    Format,
    MaxShardSize,
    Metadata,
    Option,
    Shared,
    Strict,
    declare_options,
)
from .strict import refuse_unknown, refuse_unknown_in
from .target import Target, target_of
from .trust import TrustedPlan, plan_trusted

_MOST_LISTED = 6  # losses
_WITHOUT_STRICT = "without --strict it is converted all the same"
_MOST_TIMES = 8  # as long as the source, unless somebody insists
_MOST_AT_LEAST = 1 << 20  # bytes that even the smallest may become


@declare_options
@formats.uncollected()
def convert(
    src: StrPath,
    dst: StrPath,
    *,
    select: Annotated[
        str | Iterable[str],
        Option(
            "Write only entries whose name matches GLOB, and everything below them.",
            "GLOB",
            "What to write",
            value="GLOB matches dotted names as `inspect` lists them, and everything below a "
            "match. If no name matches, it may be the name of a section: `model`, `ema`, "
            "`optimizer`, `scheduler`, `rng`. A key that contains a dot is quoted where its name "
            "would otherwise be ambiguous.",
        ),
    ] = (),
    exclude_tensors: Annotated[
        str | Iterable[str],
        Option(
            "Exclude entries whose name matches GLOB, and everything below them.",
            "GLOB",
            former="exclude",
        ),
    ] = (),
    root: Annotated[
        str | None,
        Option("Write only the entry with this name, as the top of the new checkpoint.", "NAME"),
    ] = None,
    weights: Annotated[
        Literal["model", "ema"] | None,
        Option(
            "Write only the state dict of one model, or its averaged weights (EMA, SWA) under the "
            "names that the model uses."
        ),
    ] = None,
    preset: Annotated[
        str | None,
        Option(
            f"Use a set of options: {', '.join(PRESETS)}. Your own options are added to it; "
            "--weights replaces its --root.",
            "NAME",
        ),
    ] = None,
    format: Format = None,
    shared: Shared = "keep",
    bare: Annotated[bool | None, BARE] = None,
    metadata: Metadata = None,
    max_shard_size: MaxShardSize = None,
    rename: Annotated[
        str | Iterable[str],
        Option(
            "Substitute in keys, in the given order. OLD is a regular expression.",
            "s/OLD/NEW/",
            "Keys of state dicts",
        ),
    ] = (),
    strip_prefix: Annotated[
        str | None,
        Option("Remove this prefix from keys; a dot at its end may be left out.", "PREFIX"),
    ] = None,
    add_prefix: Annotated[
        str | None, Option("Add this prefix to keys; a dot at its end may be left out.", "PREFIX")
    ] = None,
    dtype: Annotated[
        Mapping[str, Dtype] | Dtype | None,
        Option(
            "Cast the model's floating-point tensors, or those whose name matches GLOB.",
            "[GLOB=]DTYPE",
            "Dtype and device",
        ),
    ] = None,
    keep_dtype: Annotated[
        str | Iterable[str], Option("Do not cast tensors whose name matches GLOB.", "GLOB")
    ] = (),
    to: Annotated[
        Device | None, Option("Tag the tensors with this device, as relocate does.", "DEVICE")
    ] = None,
    drop: Annotated[
        str | Iterable[str],
        Option(
            "Drop entries whose name matches GLOB if the target cannot store them, or if they call "
            "something that must not be written (see --trust-objects).",
            "GLOB",
            "Safety",
        ),
    ] = (),
    strict: Strict = False,
    trust_objects: Annotated[
        bool,
        Option(
            "Allow the new pickle to name callables not known to be harmless, such as your own "
            "classes, when SRC is a format that runs nothing."
        ),
    ] = False,
    follow_links: FollowLinks = False,
    force: Annotated[
        bool,
        Option(
            "Replace an existing destination; allow a result more than eight times the size of "
            "SRC.",
            group="Destination",
        ),
    ] = False,
    dry_run: DryRun = False,
    progress: Progress | None = None,
) -> ConvertReport:
    """Convert a checkpoint to another format; drop nothing unless the caller allows it.

    Nothing in the file is executed: objects are kept as inert data. torch is needed only if tensors
    are gathered or cast; the model's classes are never needed.

    Args:
        src: the checkpoint; it is not changed. It may be a file, an index of several files, or a
            model folder (also a Trainer checkpoint), of which the weights are converted.
        dst: the new checkpoint. It appears complete and verified, or not at all. It is a folder if
            it ends with a slash, is an existing folder, or if `max_shard_size` is given. From
            folder to folder, the other files are copied too: links to files are followed, links to
            folders are skipped with a warning. In an object store (a URL), the files of a folder
            appear one by one after all are verified, the index last.
        progress: a function that is called with the number of bytes copied and verified since the
            last call.

    Returns:
        What was written, dropped, cast and renamed.

    Raises:
        UsageError: the options make no sense.
        InputError: the source cannot be read, or is refused (`UntrustedError`: it, or a file that
            is copied from a folder, names unknown callables, and `strict` is set).
        RefusedError: something would be lost or overwritten, the options contradict each other, or
            a pickle would name callables that the source could not run and that are not known to be
            harmless.
        WriteError: writing or verifying failed.
    """
    started = time.monotonic()
    edits = Edits.of(
        preset=preset,
        select=select,
        exclude_tensors=exclude_tensors,
        root=root,
        weights=weights,
        rename=rename,
        strip_prefix=strip_prefix,
        add_prefix=add_prefix,
        dtype=dtype,
        keep_dtype=keep_dtype,
        to=to,
        bare=bare,
    )
    from_folder = place_of(src).is_folder()
    target = target_of(dst, format, max_shard_size=max_shard_size, from_folder=from_folder)
    options = target.write_options(shared, metadata, bare=edits.bare)
    with formats.opened(src, follow_links=follow_links, only_weights=True) as found:
        if strict:
            refuse_unknown(found.manifest, otherwise=_WITHOUT_STRICT)
        graph = found.draft(nested=edits.narrow)
        changes = edits.apply(graph)
        conversion = _Conversion(graph, found.folder if target.is_folder else None, target, force)
        plan = conversion.plan(options, texts(drop), trusted=trust_objects)
        companions = conversion.companions(plan.weights, strict=strict, follow_links=follow_links)
        graph.release()
        if dry_run:
            target.check(plan.weights, graph.sources, companions, force=force)
        else:
            target.write(plan.weights, graph.sources, companions, force=force, progress=progress)
        return conversion.report(changes, plan, companions, written=not dry_run, started=started)


def check_options(options: Mapping[str, Any]) -> None:
    """Raises UsageError if options of `convert`, by name, make no sense whatever the file."""
    names = signature(Edits.of).parameters
    edits = Edits.of(**{name: value for name, value in options.items() if name in names})
    size = options.get("max_shard_size")
    format = options.get("format") or formats.WRITABLE[0].name
    target = target_of("any" if size is None else "any/", format, max_shard_size=size)
    shared = options.get("shared", "keep")
    target.write_options(shared, options.get("metadata"), bare=edits.bare)


class _Conversion(NamedTuple):
    """What is converted, and where to."""

    graph: CheckpointGraph
    folder: Folder | None  #: that is converted as a whole, to another folder
    target: Target
    force: bool

    def plan(self, options: WriteOptions, drops: Sequence[str], *, trusted: bool) -> TrustedPlan:
        """Plan the weights, and list what is dropped.

        Raises:
            RefusedError: something would be lost that is not in `drops`, or written that must not
                be; or the result is far larger than its source, and there is no `force`.
        """
        graph, target, force = self.graph, self.target, self.force
        if self.folder is not None:
            options = options._replace(stem=target.stem_of(self.folder.stem))
        graph.losses += target.format.losses(graph, options)
        _check_losses(graph.losses, drops)
        source = sum(each.nbytes for each in graph.sources)
        most = max(_MOST_TIMES * source, _MOST_AT_LEAST)
        if not force:
            options = options._replace(most_nbytes=most)
        try:
            plan = plan_trusted(graph, target.format, options, drops, trusted=trusted)
            nbytes = sum(file.nbytes for file in plan.weights.files.values())
            if force or nbytes <= most:
                return plan._replace(dropped=(*graph.losses, *plan.dropped))
            size = f"{nbytes:,}"
        except TooLong:
            size = f"more than {most:,}"
        raise RefusedError(
            f"would write {size} bytes from {source:,}: more than {_MOST_TIMES} times as many",
            hint="--force writes them all the same",
        )

    def companions(
        self, weights: WritePlan, *, strict: bool, follow_links: bool
    ) -> Sequence[Companion]:
        """What else is copied from a folder.

        Raises:
            RefusedError: it can't be where the folder goes.
            UntrustedError: it names unknown callables, and `strict` is set.
        """
        if self.folder is None:
            return ()
        path, warnings = self.folder.path, self.graph.warnings
        check_apart(path, self.target.path)
        read = {PurePath(source.path).name for source in self.graph.sources}
        left_out = {*read, *self.folder.copies}
        found = companions_of(path, left_out, warnings, follow_links=follow_links)
        for each in found:
            if each.name.partition("/")[0] in weights.files:
                raise RefusedError(f"it has another {each.name!r} besides its weights", path=path)
            if strict and not each.is_folder:
                refuse_unknown_in(each.path, otherwise=_WITHOUT_STRICT)
        return found

    def report(
        self,
        changes: Changes,
        plan: TrustedPlan,
        companions: Sequence[Companion],
        *,
        written: bool,
        started: float,
    ) -> ConvertReport:
        """What was done, or would be."""
        graph, weights = self.graph, plan.weights
        files = self.target.sizes(weights, companions)
        nbytes = sum(each.nbytes for each in graph.sources)
        return ConvertReport(
            source=graph.path if self.folder is None else self.folder.path,
            destination=self.target.path,
            source_format=graph.format,
            format=self.target.format.name,
            written=written,
            files=files,
            tensors=weights.tensors,
            dropped=plan.dropped,
            shared=weights.shared,
            duplicates=weights.duplicates,
            unknown_callables=plan.unknown_callables,
            warnings=tuple(graph.warnings),
            nbytes=nbytes + sum(each.nbytes for each in companions if not each.is_folder),
            bytes_written=sum(files.values()) if written else 0,
            seconds=time.monotonic() - started,
            **changes._asdict(),
        )


def _check_losses(losses: Sequence[Loss], drops: Sequence[str]) -> None:
    """Raises RefusedError if something would be lost that no pattern allows."""
    refused = [loss for loss in losses if not any(covers(each, loss.name) for each in drops)]
    if refused:
        lines = [f"{loss.name}, which {loss.why}" for loss in refused[:_MOST_LISTED]]
        more = [f"{len(refused) - len(lines):,} more"] if len(refused) > len(lines) else []
        accept = " ".join(f"--drop '{loss.name}'" for loss in refused[:_MOST_LISTED])
        raise RefusedError(
            f"would lose {'; '.join([*lines, *more])}",
            hint=f"{accept} {'accepts' if len(refused) == 1 else 'accept'} that",
        )
