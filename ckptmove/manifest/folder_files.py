"""The files of a checkpoint that is a folder: what each of them is."""

from __future__ import annotations

from typing import NamedTuple

#: Why a file was not read that should be there.
MISSING = "it is missing"
#: Why a file was not read that is called like a checkpoint.
NO_PART = "it is no part of the checkpoint"


class FolderFile(NamedTuple):
    """A file in a folder, an index with its files, or a folder that is a checkpoint in itself.

    Attributes:
        name: relative to the folder, with `/`.
        format: of the checkpoint in it; empty if it is none, or can't be read.
        part: what the names of its tensors start with; empty if they are those of the checkpoint.
        sections: the sections of its tensors.
        devices: the devices of its tensors; empty if the format stores none.
        tensors: how many there are.
        nbytes: its size, with all that belongs to it.
        copy_of: the file that should hold the same weights, by its name; they were not compared.
        not_read: why it could not be read, though it is called like a checkpoint, or belongs here.
    """

    name: str
    format: str = ""
    part: str = ""
    sections: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    tensors: int = 0
    nbytes: int = 0
    copy_of: str | None = None
    not_read: str | None = None


class FileShare(NamedTuple):
    """What one file of several has of the tensors of a checkpoint.

    Attributes:
        name: relative to what all of the files are in, with `/`.
        rank: the rank that wrote it, if its name tells.
        tensors: of how many tensors it has bytes.
        nbytes: how many bytes of theirs it has.
    """

    name: str
    rank: int | None
    tensors: int
    nbytes: int
