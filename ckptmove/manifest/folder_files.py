"""The files of a checkpoint that is a folder, each with its format and content."""

from typing import NamedTuple

#: The reason for a missing file.
MISSING = "it is missing"
#: The reason for a file with the name of a checkpoint that was not read.
NO_PART = "it is no part of the checkpoint"


class FolderFile(NamedTuple):
    """A file in a folder, an index with its files, or a folder that is a checkpoint in itself.

    Attributes:
        name: relative to the folder, with `/`.
        format: of the checkpoint in it; empty if it is not a checkpoint, or can't be read.
        part: the prefix of its tensors' names; empty without a prefix.
        sections: the sections of its tensors.
        devices: the devices of its tensors; empty if the format stores none.
        tensors: how many there are.
        nbytes: its size, with all files that belong to it.
        copy_of: the file that should hold the same weights, by its name; they were not compared.
        not_read: why it could not be read, although it has the name of a checkpoint, or belongs
            here.
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
    """The share that one of several files has of a checkpoint's tensors.

    Attributes:
        name: relative to the common folder of the files, with `/`.
        rank: the rank that wrote it, if its name tells.
        tensors: the number of tensors of which it has bytes.
        nbytes: the number of these bytes.
    """

    name: str
    rank: int | None
    tensors: int
    nbytes: int
