"""All formats of checkpoints, and how the format of a user's file or folder is recognized.

To add a format, write one file here that implements `base.Format`, and name it in `FORMATS`. The
module is imported only when a file of the right kind (zip, tar, folder …) is read.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

from ..errors import InputError, RefusedError, UnsupportedError
from ..sources import place_of
from .base import PickledFormat, WritableFormat
from .probe import Opener, Probe
from .session import ReadSession
from .table import FormatRow, in_file, in_folder, in_index, in_package, in_pickle, in_tar, in_zip

if TYPE_CHECKING:
    from ..errors import StrPath
    from ..sources.place import FolderEntry
    from ..sources.source import Readable
    from ..torch_pickle.streams import Container
    from .base import Format
    from .checkpoint import Checkpoint
    from .folders.training_folder import FolderCheckpoint

__all__ = [
    "FORMATS",
    "WRITABLE",
    "folder_format",
    "looks_like",
    "named_checkpoint",
    "new_session",
    "open_checkpoint",
    "open_whole_folder",
    "pause_collection",
    "read",
    "read_probe",
    "sniff_format",
    "writable",
]

#: The first format that recognizes a file or folder reads it.
FORMATS: tuple[FormatRow, ...] = (
    FormatRow("dcp", in_folder, ".distributed.dcp.folder.Dcp"),
    FormatRow("universal", in_folder, ".distributed.deepspeed.universal.Universal"),
    FormatRow("deepspeed", in_folder, ".distributed.deepspeed.folder.DeepSpeed"),
    FormatRow("fsdp-ranks", in_folder, ".distributed.fsdp_ranks.FsdpRanks"),
    FormatRow("dcp-safetensors", in_folder, ".distributed.dcp.hf_shards.HuggingFaceShards"),
    FormatRow("training-folder", in_folder, ".folders.training_folder.TrainingFolder"),
    FormatRow("model-folder", in_folder, ".folders.model_folder.ModelFolder"),
    FormatRow("sharded", in_index, ".folders.sharded.ShardedFormat"),
    FormatRow("torch-package", in_package, ".torch.package.TorchPackage"),
    FormatRow("torch-zip", in_zip, ".torch.zip.TorchZip", nestable=True),
    FormatRow("torchscript", in_zip, ".programs.torchscript.TorchScript", nestable=True),
    FormatRow("torch-export", in_zip, ".programs.torch_export.TorchExport"),
    FormatRow("torchscript-v1", in_zip, ".programs.torchscript_v1.TorchScriptV1"),
    FormatRow("nemo", in_tar, ".torch.nemo.Nemo"),
    FormatRow("torch-tar", in_tar, ".torch.tar.TorchTar"),
    FormatRow("torch-legacy", in_pickle, ".torch.legacy.TorchLegacy", nestable=True),
    # every other length of the header of safetensors could also start a pickle
    FormatRow("safetensors", in_file, ".safetensors.file.SafetensorsFile"),
    FormatRow("pickle", in_file, ".pickle.PlainPickle", nestable=True),
    FormatRow("zip-bundle", in_zip, ".bundle.ZipBundle"),
)

_STRANGE = FormatRow("", in_folder, ".unread_formats.StrangeFolder")
#: These are tried when no format in `FORMATS` fits.
_GUESSES: tuple[FormatRow, ...] = (
    _STRANGE,
    FormatRow("torch-legacy", in_file, ".torch.legacy.LegacyAfterPrefix"),
    FormatRow("model-folder", in_folder, ".folders.model_folder.OnlyFile"),
)

#: The formats that can be written, the most usual first.
WRITABLE = ("safetensors", "torch-zip", "zip-bundle", "dcp", "universal")


def writable(name: str) -> WritableFormat:
    """The format of that name, which is one of `WRITABLE`."""
    found = next(row.format for row in FORMATS if row.name == name)
    assert isinstance(found, WritableFormat)
    return found


@contextlib.contextmanager
def open_checkpoint(
    path: StrPath,
    *,
    follow_links: bool = False,
    weights: str | None = None,
) -> Iterator[Checkpoint]:
    """Open a checkpoint of any format, or an index with its files, or a folder, for a `with` block.

    Interrupted changes in place are undone first, in all its files. Links in the folder, or beside
    the index, may lead out of it only with `follow_links`. `weights` selects the `master` or
    `module` weights of a ZeRO checkpoint; RefusedError if the checkpoint does not have both.
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
def open_whole_folder(
    path: StrPath, *, follow_links: bool = False, by_rank: bool = False
) -> Iterator[FolderCheckpoint]:
    """Open everything in a folder, even if it holds only the weights of one model.

    Like `open_checkpoint`; tensors have the same names. With `by_rank`, DeepSpeed folders in it are
    not merged, so each rank file is a part; InputError if a folder lacks such a file.
    """
    from .folders.whole_folder import read_whole

    with ExitStack() as stack:
        opener = Opener(stack, read_probe, sniff_format, follow_links=follow_links)
        probe = opener.probe(path, new_session())
        with _explaining(probe):
            with pause_collection():
                checkpoint = read_whole(probe, by_rank=by_rank)
            checkpoint.notes, checkpoint.left = opener.notes, opener.left
            yield checkpoint


