"""training-folder: everything in a folder, as one checkpoint; each file in it is a part.

    checkpoint-500/
      model.safetensors, or an index with its files      model
      optimizer.pt                                       optimizer
      scheduler.pt                                       scheduler
      rng_state_0.pth, rng_state_1.pth                   rng.0, rng.1
      training_args.bin                                  training_args
      trainer_state.json, config.json, …                 other files

The tree has an entry for each part, so the tensors are called `model.lm_head.weight` or
`optimizer.state.0.exp_avg`. The key of a part follows from the name of its file: `layouts` lists
the names that libraries use, and any other file is called by its name without the suffix. If two
parts would have the same key, the second keeps the name of its file: `pytorch_model`, for example,
if `model.safetensors` is already `model`. A subfolder of torch.distributed.checkpoint or of
DeepSpeed is one part. If everything is in one subfolder that a library laid out, names are relative
to that subfolder.

Folders within it that are separate checkpoints (`checkpoint-600/`) are not part of it. Files that
are named like checkpoints but can't be read are reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from ...display.phrases import join_names
from ...errors import UnsupportedError
from ...manifest.folder_files import MISSING, FolderFile
from ...manifest.manifest import Manifest, Section, TensorEntry
from ...manifest.paths import Path, spell
from ...pickles.nodes import Dict, Mapping, Node
from ...sources import place_of
from ...sources.place import EntryKind, FolderEntry, folders_above
from ...sources.source import Memory, Source
from ...torch_pickle.sections.averages import averages_within
from ...torch_pickle.streams import Container
from ..base import Format
from ..checkpoint import Carries, Checkpoint
from ..distributed.deepspeed.rank_files import is_of_rank
from ..distributed.rank_groups import divided_folders
from ..probe import Probe
from ..safetensors.file import TensorsContainer
from ..safetensors.header import LONGEST
from .layouts import (
    Layout,
    NameMeaning,
    has_components,
    is_several,
    layout_below,
    layout_of,
    says,
    stem_of,
)
from .missing_files import MissingFile, missing_files
from .parts import PartsContainer, number_files
from .run_folders import LIKE_CHECKPOINTS, UNLIKE_CHECKPOINTS, own_folders, several_checkpoints
from .sharded import file_names, unnamed_shards
from .weight_names import INDEX, NOT_COMPARED, SHARDED, WHOLE, same_weights, shard_name, whole_of

_OF_ITS_OWN = "it is a checkpoint of its own"
_MOST_NAMED = 5
_MOST_SNIFFED = 1_000  # the most files that are recognized only by their content
_MODEL: Path = ("model",)
_OF_RANKS = "dcp-safetensors"  # the format from which weights are consolidated
_FOLDERS = (EntryKind.FOLDER, EntryKind.FOLDER_LINK)


class FolderPart(NamedTuple):
    """A checkpoint in a folder: a file, an index with its files, or a folder with its files."""

    name: str  #: of the file, the index or the folder, relative to the folder, with `/`
    keys: Path  #: its keys in the tree of the folder
    section: Section  #: the section that its name gives; with OTHER, its content decides
    checkpoint: Checkpoint
    first: int  #: the number of its first file among the files of the folder
    is_known: bool  #: whether the name alone shows that it is a checkpoint
    copy_of: str | None = None  #: name of the part that should hold the same weights

    @property
    def stores_devices(self) -> bool:
        """Whether it stores the devices of its tensors."""
        container = self.checkpoint.container
        if isinstance(container, TensorsContainer):
            return container.has_tree
        return self.checkpoint.carries.devices


class Unread(NamedTuple):
    """A file or folder that is named like a checkpoint, and why it was not read."""

    name: str
    why: str


class FolderCheckpoint(Checkpoint):
    """Everything in a folder, as one checkpoint."""

    container: PartsContainer
    spans_folder = True
    #: Folders in it that are separate checkpoints; they were not read.
    own: Sequence[str] = ()
    #: Missing files, judged by the names of the other files.
    missing: Sequence[MissingFile] = ()

    def __init__(
        self,
        format: str,
        probe: Probe,
        layout: Layout | None,
        parts: Sequence[FolderPart],
        others: Sequence[FolderEntry],
        unread: Sequence[Unread],
        carries: Carries,
    ) -> None:
        """`others`: the files that are not checkpoints.

        `unread`: checkpoints that can't be read.
        """
        self.layout_rules, self.parts = layout, parts
        self._probe = probe
        self.others, self.unread = others, unread
        files: list[Source] = []
        indexes: list[Source] = []
        for part in parts:
            files += part.checkpoint.files
            indexes += part.checkpoint.sources[len(part.checkpoint.files) :]
        super().__init__(format, _container(probe, parts), carries, files, indexes)

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest, with an entry for each file of the folder."""
        manifest = super().manifest
        return replace(manifest, files=(*self._files(manifest), *self.files_left()))

    def _files(self, manifest: Manifest) -> Iterator[FolderFile]:
        held: dict[Path, list[TensorEntry]] = {part.keys: [] for part in self.parts}
        depths = sorted({len(keys) for keys in held}, reverse=True)
        for entry in manifest.tensors:
            keys = next((entry.path[:n] for n in depths if entry.path[:n] in held), None)
            if keys is not None:
                held[keys].append(entry)
        for part in self.parts:
            entries = held[part.keys]
            tagged = entries if part.stores_devices else []
            yield FolderFile(
                part.name,
                part.checkpoint.format,
                spell(part.keys) if part.keys else "",
                tuple(dict.fromkeys(str(e.section) for e in entries)) or (str(part.section),),
                tuple(dict.fromkeys(each.device for each in tagged)),
                sum(each.part_of is None for each in entries),
                part.checkpoint.container.nbytes,
                part.copy_of,
            )
        for missing in self.missing:
            yield FolderFile(missing.name, not_read=MISSING)
        for unread in self.not_looked_at:
            yield FolderFile(unread.name, not_read=unread.why)
        for other in self.others:
            yield FolderFile(other.name, nbytes=other.nbytes)

    @property
    def not_looked_at(self) -> Sequence[Unread]:
        """Checkpoints that were not read: unreadable ones, and separate ones in subfolders."""
        return (*self.unread, *(Unread(each, _OF_ITS_OWN) for each in self.own))

    @property
    def layout(self) -> str:
        """The library that lays out folders like this one; or an empty string."""
        return "" if self.layout_rules is None else self.layout_rules.name

    @property
    def source_names(self) -> list[str]:
        """The names of the opened files, relative to the folder."""
        start = place_of(self._probe.path).child("").path
        return [source.path.removeprefix(start) for source in self.sources]

    def read_other(self, other: FolderEntry, most: int) -> bytes:
        """Read a whole file that is not a checkpoint.

        InputError if it can't be read, is a link that must not be followed, or has more than `most`
        bytes.
        """
        return self._probe.content(other.name, most)

    def damage(self, report: Callable[[int], object]) -> Iterator[str]:
        """Like `Checkpoint.damage`, with the name of the part's file before each sentence."""
        for part in self.parts:
            for found in part.checkpoint.damage(report):
                yield f"{part.name}: {found}"

    def containers_of(self, part: FolderPart) -> Iterator[tuple[int, Container]]:
        """The containers of a part's files with pickles or tensors, each with its file number."""
        container = part.checkpoint.container
        inside = dict(container.inner()) if isinstance(container, PartsContainer) else {}
        return enumerate(inside.values() if inside else [container], part.first)


