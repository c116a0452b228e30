"""Sort the files of a folder into checkpoints, pickles that stay, and files to copy."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import NamedTuple

from ... import formats
from ...errors import CorruptError, InputError, RefusedError, UnsupportedError
from ...formats.distributed.deepspeed.folder import DeepSpeed
from ...formats.distributed.fsdp_ranks import FsdpRanks
from ...formats.distributed.rank_groups import (
    CONFIGURED,
    divided_folders,
    files_beside,
    files_of_ranks,
    is_of_ranks,
)
from ...formats.folders.layouts import layout_of, name_as_file, says
from ...formats.folders.model_folder import ModelFolder
from ...formats.folders.training_folder import TrainingFolder
from ...formats.folders.weight_names import INDEX, weights_among
from ...formats.pickle import PlainPickle
from ...manifest.manifest import Section, TensorEntry
from ...plans.plan import Copy, Plan, Write
from ...reports.convert import Loss
from ...sources import place_of
from ...sources.place import EntryKind, FolderEntry, Place, folders_above
from ...sources.source import Source
from ...writing.destination import StagedFolder, StagedPart
from ...writing.in_place import recover_if_interrupted
from ...writing.in_place.undo import journaled_files
from ...writing.verify import Progress

_MOST = 100_000  # files, and folders
#: A file with one of these suffixes is a checkpoint, or it is damaged.
_SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt")
_CONVERTED = frozenset(("torch-zip", "torch-legacy", "torch-tar", "safetensors", "sharded"))
_PROGRAM = "is a program, which stays a pickle"
#: Formats that may run code when they are loaded, and why they are not converted.
_PICKLES = {
    PlainPickle.name: "is a plain pickle, which its own library has to read",
    "zip-bundle": "is a zip of several files, some of which are pickles",
    "torchscript": _PROGRAM,
    "torchscript-v1": _PROGRAM,
    "torch-export": _PROGRAM,
    "torch-package": _PROGRAM,
}


#: The configuration file beside the weights of a model.
CONFIGURATION = "config.json"
_LONGEST_CONFIGURATION = 1 << 24  # bytes; larger files are left as they are
#: The dtype of a model or a nested model: transformers 5 writes `dtype`, older ones `torch_dtype`.
_SAID = re.compile(r'("(?:torch_)?dtype"\s*:\s*")(?:torch\.)?b?float\d+(?:_\w+)?"')


class Companion(NamedTuple):
    """A file that is copied, or an empty folder."""

    name: str  #: relative to the folder, with `/` as separator; the name of a folder ends with `/`
    path: str  #: empty if it is new
    nbytes: int
    within: str | None = None  #: a link may not lead out of this folder
    content: bytes | None = None  #: written instead of the bytes of the file

    @property
    def is_folder(self) -> bool:
        """Whether it is an empty folder."""
        return self.name.endswith("/")

    def copy_into(self, folder: StagedFolder, progress: Progress | None) -> None:
        """Write a copy and verify it; raises CorruptError if the size of the source has changed."""
        if self.is_folder:
            folder.make(self.name.rstrip("/"))
            return
        if not self.path:
            with folder.file(self.name, []) as file:
                self._write_content(file, progress)
            return
        place = place_of(self.path)
        with place.open() as source, folder.file(self.name, [source]) as file:
            if self.within is not None:
                place.check_link(place_of(self.within), source)
            if self.content is not None:
                self._write_content(file, progress)
                return
            if source.nbytes != self.nbytes:
                raise CorruptError("the file was changed while it was read", path=self.path)
            copies = (Copy(0, self.nbytes, 0),) if self.nbytes else ()
            file.write(Plan("clone", self.nbytes, copies, ()), progress)

    def _write_content(self, file: StagedPart, progress: Progress | None) -> None:
        writes = (Write(0, self.content),) if self.content else ()
        file.write(Plan("relay", self.nbytes, (), writes), progress)


class CheckpointFile(NamedTuple):
    """A checkpoint in a folder: a file, an index with its files, or a folder that ranks wrote."""

    name: str  #: relative to the folder
    files: Collection[str]  #: the names of all its files
    is_weights: bool  #: whether libraries look for weights under this name
    section: Section | None = None  #: the section that the name of a folder says
    within: bool = False  #: whether its output is written into a folder of the same name

    @property
    def name_in_folder(self) -> str:
        """The file name; for a folder, the name of the file that it becomes."""
        if self.within or not self.name:
            return "model"
        own = self.name[len(self.folder) :]
        return own if self.section is None else name_as_file(own)

    @property
    def folder(self) -> str:
        """The subfolder that it is in, with a slash at its end; empty at the top."""
        if self.within and self.name:
            return f"{self.name}/"
        return self.name[: self.name.rfind("/") + 1]

    @property
    def stem(self) -> str:
        """The file name without its suffix."""
        name = self.name_in_folder.removesuffix(INDEX)
        return name.rpartition(".")[0] or name


class FolderFiles(NamedTuple):
    """The sorted contents of a folder."""

    checkpoints: list[CheckpointFile]
    companions: list[Companion]
    pickles: list[Loss]  #: companions that are pickles, and why they are not converted
    #: weights that are used, each with other files that should hold the same tensors
    copies: list[tuple[str, list[str]]]


def files_of(
    folder: str,
    warnings: list[str],
    *,
    keep: Collection[str] = (),
    follow_links: bool = False,
) -> FolderFiles:
    """Return everything in a folder, at any depth; adds to the warnings.

    Files that match a glob of `keep` are companions. Links to files are followed, links to folders
    are not. Raises as `all_files`, and InputError for a damaged checkpoint.
    """
    files, place = all_files(folder, warnings, follow_links=follow_links), place_of(folder)
    kept = {each for each in files if any(fnmatchcase(each, glob) for glob in keep)}
    divided = divided_folders(files) - {name.rpartition("/")[0] for name in kept}
    sorting = _Sorting(place, {name: files[name] for name in files if name not in kept})
    if is_of_ranks({name.partition("/")[0] for name in sorting.files}):
        divided.add("")
    sorting.take_divided(divided)
    sorting.take_weights()
    sorting.take_others()
    rest = [files[name] for name in files if name not in sorting.taken]
    return FolderFiles(sorted(sorting.checkpoints), rest, sorting.pickles, sorting.copies)


def all_files(
    folder: str, warnings: list[str], *, follow_links: bool = False
) -> dict[str, Companion]:
    """Return all files and all empty folders in a folder, at any depth, by their names.

    Links to files are followed, links to folders are not, which adds to the warnings. Interrupted
    changes in place are undone first. Raises UnsupportedError for an entry that is not a file, or a
    link that leads out of the folder.
    """
    place, files = place_of(folder), dict[str, Companion]()
    for path in filter(os.path.lexists, journaled_files(folder)):
        notes = recover_if_interrupted(path)
        warnings += (f"{os.path.relpath(path, folder)}: {note}" for note in notes)
    for each in sorted(place.files_below()):
        if each.kind is EntryKind.FOLDER_LINK:
            warnings.append(f"{each.name} is a link to a folder and was not followed")
            continue
        if each.kind is EntryKind.FILE:
            if not follow_links:
                place_of(each.path).check_link(place)
        elif each.kind is not EntryKind.FOLDER:
            raise _not_copied(each)
        within = None if follow_links else folder
        files[each.name] = Companion(each.name, each.path, each.nbytes, within)
        if len(files) > _MOST:
            raise RefusedError(f"there are more than {_MOST:,} files in it", path=folder)
    return files


class _Sorting:
    """Finds the checkpoints among files."""

    def __init__(self, place: Place, files: Mapping[str, Companion]) -> None:
        self.place = place
        self.files = files
        self.checkpoints = list[CheckpointFile]()
        self.pickles = list[Loss]()
        self.copies = list[tuple[str, list[str]]]()
        self.taken = set[str]()  # names of files that are not copied

    def take_divided(self, folders: Collection[str]) -> None:
        """Take the folders that ranks wrote together, with the files in them."""
        layout = layout_of({name.partition("/")[0] for name in self.files})
        for folder in sorted(folders):
            files = [name for name in self.files if not folder or folder in folders_above(name)]
            start = f"{folder}/" if folder else ""
            own = {name.removeprefix(start) for name in files if "/" not in name[len(start) :]}
            if is_of_ranks(own):  # other files are not parts of it
                files = [start + name for name in (*files_of_ranks(own), *files_beside(own))]
            section = says(folder, layout).section
            self.taken.update(files)
            is_weights = section is Section.MODEL
            self.checkpoints.append(CheckpointFile(folder, tuple(files), is_weights, section))

    def take_weights(self) -> None:
        """Take files with the usual names of weights."""
        below: dict[str, list[str]] = {}
        for name in (each for each in self.files if each not in self.taken):
            folder, slash, own = name.rpartition("/")
            if own:
                below.setdefault(folder + slash, []).append(own)
        for folder, names in below.items():
            for found in weights_among(names):
                whole = self._take(folder + found.name, is_weights=True)
                others = [folder + each for each in found.others]
                copies = [each for each in others if each not in whole.files]
                if copies:
                    self.copies.append((whole.name, copies))
                    self.taken.update(copies)

    def take_others(self) -> None:
        """Take the other checkpoints, found by content; list pickles that are not converted."""
        names = [name for name in self.files if not name.endswith("/")]
        for name in sorted(names, key=lambda name: not name.endswith(INDEX)):
            if name in self.taken or (name.endswith(".json") and not name.endswith(INDEX)):
                continue
            found = self._format_of(name)
            if found in _CONVERTED:
                self._take(name, is_weights=False)
            elif found in _PICKLES:
                self.pickles.append(Loss(name, _PICKLES[found]))

    def _take(self, name: str, *, is_weights: bool) -> CheckpointFile:
        files = [name]
        if name.endswith(".json"):
            with self._open_source(name) as source:
                found = formats.sniff_format(source)
            beside = name[: name.rfind("/") + 1]
            files += [beside + each for each in (found.files if found is not None else ())]
        self.taken.update(files)
        self.checkpoints.append(CheckpointFile(name, tuple(files), is_weights))
        return self.checkpoints[-1]

    def _format_of(self, name: str) -> str | None:
        """Return the name of a file's format; None if it is not a checkpoint."""
        with self._open_source(name) as source:
            try:
                found = formats.looks_like(source)
                if found is None and name.endswith(_SUFFIXES):
                    formats.read(source)  # raises an error that says what is wrong
                if found is None or found.name == PlainPickle.name or not found.vague:
                    return None if found is None else found.name
                return found.name if formats.sniff_format(source) is not None else None
            except InputError as error:
                error.about(source.path)
                keep = f"--keep-files '{name}' copies it as it is"
                error.hint = f"{error.hint}, or {keep}" if error.hint else keep
                raise

    @contextmanager
    def _open_source(self, name: str) -> Iterator[Source]:
        file = self.files[name]
        place = place_of(file.path)
        with place.open() as source:
            if file.within is not None:
                place.check_link(self.place, source)
            yield source


