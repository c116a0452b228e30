"""Implements `ckptmove.convert`: write a checkpoint in another format."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import TYPE_CHECKING, Annotated, Any, Literal

from .. import formats
from ..errors import CkptmoveError, StrPath
from ..formats.writing import FOLDER
from ..graph.edit.cast import Dtype
from ..manifest.device import Device
from ..reports.convert import ConvertReport
from ..sources import place_of
from ..writing.verify import Progress
from .conversion.edits import PRESETS, Edits, texts
from .conversion.plan import ConversionOptions, plan_conversion
from .conversion.target import PlannedPart, Target, beside, target_of
from .options import (
    BARE,
    OF_WHICH_WEIGHTS,
    OF_ZERO,
    DryRun,
    FollowLinks,
    ForceLarger,
    Format,
    MaxShardSize,
    Metadata,
    Option,
    Ranks,
    Shared,
    Strict,
    Weights,
    declare_options,
)
from .strict import refuse_unknown_around

if TYPE_CHECKING:
    from ..formats.checkpoint import Checkpoint
    from ..graph.draft import CheckpointGraph
    from ..sources.place import Place
    from .folders.one_file import PackedFolder

_WITHOUT_STRICT = "without --strict it is converted all the same"


@declare_options
@formats.pause_collection()
def convert(
    src: StrPath,
    dst: StrPath | None = None,
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
        Weights | None,
        Option(f"Write {OF_WHICH_WEIGHTS}"),
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
    ranks: Ranks = None,
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
    optimizer_ids: Annotated[
        Literal["int", "name"] | None,
        Option(
            "Call the parameters of optimizers by numbers, as `load_state_dict` needs, or by "
            "names.",
            default="as SRC does",
        ),
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
    keep_files: Annotated[
        str | Iterable[str],
        Option(
            "In a folder, copy files whose name matches GLOB as they are, such as pickles that a "
            "library resumes from.",
            "GLOB",
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
    force: ForceLarger = False,
    dry_run: DryRun = False,
    progress: Progress | None = None,
) -> ConvertReport:
    """Convert a checkpoint to another format; drop nothing unless the caller allows it.

    Nothing in the file is executed: objects are kept as inert data. torch is needed only if tensors
    are gathered or cast; the model's classes are never needed.

    Args:
        src: the checkpoint; it is not changed. It may be a file, an index of several files, or a
            model folder (also a Trainer checkpoint).
        dst: the new checkpoint. It appears complete and verified, or not at all. Without it, the
            new file is beside the source: `run.safetensors` for `run.pt`, `run.pt` for
            `run.safetensors`; folders need one. It is a folder if it ends with a slash, is an
            existing folder, or if `max_shard_size` is given. From folder to folder, every
            checkpoint in it is converted, at any depth: weights get the names that libraries load;
            other files of torch, such as the optimizer, keep their whole tree, as in
            `optimizer.pt.safetensors`. A folder that was converted to one file comes back with the
            same names, formats and contents; the bytes of files of torch may differ. Options about
            names and dtypes apply to the weights only. Options that select a part, and presets,
            leave out the rest of the training state. `config.json` gets the dtype of the weights.
            Other files are copied: links to files are followed, links to folders are skipped with a
            warning. In an object store (a URL), the files of a folder appear one by one after all
            are verified, the index last.
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
        optimizer_ids=optimizer_ids,
    )
    src, notes = formats.named_checkpoint(src)
    place = place_of(src)
    from_folder = place.is_folder()
    if dst is None:
        single = not from_folder and max_shard_size is None and ranks is None
        dst = beside(place, format, single=single)
    target = target_of(
        dst, format, max_shard_size=max_shard_size, ranks=ranks, from_folder=from_folder
    )
    how = ConversionOptions(
        options=target.write_options(shared, metadata, bare=edits.bare),
        drops=texts(drop),
        keep_files=texts(keep_files),
        strict=strict,
        otherwise=_WITHOUT_STRICT,
        trusted=trust_objects,
        follow_links=follow_links,
        force=force,
        dry_run=dry_run,
        progress=progress,
    )
    apart = target.is_folder and not target.format.is_folder
    if from_folder and apart and _holds_parts(place):
        from .folders.convert import convert_folder

        report = convert_folder(src, target, edits, how)
        return _with_notes_and_time(report, notes, started)
    again = None
    if target.is_folder and format is None and max_shard_size is None and edits.keeps_tree:
        from .folders.one_file import unpack

        again = unpack(src, target, edits, how)
    if again is not None:
        report = again
    else:
        of_zero = weights if weights in OF_ZERO else None
        report = _convert_to_file(src, target, edits, how, of_zero=of_zero)
    return _with_notes_and_time(report, notes, started)


def _with_notes_and_time(
    report: ConvertReport, notes: Sequence[str], started: float
) -> ConvertReport:
    """Return the report with these notes before its warnings, and with the time taken."""
    warnings = (*notes, *report.warnings)
    return replace(report, warnings=warnings, seconds=time.monotonic() - started)


