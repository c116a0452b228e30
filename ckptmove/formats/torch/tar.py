"""torch-tar: the format of `torch.save` in torch 0.1, an uncompressed tar of four members.

    sys_info   a pickle about the machine that wrote it, which nothing reads
    pickle     the object; a tensor, or a storage, is its number as text
    tensors    pickle of how many; for each: pickle of (number, number of its storage, tensor type),
               int32 dimensions, 4 bytes that mean nothing, then int64 sizes, strides and offset
    storages   pickle of how many; for each: pickle of (number, location, storage type), int64
               number of elements, and the bytes; then pickle of a list of views, which are parts of
               storages: (number, number of the storage, offset, elements)

A number is the address of a C object, so all numbers are different. Only the location gives the
device: torch takes the dtype from a storage's type and ignores the type of a tensor, which may be
of `torch` or `torch.cuda`; types are not changed. Relocating changes locations, and devices that
the object names; if a member gets longer, its header is updated, and the bytes after it move. torch
loads a tar only with `weights_only=False`, and only from a file.

Source: torch/serialization.py (`_legacy_load`, `legacy_load`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import cached_property, partial

from ...errors import CorruptError, UnsupportedError
from ...manifest.dtypes import STORAGE_CLASSES, storage_element_nbytes
from ...manifest.manifest import Extent
from ...manifest.other_records import HeldRecord, OtherRecord, RecordKind
from ...pickles.nodes import Global, Items, List, Node, Text, Tuple, without_source_text
from ...plans.plan import Plan, apply_edits
from ...sources.source import Readable
from ...torch_pickle.streams import Container, LocationEdits, PickleStream
from ...torch_pickle.values.persistent_ids import StorageId, TensorId, is_size, storages_of
from ...torch_pickle.values.strided import reach_of, tensor_at
from ..archives.tar_archive import (
    TarMember,
    bytes_behind,
    edits_to_resize,
    members_of,
    starts_tar,
)
from ..base import PickledFormat, runs_nothing
from ..checkpoint import Carries
from ..probe import Probe

_NEEDED = ("storages", "tensors", "pickle")
_MOST_DIMENSIONS = 1024


class TorchTar(PickledFormat):
    """The format of `torch.save` in torch 0.1."""

    name = "torch-tar"
    suffixes = (".pt", ".pth", ".t7", ".tar")
    vague = True
    summary = "torch.save, torch 0.1"
    refused = (
        "tars without the members that torch always writes, since nothing else locates the tensors"
    )
    carries = Carries(
        devices=True, aliases=True, strides=True, objects=True, dtypes="those that torch 0.1 had"
    )

    def sniff(self, probe: Probe) -> bool:
        """Whether it starts with a tar header."""
        return starts_tar(probe.head) and runs_nothing(probe)

    def open(self, probe: Probe) -> TarContainer:
        """Read the pickles and the offsets of the storages."""
        return TarContainer(probe)


class TarContainer(Container):
    """The members of a tar, with the tensors and storages by number."""

    def __init__(self, probe: Probe, members: dict[str, TarMember] | None = None) -> None:
        """Read the pickles, the table of tensors, and the size of each storage.

        `members`: the members of a tar that is cut short; the last storage may be incomplete.
        """
        super().__init__(probe.source)
        self.session = probe.session
        self.folder = f"{self.session.folder()}storages/"
        self.is_cut = members is not None
        self.members, end = (members, 0) if members is not None else members_of(self.source)
        missing = [name for name in _NEEDED if name not in self.members]
        if len(missing) == len(_NEEDED):
            raise UnsupportedError(
                "is a tar archive", hint="if it holds checkpoints, unpack it first"
            )
        if missing:
            raise UnsupportedError(
                f"is a tar archive without the member {missing[0]!r}, which torch always writes"
            )
        self._storages: dict[int, StorageId] = {}
        self._tensors: dict[int, TensorId] = {}
        self._extents: dict[str, Extent] = {}
        self._unread: list[tuple[str, Readable]] = []
        try:
            self._read_storages(self.members["storages"])
        except CorruptError:
            if not self.is_cut:
                raise
        self._read_tensors(self.members["tensors"])
        self._read_object(self.members["pickle"])
        if not self.is_cut:
            self.storages = storages_of(self.ids.values(), partial(map, self._extent))
            self._warn(end)
        python2 = any(stream.pickle.python2 for stream in self.streams)
        self.writer = "torch 0.1, Python 2" if python2 else "torch 0.1"

    def _read_storages(self, member: TarMember) -> None:
        stream = self._stream(member, member.start)
        at = stream.start + stream.nbytes
        for _ in range(_size(stream.pickle.root)):
            stream = self._stream(member, at)
            number, location, cls = _items(stream.pickle.root, 3)
            if not isinstance(location, Text):
                raise CorruptError("the device tag of a storage is not a string")
            dtype = _dtype(cls, "Storage")
            at = stream.start + stream.nbytes
            (numel,) = self._int64s(member, at, 1)
            at += 8
            nbytes = numel * storage_element_nbytes(dtype)
            is_cut = numel < 0 or at + nbytes > member.end
            if is_cut and (numel < 0 or not self.is_cut):
                raise CorruptError(f"the storage {number!r} is truncated")
            key = str(self._unused_number(number))
            storage = StorageId(f"{self.folder}{key}", key, location, dtype, nbytes, nbytes)
            self._storages[int(key)] = self.ids[id(stream.pickle.root)] = storage
            self._extents[key] = Extent(at, min(nbytes, member.end - at))
            if is_cut:
                raise CorruptError(f"the storage {number!r} is truncated")
            at += nbytes
        views = self._stream(member, at)
        if not isinstance(views.pickle.root, List):
            raise CorruptError("the list of parts of storages is not a list")
        for view in views.pickle.root.items:
            self._read_view(view)
        self._check_end(member, views.start + views.nbytes)

    def _read_view(self, view: Node) -> None:
        """Read the entry for a part of a storage, or for a part of such a part."""
        number, root, start, count = _items(view, 4)
        whole = self._storages.get(_size(root))
        if whole is None:
            raise CorruptError(f"the storage {root!r}, of which {number!r} is a part, is missing")
        element = storage_element_nbytes(whole.dtype or "uint8")
        start, nbytes = _size(start), _size(count) * element
        if start * element + nbytes > whole.nbytes:
            raise CorruptError(f"a part of the storage {root!r} is larger than the storage")
        view_at = whole.view_at + start
        self._storages[self._unused_number(number)] = whole._replace(nbytes=nbytes, view_at=view_at)

    def _read_tensors(self, member: TarMember) -> None:
        stream = self._stream(member, member.start)
        at = stream.start + stream.nbytes
        for _ in range(_size(stream.pickle.root)):
            stream = self._stream(member, at)
            number, storage, cls = _items(stream.pickle.root, 3)
            on, dtype = self._storages.get(_size(storage)), _dtype(cls, "Tensor")
            if on is None and not self.is_cut:
                raise CorruptError(f"the storage {storage!r} of a tensor is missing")
            if on is not None and dtype != on.dtype:
                raise CorruptError(f"a tensor has another type than its storage {storage!r}")
            at = stream.start + stream.nbytes
            (dimensions,) = self._int64s(member, at, 1)
            # the other 4 bytes have no meaning
            dimensions = (dimensions + (1 << 31)) % (1 << 32) - (1 << 31)
            if not 0 <= dimensions <= _MOST_DIMENSIONS:
                raise CorruptError(f"a tensor has {dimensions:,} dimensions")
            numbers = self._int64s(member, at + 8, 2 * dimensions + 1)
            if min(numbers) < 0:
                raise CorruptError("a tensor has a negative size, stride or offset")
            shape, stride = numbers[:dimensions], numbers[dimensions:-1]
            if on is None:
                on = self._missing(_size(storage), dtype, shape, stride, numbers[-1])
            tensor = TensorId(on, shape, stride, numbers[-1])
            tensor_at(*tensor)  # it must fit into its storage, even if it is not used
            self._tensors[self._unused_number(number)] = tensor
            at += 8 + 8 * len(numbers)
        self._check_end(member, at)

    def _missing(
        self, number: int, dtype: str, shape: Sequence[int], stride: Sequence[int], offset: int
    ) -> StorageId:
        """A missing storage, as large as its tensor needs."""
        reach = reach_of(tuple(shape), tuple(stride), offset, dtype)
        return StorageId(f"{self.folder}{number}", str(number), Text("cpu", 0), dtype, reach, reach)

    def _read_object(self, member: TarMember) -> None:
        stream = self._stream(member, member.start)
        self.roots = [((), stream.pickle.root)]
        for node in stream.pickle.persistents:
            if without_source_text(node) is not node:
                continue
            text = str(node.pid) if isinstance(node.pid, str) else ""
            number = int(text) if text.isdecimal() and len(text) < 20 else -1
            if number in self._tensors:
                self.tensors[id(node)] = self._tensors[number]
            elif number in self._storages:
                self.ids[id(node)] = self._storages[number]
            else:
                raise CorruptError("the pickle refers to something that the tar does not hold")
        self._check_end(member, stream.start + stream.nbytes)

    def _stream(self, member: TarMember, at: int) -> PickleStream:
        """Read the pickle at an offset; it must not extend beyond the member."""
        stream = self.session.stream(self.source.window(0, member.end), at)
        self.streams.append(stream)
        return stream

    def _int64s(self, member: TarMember, at: int, count: int) -> tuple[int, ...]:
        if at + 8 * count > member.end:
            raise CorruptError(f"the member {member.name!r} of the tar is truncated")
        return struct.unpack(f"<{count}q", self.source.read(at, 8 * count))

    def _unused_number(self, number: Node) -> int:
        """A number that no other object has."""
        number = _size(number)
        if number in self._storages or number in self._tensors:
            raise CorruptError(f"two objects in the tar have the number {number}")
        return number

    def _check_end(self, member: TarMember, at: int) -> None:
        if at < member.end:
            rest = member.end - at
            self._unread.append((member.name, self.source.window(at, rest)))
            self.warnings.append(
                f"{rest:,} bytes follow the part that torch reads of {member.name!r}"
            )

    def _warn(self, end: int) -> None:
        strange = [name for name in self.members if name not in (*_NEEDED, "sys_info")]
        if strange:
            self.warnings.append(f"torch does not read its member {strange[0]!r}")
        self.warnings += bytes_behind(self.source, end)

    def extent_of(self, key: str) -> Extent | None:
        """The extent in the source of the present bytes of a storage; None if there are none."""
        return self._extents.get(key)

    def _extent(self, storage: StorageId) -> Extent | None:
        start = self.source.start
        found = self._extents[storage.key]
        return None if start is None else Extent(start + found.start, found.nbytes)

    def plan(self, spelling: LocationEdits) -> Plan:
        """Patch a clone if all pickles keep their lengths; otherwise move the bytes after them."""
        changes = self.changes(spelling)
        for member in self.members.values():
            inside = (e for e in changes if member.start <= e.start and e.end <= member.end)
            growth = sum(edit.growth for edit in inside)
            if growth:
                changes += edits_to_resize(self.source, member, member.nbytes + growth)
        return apply_edits(self.source.start or 0, self.source.nbytes, changes)

    def records(self) -> Iterator[HeldRecord]:
        for name, member in self.members.items():
            if name not in _NEEDED:
                kind = RecordKind.IDENTITY if name == "sys_info" else RecordKind.DATA
                content = partial(self._window, member)
                yield HeldRecord(OtherRecord(name, kind, member.nbytes), content)

    def unknown_callables(self) -> Iterator[str]:
        yield from super().unknown_callables()
        yield from self._beside

    @cached_property
    def _beside(self) -> tuple[str, ...]:
        """The unknown callables in what torch does not read: other members, and ends of members."""
        found = list(self.session.callables_beside(self.records()))
        for name, rest in self._unread:
            found += self.session.callables_in(rest, f"the member {name!r}")
        return tuple(found)

    def _window(self, member: TarMember, _no_devices: bool) -> Readable:
        return self.source.window(member.start, member.nbytes)

    def content(self, storage: str) -> bytes:
        extent = self._extents[storage.removeprefix(self.folder)]
        return self.source.read(extent.start, extent.nbytes)

    def frame(self, spelling: LocationEdits | None = None) -> object:
        """The names of the members, and the storages and tensors by number."""
        parts = {n: (each.key, each.view_at, each.nbytes) for n, each in self._storages.items()}
        tensors = {n: (each.storage.key, *each[1:]) for n, each in self._tensors.items()}
        return list(self.members), parts, tensors


def _items(node: Node, count: int) -> Items:
    """The items of a tuple that must have `count` of them."""
    if not isinstance(node, Tuple) or len(node.items) != count:
        raise CorruptError("a table of the tar is malformed")
    return node.items


def _size(node: Node) -> int:
    if not isinstance(node, int) or not is_size(node):
        raise CorruptError("a number in a table of the tar is not an integer")
    return node


def _dtype(cls: Node, kind: str) -> str:
    """The dtype of a class, e.g. `torch.FloatStorage` or `torch.cuda.FloatTensor`."""
    if not isinstance(cls, Global) or cls.module not in ("torch", "torch.cuda"):
        raise CorruptError("a type in a table of the tar is not a class")
    dtype = STORAGE_CLASSES.get(cls.name.removesuffix(kind) + "Storage")
    if dtype is None or not cls.name.endswith(kind):
        raise UnsupportedError(f"the type {cls.qualname} is not known")
    return dtype
