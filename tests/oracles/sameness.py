"""Compare two trees by bytes, types, order, and what they share.

NaNs equal themselves, -0.0 is not 0.0, and two names of one storage must be two names of one
storage on the other side.
"""

from __future__ import annotations

import copyreg
import enum
import struct
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container
from typing import Any

import torch

# Equal where == says so; of these no copy is told from another.
ATOMS = (
    *(str, bytes, int, type(None), type(...), type, enum.Enum),
    *(types.FunctionType, types.BuiltinFunctionType),
    *(torch.dtype, torch.layout, torch.device, torch.memory_format, torch.Size, torch.qscheme),
)


def assert_same_tree(ours: object, theirs: object, *, skip: Container[str] = ()) -> None:
    """Fail with the path of the first difference; skip the nodes named in `skip`."""
    _Comparison(skip).nodes(ours, theirs, "")


def assert_shows_the_same(ours: object, theirs: object) -> None:
    """Like `assert_same_tree`, but storages may be split and views gathered.

    Tensors have the same elements, possibly dense; tensors whose bytes overlap still do, at the
    same distance; others share nothing new.
    """
    comparison = _ComparisonOfShown(())
    comparison.nodes(ours, theirs, "")
    comparison.sharing()


class _Comparison:
    """A walk down two trees at once that remembers the pairs it met."""

    def __init__(self, skip: Container[str]) -> None:
        self._skip = skip
        self._partners: dict[int, tuple[object, object]] = {}  # holds both: no id is used again
        self._taken: set[int] = set()
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._storages_taken: set[int] = set()

    def nodes(self, ours: object, theirs: object, at: str) -> None:
        if at in self._skip:
            return
        _check(type(ours) is type(theirs), at, "type", type(ours), type(theirs))
        if isinstance(ours, torch.SymInt):
            return  # a jagged size, numbered anew by each load
        if isinstance(ours, (float, complex)):
            _check(_bits(ours) == _bits(theirs), at, "value", ours, theirs)
        elif isinstance(ours, ATOMS):
            _check(ours == theirs, at, "value", ours, theirs)
        elif not self._met(ours, theirs, at):
            self._rule(ours)(ours, theirs, at)

    def _met(self, ours: object, theirs: object, at: str) -> bool:
        """True where this pair was compared before; fails where either had another partner."""
        if type(ours) is tuple and not ours:
            return ours == theirs  # there is only one empty tuple
        known = self._partners.get(id(ours))
        if known is not None:
            _check(known[1] is theirs, at, "aliasing", ours, theirs)
            return True
        _check(id(theirs) not in self._taken, at, "aliasing", ours, theirs)
        self._partners[id(ours)] = (ours, theirs)
        self._taken.add(id(theirs))
        return False

    def _rule(self, node: object) -> Callable[..., None]:
        if isinstance(node, torch.Tensor):
            return self._tensors
        if isinstance(node, (torch.UntypedStorage, torch.TypedStorage)):
            return self._bare_storages
        if isinstance(node, (set, frozenset)):
            return self._sets
        if isinstance(node, (OrderedDict, defaultdict)):
            return self._dict_objects
        exact: dict[type, Callable[..., None]] = {
            dict: self._dicts,
            list: self._sequences,
            tuple: self._sequences,
            bytearray: self._atoms,
        }
        return exact.get(type(node), self._objects)

    def _atoms(self, ours: object, theirs: object, at: str) -> None:
        _check(ours == theirs, at, "value", ours, theirs)

    def _sets(self, ours: set[object], theirs: set[object], at: str) -> None:
        both = sorted(map(repr, ours)), sorted(map(repr, theirs))
        _check(both[0] == both[1], at, "elements", *both)

    def _dicts(self, ours: dict[object, object], theirs: dict[object, object], at: str) -> None:
        _check(len(ours) == len(theirs), at, "keys", list(ours), list(theirs))
        for our_key, their_key in zip(ours, theirs, strict=True):
            self.nodes(our_key, their_key, f"{at} key {our_key!r:.80}")
            self.nodes(ours[our_key], theirs[their_key], _under(at, our_key))

    def _dict_objects(self, ours: Any, theirs: Any, at: str) -> None:
        """A dict that has attributes, too."""
        self.nodes(_reduced(ours)[:3], _reduced(theirs)[:3], at)
        self._dicts(ours, theirs, at)

    def _sequences(self, ours: list[object], theirs: list[object], at: str) -> None:
        _check(len(ours) == len(theirs), at, "length", len(ours), len(theirs))
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            self.nodes(*pair, _under(at, index))

    def _objects(self, ours: object, theirs: object, at: str) -> None:
        """Any other object, by its `__reduce_ex__`."""
        said, heard = _reduced(ours), _reduced(theirs)
        _check(len(said) == len(heard), at, "kind of state", said, heard)
        for pair in zip(said, heard, strict=True):
            self.nodes(*pair, at)

    def _tensors(self, ours: torch.Tensor, theirs: torch.Tensor, at: str) -> None:
        self._facts(ours, theirs, at)
        for part, ours_of_it, theirs_of_it in zip(*_parts(ours), _parts(theirs)[1], strict=True):
            self.nodes(ours_of_it, theirs_of_it, f"{at}.{part}")
        state = torch._utils._get_obj_state
        self.nodes(state(ours), state(theirs), at)  # type: ignore[no-untyped-call]
        if _has_own_storage(ours):
            self._own_storage(ours, theirs, at)

    def _facts(self, ours: torch.Tensor, theirs: torch.Tensor, at: str) -> None:
        for fact, look in FACTS.items():
            _check(look(ours) == look(theirs), at, fact, look(ours), look(theirs))

    def _own_storage(self, ours: torch.Tensor, theirs: torch.Tensor, at: str) -> None:
        self._storage(ours.untyped_storage(), theirs.untyped_storage(), at)

    def _bare_storages(
        self, ours: torch.UntypedStorage, theirs: torch.UntypedStorage, at: str
    ) -> None:
        if isinstance(ours, torch.TypedStorage) and isinstance(theirs, torch.TypedStorage):
            _check(ours.dtype == theirs.dtype, at, "dtype", ours.dtype, theirs.dtype)
            ours, theirs = ours._untyped_storage, theirs._untyped_storage
        self._storage(ours, theirs, at)

    def _storage(self, ours: torch.UntypedStorage, theirs: torch.UntypedStorage, at: str) -> None:
        if ours.nbytes() == 0:  # each mode of torch.load shares these as it likes
            return _check(theirs.nbytes() == 0, at, "nbytes", 0, theirs.nbytes())
        known = self._storages.get(ours._cdata)
        if known is not None:
            shared = known[1]._cdata == theirs._cdata
            return _check(shared, at, "storage sharing", ours._cdata, theirs._cdata)
        _check(theirs._cdata not in self._storages_taken, at, "storage sharing", "own", "shared")
        self._storages[ours._cdata] = (ours, theirs)
        self._storages_taken.add(theirs._cdata)
        _check(ours.nbytes() == theirs.nbytes(), at, "nbytes", ours.nbytes(), theirs.nbytes())
        return _check(torch.equal(_raw(ours), _raw(theirs)), at, "bytes", ours, theirs)