def _not_copied(entry: FolderEntry) -> InputError:
    try:
        place_of(entry.path).size_and_stamp()
    except InputError as error:  # such as a link that leads nowhere
        return error
    return UnsupportedError("is no file, and can't be copied", path=entry.path)


def holds_parts(folder: Place) -> bool:
    """Whether each checkpoint in a folder is complete by itself, not a part of a common one."""
    found = formats.folder_format(folder.path, folder.entries())
    if isinstance(found, DeepSpeed):  # without ZeRO, each file is complete
        return not divided_folders(f"in/{each.name}" for each in folder.files_below())
    if isinstance(found, FsdpRanks):  # verl writes a folder with the files of the model
        return folder.child(CONFIGURED).is_folder()
    return found is None or isinstance(found, (ModelFolder, TrainingFolder))


def check_apart(source: str, destination: str) -> None:
    """Raises RefusedError if one of two folders is, or lies in, the other."""
    ours, theirs = (place_of(each).folder_identity() for each in (source, destination))
    if ours == theirs:
        raise RefusedError("the destination is the source itself", path=destination)
    if theirs.startswith(ours):
        raise RefusedError("the destination is inside the source", path=destination)
    if ours.startswith(theirs):
        raise RefusedError("the source is inside the destination", path=destination)


def main_dtype(tensors: Iterable[TensorEntry]) -> str | None:
    """Return the dtype of most bytes of floating-point tensors; None without such tensors."""
    counted = Counter[str]()
    for each in tensors:
        if "float" in each.dtype:
            counted[each.dtype] += each.nbytes
    return counted.most_common(1)[0][0] if counted else None


def with_dtype(configuration: Companion, dtype: str) -> Companion:
    """Return the configuration with this dtype; unchanged if it has no dtype or can't be read."""
    if configuration.nbytes > _LONGEST_CONFIGURATION:
        return configuration
    before = configuration.content
    if before is None:
        with place_of(configuration.path).open() as source:
            before = source.read(0, source.nbytes)
    try:
        text = before.decode("utf-8")
        json.loads(text)
    except (ValueError, RecursionError):
        return configuration
    after = _SAID.sub(lambda found: f'{found[1]}{dtype}"', text).encode()
    if after == before:
        return configuration
    return configuration._replace(content=after, nbytes=len(after))