def check_options(options: Mapping[str, Any]) -> None:
    """Raises UsageError if these options of `convert` make no sense for any file."""
    names = signature(Edits.of).parameters
    edits = Edits.of(**{name: value for name, value in options.items() if name in names})
    size = options.get("max_shard_size")
    format = options.get("format") or formats.WRITABLE[0]
    ranks = options.get("ranks")
    target = target_of("any" if size is None else "any/", format, max_shard_size=size, ranks=ranks)
    shared = options.get("shared", "keep")
    target.write_options(shared, options.get("metadata"), bare=edits.bare)


def _convert_to_file(
    src: StrPath,
    target: Target,
    edits: Edits,
    options: ConversionOptions,
    *,
    of_zero: str | None,
) -> ConvertReport:
    """Convert a checkpoint to one checkpoint, even if the source is a folder of several."""
    with formats.open_checkpoint(src, follow_links=options.follow_links, weights=of_zero) as found:
        if options.strict:
            refuse_unknown_around(
                src, found, otherwise=options.otherwise, follow_links=options.follow_links
            )
        packed = None
        if found.is_from_folder and (found.spans_folder or _leads_back(edits, target)):
            from .folders.one_file import pack

            packed = pack(found, follow_links=options.follow_links)
        is_as_it_was = target.format.name == "torch-zip" and edits.keeps_tree
        if found.class_of_parts is not None and not is_as_it_was:
            from ..formats.distributed.part_of_rank import check_has_all_parts

            check_has_all_parts([found.container], "convert the folder of all ranks")
        graph = found.draft(nested=edits.narrow)
        _tell_of_folder(graph, packed, edits, target)
        if found.is_from_folder:
            _tell_of_other_files(graph, found, edits, options)
        source = graph.path if found.folder is None else found.folder.path
        try:
            changes = edits.apply(graph)
            plan = plan_conversion(
                graph,
                target.format,
                options.options,
                options.drops,
                trusted=options.trusted,
                force=options.force,
            )
        except CkptmoveError as error:
            error.about(source)  # name the folder, not one of its files
            raise
        weights = plan.weights
        part = PlannedPart(weights, graph.sources, {name: name for name in weights.files})
        graph.release()
        if options.dry_run:
            target.check([part], (), force=options.force)
        else:
            target.write([part], force=options.force, progress=options.progress)
        files = target.sizes([part], ())
        left_out = (*(packed.left_out if packed is not None else ()), *changes.left_out)
        return ConvertReport(
            source=source,
            destination=target.path,
            source_format=graph.format,
            format=target.format.name,
            written=not options.dry_run,
            files=files,
            tensors=weights.tensors,
            dropped=plan.dropped,
            shared=weights.shared,
            duplicates=weights.duplicates,
            unknown_callables=plan.unknown_callables,
            warnings=(*graph.warnings, *weights.warnings),
            nbytes=sum(each.own_nbytes for each in graph.sources),
            bytes_written=0 if options.dry_run else sum(files.values()),
            **(changes._asdict() | {"left_out": left_out}),
        )


def _leads_back(edits: Edits, target: Target) -> bool:
    """Whether the file can record the folder that it is made from."""
    annotates = target.format.name in ("safetensors", "torch-zip")
    return annotates and edits.keeps_tree and not target.is_folder


def _tell_of_folder(
    graph: "CheckpointGraph", packed: "PackedFolder | None", edits: Edits, target: Target
) -> None:
    """Set the sections of the draft's parts, and record the folder in the metadata, if possible."""
    metadata = {key: text for key, text in graph.metadata.items() if key != FOLDER}
    if packed is not None:
        from .folders.one_file import tell_sections

        graph.losses += packed.losses
        tell_sections(graph, packed.record)
    if _leads_back(edits, target):
        if packed is not None and packed.leads_back:
            metadata[FOLDER] = packed.record.to_text()
        elif packed is None and FOLDER in graph.metadata:
            return
    graph.metadata = metadata


def _tell_of_other_files(
    graph: "CheckpointGraph", found: "Checkpoint", edits: Edits, options: ConversionOptions
) -> None:
    """Add as losses the checkpoints that were not read, and copies of the weights that differ."""
    from .folders.one_file import losses_of_others
    from .folders.weight_copies import copies_in, losses_of_copies, true_notes

    graph.losses += () if edits.narrow else losses_of_others(found)
    copies = copies_in(found)
    if copies and not options.dry_run:  # a dry run reads no tensors
        folder = graph.path if found.folder is None else found.folder.path
        graph.losses += losses_of_copies(folder, copies, follow_links=options.follow_links)
        graph.warnings[:] = true_notes(graph.warnings)


def _holds_parts(folder: "Place") -> bool:
    from .folders.files import holds_parts

    return holds_parts(folder)
