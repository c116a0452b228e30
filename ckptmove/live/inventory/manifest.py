"""Make the manifest of a model in memory: one entry for each tensor, and for each tensor's parts.

Nothing is copied, no value is read, and the manifest keeps no tensor alive.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses import FakeTensor

from ...manifest.dtypes import BITS, nbytes_of
from ...manifest.manifest import MOST_SHARED, Manifest, Role, Section, Storage, TensorEntry
from ...manifest.other_records import NamedDevice
from ...manifest.paths import Path, spell
from ...reports.live import LiveManifest
from .findings import warnings_of
from .holdings import COMPILED, REGISTERED, HeldTensor, Holdings, Naming, Ownership
from .offloaded import OffloadedData, Offloads

FORMAT = "live model"
#: Classes that wrap a model → the name of the attribute with the model.
_WRAPPERS = {
    "AveragedModel": "module",
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": COMPILED,
}
_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def report_of(found: Holdings, model: nn.Module) -> LiveManifest:
    """The manifest of a model in the form that `ckptmove.report` returns."""
    listing = _Listing(found)
    manifest = _manifest(listing, found, model, warn=True)
    return replace(LiveManifest.of(manifest), inputs=_inputs(listing.offloads, found, manifest))


def manifest_of(found: Holdings, model: nn.Module, *, warn: bool = True) -> Manifest:
    """The manifest of the found tensors, in the order of `found.all`; parts follow their whole."""
    return _manifest(_Listing(found), found, model, warn=warn)


def _manifest(listing: _Listing, found: Holdings, model: nn.Module, *, warn: bool) -> Manifest:
    wholes = [listing.add(holding) for holding in found.all]
    capturable = (
        spell(path)
        for path, each in found.optimizers.items()
        if any(group.get("capturable") for group in each.param_groups)
    )
    return Manifest(
        path=type(model).__name__,
        format=FORMAT,
        nbytes=sum(each.nbytes for each in listing.storages.values()),
        tensors=listing.tensors(),
        storages=listing.storages,
        values_naming_devices=tuple(
            NamedDevice(
                each.path,
                spell(each.path),
                str(each.value),
                "str" if isinstance(each.value, str) else "torch.device",
            )
            for each in found.naming
            if not _follows(each)
        ),
        aliases=tuple(found.aliases),
        capturable=tuple(capturable),
        meshes=tuple(listing.meshes.values()),
        warnings=tuple(warnings_of(found, wholes, listing.offloads)) if warn else (),
    )


def _follows(naming: Naming) -> bool:
    """Whether the module's own class updates the attribute when it moves."""
    ways = ("_apply", "to")
    owners = [k for k in type(naming.module).__mro__ if not k.__module__.startswith("torch.")]
    own = [vars(kind)[way] for kind in owners for way in ways if way in vars(kind)]
    code = [getattr(each, "__code__", None) for each in own]
    said = any(naming.attribute in each.co_names for each in code if each is not None)
    return said or (bool(own) and naming.attribute == "_device")  # torchmetrics, Lightning


def _inputs(offloads: Offloads, found: Holdings, manifest: Manifest) -> str:
    """A sentence about the device for a model's inputs; "" if it has no parameters."""
    first = next((each for each in found.all if each.held is Ownership.PARAMETER), None)
    if first is None:
        return ""
    where = first.module or "the model itself"
    where = f"{where}, the first module with parameters"
    brought = offloads.runs_on(first.path[:-1])
    if brought is not None:
        return f"inputs go to {brought} ({where}); accelerate moves them there"
    entry = next(each for each in manifest.tensors if each.held == Ownership.PARAMETER)
    return f"inputs go to {entry.device} ({where})"


class _Storing(NamedTuple):
    """The storage of a tensor's bytes."""

    key: Hashable  #: the same for all tensors that share the bytes
    nbytes: int | None  #: their number; None if the manifest has no storage for them
    location: str


