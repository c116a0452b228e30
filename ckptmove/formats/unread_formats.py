"""Formats that ckptmove does not read: how to recognize them, and what to do with them."""

from __future__ import annotations

import re
from typing import NamedTuple

from ..errors import UnsupportedError
from ..writing.in_place.journal import MAGIC as JOURNAL_MAGIC
from ..writing.in_place.journal_name import file_of
from .base import Format
from .checkpoint import Carries, Checkpoint
from .probe import Probe

#: The magic numbers of files that hold weights, or should.
_WEIGHTS = (b"GGUF", b"\x89HDF", b"version https://git-lfs", b'{"')
#: Offset, magic number, what the file is, and what to do with it.
_UNREAD_FILES: tuple[tuple[int, bytes, str, str | None], ...] = (
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


def kind_of_weights(head: bytes) -> str:
    """What a file with this start is, if it has weights in a format that is not read; else empty.

    The text continues a sentence that starts with the name of the file.
    """
    starts = (each for each in _UNREAD_FILES if each[1] in _WEIGHTS)
    return next((what for at, magic, what, _ in starts if head.startswith(magic, at)), "")


def refusal_of(probe: Probe) -> UnsupportedError:
    """Why a file or folder is not a checkpoint, and what it is if that is known."""
    if not probe.source.nbytes:
        return UnsupportedError("is empty")
    if probe.is_json:
        return UnsupportedError(
            "is JSON: an index without the files that it names",
            hint="give one of those files instead",
        )
    if probe.archive is not None:
        return UnsupportedError("is a zip file, but not one that torch.save wrote")
    for at, magic, what, hint in _UNREAD_FILES:
        if probe.head[at:].startswith(magic):
            file = file_of(probe.path) or "FILE, where FILE is the file that it was beside"
            return UnsupportedError(what, hint=hint and hint.format(file=file))
    return UnsupportedError("is not a checkpoint in a format that ckptmove knows")


class KindOfFolder(NamedTuple):
    """A kind of folder that is not read."""

    pattern: str  #: a regular expression for the name of an entry
    what: str
    hint: str | None = None  #: what to do then; `DIR` is the folder
    #: whether its files are parts of one checkpoint, and not separate checkpoints
    is_one: bool = False


_UNREAD_FOLDERS: tuple[KindOfFolder, ...] = (
    KindOfFolder(
        r"\.metadata\.tmp|.*\.distcp",
        "a checkpoint of torch.distributed.checkpoint without .metadata: its save did not finish",
        "use an earlier checkpoint, or copy .metadata from the machine that wrote it",
        is_one=True,
    ),
    KindOfFolder(r"mp_rank_\d+_model_states\.pt", "a checkpoint of DeepSpeed"),
    KindOfFolder(
        r"mp_rank_(?!00(_000)?$)\d+(_\d+)?",
        "a checkpoint of Megatron-LM, whose parts of each rank (mp_rank_01) are not merged",
        is_one=True,
    ),
    KindOfFolder(
        r"latest_checkpointed_iteration\.txt",
        "a run of Megatron-LM or verl",
        "give a checkpoint in it: a folder iter_… or global_step_…",
    ),
    KindOfFolder(r"mp_rank_\d+.*", "a checkpoint of Megatron-LM"),
    KindOfFolder(r"\.snapshot_metadata", "a snapshot of torchsnapshot", is_one=True),
    KindOfFolder(r"_CHECKPOINT_METADATA|_METADATA", "a checkpoint of Orbax", is_one=True),
    KindOfFolder(r"saved_model\.pb", "a SavedModel of TensorFlow"),
    KindOfFolder(
        "snapshots", "a repository in the cache of the Hub", "name a folder within snapshots/"
    ),
    KindOfFolder(
        r"data\.pkl",
        "an unpacked checkpoint of torch.save",
        "zip it again without compression",
    ),
)


def unread_folder(probe: Probe) -> KindOfFolder | None:
    """The kind of a folder, judged by the names in it; None if no unread kind fits."""
    for each in _UNREAD_FOLDERS:
        if any(re.fullmatch(each.pattern, name) for name in probe.entries):
            return each
    return None


def refuse_unread_folder(probe: Probe) -> None:
    """Raise UnsupportedError if a folder is of a kind that is not read."""
    found = unread_folder(probe)
    if found is not None:
        hint = found.hint and found.hint.replace("DIR", probe.path)
        raise UnsupportedError(f"is a directory: {found.what}", path=probe.path, hint=hint)


class StrangeFolder(Format):
    """A folder whose files are parts of one checkpoint that is not read.

    In a tree it is one item, which is refused; none of its files counts as a separate checkpoint.
    """

    name = "strange-folder"
    summary = "frameworks whose checkpoints are not read"
    refused = "all of it"
    carries = Carries(False, False, False, False, dtypes="none")
    in_parts = True

    def sniff(self, probe: Probe) -> bool:
        found = unread_folder(probe) if probe.is_folder else None
        return found is not None and found.is_one

    def read(self, probe: Probe) -> Checkpoint:
        refuse_unread_folder(probe)
        raise UnsupportedError("is a directory that changed while it was read", path=probe.path)