class _ComparisonOfShown(_Comparison):
    """Compares the elements that tensors show, not their whole storages."""

    def __init__(self, skip: Container[str]) -> None:
        super().__init__(skip)
        self._seen: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def _facts(self, ours: torch.Tensor, theirs: torch.Tensor, at: str) -> None:
        skip = ("stride", "offset", "conj and neg bits")
        for fact, look in FACTS.items():
            same = fact in skip or look(ours) == look(theirs)
            _check(same, at, fact, look(ours), look(theirs))
        if _has_own_storage(ours) and not ours.is_nested:
            dense = torch.empty(ours.shape, device="meta").stride()
            strides = [ours.stride(), dense] if ours.numel() > 1 else [theirs.stride()]
            _check(theirs.stride() in strides, at, "stride", ours.stride(), theirs.stride())

    def _own_storage(self, ours: torch.Tensor, theirs: torch.Tensor, at: str) -> None:
        if ours.is_nested or ours.is_quantized:  # whose elements are not in rows, or no bytes
            return super()._own_storage(ours, theirs, at)
        _check(shown_bytes(ours) == shown_bytes(theirs), at, "bytes", ours.shape, theirs.shape)
        self._seen.append((at, ours, theirs))
        return None

    def sharing(self) -> None:
        """Fail if tensors do not share their bytes as before."""
        homes: dict[int, int] = {}
        clusters: dict[int, list[tuple[int, int, torch.Tensor, torch.Tensor, str]]]
        clusters = defaultdict(list)
        for at, ours, theirs in self._seen:
            if ours.numel():
                home, new = (each.untyped_storage()._cdata for each in (ours, theirs))
                same = homes.setdefault(new, home) == home
                _check(same, at, "storage sharing", "own", "shared")
                clusters[home].append((*_range(ours), ours, theirs, at))
        for members in clusters.values():
            members.sort(key=lambda member: member[0])
            end = -1
            for start, stop, ours, theirs, at in members:
                if start >= end:
                    first = ours, theirs
                apart = [
                    each.data_ptr() - one.data_ptr()
                    for each, one in zip((ours, theirs), first, strict=True)
                ]
                storages = [each.untyped_storage()._cdata for each in (theirs, first[1])]
                _check(storages[0] == storages[1], at, "storage sharing", "shared", "own")
                _check(apart[0] == apart[1], at, "bytes apart", *apart)
                end = max(end, stop)


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """The range of bytes in its storage that a tensor spans."""
    start = int(tensor.storage_offset()) * tensor.itemsize
    last = sum(
        int(n - 1) * int(step) for n, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return start, start + (last + 1) * tensor.itemsize


def shown_bytes(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor in order, by their bits."""
    if not tensor.numel():
        return b""
    if tensor.is_conj() or tensor.is_neg():
        return shown_bytes(tensor.resolve_conj().resolve_neg())
    width, parts = min(8, tensor.itemsize), max(1, tensor.itemsize // 8)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    shape, stride = [*tensor.shape, parts], [*(n * parts for n in tensor.stride()), 1]
    bits = torch.empty(0, dtype=integer)
    bits.set_(tensor.untyped_storage(), tensor.storage_offset() * parts, shape, stride)
    return bits.contiguous().numpy().tobytes()


FACTS: dict[str, Callable[[torch.Tensor], object]] = {
    "dtype": lambda tensor: tensor.dtype,
    "shape": lambda tensor: tensor.dim() if tensor.is_nested else tensor.shape,
    "layout": lambda tensor: tensor.layout,
    "device": lambda tensor: tensor.device,
    "requires_grad": lambda tensor: tensor.requires_grad,
    "conj and neg bits": lambda tensor: (tensor.is_conj(), tensor.is_neg()),
    "stride": lambda tensor: tensor.stride() if _is_plain(tensor) else None,
    "offset": lambda tensor: tensor.storage_offset() if _is_plain(tensor) else None,
    "coalesced": lambda tensor: tensor.layout is torch.sparse_coo and tensor.is_coalesced(),
    "quantisation": lambda tensor: tensor.qscheme() if tensor.is_quantized else None,
}

COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_coo: ("_indices", "_values"),
}
NESTED = ("_nested_tensor_size", "_nested_tensor_strides", "_nested_tensor_storage_offsets")


def _parts(tensor: torch.Tensor) -> tuple[list[str], list[object]]:
    """The names and values of what a composite tensor has beside a storage."""
    names: list[str] = []
    if _is_wrapper(tensor):
        pass  # what it holds is in its state
    elif tensor.layout in COMPRESSED:
        names = list(COMPRESSED[tensor.layout])
    elif tensor.is_nested:
        names = list(NESTED)
    elif tensor.is_quantized and tensor.qscheme() is torch.per_tensor_affine:
        names = ["q_scale", "q_zero_point"]
    elif tensor.is_quantized:
        names = ["q_per_channel_scales", "q_per_channel_zero_points", "q_per_channel_axis"]
    return names, [getattr(tensor, name)() for name in names]


def _is_wrapper(tensor: torch.Tensor) -> bool:
    return hasattr(type(tensor), "__tensor_flatten__")


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _has_own_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not _is_wrapper(tensor) and not tensor.is_meta


def _raw(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _bits(number: object) -> bytes:
    value = complex(number)  # type: ignore[call-overload]
    return struct.pack("dd", value.real, value.imag)


def _reduced(node: object) -> tuple[object, ...]:
    reduce = copyreg.dispatch_table.get(type(node))
    said = reduce(node) if reduce else node.__reduce_ex__(2)
    if isinstance(said, str):
        return (said,)
    return tuple(list(part) if index > 2 and part else part for index, part in enumerate(said))


def _under(at: str, key: object) -> str:
    return f"{at}.{key}" if at else str(key)


def _check(holds: bool, at: str, what: str, ours: object, theirs: object) -> None:
    if not holds:
        raise AssertionError(f"{at or 'root'}: {what}: {ours!r:.200} is not {theirs!r:.200}")
