"""Further content of a checkpoint: records, aliases, chunks, values that name a device.

Records hold neither its object nor its tensors. A comparison must not ignore them, and a conversion
must not lose them silently. So each container lists them, with their kind:

    code      what runs, or says how: the text of TorchScript, the graph of a `.pt2`, the modules
              of a package. Compared.
    data      the user's own files, and everything unknown. Compared.
    debug     where in the sources code comes from (`*.debug_pkl`). It follows the code and names
              files of the machine that saved it. Not compared.
    identity  numbers and names of one save (`.data/serialization_id`, the version of Python,
              `sys_info`). They differ between two saves of the same object. Not compared.

Records that describe only the layout of the format (`version`, `byteorder`, `.storage_alignment`)
are not listed: their content shows in everything else that is read.
"""

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from ..sources.source import Readable
from .paths import PlainPath


class RecordKind(str, Enum):
    """The purpose of a record."""

    CODE = "code"
    DATA = "data"
    DEBUG = "debug"
    IDENTITY = "identity"

    __str__ = str.__str__

    @property
    def is_content(self) -> bool:
        """Whether a difference in such a record makes two checkpoints different."""
        return self in (RecordKind.CODE, RecordKind.DATA)


class OtherRecord(NamedTuple):
    """A record, as a manifest lists it."""

    name: str  #: the name of the record, without the common folder of a torch zip
    kind: RecordKind  #: its purpose
    nbytes: int  #: its size


class HeldRecord(NamedTuple):
    """A record, with access to its content."""

    record: OtherRecord  #: its description
    #: its bytes, for comparison; with True, without the devices that its code names.
    content: Callable[[bool], Readable]
    in_tree: bool = False  #: whether the displayed object holds these bytes too


class Alias(NamedTuple):
    """A container that is the same object as one listed before, under another path.

    It is not listed again, unless it is a module: its tensors are in a state dict under each name.
    """

    name: str
    of: str


class Chunk(NamedTuple):
    """A part of a tensor that a rank has saved.

    Attributes:
        name: of the tensor.
        offsets: where it starts in the tensor, in each dimension.
        sizes: how many elements it has in each.
        file: the file that it is in.
        rank: the rank that wrote the file, if its name tells.
        nbytes: its size.
    """

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    rank: int | None
    nbytes: int


class NamedDevice(NamedTuple):
    """A value that names a device: your own value, or an instruction of an exported program.

    Attributes:
        path, name: where it is.
        value: the device.
        kind: `torch.device` or `str`. In TorchScript also `code` (a `torch.device` in the code) and
            `code string`. In an exported program `graph`, or `autocast` (a device type only).
        fixed: whether it cannot be changed: a key of a dict or member of a set, because two of them
            might become equal, or a string in code, because it may mean anything.
    """

    path: PlainPath
    name: str
    value: str
    kind: str
    fixed: bool = False

    @property
    def follows(self) -> bool:
        """Whether it belongs to a program, and so moves with the tensors of the program."""
        return self.kind in ("graph", "autocast")
