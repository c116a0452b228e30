"""Pack a whole folder into one file, and make the folder from that file again."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from ... import formats
from ...errors import CkptmoveError, CorruptError
from ...formats.checkpoint import Checkpoint, Folder
from ...formats.folders.folder_record import (
    FolderRecord,
    RecordedPart,
    is_name,
    mixed_parts,
    read_record,
)
from ...formats.folders.layouts import layout_below, says
from ...formats.folders.model_folder import checkpoints_beside
from ...formats.folders.run_folders import LIKE_CHECKPOINTS
from ...formats.folders.training_folder import (
    FolderCheckpoint,
    TrainingFolder,
)
from ...formats.folders.weight_names import INDEX
from ...formats.writing import FOLDER, WriteOptions
from ...graph.draft import CheckpointGraph
from ...manifest.manifest import Section
from ...manifest.paths import Path
from ...pickles.nodes import Mapping as MappingNode
from ...pickles.nodes import Node
from ...reports.convert import ConvertReport, Loss
from ...sources import place_of
from ...sources.place import EntryKind, FolderEntry, Place, folders_above
from ..conversion.edits import Edits, is_state_dict
from ..conversion.plan import ConversionOptions, check_size, plan_conversion
from ..conversion.target import PlannedPart, Target
from ..conversion.trust import TrustedPlan
from .files import CONFIGURATION, Companion, main_dtype, with_dtype
from .weight_copies import used_name

_MOST_NBYTES = 16 << 20  # bytes of all other files together, such as those of a tokenizer
_LIKE_TORCH = frozenset(("torch-zip", "torch-legacy", "torch-tar", "torch-sharded"))
_WEIGHTS = frozenset((Section.MODEL, Section.EMA))


class PackedFolder(NamedTuple):
    """A folder that will become one file, without duplicates."""

    record: FolderRecord
    losses: Sequence[Loss]
    left_out: Sequence[str]  #: names of other files
    leads_back: bool = True  #: whether the folder can be made again


def pack(found: Checkpoint, *, follow_links: bool) -> PackedFolder | None:
    """Return what to keep of the checkpoint's folder; None if there is nothing to keep."""
    if isinstance(found, FolderCheckpoint):
        return _pack_parts(found, follow_links=follow_links)
    if found.folder is not None:
        return _pack_model(found, found.folder, follow_links=follow_links)
    return None


def _pack_model(found: Checkpoint, folder: Folder, *, follow_links: bool) -> PackedFolder | None:
    """Keep the name of the weights of one model, and the other files of its folder."""
    place, format = place_of(folder.path), _form_of(found.format)
    start = f"{folder.path.rstrip('/')}/"
    own = {each.path.removeprefix(start) for each in found.sources}
    name = used_name(found, folder.path).removesuffix(INDEX)
    if format is None or not is_name(name):
        return None
    left_out = list(folder.copies)
    others = [
        each
        for each in sorted(place.files_below())
        if each.name not in own and {*left_out}.isdisjoint(folders_above(each.name))
    ]
    apart = {*left_out, *(loss.name for loss in losses_of_others(found))}
    kept = [each for each in others if each.name not in apart]
    left_out += [each.name for each in kept if each.name.endswith(LIKE_CHECKPOINTS)]
    kept = [each for each in kept if each.name not in left_out]
    files = _contents(kept, place, left_out, follow_links=follow_links)
    if not files and not left_out:
        return None  # a folder of weights alone needs no record
    return PackedFolder(FolderRecord([RecordedPart(name, (), format)], files), (), left_out)


def losses_of_others(found: Checkpoint) -> list[Loss]:
    """Return the checkpoints of a folder that were not read, each as a loss."""
    why = "is another checkpoint than what was read of the folder"
    return [Loss(name, why) for name in checkpoints_beside(found)]


def _form_of(format: str) -> str | None:
    """Return the format in which a file can be made again; None if it can't."""
    if format.startswith("safetensors"):
        return "safetensors"
    return "torch-zip" if format in _LIKE_TORCH else None


