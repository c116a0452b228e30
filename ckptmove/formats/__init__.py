"""All checkpoint formats, and how the format of a file is recognized.

To add a format, write one file here that implements `base.Format`, and name it below.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..errors import CorruptError, InputError, StrPath, UnsupportedError
from ..graph.draft import CheckpointGraph
from ..graph.edit.callables import Judge, misused
from ..manifest.manifest import Manifest
from ..pickles.nodes import Blob, Node
from ..pickles.reach import names_reached
from ..sources import place_of
from ..sources.source import Fetched, Memory, Readable, Source
from ..torch_pickle.callables.uses import not_surely_harmless
from ..torch_pickle.streams import Container
from ..writing.in_place.change import recover_if_interrupted
from ..writing.in_place.journal import MAGIC as JOURNAL_MAGIC
from ..writing.in_place.journal import file_of
from ..zips.archive import LOCAL_MAGIC, Archive
from .base import Carries, Checkpoint, Format, Nestable, Probe, WritableFormat
from .bundle import ZipBundle
from .checkpoint import PickledCheckpoint
from .folders.model_folder import weights_of
from .folders.shard_index import Index, is_json, open_shards, read_index
from .folders.sharded import SafetensorsSharded, Shard, TorchSharded
from .opening import ReadSession
from .pickle import PlainPickle
from .programs.torch_export import TorchExport
from .programs.torchscript import TorchScript
from .programs.torchscript_v1 import TorchScriptV1
from .safetensors.file import SafetensorsFile
from .torch.legacy import TorchLegacy
from .torch.package import TorchPackage
from .torch.tar import TorchTar
from .torch.zip import TorchZip

__all__ = [
    "FORMATS",
    "SHARDED",
    "WRITABLE",
    "Carries",
    "Checkpoint",
    "Format",
    "Opened",
    "Probe",
    "WritableFormat",
    "judge",
    "looks_like",
    "opened",
    "read",
    "sniffed",
    "uncollected",
    "unknown_callables",
]

FORMATS: tuple[Format, ...] = (
    TorchPackage(),
    TorchZip(),
    TorchScript(),
    TorchExport(),
    TorchScriptV1(),
    TorchTar(),
    TorchLegacy(),
    SafetensorsFile(),  # every other length of a header could also start a pickle
    PlainPickle(),
    ZipBundle(),
)

#: In which a checkpoint can be written, the usual first.
WRITABLE: tuple[WritableFormat, ...] = (SafetensorsFile(), TorchZip(), ZipBundle())

#: What may lie within the bytes of a pickle.
_NESTED: tuple[Nestable, ...] = (TorchZip(), TorchScript(), TorchLegacy(), PlainPickle())

#: Checkpoints of several files with an index, and of what format these may be.
SHARDED = (SafetensorsSharded(), TorchSharded())
_PARTS: tuple[Nestable, ...] = (TorchZip(), TorchLegacy(), SafetensorsFile(), PlainPickle())

_HEAD_NBYTES = 512
#: What else a user may hand us, by how it starts; a hint says what to do with it.
_STRANGERS: tuple[tuple[int, bytes, str, str | None], ...] = (
    (0, b"\x1f\x8b", "is compressed with gzip", "decompress it first"),
    (0, b"7z\xbc\xaf\x27\x1c", "is a 7z archive", "unpack it first"),
    (0, b"BZh", "is compressed with bzip2", "decompress it first"),
    (0, b"\xfd7zXZ", "is compressed with xz", "decompress it first"),
    (0, b"\x28\xb5\x2f\xfd", "is compressed with zstd", "decompress it first"),
    (0, JOURNAL_MAGIC, "is a journal of ckptmove", "ckptmove recover {file}"),
    (0, b"GGUF", "is a GGUF file", None),
    (0, b"\x89HDF", "is an HDF5 file", None),
    (0, b"version https://git-lfs", "is a Git LFS pointer, not the file itself", "git lfs pull"),
    (
        8,
        b'{"',
        "looks like the beginning of a safetensors file; the rest is missing",
        "download it again",
    ),
)


def read(source: Readable) -> Checkpoint:
    """Read a checkpoint of any format, without its tensors.

    Raises:
        CorruptError: it is damaged, truncated or hostile.
        UnsupportedError: it is no checkpoint, or of a format that can't be read.
    """
    with uncollected():
        glimpse = _glimpse(source, ReadSession(_open_nested))
        format = _format_of(glimpse)
        if format is None:
            raise _stranger(glimpse)
        return format.read(glimpse)


def sniffed(source: Readable) -> Format | None:
    """The format that a file is of, by its content; None if it is no checkpoint.

    Only as much is read as that takes: the checkpoint may still turn out to be damaged.

    Raises:
        InputError: it may have been one, and is damaged.
    """
    with uncollected():
        glimpse = _glimpse(source, ReadSession(_open_nested))
        found = _format_of(glimpse)
        return found if found is not None and _is_one(found, glimpse) else None


def unknown_callables(pickle: bytes, path: str) -> tuple[str, ...]:
    """The callables of a pickle that is to be written, as those of one that was read are listed.

    Args:
        pickle: the pickle, as torch.save writes it.
        path: what it is told of.

    Raises:
        CorruptError, UnsupportedError: as `read`.
    """
    with uncollected():
        opening = ReadSession(_open_nested)
        opening.folder()
        container = Container(Memory(pickle, path))
        container.streams.append(opening.stream(container.source))
        return PickledCheckpoint(TorchZip.name, container).unknown_callables()


def judge(path: str) -> Judge:
    """Tells the unknown callable that a node of a graph is, or holds as bytes, if it does.

    Args:
        path: what the graph is of.
    """
    opening = ReadSession(_open_nested)
    opening.folder()

    def judged(node: Node) -> str | None:
        if isinstance(node, Blob) and node.content is not None:
            return next(iter(_unknown_within(node.content)), None)
        return misused(node)

    def _unknown_within(content: bytes) -> tuple[str, ...]:
        with contextlib.suppress(InputError):
            container = opening.open(Memory(content, path))
            if container is not None:
                return PickledCheckpoint("", container).unknown_callables()
        return ()

    return judged


def looks_like(source: Readable) -> Format | None:
    """The format that a file looks to be of, even if it holds no tensors or can't be read.

    Raises:
        InputError: it may have been one, and is damaged.
    """
    if source.nbytes == 0:
        return None
    with uncollected():
        return _format_of(_glimpse(source, ReadSession(_open_nested)))


def _format_of(glimpse: Probe) -> Format | None:
    for format in FORMATS:
        if format.sniff(glimpse):
            if isinstance(format, (TorchTar, SafetensorsFile)):
                _refuse_pickle(glimpse)
            return format
    legacy = TorchLegacy()
    if not legacy.sniff_behind(glimpse):
        return None
    _refuse_pickle(glimpse)
    return legacy


def _refuse_pickle(glimpse: Probe) -> None:
    """Refuse a file that is of another format, and runs something where it is unpickled.

    `torch.load` unpickles whatever is no zip, from its first byte.

    Raises:
        CorruptError: it would run something.
    """
    found = list(not_surely_harmless(names_reached(glimpse.source)))
    if found:
        raise CorruptError(
            f"if it were unpickled from its first byte, it would run {found[0]!r:.100}"
        )


def _is_one(format: Format, glimpse: Probe) -> bool:
    """Whether what a format sniffs is a checkpoint; any tar, and any pickle, looks like one."""
    if not isinstance(format, (TorchTar, PlainPickle)):
        return True
    try:
        return bool(format.read(glimpse).manifest.tensors)
    except UnsupportedError:
        return False


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """A context in which all that is built stays: to look for garbage takes longer than that."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class Opened(NamedTuple):
    """A checkpoint that is open.

    Attributes:
        checkpoint: what was read.
        sources: its files; of several, the last is their index.
        notes: what the user should know of how it was found.
    """

    checkpoint: Checkpoint
    sources: Sequence[Source]
    notes: Sequence[str] = ()

    @property
    def files(self) -> Sequence[Source]:
        """Those that hold tensors: all but the index, which is last."""
        return self.sources[:-1] or self.sources

    @property
    def fetched(self) -> Fetched | None:
        """What was fetched of its files so far, or None if they are here."""
        parts = [source.fetched for source in self.sources]
        away = [part for part in parts if part is not None]
        return Fetched(*map(sum, zip(*away, strict=True))) if away else None

    @property
    def manifest(self) -> Manifest:
        """As `Checkpoint.manifest`."""
        found = self.checkpoint.manifest
        return replace(found, warnings=(*self.notes, *found.warnings))

    def draft(self, *, nested: bool = False, program: bool = False) -> CheckpointGraph:
        """As `Checkpoint.draft`."""
        draft = self.checkpoint.draft(self.sources, nested=nested, program=program)
        draft.warnings = [*self.notes, *draft.warnings]
        return draft