class _Listing:
    def __init__(self, found: Holdings) -> None:
        self.offloads = Offloads(found.modules)
        self.storages: dict[str, Storage] = {}
        self.meshes: dict[Hashable, str] = {}
        self._roots = set(found.roots) - {()}
        self._wrapped = {
            (*path, inner)
            for path, module in found.modules.items()
            if (inner := _WRAPPERS.get(type(module).__name__)) is not None
        }
        self._entries: list[TensorEntry] = []
        self._keys: list[Hashable] = []  # the key of each entry's storage
        self._ids: dict[Hashable, str] = {}
        self._kept: list[object] = []  # keeps the keys of storages unique

    def add(self, holding: HeldTensor) -> TensorEntry:
        """List a tensor and its parts; returns the entry of the whole tensor."""
        start = len(self._entries)
        wholes: list[int | None] = []
        todo: list[tuple[Path, torch.Tensor, int | None, Role | None]]
        todo = [(holding.path, holding.tensor, None, holding.role)]
        while todo:
            path, tensor, whole, role = todo.pop()
            parts = list(_parts(tensor))
            n = len(self._entries)
            self._list(holding, path, tensor, whole, role, bool(parts))
            wholes.append(whole)
            todo += [((*path, key), part, n, own or role) for key, part, own in reversed(parts)]
        for n in range(len(self._entries) - 1, start, -1):
            self._count(wholes[n - start], self._entries[n])
        return self._entries[start]

    def tensors(self) -> tuple[TensorEntry, ...]:
        names: dict[Hashable, list[str]] = {}
        for entry, key in zip(self._entries, self._keys, strict=True):
            names.setdefault(key, []).append(entry.name)
        found = []
        for entry, key in zip(self._entries, self._keys, strict=True):
            sharing = [] if key is None else names[key][: MOST_SHARED + 1]
            others = tuple(name for name in sharing if name != entry.name)[:MOST_SHARED]
            found.append(entry._replace(shared_with=others) if others else entry)
        return tuple(found)

    def _list(
        self,
        holding: HeldTensor,
        path: Path,
        tensor: torch.Tensor,
        whole: int | None,
        role: Role | None,
        is_composite: bool,
    ) -> None:
        wraps = hasattr(tensor, "__tensor_flatten__")
        mesh = getattr(tensor, "device_mesh", None) if wraps else None
        if mesh is not None:
            self.meshes[mesh] = str(mesh.device_type)
        lazy = nn.parameter.is_lazy(tensor)
        shape, stride, offset = ((), (), 0) if lazy else _laid(tensor)
        dtype = str(tensor.dtype).removeprefix("torch.")
        own = is_composite and not tensor.is_quantized
        nbytes = 0 if own or lazy else _nbytes(tensor, dtype)
        storing = None if own or lazy else self._storing(holding, path, tensor, nbytes)
        device = storing.location if storing is not None else tag_of(tensor.device)
        is_hollow = not own and not lazy and device != "meta" and _is_hollow(tensor)
        self._keys.append(None if storing is None else storing.key)
        self._entries.append(
            TensorEntry(
                path=path,
                name=spell(path),
                section=holding.section,
                kind=_kind(tensor),
                layout=_layout(tensor),
                dtype=dtype,
                shape=shape,
                stride=stride,
                offset=offset,
                device=device,
                nbytes=nbytes,
                storage=None if storing is None else self._store(storing, dtype),
                requires_grad=tensor.requires_grad,
                state_key=self._state_key(holding),
                part_of=None if whole is None else self._entries[whole].name,
                role=role,
                says_device=(wraps and tensor.layout is not torch.jagged) or is_hollow,
                held=str(holding.held),
            )
        )

    def _count(self, whole: int | None, part: TensorEntry) -> None:
        """Add the bytes of a part to its whole, unless the whole has its own storage."""
        if whole is None or part.role is Role.SHAPE:
            return
        entry = self._entries[whole]
        if entry.storage is None:
            self._entries[whole] = entry._replace(nbytes=entry.nbytes + part.nbytes)

    def _state_key(self, holding: HeldTensor) -> str | None:
        path = holding.owner
        if path is None:
            path = holding.path if holding.section is Section.MODEL else None
        if path is None:
            return None
        keys = path
        if self._wrapped:  # a device map uses the names inside wrappers
            keys = tuple(k for n, k in enumerate(path, 1) if path[:n] not in self._wrapped)
        return spell(keys[1:] if path[:1] in self._roots else keys)

    # -- storages ------------------------------------------------------------------------------

    def _storing(
        self, holding: HeldTensor, path: Path, tensor: torch.Tensor, nbytes: int
    ) -> _Storing:
        device = tag_of(tensor.device)
        if device == "meta":
            registered = holding.held in REGISTERED and path == holding.path
            found = self.offloads.of(path) if registered else None
            if found is not None:
                return self._offloaded(found, nbytes)
        try:
            storage = tensor.untyped_storage()
        except RuntimeError:  # mkldnn, and devices without storages
            self._kept.append(tensor)
            return _Storing(("tensor", id(tensor)), nbytes, device)
        self._kept.append(storage)
        without = device == "meta" or _is_hollow(tensor)
        size = None if without else _number(storage.nbytes(), 0)
        return _Storing(storage._cdata, size, device)

    def _offloaded(self, found: OffloadedData, nbytes: int) -> _Storing:
        if found.tensor is None:
            return _Storing(found.place, nbytes, found.device)
        storage = found.tensor.untyped_storage()
        self._kept.append(storage)
        return _Storing(storage._cdata, storage.nbytes(), found.device)

    def _store(self, storing: _Storing, dtype: str) -> str | None:
        if storing.nbytes is None:
            return None
        if storing.key not in self._ids:
            name = f"s{len(self._ids)}"
            self._ids[storing.key] = name
            self.storages[name] = Storage(name, storing.location, storing.nbytes, dtype, None)
        return self._ids[storing.key]


