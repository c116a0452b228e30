"""Read the persistent ids by which a pickle names its storages.

Source: torch/serialization.py (`persistent_id`, `persistent_load`).
"""

from __future__ import annotations

from typing import NamedTuple

from ..dtypes import STORAGE_CLASSES, storage_element_nbytes
from ..errors import CorruptError, UnsupportedError
from ..pickles.nodes import Global, Node, Persistent, Text, Tuple


class StorageId(NamedTuple):
    """A persistent id `('storage', class, key, location, numel)`, read.

    Attributes:
        key: names the storage within the file.
        location: the use of the string that tags it.
        dtype: of the storage class, or None for an untyped storage.
        nbytes: its size.
    """

    key: str
    location: Text
    dtype: str | None
    nbytes: int


def storage_id(node: Persistent) -> StorageId:
    """Read a persistent id.

    Raises:
        CorruptError: it is not one of a storage.
        UnsupportedError: the storage class is unknown.
    """
    items = node.pid.items if isinstance(node.pid, Tuple) else []
    if len(items) != 5 or items[0] != "storage":
        raise CorruptError("the pickle refers to something outside that is no storage")
    _, cls, key, location, numel = items
    if (
        not isinstance(cls, Global)
        or not isinstance(key, str)
        or not isinstance(location, Text)
        or not is_size(numel)
    ):
        raise CorruptError("the pickle refers to a storage in a malformed way")
    assert isinstance(numel, int)
    if cls.name == "UntypedStorage":
        return StorageId(str(key), location, None, numel)
    dtype = STORAGE_CLASSES.get(cls.name)
    if dtype is None:
        raise UnsupportedError(f"the storage class {cls.qualname} is not known")
    return StorageId(str(key), location, dtype, numel * storage_element_nbytes(dtype))


def is_size(node: Node) -> bool:
    """Whether this is a number that a size, offset or stride can be."""
    return isinstance(node, int) and not isinstance(node, bool) and 0 <= node < 1 << 63