def _pack_parts(found: FolderCheckpoint, *, follow_links: bool) -> PackedFolder:
    """Leave out copies of weights, and parts that can't be made again as files of a folder."""
    named = {part.checkpoint.format for part in found.parts}
    leads_back = not any(row.format.in_parts for row in formats.FORMATS if row.name in named)
    losses = [Loss(each.name, f"can't be read: {each.why}") for each in found.unread]
    left_out, parts, gone = list[str](), list[RecordedPart](), list[Path]()
    taken = {each.name for each in found.parts}
    for part in found.parts:
        format, name = _form_of(part.checkpoint.format), _name_of_whole(part.name, found.layout)
        if not is_name(part.name):
            losses.append(Loss(part.name, "has a name that can't be kept"))
        elif part.copy_of is not None:
            left_out.append(part.name)
        elif not leads_back:  # only the state is kept
            parts.append(RecordedPart(name, part.keys, format or ""))
            continue
        elif format is None:
            what = f"is a {part.checkpoint.format} file"
            losses.append(Loss(part.name, f"{what}, which can't be made again"))
        elif name != part.name and name in taken:
            losses.append(Loss(part.name, f"would come back as {name}, which is there too"))
        else:
            parts.append(RecordedPart(name, part.keys, format))
            continue
        gone.append(part.keys)
    for name, other in mixed_parts(parts) if leads_back else ():
        losses.append(Loss(name, f"has the keys of {other}, so it can't be made again"))
        gone += [each.keys for each in parts if each.name == name]
        parts = [each for each in parts if each.name != name]
    owned = {part.keys for part in found.parts}

    def owner(path: Path) -> Path | None:
        """Return the keys of the innermost part that a root belongs to."""
        return next((path[:n] for n in range(len(path), -1, -1) if path[:n] in owned), None)

    roots = found.container.roots
    found.container.roots = [(path, root) for path, root in roots if owner(path) not in gone]
    kept = {part.name for part in found.parts if part.keys not in gone}
    within = found.container.parts
    found.container.parts = {name: each for name, each in within.items() if name in kept}
    place = place_of(found.container.source.path)
    if not leads_back:
        left_out += [each.name for each in found.others if each.kind is not EntryKind.FOLDER]
        return PackedFolder(FolderRecord(parts, {}), losses, left_out, leads_back=False)
    files = _contents(found.others, place, left_out, follow_links=follow_links)
    return PackedFolder(FolderRecord(parts, files), losses, left_out)


def _name_of_whole(name: str, layout: str) -> str:
    """Return the file name for a part when the folder is made again; shards become one file.

    torchtune loads the weights of an epoch by the names of shards only, never by an index.
    """
    whole = name.removesuffix(INDEX)
    if whole == name or layout != "torchtune":
        return whole
    folder, _, file = whole.rpartition("/")
    return f"{folder}/model-00001-of-00001.{file.rpartition('.')[2]}".removeprefix("/")


def _contents(
    entries: Iterable[FolderEntry], place: Place, left_out: list[str], *, follow_links: bool
) -> dict[str, bytes]:
    """Return the bytes of the files that can be kept, by name; add the others to `left_out`."""
    files, room = dict[str, bytes](), _MOST_NBYTES
    for each in entries:
        if each.kind is EntryKind.FOLDER:
            continue
        if each.kind is not EntryKind.FILE or each.nbytes > room or not is_name(each.name):
            left_out.append(each.name)
            continue
        room -= each.nbytes
        file = place_of(each.path)
        with file.open() as source:
            if not follow_links:
                file.check_link(place, source)
            files[each.name] = source.read(0, source.nbytes)
    return files


def tell_sections(draft: CheckpointGraph, record: FolderRecord) -> None:
    """Set the section of tensors to `other` if the name of their file says they are not weights."""
    start, layout = layout_below([part.name for part in record.parts])
    said = {part.keys: says(part.name.removeprefix(start), layout) for part in record.parts}
    other = [keys for keys, each in said.items() if each.is_known and each.section not in _WEIGHTS]
    for entry in draft.list_contents().tensors:
        if entry.section in _WEIGHTS and any(entry.path[: len(keys)] == keys for keys in other):
            draft.graph.sections[entry.name] = Section.OTHER