def tag_of(device: torch.device) -> str:
    """The device tag of storages: `mps` has no index."""
    return device.type if device.type in ("cpu", "meta", "mps") else str(device)


# -- tensors ---------------------------------------------------------------------------------------


def _kind(tensor: torch.Tensor) -> str:
    kind = type(tensor)
    plain = kind in (torch.Tensor, nn.Parameter) or tensor.layout is torch.jagged
    if plain or isinstance(tensor, FakeTensor):
        return "parameter" if isinstance(tensor, nn.Parameter) else "tensor"
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_hollow(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a wrapper with unknown parts: its own storage has no bytes."""
    if type(tensor) in (torch.Tensor, nn.Parameter) or isinstance(tensor, FakeTensor):
        return False
    dispatches = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if not dispatches or not tensor.numel():
        return False
    try:
        return tensor.untyped_storage().data_ptr() == 0
    except RuntimeError:  # it has no data pointer
        return True


def _layout(tensor: torch.Tensor) -> str:
    if tensor.is_nested and tensor.layout is torch.strided:
        return "nested"
    return str(tensor.layout).removeprefix("torch.")


def _laid(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """The shape, stride and offset of a tensor, as far as it has them."""
    if tensor.is_nested and tensor.layout is torch.strided:
        return (tensor.size(0), *[-1] * (tensor.dim() - 1)), (), 0
    shape = tuple(_number(n, -1) for n in tensor.shape)
    if tensor.layout is not torch.strided:
        return shape, (), 0
    stride = tuple(_number(n, -1) for n in tensor.stride())
    return shape, stride, _number(tensor.storage_offset(), 0)


def _number(value: Any, unknown: int) -> int:
    """A size as a number; `unknown` if it is symbolic, as in fake and nested tensors."""
    return value if isinstance(value, int) else unknown


def _nbytes(tensor: torch.Tensor, dtype: str) -> int:
    elements = _number(tensor.numel(), 0)
    return nbytes_of(elements, dtype) if dtype in BITS else elements * tensor.element_size()


def _parts(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, Role | None]]:
    """The parts of a composite tensor, with the names that files use."""
    if nn.parameter.is_lazy(tensor):
        return
    if hasattr(tensor, "__tensor_flatten__"):
        is_jagged = tensor.layout is torch.jagged
        for name in tensor.__tensor_flatten__()[0]:
            part = getattr(tensor, name)
            if isinstance(part, torch.Tensor):
                role = Role.SHAPE if is_jagged and "seqlen" in name else None
                yield name.lstrip("_") if is_jagged else name, part, role
    elif tensor.layout is torch.sparse_coo:
        yield "indices", tensor._indices(), None
        yield "values", tensor._values(), None
    elif tensor.layout in _COMPRESSED:
        for name in (*_COMPRESSED[tensor.layout], "values"):
            yield name, getattr(tensor, name)(), None
    elif tensor.is_nested:
        yield "values", tensor.values(), None
        yield "sizes", tensor._nested_tensor_size(), Role.SHAPE
        yield "strides", tensor._nested_tensor_strides(), Role.SHAPE
        yield "offsets", tensor._nested_tensor_storage_offsets(), Role.SHAPE
    elif tensor.is_quantized and "per_channel" in str(tensor.qscheme()):
        yield "scales", tensor.q_per_channel_scales(), None
        yield "zero_points", tensor.q_per_channel_zero_points(), None
