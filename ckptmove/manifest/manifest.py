"""The manifest: what a checkpoint or a model in memory holds, in any format.

All sizes and offsets are bytes, except `TensorEntry.offset` and `stride`, which count elements as
in torch. A path is the tuple of real keys that leads to a value (numbers of more than 60 bits, and
keys that are not scalars, as text); a name is its dotted spelling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from fnmatch import fnmatchcase
from functools import cached_property
from operator import add, attrgetter
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeVar

from ..display.phrases import join_names, plural
from ..display.plain import OMITTED, Key, derived_key
from ..display.report import Report
from ..errors import CheckFailed
from ..pickles.nodes import Node
from ..sources.source import FetchStats
from .device import kind_of, parse
from .folder_files import MISSING, FileShare, FolderFile
from .other_records import Alias, Chunk, NamedDevice, OtherRecord
from .paths import Path, PlainPath

#: Most names in `shared_with`: without a limit, a checkpoint of slices would make it quadratic.
MOST_SHARED = 16
_MOST_NAMED = 5  # of tensors on a wrong device

if TYPE_CHECKING:
    from typing_extensions import Self

Group = TypeVar("Group", str, tuple[str, ...])

#: The device of tensors that are stored without one.
NOT_STORED = "not stored"


class Section(str, Enum):
    """The part of a checkpoint that a tensor belongs to, found by its contents."""

    MODEL = "model"
    EMA = "ema"
    OPTIMIZER = "optimizer"
    SCHEDULER = "scheduler"
    RNG = "rng"
    OTHER = "other"

    __str__ = str.__str__


class Role(str, Enum):
    """What a tensor is used for, where its library has a rule for the device of such tensors."""

    STEP = "optimizer step"
    HYPERPARAMETER = "optimizer hyper-parameter"
    SCORE = "initial score"
    RNG_STATE = "RNG state"
    RANK_MAP = "mesh rank map"
    SHAPE = "nested tensor shape"
    LENGTHS = "packed sequence length"
    ARRAY = "numpy array"
    UNTAGGED = "device not stored"  # of a file that stores no devices, such as safetensors

    __str__ = str.__str__


class Extent(NamedTuple):
    """A half-open byte range; `source` is the number of the source file, if there are several."""

    start: int
    nbytes: int
    source: int = 0

    @property
    def end(self) -> int:
        """The offset after the last byte."""
        return self.start + self.nbytes


class Storage(NamedTuple):
    """Untyped bytes that tensors share.

    Attributes:
        id: its name within the checkpoint, for example `data/0`.
        location: the device tag that torch saved with it.
        nbytes: its size.
        dtype: the element type it was saved with, or None for an untyped storage.
        extent: where its bytes are in the file; None for bytes kept as text, and for numpy arrays.
    """

    id: str
    location: str
    nbytes: int
    dtype: str | None
    extent: Extent | None


class TensorEntry(NamedTuple):  # there may be very many, and a dataclass is slower to make
    """One tensor under one path.

    Attributes:
        name, path: where it is. In a module that was saved whole, the name is the one in its state
            dict, or the name of the attribute.
        section: the part of the checkpoint it belongs to.
        kind: `tensor`, `parameter`, `storage`, or a qualified name: `numpy.ndarray`, a subclass.
        layout: `strided`, `sparse_coo`, `sparse_csr` …, `nested`.
        dtype: torch's name of the element type.
        shape: the size of each dimension; -1 where it differs along the batch of a nested tensor.
        stride: in elements; empty if the layout has none.
        offset: of its first element in the storage, in elements.
        device: the device it will be loaded on.
        nbytes: of its elements, without gaps; for a composite tensor, the sum of its parts.
        storage: the id of its storage, or None for a composite or meta tensor.
        shared_with: up to 16 other names of tensors on the same storage.
        requires_grad: as saved.
        state_key: its name in the model's state dict, or None outside of one. For gradients and
            optimizer state of a model in memory: the name of their parameter.
        part_of: the name of the composite tensor (sparse, quantized, subclass) it is a part of.
        role: set if torch has its own rule for its device, and for a numpy array.
        says_device: whether it stores a device itself, in addition to that of its storage: wrapper
            subclasses, and tensors that are saved through the CPU.
        held: how a model in memory holds it: `parameter`, `buffer`, `optimizer state`, …
        beside: whether a module that was saved whole holds it outside its state dict: a
            non-persistent buffer, an attribute, …
    """

    name: str
    path: PlainPath
    section: Section
    kind: str
    layout: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    device: str
    nbytes: int
    storage: str | None
    requires_grad: bool
    state_key: Annotated[str | None, OMITTED] = None
    part_of: str | None = None
    role: Role | None = None
    shared_with: Annotated[tuple[str, ...], Key(after="storage")] = ()
    says_device: Annotated[bool, OMITTED] = False
    held: str | None = None
    beside: Annotated[bool, OMITTED] = False


class Total(NamedTuple):
    """The total of a group of tensors; `nbytes` counts each storage once."""

    tensors: int = 0
    storages: int = 0
    nbytes: int = 0


@dataclass(frozen=True, repr=False, kw_only=True)
class Manifest(Report):
    """Everything that is known about a checkpoint, or a model in memory, without reading a tensor.

    Attributes:
        path: the file; for a model in memory, the name of its class.
        format: the name of its format, or `live model`.
        writer: what is known about the program that wrote it, for example `torch 1.6 to 2.0`; may
            be empty.
        nbytes: its size; for a model in memory, the size of its storages, each counted once.
        tensors: every tensor under every path, in the order of the checkpoint.
        storages: by id.
        objects: how many objects of each kind there are, except tensors and plain containers.
        values_naming_devices: your own values that name a device.
        records: records of the file that hold neither its object nor its tensors.
        metadata: the metadata of safetensors, text by key.
        divisions: how a distributed checkpoint divides its tensors into chunks, by their names:
            `rows/4`, `2×2`, `one copy, rank 2`.
        mesh_shapes: the meshes of devices that have these chunks, where known: `2×4 (dp, tp)`.
        tags: the devices that files of ranks state for tensors merged from several files, by name.
        chunks: those chunks, with their place in the tensor and their file, if requested.
        aliases: containers that are listed before under another path.
        globals: every name that unpickling would import.
        unknown_callables: the names among these that neither belong to torch nor are known to be
            harmless. For safetensors: the names in its tree, which a pickle made from it would
            import.
        unknown_makers: those of them that loading calls with a tensor or a device.
        capturable: names of optimizers that have a group with `capturable=True`.
        meshes: the device type of each device mesh.
        remotes: the devices that sharded tensors name for their shards, on any machine.
        files: what each file is, if the checkpoint is a folder with several parts.
        file_shares: each file's share of the tensors, if there are several.
        lies_in: then, for each tensor by name, its file or the number of its files.
        warnings: what is unusual about the file, one sentence each.
        fetched: how much was fetched for this manifest, if the file is in an object store.
        tree: the root of the saved object, as inert nodes (`ckptmove.pickles.nodes`).
        nested: objects that are saved in bytes within it: from `id()` of the node of these bytes to
            paths from there, and nodes.
    """

    path: str
    format: str
    writer: str = ""
    nbytes: int
    tensors: tuple[TensorEntry, ...]
    storages: Annotated[Mapping[str, Storage], OMITTED]
    objects: Mapping[str, int] = field(default_factory=dict)
    values_naming_devices: tuple[NamedDevice, ...] = ()
    records: tuple[OtherRecord, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    divisions: Mapping[str, str] = field(default_factory=dict)
    mesh_shapes: tuple[str, ...] = ()
    tags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    chunks: tuple[Chunk, ...] = ()
    aliases: tuple[Alias, ...] = ()
    globals: tuple[str, ...] = ()
    unknown_callables: tuple[str, ...] = ()
    unknown_makers: Annotated[tuple[str, ...], OMITTED] = ()
    capturable: Annotated[tuple[str, ...], OMITTED] = ()
    meshes: Annotated[tuple[str, ...], OMITTED] = ()
    remotes: Annotated[tuple[str, ...], OMITTED] = ()
    files: tuple[FolderFile, ...] = ()
    file_shares: tuple[FileShare, ...] = ()
    lies_in: Annotated[Mapping[str, str], OMITTED] = field(default_factory=dict, repr=False)
    warnings: tuple[str, ...] = ()
    fetched: Annotated[FetchStats | None, Key(shown=attrgetter("fetched"))] = field(
        default=None, compare=False
    )
    tree: Annotated[Node, OMITTED] = field(default=None, repr=False, compare=False)
    nested: Annotated[Mapping[int, Sequence[tuple[Path, Node]]], OMITTED] = field(
        default_factory=dict, repr=False, compare=False
    )

    def __repr__(self) -> str:
        return f"<Manifest of {self.path!r}: {len(self.tensors):,} tensors, {self.verdict}>"

    def select(self, patterns: str | Iterable[str]) -> Self:
        """Return the manifest with only the tensors whose name or section matches a glob."""
        globs = (patterns,) if isinstance(patterns, str) else tuple(patterns)

        def chosen(name: str) -> bool:
            return any(fnmatchcase(name, glob) for glob in globs)

        tensors = tuple(e for e in self.tensors if chosen(e.name) or str(e.section) in globs)
        used, names = {entry.storage for entry in tensors}, {entry.name for entry in tensors}
        return replace(
            self,
            tensors=tensors,
            storages={key: each for key, each in self.storages.items() if key in used},
            values_naming_devices=tuple(v for v in self.values_naming_devices if chosen(v.name)),
            chunks=tuple(each for each in self.chunks if each.name in names),
        )

    # -- totals --------------------------------------------------------------------------------

    def device_of(self, entry: TensorEntry) -> str:
        """Return the device that the file states for a tensor, or `NOT_STORED`."""
        return NOT_STORED if self.is_untagged(entry) else entry.device

    def is_untagged(self, entry: TensorEntry) -> bool:
        """Whether a tensor's file stores no devices, as safetensors and DCP."""
        return entry.role is Role.UNTAGGED or entry.name in self.divisions

    @derived_key(after="tensors")
    def devices(self) -> dict[str, Total]:
        """Totals by device, the largest first; `NOT_STORED` for tensors stored without a device."""
        return self.totals(self.device_of, lambda storage: storage.location)

    @derived_key(after="tensors")
    def sections(self) -> dict[str, Total]:
        """Totals by section; a storage counts for the first section that holds it."""
        return self.totals(lambda entry: str(entry.section))

    @derived_key(after="tensors")
    def dtypes(self) -> dict[str, Total]:
        """Totals by dtype; a storage counts for the first dtype that looks at it."""
        return self.totals(lambda entry: entry.dtype)

    def totals(
        self,
        by: Callable[[TensorEntry], Group],
        orphans: Callable[[Storage], Group] | None = None,
    ) -> dict[Group, Total]:
        """Return totals of groups of tensors (`by`), largest first; each storage is counted once.

        A tensor without a storage counts for its own bytes, unless they are those of its parts or
        it is on meta. `by` may use what `_kinds` divides by.
        `orphans` gives the group of storages that no tensor uses; without it they are left out.
        """
        groups: dict[Group, Total] = {}
        found = [(by(entry), total) for entry, _, total in self._kinds]
        if orphans is not None:
            used = {entry.storage for entry in self.tensors}
            rest = (each for key, each in self.storages.items() if key not in used)
            found += [(orphans(each), Total(0, 1, each.nbytes)) for each in rest]
        for group, total in found:
            groups[group] = Total(*map(add, groups.get(group, Total()), total))
        return dict(sorted(groups.items(), key=lambda item: (-item[1].nbytes, item[0])))

    @cached_property
    def _kinds(self) -> list[tuple[TensorEntry, int, Total]]:
        """By section, dtype, device, `held`, role and division: a tensor, their number, total."""
        kinds: dict[object, tuple[TensorEntry, list[int]]] = {}
        seen: set[str | None] = {None}
        wholes = {entry.part_of for entry in self.tensors}
        for entry in self.tensors:
            divided, storage = entry.name in self.divisions, entry.storage
            label = entry.section, entry.dtype, entry.device, entry.held, entry.role, divided
            if label not in kinds:
                kinds[label] = entry, [0, 0, 0, 0]
            counts = kinds[label][1]
            counts[0] += 1
            counts[1] += entry.part_of is None
            if storage not in seen:
                seen.add(storage)
                counts[2] += 1
                counts[3] += self.storages[storage].nbytes  # type: ignore[index] # it is not None
            elif storage is None and entry.device != "meta" and entry.name not in wholes:
                counts[3] += entry.nbytes
        return [(entry, count, Total(*total)) for entry, (count, *total) in kinds.values()]

    # -- judgement -----------------------------------------------------------------------------

    @derived_key(after="nbytes")
    def verdict(self) -> str:
        """One line: `uniform cuda:0`, or `mixed: cuda:0 98.7 %, cpu 1.3 % (2 optimizer steps)`.

        Objects made by unknown callables are not counted, and it says so.
        """
        said = self._where_tensors_are()
        makers = plural(len(self.unknown_makers), "unknown callable")
        return f"{said}; apart from what {makers} may make" if self.unknown_makers else said

    def _where_tensors_are(self) -> str:
        """Describe the devices of the listed tensors.

        `stores no devices` if all files are such as safetensors; `merged of files tagged cuda:0,
        cuda:1` if tensors are merged from files of ranks.
        """
        devices = self.devices
        if not devices:
            return "no tensors"
        tags = list(dict.fromkeys(tag for each in self.tags.values() for tag in each))
        merged = f"merged of files tagged {join_names(tags, _MOST_NAMED)}" if tags else ""
        said = [device for device in devices if device != NOT_STORED]
        by_role = any(entry.role is Role.UNTAGGED for entry, _, _ in self._kinds)
        if not said or (self.divisions and said == ["cpu"] and not by_role):
            return merged or "stores no devices"
        if len(said) == 1:
            without = devices.get(NOT_STORED)
            if without is None:
                return f"uniform {said[0]}"
            count = plural(without.tensors, "tensor")
            return f"uniform {said[0]}; {count} {merged or 'stored without one'}"
        whole = sum(total.nbytes for total in devices.values())
        shares = [
            f"{device} {_percent(total.nbytes, whole)}{self._explain_device(device)}"
            for device, total in devices.items()
        ]
        return "mixed: " + ", ".join(shares) + (f"; {merged}" if merged else "")

    def _explain_device(self, device: str) -> str:
        """Return the common roles of tensors on a device, or a note that they have no values."""
        if device == "meta" and not self.devices[device].nbytes:
            return f" ({plural(self.devices[device].tensors, 'tensor')} without values)"
        roles = self._roles.get(device, {})
        if None in roles or device == NOT_STORED:
            return ""
        said = [plural(n, str(role)) for role, n in roles.items()]
        return f" ({', '.join(said)})" if said else ""

    @cached_property
    def _roles(self) -> dict[str, dict[Role | None, int]]:
        roles: dict[str, dict[Role | None, int]] = {}
        for entry, count, _ in self._kinds:
            counts = roles.setdefault(self.device_of(entry), {})
            counts[entry.role] = counts.get(entry.role, 0) + count
        return roles

    def elsewhere(self, device: str) -> tuple[TensorEntry, ...]:
        """Return the tensors that are not on `device`, except those that belong on the CPU.

        RNG states and optimizer steps of a checkpoint for `cuda:0` are on the CPU, as torch keeps
        them. Tensors stored without a device, as in safetensors, can be loaded anywhere, unless
        they are merged from files that state other devices. `cuda` matches each index.
        """
        wanted = parse(device)

        def is_there(said: str, role: Role | None) -> bool:
            return wanted in (said, kind_of(said)) or (role is not None and said == "cpu")

        return tuple(
            entry
            for entry in self.tensors
            if not all(is_there(said, entry.role) for said in self._said_of(entry))
        )

    def _said_of(self, entry: TensorEntry) -> tuple[str, ...]:
        """Return the devices that are stated for a tensor."""
        return self.tags.get(entry.name) or (entry.device,) * (not self.is_untagged(entry))

    def require(self, device: str) -> None:
        """Raise CheckFailed unless everything is on `device`, as `elsewhere` counts it.

        Also if there are no tensors, or a file of the folder is missing or could not be read.
        DeviceError if the name of the device is not valid.
        """
        elsewhere = self.elsewhere(device)
        absent = [each.name for each in self.files if each.not_read == MISSING]
        unread = [each.name for each in self.files if each.not_read not in (None, MISSING)]
        if absent or unread:
            lists = (("missing", absent), ("not read", unread))
            why = [f"{what}: {join_names(names, _MOST_NAMED)}" for what, names in lists if names]
            raise CheckFailed("; ".join(why), path=self.path)
        if elsewhere:
            said = ((e.name, join_names(self._said_of(e), _MOST_NAMED)) for e in elsewhere)
            told = join_names([f"{name!r} is on {where}" for name, where in said], _MOST_NAMED)
            raise CheckFailed(f"not on {device}: {told}", path=self.path)
        if self.unknown_makers:
            names = join_names(self.unknown_makers, _MOST_NAMED)
            told = "nobody knows what unknown callables make of tensors and devices"
            raise CheckFailed(f"perhaps not on {device}: {told}: {names}", path=self.path)
        if not self.tensors:
            raise CheckFailed(f"not on {device}: there are no tensors", path=self.path)
        if kind_of(device) != "cpu" and all(e.role is Role.ARRAY for e in self.tensors):
            told = "there are numpy arrays alone, which have no device"
            raise CheckFailed(f"not on {device}: {told}", path=self.path)
        wanted, used = parse(device), {entry.storage for entry in self.tensors}
        for key, storage in self.storages.items():
            if key not in used and wanted not in (storage.location, kind_of(storage.location)):
                told = f"the storage {key!r}, which no tensor uses, is on {storage.location}"
                raise CheckFailed(f"not on {device}: {told}", path=self.path)


def _percent(part: int, whole: int) -> str:
    share = 100 * part / whole if whole else 0.0
    if 0 < share < 0.1:
        return "<0.1 %"
    return f"{min(share, 99.9) if part < whole else share:.1f} %"
