"""Read the persistent ids by which a pickle refers to its storages.

    ('storage', class, key, location, numel)                 since 0.2
    ('storage', class, key, location, numel, view)           until 1.5: view is None, or (key,
                                                             offset, numel) of a part, in elements
    ('module', class, source file, source text)              until 1.5: a class, with its source
    ('reduce_package', id, function, arguments)              in torch.package: whatever that makes
    'number'                                                 in 0.1: a tensor or a storage
    (class, source file, source text)                        in 0.1: a class, with its source

Source: torch/serialization.py (`persistent_id`, `persistent_load`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from sys import intern
from typing import NamedTuple, TypeGuard

from ...errors import CorruptError, UnsupportedError
from ...manifest.dtypes import STORAGE_CLASSES, storage_element_nbytes
from ...manifest.manifest import Extent
from ...manifest.storage_table import StorageTable
from ...pickles.nodes import Global, Node, Persistent, Text, Tuple, without_source_text
from ...pickles.opcodes.plain_tensors import StorageForm, StorageReference, is_compact

_LONGEST = 256  # characters of a key or a location


class StorageId(NamedTuple):
    """A parsed persistent id of a storage."""

    #: the id of the storage within the checkpoint
    id: str
    #: the name of the storage within its container
    key: str
    #: the use of the string that is its device tag, or the reference that has it
    use: Text | StorageReference
    #: the dtype of the storage class, or None for an untyped storage
    dtype: str | None
    whole_nbytes: int
    #: the size of the part of the storage that is used; usually all of it
    nbytes: int
    #: the start of that part, in elements
    view_at: int = 0

    @property
    def tag(self) -> str:
        """The device tag."""
        use = self.use
        return use.tag if type(use) is StorageReference else use  # type: ignore[return-value]

    @property
    def location(self) -> Text:
        """The use of the string that is its device tag."""
        use = self.use
        return use.location if type(use) is StorageReference else use  # type: ignore[return-value]


class TensorId(NamedTuple):
    """A parsed persistent id of a tensor: its place in a storage or in a part of one."""

    storage: StorageId
    shape: tuple[int, ...]
    #: in elements, like the offset, which counts from the start of the storage or part
    stride: tuple[int, ...]
    offset: int


def storage_ids(
    persistents: Iterable[Persistent], folder: str, *, legacy: bool = False, numbered: bool = False
) -> dict[int, StorageId]:
    """Parse the persistent ids of storages: `id()` of the node → storage.

    The ids of the storages start with `folder`, e.g. `data/`. If `legacy`, there may be parts of
    storages, and classes, which are left out. If `numbered`, keys may be numbers, as in packages.
    """
    compact: dict[int, tuple[str, int] | None] = {}  # dtype and bytes, by `id()` of the form
    found: dict[int, StorageId] = {}
    for node in persistents:
        if type(node) is StorageReference and is_compact(node):
            form = node.form
            if id(form) not in compact:
                compact[id(form)] = _dtype_and_size(form)
            said = compact[id(form)]
            if said is not None:
                (dtype, size), key = said, node.key
                fields = folder + key, key, node, dtype, size, size, 0
                found[id(node)] = tuple.__new__(StorageId, fields)
                continue
        if not (legacy and _names_class(node)):
            found[id(node)] = _storage_id(node, folder, 6 if legacy else 5, numbered)
    return found


def _dtype_and_size(form: StorageForm) -> tuple[str, int] | None:
    """The common dtype and size of many storages; None for a class that needs separate handling."""
    dtype = STORAGE_CLASSES.get(form.storage_class.name)
    return None if dtype is None else (dtype, form.numel * storage_element_nbytes(dtype))


def _names_class(node: Persistent) -> bool:
    """Whether the node is a class with its source, in the form of torch 0.2."""
    return (
        without_source_text(node) is not node
        and isinstance(node.pid, Tuple)
        and len(node.pid.items) == 4
    )


def _storage_id(node: Persistent, folder: str, longest: int, numbered: bool) -> StorageId:
    items = node.pid.items if isinstance(node.pid, Tuple) else []
    if not 5 <= len(items) <= longest or items[0] != "storage":
        raise CorruptError("the pickle refers to something outside the file that is not a storage")
    _, cls, key, location, numel = items[:5]
    if (
        not isinstance(cls, Global)
        or not (isinstance(key, str) or (numbered and is_size(key)))
        or not isinstance(location, Text)
        or not is_size(numel)
    ):
        raise CorruptError("the pickle refers to a storage in a malformed way")
    if len(str(key)) > _LONGEST or len(location) > _LONGEST:
        raise CorruptError("the pickle has a storage name that is too long")
    assert isinstance(numel, int)
    dtype = STORAGE_CLASSES.get(cls.name)
    if dtype is None and cls.name != "UntypedStorage":
        raise UnsupportedError(f"the storage class {cls.qualname} is not known")
    element = 1 if dtype is None else storage_element_nbytes(dtype)
    start, count = _view(items[5] if len(items) == 6 else None, numel)
    name = folder + str(key)
    return StorageId(name, str(key), location, dtype, numel * element, count * element, start)


def _view(view: Node, numel: int) -> tuple[int, int]:
    """Start and size, in elements, of the part of a storage that is used."""
    if view is None:
        return 0, numel
    items = view.items if isinstance(view, Tuple) else []
    if len(items) != 3 or not isinstance(items[0], str):
        raise CorruptError("the pickle refers to a part of a storage in a malformed way")
    start, count = items[1], items[2]
    if not isinstance(start, int) or not isinstance(count, int):
        raise CorruptError("the pickle refers to a part of a storage in a malformed way")
    if not is_size(start) or not is_size(count) or start + count > numel:
        raise CorruptError("the pickle refers to more bytes of a storage than it has")
    return start, count


def storages_of(
    ids: Iterable[StorageId],
    extents: Callable[[Collection[StorageId]], Iterable[Extent | None]],
    *,
    retyped: bool = False,
) -> StorageTable:
    """Storage id → storage, given every reference to a storage.

    `extents` returns where the bytes of storages are in the file. If `retyped`, the references may
    have several dtypes, as in packages; references to an empty storage always may.
    """
    firsts: dict[str, StorageId] = {}
    others: dict[str, list[StorageId]] = {}
    for each in ids:
        if firsts.setdefault(each[0], each) is not each:
            others.setdefault(each[0], []).append(each)
    storages = StorageTable()
    locations: dict[str, str] = {}
    for first, extent in zip(firsts.values(), extents(firsts.values()), strict=True):
        name, _, use, dtype, nbytes, _, _ = first
        place = use.tag if type(use) is StorageReference else str(use)
        if name in others:
            dtype = _dtype_of(first, others[name], retyped=retyped)
        location = locations.get(place) or locations.setdefault(place, intern(str(place)))
        storages.add(name, location, nbytes if extent is None else extent[1], dtype, extent)
    return storages


def _dtype_of(first: StorageId, more: Iterable[StorageId], *, retyped: bool) -> str | None:
    """The dtype of a storage with several references, which must agree."""
    for each in more:
        if str(each.location) != str(first.location):
            raise CorruptError(
                f"the storage {first.key!r} is listed on {str(first.location)!r} and on "
                f"{str(each.location)!r}"
            )
        if each.whole_nbytes != first.whole_nbytes:
            raise CorruptError(
                f"the storage {first.key!r} is listed with "
                f"{first.whole_nbytes:,} bytes and with {each.whole_nbytes:,}"
            )
    several = len({each.dtype for each in (first, *more) if each.dtype}) > 1
    # torch saves and loads an empty storage under as many dtypes as its tensors have
    if several and not retyped and first.whole_nbytes:
        raise CorruptError(f"the storage {first.key!r} is listed with several dtypes")
    return None if several else first.dtype


def is_size(node: Node) -> TypeGuard[int]:
    """Whether a node is a number that a size, offset or stride can have."""
    return type(node) is int and 0 <= node < 1 << 63  # a bool is not