class TrainingFolder(Format):
    """The format of a folder that holds more than the weights of one model."""

    name = "training-folder"
    summary = "transformers `Trainer`, accelerate `save_state`, diffusers, and other folders"
    refused = "files that can't be read; links that lead out of it"
    carries = Carries(True, True, True, True, dtypes="those of its files")
    takes_folders = True

    def sniff(self, probe: Probe) -> bool:
        """Whether it holds training state or several models directly, or models in subfolders."""
        names = probe.entries.keys()
        if not probe.is_folder or not names:
            return False
        if is_several(names):
            return True
        layout = layout_of(names)
        return layout is not None and layout.has_folders and has_components(probe.names_below())

    def read(self, probe: Probe) -> FolderCheckpoint:
        return read_folder(probe, self)


def read_folder(
    probe: Probe, format: Format, *, bare: bool = False, by_rank: bool = False
) -> FolderCheckpoint:
    """Read all checkpoints in a folder; UnsupportedError if there is none.

    `bare`: the weights are those of one model and keep their tensor names, without a prefix.
    `by_rank`: each file that a DeepSpeed rank wrote is a part.
    """
    found = _Files(probe, by_rank=by_rank)
    start, layout = layout_below([*found.parts, *(each.name for each in found.others)])
    parts: list[FolderPart] = []
    unread: list[Unread] = []
    first = 0
    owners: dict[Path, FolderPart] = {}
    said_of = {name: says(name.removeprefix(start), layout) for name in found.parts}
    for said, name in sorted((said, name) for name, said in said_of.items()):
        keys = () if bare and said.section is Section.MODEL else said.keys
        copied = owners.get(keys) if said.section is Section.MODEL else None
        if copied is not None and not same_weights(name, copied.name):
            copied = None
        if is_of_rank(name):  # the other ranks' files are useless without it
            said = said._replace(is_known=True)
        keys = next(each for each in _free(keys, name.removeprefix(start)) if each not in owners)
        checkpoint = _read(probe, name, said, unread, is_folder=name in found.folders)
        if checkpoint is None:
            continue
        if name == start + SHARDED:
            copied = _consolidated(owners.get(() if bare else _MODEL), checkpoint)
        about = copied and copied.name
        part = FolderPart(name, keys, said.section, checkpoint, first, said.is_known, about)
        number_files(checkpoint.container, first)
        first += len(checkpoint.files)
        parts.append(part)
        owners[keys] = part
    named = {part.name: file_names(part.checkpoint) for part in parts}
    stray = unnamed_shards(found.shards, lambda name: probe.content(name, LONGEST), named)
    unread[:0] = [Unread(name, "no index names it") for name in sorted(stray)]
    if found.not_sniffed:
        probe.note(
            f"{found.not_sniffed:,} files in it are not named like checkpoints and were not "
            "opened: there are too many"
        )
    for own in found.own:
        probe.note(f"{own} in it is a checkpoint of its own and was not looked at")
    if not parts and found.own:
        raise several_checkpoints(found.own, place_of(probe.path))
    if not parts:
        told = join_names([f"{each.name} ({each.why})" for each in unread], _MOST_NAMED)
        none = "holds no checkpoint that can be read" + (told and f": {told}")
        raise UnsupportedError(none, path=probe.path)
    for part in parts:
        if part.copy_of is not None:
            probe.note(f"{part.name} should hold the same as {part.copy_of}{NOT_COMPARED}")
    if unread:
        told = join_names([f"{each.name} ({each.why})" for each in unread], _MOST_NAMED)
        probe.note(f"not read: {told}")
    others = found.others
    folder = FolderCheckpoint(format.name, probe, layout, parts, others, unread, format.carries)
    folder.own = found.own
    apart = set(found.own)
    below = [n for n in probe.names_below() if apart.isdisjoint(folders_above(n))]
    missing = missing_files(n.removeprefix(start) for n in below)
    folder.missing = [each._replace(name=start + each.name) for each in missing]
    if folder.missing:
        told = join_names([f"{each.name} ({each.because})" for each in folder.missing], _MOST_NAMED)
        probe.note(f"incomplete, missing: {told}")
    return folder


