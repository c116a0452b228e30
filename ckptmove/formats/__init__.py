"""All formats of checkpoints, and how what a user names is recognized and read.

To add a format, write one file here that implements `base.Format`, and name it in `FORMATS`.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from ..errors import InputError, RefusedError, StrPath, UnsupportedError
from ..sources import place_of
from ..sources.place import FolderEntry
from ..sources.source import Readable
from ..torch_pickle.streams import Container
from .base import Format, PickledFormat, WritableFormat
from .bundle import ZipBundle
from .checkpoint import Checkpoint
from .diagnosis import explain
from .distributed.dcp.folder import Dcp, no_devices
from .distributed.dcp.hf_shards import HuggingFaceShards
from .distributed.deepspeed.folder import DeepSpeed, check_complete
from .distributed.deepspeed.universal import Universal
from .distributed.fsdp_ranks import FsdpRanks
from .distributed.rank_groups import divided_folders
from .folders.model_folder import ModelFolder, OnlyFile
from .folders.runs import checkpoint_in
from .folders.sharded import Sharded
from .folders.training_folder import FolderCheckpoint, TrainingFolder, read_folder
from .pickle import PlainPickle
from .probe import Opener, Probe
from .programs.torch_export import TorchExport
from .programs.torchscript import TorchScript
from .programs.torchscript_v1 import TorchScriptV1
from .safetensors.file import SafetensorsFile
from .session import ReadSession
from .torch.legacy import LegacyBehind, TorchLegacy
from .torch.nemo import Nemo
from .torch.package import TorchPackage
from .torch.tar import TorchTar
from .torch.zip import TorchZip
from .unread_formats import StrangeFolder, refusal_of

__all__ = [
    "FORMATS",
    "WRITABLE",
    "Checkpoint",
    "FolderCheckpoint",
    "Format",
    "WritableFormat",
    "folder_format",
    "looks_like",
    "named",
    "new_session",
    "opened",
    "opened_folder",
    "read",
    "read_probe",
    "sniffed",
    "uncollected",
]

#: The first that recognizes something reads it.
FORMATS: tuple[Format, ...] = (
    Dcp(),
    Universal(),
    DeepSpeed(),
    FsdpRanks(),
    HuggingFaceShards(),
    TrainingFolder(),
    ModelFolder(),
    Sharded(),
    TorchPackage(),
    TorchZip(),
    TorchScript(),
    TorchExport(),
    TorchScriptV1(),
    Nemo(),
    TorchTar(),
    TorchLegacy(),
    SafetensorsFile(),  # every other length of a header could also start a pickle
    PlainPickle(),
    ZipBundle(),
)

#: What is tried where none of them fits.
_GUESSES: tuple[Format, ...] = (StrangeFolder(), LegacyBehind(), OnlyFile())

#: In which a checkpoint can be written, the usual first.
WRITABLE: tuple[WritableFormat, ...] = (
    SafetensorsFile(),
    TorchZip(),
    ZipBundle(),
    Dcp(),
    Universal(),
)

#: What may lie within the bytes of a pickle.
_NESTED = [each for each in FORMATS if isinstance(each, PickledFormat) and each.nestable]


@contextlib.contextmanager
def opened(
    path: StrPath,
    *,
    follow_links: bool = False,
    weights: str | None = None,
) -> Iterator[Checkpoint]:
    """Open a checkpoint of any format, or an index with its files, or a folder, for a `with` block.

    Changes in place that were interrupted are undone first, in all its files. Links in the folder,
    or beside the index, may lead out of it only with `follow_links`. `weights`: those of ZeRO that
    are wanted, `master` or `module`; RefusedError if it has no such two.
    """
    with ExitStack() as stack:
        opener = Opener(stack, read_probe, sniff_format, follow_links=follow_links)
        session = new_session()
        session.weights = weights
        probe = opener.probe(path, session)
        with _explaining(probe):
            with pause_collection():
                checkpoint = read_probe(probe)
            if weights is not None and not session.has_two_weights:
                raise RefusedError(
                    f"it has no {weights} weights beside others: it is no checkpoint of ZeRO",
                    path=probe.path,
                    hint="--weights model",
                )
            checkpoint.notes, checkpoint.left = opener.notes, opener.left
            yield checkpoint


@contextlib.contextmanager
def opened_folder(
    path: StrPath, *, follow_links: bool = False, by_rank: bool = False
) -> Iterator[FolderCheckpoint]:
    """Open all that a folder holds, even if that is but the weights of one model; as `opened`.

    Tensors have the names that they have for `opened`. `by_rank`: folders of DeepSpeed in it are
    not put together, so that each file of a rank is a part; InputError if one lacks such a file.
    """
    with ExitStack() as stack:
        opener = Opener(stack, read_probe, sniff_format, follow_links=follow_links)
        probe = opener.probe(path, new_session())
        with _explaining(probe):
            with pause_collection():
                if Dcp().sniff(probe) or HuggingFaceShards().sniff(probe):
                    raise no_devices(probe.path)
                check_complete(probe)
                format = TrainingFolder()
                bare = not format.sniff(probe) and ModelFolder().sniff(probe)
                if by_rank:
                    for name in sorted(divided_folders(probe.names_below())):
                        check_complete(probe.open_folder(name))
                checkpoint = read_folder(probe, format, bare=bare, by_rank=by_rank)
            checkpoint.notes, checkpoint.left = opener.notes, opener.left
            yield checkpoint


@contextlib.contextmanager
def _explaining(probe: Probe) -> Iterator[None]:
    """A context in which errors say what a broken file looks like."""
    try:
        yield
    except InputError as error:
        explain(error, probe.path, None if probe.is_folder else probe.file)
        raise


def named_checkpoint(path: StrPath) -> tuple[str, Sequence[str]]:
    """What a user named: the only checkpoint in the folder of a run, with a note that says so."""
    place = place_of(path)
    with contextlib.suppress(InputError):  # which the reader meets again
        if place.is_folder():
            chosen, notes = checkpoint_in(place)
            return chosen.path if notes else os.fspath(path), notes
    return os.fspath(path), ()


def read(source: Readable) -> Checkpoint:
    """Read a checkpoint of one file of any format, without its tensors."""
    probe = Probe(source, new_session())
    with _explaining(probe), pause_collection():
        return read_probe(probe)


class Sniffed(NamedTuple):
    """What a file is, by its content."""

    format: Format
    #: The names of the files beside it that belong to it.
    files: Sequence[str]


def sniff_format(source: Readable) -> Sniffed | None:
    """The format of a file, which may still turn out to be damaged; None if it is no checkpoint."""
    if not source.nbytes:
        return None
    probe = Probe(source, new_session(), is_alone=False)
    with pause_collection(), contextlib.suppress(UnsupportedError):
        format = _format_of(probe)
        if format is not None:
            files = format.files(probe)
            if files or not format.vague or format.read(probe).manifest.tensors:
                return Sniffed(format, files)
    return None


def folder_format(path: str, entries: Iterable[FolderEntry]) -> Format | None:
    """The format of a folder with these entries, which makes it one checkpoint.

    It may be one that is refused, where none of the files is a checkpoint of its own.
    """
    probe = Probe.folder(place_of(path), entries, new_session())
    return next((format for format in (*FORMATS, StrangeFolder()) if format.sniff(probe)), None)


def looks_like(source: Readable) -> Format | None:
    """The format that a file looks to be of, even if it holds no tensors or can't be read."""
    if source.nbytes == 0:
        return None
    with pause_collection():
        return _format_of(Probe(source, new_session()))


@contextlib.contextmanager
def pause_collection() -> Iterator[None]:
    """A context in which all that is built stays: to look for garbage takes longer than that."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def new_session() -> ReadSession:
    """A reading of one checkpoint, which opens what is nested in it."""
    return ReadSession(_open_nested)


def read_probe(probe: Probe) -> Checkpoint:
    """Read what was opened, of whatever format."""
    format = _format_of(probe)
    if format is None:
        raise refusal_of(probe)
    return format.read(probe)


def _format_of(probe: Probe) -> Format | None:
    if not (probe.is_folder or probe.source.nbytes):
        raise UnsupportedError("is empty")
    return next((each for each in (*FORMATS, *_GUESSES) if each.sniff(probe)), None)


def _open_nested(source: Readable, session: ReadSession) -> Container | None:
    """What bytes within a pickle hold, if they are a checkpoint."""
    format: PickledFormat | None = None
    try:
        probe = Probe(source, session)
        if not source.nbytes:
            raise UnsupportedError("is empty")
        format = next((each for each in _NESTED if each.sniff(probe)), None)
        return None if format is None else format.open(probe)
    except InputError:
        session.unread += not isinstance(format, PlainPickle)  # any bytes may look like one
        raise