@contextlib.contextmanager
def opened(path: StrPath, *, follow_links: bool = False) -> Iterator[Opened]:
    """A checkpoint of any format, open for as long as the context is.

    Changes in place that were interrupted are undone first, of all its files.

    Args:
        path: a file; an index, which stands for the files that it names; or a folder that holds
            one of these.
        follow_links: whether links in that folder, or beside that index, may lead out of it.

    Raises:
        InputError: as `read`, or it can't be opened.
    """
    notes: list[str] = []
    place, folder = place_of(path), None
    if place.is_folder():
        folder = None if follow_links else place
        weights = weights_of(path)
        place = place_of(weights.path)
        if folder is not None:
            place.check_link(folder)
        notes += weights.warnings
    notes += recover_if_interrupted(place.path)
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(place.open())
        if folder is not None:
            place.check_link(folder, source)
        if is_json(_head(source)):
            index = read_index(source)
            shards, more = open_shards(index, stack, follow_links=follow_links)
            checkpoint = _read_shards(index, shards)
            yield Opened(checkpoint, (*shards.values(), source), (*notes, *more))
        else:
            yield Opened(read(source), (source,), notes)


def _read_shards(index: Index, sources: Mapping[str, Source]) -> Checkpoint:
    """Read the files of a checkpoint as one.

    Raises:
        CorruptError, UnsupportedError: as `read`; or they don't belong together.
    """
    opening, shards = ReadSession(_open_nested), list[Shard]()
    with uncollected():
        for name, source in sources.items():
            try:
                shards.append(Shard(name, source, _read_part(source, opening)))
            except InputError as error:
                error.about(source.path)
                raise
        for format in SHARDED:
            if format.fits(shards):
                return format.read(index, shards)
    raise UnsupportedError("its files have different formats")


