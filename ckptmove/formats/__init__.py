"""The formats, and the one way to find out which a file is of.

To add a format, write one file here that says what `base.Format` asks for, and name it below.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import NamedTuple

from ..contents.streams import Container
from ..drafts.draft import Draft
from ..errors import InputError, StrPath, UnsupportedError
from ..journal import MAGIC as JOURNAL_MAGIC
from ..journal import file_of
from ..source import Readable, Source
from ..zips.archive import LOCAL_MAGIC, Archive
from .base import Carries, Checkpoint, Format, Glimpse, Nestable, WritableFormat
from .bundle import ZipBundle
from .opening import Opening
from .pickle import PlainPickle
from .safetensors import SafetensorsFile
from .torch_export import TorchExport
from .torch_legacy import TorchLegacy
from .torch_package import TorchPackage
from .torch_tar import TorchTar
from .torch_zip import TorchZip
from .torchscript import TorchScript
from .torchscript_v1 import TorchScriptV1

__all__ = [
    "FORMATS",
    "WRITABLE",
    "Carries",
    "Checkpoint",
    "Format",
    "Glimpse",
    "WritableFormat",
    "opened",
    "read",
    "uncollected",
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
WRITABLE: tuple[WritableFormat, ...] = (SafetensorsFile(), TorchZip())

#: What may lie within the bytes of a pickle.
_NESTED: tuple[Nestable, ...] = (TorchZip(), TorchScript(), TorchLegacy(), PlainPickle())

_HEAD_NBYTES = 512
#: What else a user may hand us, by how it starts; a hint says what to do with it.
_STRANGERS: tuple[tuple[int, bytes, str, str | None], ...] = (
    (0, b"\x1f\x8b", "is compressed by gzip", "decompress it first"),
    (0, b"7z\xbc\xaf\x27\x1c", "is a 7z archive", "unpack it first"),
    (0, b"BZh", "is compressed by bzip2", "decompress it first"),
    (0, b"\xfd7zXZ", "is compressed by xz", "decompress it first"),
    (0, b"\x28\xb5\x2f\xfd", "is compressed by zstd", "decompress it first"),
    (0, JOURNAL_MAGIC, "is a journal of ckptmove", "ckptmove recover {file}"),
    (0, b"GGUF", "is a GGUF file", None),
    (0, b"\x89HDF", "is an HDF5 file", None),
    (0, b"version https://git-lfs", "is a pointer of Git LFS, not the file", "git lfs pull"),
    (8, b'{"', "looks like safetensors, of which only the beginning is there", "fetch it again"),
)


def read(source: Readable) -> Checkpoint:
    """Read a checkpoint of any format, without its tensors.

    Raises:
        CorruptError: it is damaged, truncated or hostile.
        UnsupportedError: it is no checkpoint, or of a format that can't be read.
    """
    with uncollected():
        glimpse = _glimpse(source, Opening(_open_nested))
        for format in FORMATS:
            if format.sniff(glimpse):
                return format.read(glimpse)
        legacy = TorchLegacy()
        if legacy.sniff_behind(glimpse):
            return legacy.read(glimpse)
        raise _stranger(glimpse)


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
        source: the file.
    """

    checkpoint: Checkpoint
    source: Source

    def draft(self) -> Draft:
        """As `Checkpoint.draft`."""
        return self.checkpoint.draft(self.source)


@contextlib.contextmanager
def opened(path: StrPath) -> Iterator[Opened]:
    """A checkpoint of any format, open for as long as the context is.

    Raises:
        InputError: as `read`, or it can't be opened.
    """
    with Source.open(path) as source:
        yield Opened(read(source), source)


def _open_nested(source: Readable, opening: Opening) -> Container | None:
    """What bytes within a pickle hold, if they are a checkpoint."""
    format: Nestable | None = None
    try:
        glimpse = _glimpse(source, opening)
        format = next((each for each in _NESTED if each.sniff(glimpse)), None)
        return None if format is None else format.open(glimpse)
    except InputError:
        opening.unread += not isinstance(format, PlainPickle)  # any bytes may look like one
        raise


def _glimpse(source: Readable, opening: Opening) -> Glimpse:
    if source.nbytes == 0:
        raise UnsupportedError("is empty")
    head = source.read(0, min(source.nbytes, _HEAD_NBYTES))
    archive = Archive(source) if head.startswith(LOCAL_MAGIC) else None
    return Glimpse(source, head, archive, opening)


def _stranger(glimpse: Glimpse) -> UnsupportedError:
    if glimpse.archive is not None:
        return UnsupportedError("is a zip file, but not one that torch.save wrote")
    for at, magic, what, hint in _STRANGERS:
        if glimpse.head[at:].startswith(magic):
            file = file_of(glimpse.source.path) or "FILE, the one that it was beside"
            return UnsupportedError(what, hint=hint and hint.format(file=file))
    return UnsupportedError("is not a checkpoint that ckptmove knows")
