"""Files that are no checkpoints of ours: what they are, and what to do with them."""

from __future__ import annotations

from ..errors import UnsupportedError
from ..writing.in_place.journal import MAGIC as JOURNAL_MAGIC
from ..writing.in_place.journal import file_of
from .probe import Probe

#: By how they start.
_STRANGERS: tuple[tuple[int, bytes, str, str | None], ...] = (
    (0, b"\x1f\x8b", "is compressed with gzip", "decompress it first: gunzip < FILE > DST"),
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


def stranger(probe: Probe) -> UnsupportedError:
    """Why something is no checkpoint, and what it is if that is known."""
    if not probe.source.nbytes:
        return UnsupportedError("is empty")
    if probe.is_json:
        return UnsupportedError(
            "is JSON: an index without the files that it names",
            hint="give one of those files instead",
        )
    if probe.archive is not None:
        return UnsupportedError("is a zip file, but not one that torch.save wrote")
    for at, magic, what, hint in _STRANGERS:
        if probe.head[at:].startswith(magic):
            file = file_of(probe.path) or "FILE, where FILE is the file that it was beside"
            return UnsupportedError(what, hint=hint and hint.format(file=file))
    return UnsupportedError("is not a checkpoint in a format that ckptmove knows")