def _free(keys: Path, name: str) -> Iterator[Path]:
    """The possible keys of a part, the best first."""
    yield keys
    yield (stem_of(name),)
    yield (name,)
    yield (f"{name}/",)


def _read(
    probe: Probe, name: str, said: NameMeaning, unread: list[Unread], *, is_folder: bool
) -> Checkpoint | None:
    """Read a part; None if that fails, which is added to `unread`."""
    probe.session.begin_file(name)
    found = probe.open_folder(name) if is_folder else probe.open(name)
    try:
        return probe.read_from(found)
    except UnsupportedError as error:
        if said.is_known and not is_folder:
            raise
        unread.append(Unread(name, str(error)))
        return None


def _consolidated(model: FolderPart | None, ranks: Checkpoint) -> FolderPart | None:
    """The model, if torch may have consolidated it from the files of ranks; else None."""
    if model is None or ranks.format != _OF_RANKS:
        return None
    whole, parts = model.checkpoint.container, ranks.container
    if not isinstance(whole, TensorsContainer) or not isinstance(parts, TensorsContainer):
        return None
    is_usual = whole_of(model.name).rpartition("/")[2] == WHOLE
    return model if is_usual and whole.placed.keys() == parts.placed.keys() else None


def _container(probe: Probe, parts: Sequence[FolderPart]) -> PartsContainer:
    within = {part.name: part.checkpoint.container for part in parts}
    container = PartsContainer(Memory(b"", probe.path), within)
    writers: dict[str, None] = {}
    for part in parts:
        inside = part.checkpoint.container
        for path, root in roots_as(part.section, part.checkpoint):
            full = (*part.keys, *path)
            section = inside.section_at(path)
            container.roots.append((full, root))
            named = Section.OTHER if _tells_of_averages(root) else part.section
            container.sections[full] = named if section is Section.OTHER else section
            if not part.stores_devices:
                container.untagged.add(full)
        writers[inside.writer] = None
    written = [each for each in writers if each]
    container.writer = written[0] if len(written) == 1 else ""
    return container


