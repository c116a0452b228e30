"""Records of a checkpoint that hold neither its object nor its tensors: code, files, identities.

A verdict on two checkpoints must not pass over them, and a conversion must not lose them in
silence. So each container lists them, with their kind:

    code      what runs, or says how: the text of TorchScript, the graph of a `.pt2`, the modules
              of a package. Compared.
    data      files of the user's own, and whatever is not known. Compared.
    debug     where in the sources code comes from (`*.debug_pkl`). It follows the code and names
              files of the machine that saved it, so it is no part of the content: not compared.
    identity  numbers and names of one act of saving (`.data/serialization_id`, the version of
              Python, `sys_info`). They differ between two saves of one object: not compared.

Records that only say how the format itself is laid out (`version`, `byteorder`,
`.storage_alignment`) are none of these: what they say shows in everything else that is read.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

from ..sources.source import Readable


class RecordKind(str, Enum):
    """What a record is for."""

    CODE = "code"
    DATA = "data"
    DEBUG = "debug"
    IDENTITY = "identity"

    __str__ = str.__str__

    @property
    def is_content(self) -> bool:
        """Whether two checkpoints differ if such a record does."""
        return self in (RecordKind.CODE, RecordKind.DATA)


class OtherRecord(NamedTuple):
    """A record, as a manifest lists it.

    Attributes:
        name: of the record, without the folder that all of a torch zip are in.
        kind: what it is for.
        nbytes: its size.
    """

    name: str
    kind: RecordKind
    nbytes: int

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {"name": self.name, "kind": str(self.kind), "nbytes": self.nbytes}


class HeldRecord(NamedTuple):
    """A record, and the way to its content.

    Attributes:
        record: what it is.
        content: its bytes, to be compared; asked with True, without the devices that its code
            names.
        in_tree: whether the saved object, as it is shown, holds these bytes as well.
    """

    record: OtherRecord
    content: Callable[[bool], Readable]
    in_tree: bool = False