@contextlib.contextmanager
def _explaining(probe: Probe) -> Iterator[None]:
    """A context that adds to each error what happened to the broken file, as far as it shows."""
    try:
        yield
    except InputError as error:
        with contextlib.suppress(OSError):  # for example, no more files can be opened
            from .diagnosis import explain

            explain(error, probe.path, None if probe.is_folder else probe.file)
        raise


def named_checkpoint(path: StrPath) -> tuple[str, Sequence[str]]:
    """The path that a user means: of a run's folder, the only checkpoint in it, with a note."""
    place = place_of(path)
    with contextlib.suppress(InputError):  # the reader will raise it again
        if place.is_folder():
            from .folders.run_folders import checkpoint_in

            chosen, notes = checkpoint_in(place)
            return chosen.path if notes else os.fspath(path), notes
    return os.fspath(path), ()


def read(source: Readable) -> Checkpoint:
    """Read a checkpoint of one file of any format, without its tensors."""
    probe = Probe(source, new_session())
    with _explaining(probe), pause_collection():
        return read_probe(probe)


class SniffedFile(NamedTuple):
    """What a file is, by its content."""

    format: Format
    #: The names of the other files that belong to it.
    files: Sequence[str]


def sniff_format(source: Readable) -> SniffedFile | None:
    """The format of a file, which may still be damaged; None if it is not a checkpoint."""
    if not source.nbytes:
        return None
    probe = Probe(source, new_session(), is_alone=False)
    with pause_collection(), contextlib.suppress(UnsupportedError):
        format = _format_of(probe)
        if format is not None:
            files = format.files(probe)
            if files or not format.vague or format.read(probe).manifest.tensors:
                return SniffedFile(format, files)
    return None


def folder_format(path: str, entries: Iterable[FolderEntry]) -> Format | None:
    """The format of a folder with these entries, if the whole folder is one checkpoint.

    The format may be one that ckptmove refuses, if no file in the folder is a separate checkpoint.
    """
    probe = Probe.folder(place_of(path), entries, new_session())
    return next((row.format for row in (*FORMATS, _STRANGE) if row.sniff(probe)), None)


def looks_like(source: Readable) -> Format | None:
    """The format that a file seems to have, even if it holds no tensors or can't be read."""
    if source.nbytes == 0:
        return None
    with pause_collection():
        return _format_of(Probe(source, new_session()))


@contextlib.contextmanager
def pause_collection() -> Iterator[None]:
    """A context without garbage collection: most new objects stay, so collecting wastes time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def new_session() -> ReadSession:
    """A session that reads one checkpoint and opens the checkpoints nested in it."""
    return ReadSession(_open_nested)


def read_probe(probe: Probe) -> Checkpoint:
    """Read an opened file or folder of any format."""
    format = _format_of(probe)
    if format is None:
        from .unread_formats import refusal_of

        raise refusal_of(probe)
    return format.read(probe)


def _format_of(probe: Probe) -> Format | None:
    if not (probe.is_folder or probe.source.nbytes):
        raise UnsupportedError("is empty")
    return next((row.format for row in (*FORMATS, *_GUESSES) if row.sniff(probe)), None)


def _open_nested(source: Readable, session: ReadSession) -> Container | None:
    """Open bytes from a pickle as a checkpoint; None if they are not a checkpoint."""
    format: PickledFormat | None = None
    try:
        probe = Probe(source, session)
        if not source.nbytes:
            raise UnsupportedError("is empty")
        found = next((row.format for row in FORMATS if row.nestable and row.sniff(probe)), None)
        if found is None:
            return None
        assert isinstance(found, PickledFormat)
        format = found
        return format.open(probe)
    except InputError:
        session.unread += format is None or not format.vague  # any bytes may look like a pickle
        raise