def _read_part(source: Source, opening: ReadSession) -> Container:
    """What a file holds that is a part of a checkpoint."""
    glimpse = _glimpse(source, opening)
    for format in _PARTS:
        if format.sniff(glimpse):
            if isinstance(format, SafetensorsFile):
                _refuse_pickle(glimpse)
            return format.open(glimpse)
    raise _stranger(glimpse)


def _open_nested(source: Readable, opening: ReadSession) -> Container | None:
    """What bytes within a pickle hold, if they are a checkpoint."""
    format: Nestable | None = None
    try:
        glimpse = _glimpse(source, opening)
        format = next((each for each in _NESTED if each.sniff(glimpse)), None)
        return None if format is None else format.open(glimpse)
    except InputError:
        opening.unread += not isinstance(format, PlainPickle)  # any bytes may look like one
        raise


def _glimpse(source: Readable, opening: ReadSession) -> Probe:
    if source.nbytes == 0:
        raise UnsupportedError("is empty")
    head = _head(source)
    archive = Archive(source, opening.budget) if head.startswith(LOCAL_MAGIC) else None
    return Probe(source, head, archive, opening)


def _head(source: Readable) -> bytes:
    return source.read(0, min(source.nbytes, _HEAD_NBYTES))


def _stranger(glimpse: Probe) -> UnsupportedError:
    if is_json(glimpse.head):
        return UnsupportedError(
            "is JSON: an index without the files that it names",
            hint="give one of those files instead",
        )
    if glimpse.archive is not None:
        return UnsupportedError("is a zip file, but not one that torch.save wrote")
    for at, magic, what, hint in _STRANGERS:
        if glimpse.head[at:].startswith(magic):
            file = file_of(glimpse.source.path) or "FILE, where FILE is the file that it was beside"
            return UnsupportedError(what, hint=hint and hint.format(file=file))
    return UnsupportedError("is not a checkpoint in a format that ckptmove knows")
