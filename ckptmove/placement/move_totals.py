"""What moves, and what stays: as reports tell it."""

from typing import NamedTuple


class Kept(NamedTuple):
    """A tensor that a rule matches but that torch keeps on its own device, and why."""

    name: str
    device: str
    why: str


class Moved(NamedTuple):
    """The total of what moves from one device to another.

    Attributes:
        storages: the number of storages.
        nbytes: the bytes of these storages.
        tensors: the number of tensors that store their own device; their bytes are not in `nbytes`.
    """

    storages: int
    nbytes: int
    tensors: int = 0