def unpack(
    src: str,
    target: Target,
    edits: Edits,
    options: ConversionOptions,
) -> ConvertReport | None:
    """Make the folder of a file again; None if the file has no record of one. Raises as `convert`.

    The report does not have the time taken.
    """
    with formats.open_checkpoint(src, follow_links=options.follow_links) as found:
        text = found.container.metadata.get(FOLDER)
        if text is None:
            return None
        record = read_record(text)
        draft = found.draft()
        tell_sections(draft, record)
        before = _dtype_of(draft) if edits.casts else None
        changes = edits.apply(draft)
        after = _dtype_of(draft) if edits.casts else None
        planned = [_plan(draft, part, options) for part in record.parts]
        if not options.force:
            written = sum(sum(part.sizes.values()) for part, _ in planned)
            check_size(written, draft.source_nbytes)
        companions = [
            Companion(name, "", len(content), None, content)
            for name, content in record.files.items()
        ]
        if after is not None and after != before:
            companions = [
                with_dtype(each, after) if each.name.rpartition("/")[2] == CONFIGURATION else each
                for each in companions
            ]
        parts = [part for part, _ in planned]
        losses, nbytes = draft.losses, sum(each.nbytes for each in draft.sources)
        warnings = tuple(draft.warnings)
        source_format = found.format
        draft.release()
        if options.dry_run:
            target.check(parts, companions, force=options.force)
        else:
            target.write(parts, companions, force=options.force, progress=options.progress)
        files = target.sizes(parts, companions)
        unknown = [name for _, plan in planned for name in plan.unknown_callables]
        return ConvertReport(
            source=src,
            destination=target.path,
            source_format=source_format,
            format=TrainingFolder.name if len(parts) > 1 else record.parts[0].format,
            written=not options.dry_run,
            files=files,
            tensors=sum(part.writing.tensors for part in parts),
            dropped=(*losses, *(loss for _, plan in planned for loss in plan.dropped)),
            parts={part.name: (part.name,) for part in record.parts},
            unknown_callables=tuple(dict.fromkeys(unknown)),
            warnings=warnings,
            nbytes=nbytes,
            bytes_written=0 if options.dry_run else sum(files.values()),
            **changes._asdict(),
        )


def _dtype_of(draft: CheckpointGraph) -> str | None:
    """Return the dtype of most of the weights."""
    return main_dtype(each for each in draft.list_contents().tensors if each.section in _WEIGHTS)


def _plan(
    whole: CheckpointGraph, part: RecordedPart, options: ConversionOptions
) -> tuple[PlannedPart, TrustedPlan]:
    """Plan how to write one part."""
    graph = copy.copy(whole.graph)
    graph.root, graph.sections = _at(whole.graph.root, part), {}
    own = {} if part.keys else {k: text for k, text in whole.metadata.items() if k != FOLDER}
    draft = replace(whole, graph=graph, metadata=own, losses=[], warnings=[], origin=None)
    name = part.name.rpartition("/")[2]
    stem = name.rpartition(".")[0] or name
    bare = part.format == "safetensors" and is_state_dict(draft)
    format = formats.writable(part.format)
    try:
        plan = plan_conversion(
            draft,
            format,
            WriteOptions(stem, options.options.shared, bare),
            options.drops,
            trusted=options.trusted,
            force=options.force,
        )
    except CkptmoveError as error:
        error.about(f"{whole.path}: {part.name}")
        raise
    return PlannedPart(plan.weights, draft.sources, {"": part.name}), plan


def _at(root: Node, part: RecordedPart) -> Node:
    """Return the node that the keys of a part lead to."""
    node = root
    for key in part.keys:
        pairs = node.pairs if isinstance(node, MappingNode) else ()
        found = [value for each, value in pairs if each == key and type(each) is not bool]
        if len(found) != 1:
            raise CorruptError(f"it lacks {part.name!r}, which its folder had")
        node = found[0]
    return node