def _tells_of_averages(root: Node) -> bool:
    """Whether a node holds averages beside a model: the file name then gives no section."""
    pairs = root.pairs if isinstance(root, Mapping) else ()
    told = averages_within(root, Section.OTHER)
    return any(told.get(str(key)) and isinstance(value, Mapping) for key, value in pairs)


def roots_as(section: Section, found: Checkpoint) -> Sequence[tuple[Path, Node]]:
    """The roots of a part, without the key of its section, which accelerate adds.

    Source: accelerate/utils/fsdp_utils.py, `save_fsdp_model`, `save_fsdp_optimizer`.
    """
    roots = found.container.roots
    if not isinstance(found.container.source, Source) and len(roots) == 1:  # a folder's container
        _, root = roots[0]
        if isinstance(root, Dict) and [key for key, _ in root.pairs] == [str(section)]:
            return [((), root.pairs[0][1])]
    return roots


def holds_only(probe: Probe, name: str) -> bool:
    """Whether a file, or an index with its files, is the only checkpoint in a folder."""
    found = _Files(probe, by_rank=False)
    return found.parts == [name] and not found.own and not any(missing_files(probe.names_below()))


def unusual_checkpoints(probe: Probe) -> list[str]:
    """Files in a folder that are checkpoints by their content but not by their names."""
    found = _Files(probe, by_rank=False)
    unusual = (each for each in found.parts if not each.endswith(LIKE_CHECKPOINTS))
    return [each for each in unusual if each not in found.folders]


class _Files:
    """Sorts the entries of a folder into parts, shards and other files."""

    def __init__(self, probe: Probe, *, by_rank: bool) -> None:
        """`by_rank` is the option of `read_folder`."""
        entries = probe.entries_below
        names = {each.name for each in entries}
        #: Folders that are separate checkpoints.
        self.own = own_folders(names)
        apart = set(self.own)
        #: Folders that several ranks wrote together.
        self.folders = {
            name
            for name in divided_folders(names, of_ranks=not by_rank)
            if apart.isdisjoint((name, *folders_above(name)))
        }
        self.parts: list[str] = sorted(self.folders)
        self.others: list[FolderEntry] = []
        #: Files that an index should name, and the indexes.
        self.shards: list[str] = []
        apart |= self.folders
        only_content_tells = 0
        for each in entries:
            if not apart.isdisjoint(folders_above(each.name)):
                continue
            if each.name.endswith(INDEX):
                self.shards.append(each.name)
            if _is_shard(each.name, names):
                self.shards.append(each.name)
                continue
            may_be = _may_be_part(each)
            if may_be is None:
                only_content_tells += 1
                may_be = only_content_tells <= _MOST_SNIFFED and probe.is_checkpoint(each.name)
            if may_be:
                self.parts.append(each.name)
            else:
                self.others.append(each)
        #: How many files were not opened because there are too many.
        self.not_sniffed = max(0, only_content_tells - _MOST_SNIFFED)


def _may_be_part(entry: FolderEntry) -> bool | None:
    """Whether an entry is named like a checkpoint, even as a broken link.

    None: its content decides.
    """
    if entry.kind in _FOLDERS:
        return False
    if entry.name.endswith(LIKE_CHECKPOINTS):
        return True
    unlike = entry.name.lower().endswith(UNLIKE_CHECKPOINTS)
    return None if entry.kind is EntryKind.FILE and entry.nbytes and not unlike else False


def _is_shard(name: str, names: set[str]) -> bool:
    """Whether there is an index that should name the file."""
    shard = shard_name(name)
    return shard is not None and not names.isdisjoint(shard.indexes)
