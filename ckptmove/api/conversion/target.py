"""Find out where a checkpoint will be written, and in which format."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from math import isfinite
from typing import TYPE_CHECKING, NamedTuple

from ... import formats
from ...errors import InputError, RefusedError, StrPath, UsageError, WriteError
from ...formats.base import WritableFormat
from ...formats.writing import Check, WriteOptions, WritePlan, check_metadata, check_shared
from ...sources import place_of
from ...sources.place import Place
from ...sources.source import Source
from ...writing import destination_of
from ...writing.verify import Progress

if TYPE_CHECKING:
    from ...writing.destination import StagedFolder
    from ..folders.files import Companion

_UNITS = {"": 1, **{unit: 1000**n for n, unit in enumerate(("K", "M", "G", "T"), 1)}}
_UNITS |= {f"{unit}I": 1024**n for n, unit in enumerate(("K", "M", "G", "T"), 1)}
_MOST_RANKS = 1000  # each rank has an open file
_SIZE = r"(?i)(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?"


class PlannedPart(NamedTuple):
    """The plan of one output checkpoint: the only one, or one of several in a folder."""

    writing: WritePlan
    sources: Sequence[Source]  #: the sources that it copies from
    names: Mapping[str, str]  #: file name in the plan → file name in the destination

    @property
    def sizes(self) -> dict[str, int]:
        """The size of every file, by its name in the destination."""
        return {self.names[name]: plan.nbytes for name, plan in self.writing.files.items()}


class Target(NamedTuple):
    """The file or folder to write."""

    path: str
    stem: str  #: the names of its files start with this
    format: WritableFormat
    is_folder: bool
    max_shard_nbytes: int | None  #: the largest size of a file in the folder
    ranks: int = 1  #: the number of ranks, for a format that ranks write

    def stem_of(self, stem: str) -> str:
        """Return the stem in this folder for files whose stem was `stem` in the source."""
        from ...formats.folders.weight_names import stem_for, usual_name

        if self.format.name not in ("safetensors", "torch-zip"):
            return self.stem if usual_name(f"{stem}.bin") else stem
        return stem_for(stem, is_safe=self.format.name == "safetensors")

    def sizes(
        self, parts: Sequence[PlannedPart], companions: Sequence[Companion]
    ) -> dict[str, int]:
        """The size of every file that is written, by its path."""
        files: dict[str, int] = {}
        for part in parts:
            files |= part.sizes
        files |= {each.name: each.nbytes for each in companions if not each.is_folder}
        place = place_of(self.path)
        return {place.child(name).path if name else self.path: n for name, n in files.items()}

    def write_options(
        self, shared: str, metadata: Mapping[str, str] | None, *, bare: bool
    ) -> WriteOptions:
        """Return the write options; raises UsageError for options that the format lacks."""
        about = check_metadata(metadata)
        if about and not self.format.annotates:
            raise UsageError(f"{self.format.name} has no room for text: it takes no --metadata")
        shared = check_shared(shared or "keep")
        return WriteOptions(
            self.stem,
            shared,
            bare,
            about,
            self.max_shard_nbytes,
            self.is_folder,
            ranks=self.ranks,
        )

    def check(
        self,
        parts: Sequence[PlannedPart],
        companions: Sequence[Companion],
        *,
        force: bool,
    ) -> None:
        """Raises RefusedError where writing would be refused."""
        destination = destination_of(self.path)
        sources = [source for part in parts for source in part.sources]
        if self.is_folder:
            destination.check_folder(sources, force=force)
            self._check_replaced(parts, companions)
        else:
            destination.check_file(sources, force=force)
        besides = sum(each.nbytes for each in companions)
        besides += sum(nbytes for part in parts[1:] for nbytes in part.sizes.values())
        plans = [plan for part in parts[:1] for plan in part.writing.files.values()]
        destination.check_room(plans, parts[0].sources if parts else (), besides)

    def write(
        self,
        parts: Sequence[PlannedPart],
        companions: Sequence[Companion] = (),
        *,
        force: bool,
        progress: Progress | None,
        like: str | None = None,
    ) -> None:
        """Write checkpoints and their companions, verify them, and give them their names."""
        destination = destination_of(self.path)
        if not self.is_folder:
            ((writing, sources, _),) = parts
            with destination.new_file(sources, force=force) as made:
                made.write(writing.files[""], progress)
                with made.open_written() as written:
                    _check(writing.check, {"": written})
                made.commit()
            return
        sources = [source for part in parts for source in part.sources]
        with destination.new_folder(sources, force=force, like=like) as folder:
            self._check_replaced(parts, companions)
            for part in parts:
                _write_part(part, folder, progress)
            for each in companions:
                each.copy_into(folder, progress)
            folder.commit()

    def _check_replaced(
        self, parts: Sequence[PlannedPart], companions: Sequence[Companion]
    ) -> None:
        """Raises RefusedError if the folder to replace has other files than weights to lose."""
        from ...formats.distributed.rank_groups import is_of_dcp
        from ...formats.folders.weight_names import is_weights, usual_name

        again = {each.name for each in companions}
        again.update(name for part in parts for name in part.sizes)
        for name in destination_of(self.path).names_below():
            ours = usual_name(name.rpartition("/")[2]) if "/" in name else is_weights(name)
            ours = ours or (self.format.of_ranks and is_of_dcp(name))
            if name not in again and not ours:
                raise RefusedError(
                    f"{name!r} in it would be gone",
                    path=self.path,
                    hint="remove it first, or name another folder",
                )


def _write_part(part: PlannedPart, folder: StagedFolder, progress: Progress | None) -> None:
    """Write the files of one checkpoint into a folder, and read them back."""
    with ExitStack() as stack:
        files: dict[str, Source] = {}
        for name, plan in part.writing.files.items():
            with folder.file(part.names[name], part.sources) as file:
                file.write(plan, progress)
                check = part.writing.checks.get(name)
                if check is None:
                    files[name] = stack.enter_context(file.open_written())
                    continue
                with file.open_written() as written:
                    _check(check, {"": written})
        _check(part.writing.check, files)
    part.writing.prove()


def _check(check: Check, written: Mapping[str, Source]) -> None:
    try:
        check(written)
    except InputError as error:
        raise WriteError(f"what was written can't be read: {error}", path=error.path) from error


def beside(source: Place, format: str | None, *, single: bool) -> str:
    """The default destination of a file: `run.pt` → `run.safetensors`, and back.

    Raises UsageError unless a `single` file is to become another.
    """
    stem, suffix = os.path.splitext(source.name)
    usual, other = (formats.writable(each).suffixes[0] for each in formats.WRITABLE[:2])
    if format is not None:
        found = formats.writable(format) if format in formats.WRITABLE else None
        usual = found.suffixes[0] if found is not None and found.suffixes else ""
    elif suffix.lower() == usual:
        usual = other
    if not single or not usual or suffix == ".json":
        raise UsageError("the destination is missing", hint="ckptmove convert SRC DST")
    return source.parent.child(stem + usual).path


def target_of(
    dst: StrPath,
    format: str | None,
    *,
    max_shard_size: int | str | None = None,
    ranks: int | None = None,
    from_folder: bool = False,
) -> Target:
    """Decide where and how to write; raises UsageError if the format or the size does not allow it.

    `dst` is a folder if it ends with a slash, is an existing folder, or may have several files. A
    folder is also converted to a folder, unless the suffix of `dst` is that of a file.
    """
    limit = None if max_shard_size is None else nbytes_of(max_shard_size)
    sharded = limit is not None
    path = os.fspath(dst)
    stem, written = os.path.splitext(place_of(path).name)
    suffix = written.lower()
    by_suffix = (each for each in formats.WRITABLE if suffix in formats.writable(each).suffixes)
    named = next(by_suffix, None)
    known = named is not None
    is_folder = path.endswith("/") or destination_of(path).is_folder()
    if sharded and known and not is_folder:
        raise UsageError(
            f"{path!r} is called like a file, and --max-shard-size makes a folder",
            hint=f"name one, e.g. {path.removesuffix(written)}/",
        )
    is_folder = is_folder or sharded or (from_folder and not known)
    if format is None:
        if named is None and not is_folder:
            says = f"the suffix {suffix!r} names" if suffix else f"{path!r} has no suffix and names"
            folder = "" if suffix else f"{path}/ is a folder; or "
            raise UsageError(
                f"{says} no format to write",
                hint=f"{folder}--format {' or --format '.join(formats.WRITABLE)}",
            )
        format = named or formats.WRITABLE[0]
    elif format not in formats.WRITABLE:
        raise UsageError(
            f"{format!r} is no format that can be written",
            hint=f"one of {', '.join(formats.WRITABLE)}",
        )
    found = formats.writable(format)
    if sharded and not found.shards:
        what = "divided by ranks" if found.of_ranks else "one file"
        what = "divided by parameters" if found.is_folder and not found.of_ranks else what
        raise UsageError(f"{found.name} is always {what}: it takes no --max-shard-size")
    ranks = check_ranks(ranks, found)
    if found.is_folder and known and not is_folder:
        raise UsageError(f"{path!r} is called like a file, and {found.name} is a folder")
    is_folder = is_folder or found.is_folder
    return Target(path, found.folder_stem if is_folder else stem, found, is_folder, limit, ranks)


def check_ranks(ranks: int | None, format: WritableFormat) -> int:
    """Return the number of ranks to divide a checkpoint among; UsageError if it makes no sense."""
    if ranks is None:
        return 1
    if not format.of_ranks:
        raise UsageError(f"{format.name} is not divided by ranks", hint="--format dcp is")
    if not 1 <= ranks <= _MOST_RANKS:
        raise UsageError(f"--ranks is a number from 1 to {_MOST_RANKS:,}")
    return ranks


def nbytes_of(size: int | str) -> int:
    """Parse a size in bytes: `5GB` is 5,000,000,000, `5GiB` is 5,368,709,120."""
    found = re.fullmatch(_SIZE, str(size).strip())
    many = float(found[1]) * _UNITS[found[2].upper()] if found else 0.0
    nbytes = int(many) if isfinite(many) else 0
    if not nbytes:
        raise UsageError(f"{size!r} is no size", hint="e.g. 5GB or 500MB")
    return nbytes
