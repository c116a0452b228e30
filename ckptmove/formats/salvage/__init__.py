"""Read the remains of a broken checkpoint of any format.

Each format whose broken files can be read has a row in `SALVAGERS`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from ... import formats
from ...errors import CkptmoveError, InputError, StrPath, UnsupportedError
from ...sources.budget import Excess
from ..probe import Opener, Probe
from ..torch.legacy import starts
from .distributed import is_distributed, read_distributed
from .pickled import read_legacy, read_pickle
from .readable import read_whole
from .remains import NamedTensor, Remains, StorageRemains, TensorFate
from .safetensors import read_safetensors
from .sharded import has_files, has_several, read_files
from .tars import is_tar, read_tar
from .zipped import read_zip

__all__ = ["SALVAGERS", "NamedTensor", "Remains", "StorageRemains", "TensorFate", "remains_of"]

_LOCAL_MAGIC, _PROTO = b"PK\3\4", b"\x80"
_DEEPEST = 8  # levels of nested folders
_LOOKED_AT = 1 << 16  # bytes that are searched if the start of a file is damaged


class Salvager(NamedTuple):
    """How to recognize and read the remains of a format."""

    name: str
    sniff: Callable[[Probe], bool]
    read: Callable[[Probe], Remains]


def _start(probe: Probe) -> bytes:
    return probe.source.read(0, min(probe.source.nbytes, _LOOKED_AT))


#: The first salvager that recognizes a file reads it: by its first bytes, or else by later ones.
SALVAGERS: tuple[Salvager, ...] = (
    Salvager(
        "torch-zip",
        lambda probe: probe.head.startswith(_LOCAL_MAGIC),
        lambda probe: read_zip(probe, _read_file),
    ),
    Salvager("torch-legacy", lambda probe: starts(probe.head), read_legacy),
    Salvager("tar", is_tar, lambda probe: read_tar(probe, _read_file)),
    Salvager("safetensors", lambda probe: probe.head[8:].lstrip()[:2] == b'{"', read_safetensors),
    Salvager("pickle", lambda probe: probe.head[:1] == _PROTO, read_pickle),
    Salvager(
        "torch-zip",
        lambda probe: _LOCAL_MAGIC in _start(probe),
        lambda probe: read_zip(probe, _read_file),
    ),
    Salvager("safetensors", lambda probe: b'"data_offsets"' in _start(probe), read_safetensors),
)


@contextlib.contextmanager
def remains_of(path: StrPath, *, follow_links: bool = False) -> Iterator[Remains]:
    """The remains of a checkpoint, for a `with` block in which its files are open.

    InputError if it does not resemble a checkpoint of any of these formats.
    """
    with ExitStack() as stack:
        opener = Opener(stack, formats.read_probe, formats.sniff_format, follow_links=follow_links)
        probe = opener.probe(path, formats.new_session())
        with formats.pause_collection():
            remains = _read(probe)
        remains.warnings[:0] = opener.notes
        yield remains


def _read(probe: Probe, depth: int = 0) -> Remains:
    """Read the remains of a file, an index with its files, or a folder.

    `depth` is its nesting level.
    """
    if is_distributed(probe):
        return read_distributed(probe)
    try:
        return read_whole(formats.read_probe(probe))
    except Excess:
        raise
    except InputError as error:
        if has_files(probe) or (probe.is_folder and has_several(probe)):
            return read_files(probe, partial(_read_part, depth=depth + 1))
        return _read_file(_only_file(probe, error)) if probe.is_folder else _broken(probe, error)


def _read_part(probe: Probe, *, depth: int) -> Remains:
    """Read the remains of a file or folder in a folder."""
    if not probe.is_folder:
        return _read_file(probe)
    if depth > _DEEPEST:
        raise UnsupportedError("lies too deep")
    return _read(probe, depth)


def _read_file(probe: Probe) -> Remains:
    """Read the remains of one file."""
    probe = Probe(probe.source, formats.new_session())
    try:
        return read_whole(formats.read_probe(probe))
    except Excess:
        raise
    except InputError as error:
        return _broken(probe, error)


def _broken(probe: Probe, error: InputError) -> Remains:
    """Read the remains of a file that can't be read as a whole because of `error`."""
    if isinstance(error, CkptmoveError) and not probe.source.nbytes:
        raise UnsupportedError("is empty")
    probe = Probe(probe.source, formats.new_session())
    for each in SALVAGERS:
        if each.sniff(probe):
            return each.read(probe)
    raise error


def _only_file(probe: Probe, error: InputError) -> Probe:
    """The file in a folder that caused an error."""
    if error.path is None or error.path == probe.path:
        raise error
    for name, each in probe.entries.items():
        if each.path == error.path:
            return probe.open(name)
    raise error
