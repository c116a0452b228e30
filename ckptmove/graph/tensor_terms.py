"""Write tensors, storages and long bytes of a graph as terms that refer to tensors by name.

    {"$": "tensor", "of": NAME}            the tensor of that name; and, where it is not just that:
        "dtype", "shape", "stride", "offset"   a view of its bytes, counted in elements
        "conj", "neg": true                    with that bit of torch's set
        "device": "cuda:0"                     saved on another device than the CPU
        "grad": true                           it requires a gradient
        "storage": "uint8"                     its storage is of another dtype, or "untyped"
    {"$": "storage", "of": NAME, "dtype": …}   the storage that the tensor of that name is all of
    {"$": "blob", "of": NAME}                  all bytes of that tensor; and, if they make a numpy
                                               array whose elements lie in another order:
        "fortran": true                        its first index runs fastest
        "big_endian": true                     so are its elements
        "dtype"                                its dtype, where the tensor has another

`pickles.terms` has the rest. A tensor is whole where no shape is given; then its shape is that of
the named one, without a last dimension that only makes up for the dtype (`dtypes.CARRIERS`).
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from ..errors import CorruptError
from ..manifest.dtypes import BITS, CARRIERS, STORAGE_CLASSES, storage_element_nbytes
from ..pickles.nodes import Blob, Call, Node, Persistent, Tuple
from ..pickles.opcodes.plain_tensors import PlainTensor, compact_form
from ..sources.source import MAX_NBYTES
from ..torch_pickle.values.numpy_arrays import DTYPES, Array, array_of, content_of
from ..torch_pickle.values.strided import MOST_DIMENSIONS, contiguous_stride, reach_of
from .array_order import Order, order_of
from .canonical import Graph
from .fingerprint import Fingerprint
from .traversal import nodes_of

if TYPE_CHECKING:
    from .parts import Parts

_FLAGS = ("conj", "neg", "grad")
_TENSOR = {"$", "of", "dtype", "shape", "stride", "offset", *_FLAGS, "device", "storage"}
_ORDERS = ("fortran", "big_endian")
_LONGEST = 256  # characters of a device
_MOST_AGAIN = 1 << 13  # most terms that repeat a whole tensor as another object
#: The dtypes that storages can have.
TYPED = frozenset(STORAGE_CLASSES.values())
_UNTYPED = "untyped"
_ELEMENT_NBYTES = {dtype: storage_element_nbytes(dtype) for dtype in TYPED}
_USUAL = TYPED - CARRIERS.keys()  # dtypes that tensors of a file can have directly


class Speller:
    """Writes the leaves of a graph as terms that refer to tensors of a file."""

    def __init__(self, graph: Graph, parts: Parts) -> None:
        self.graph = graph
        self.parts = parts
        self.dtypes = {part.name: part.dtype for part in parts.parts}
        #: of the leaves that were written
        self.fingerprint = Fingerprint(graph)
        #: of whole tensors, the term except the name and the number in the fingerprint, by form,
        #: dtype, device and the dtype of the part
        self._alike: dict[tuple[int, str | None, str, str], tuple[dict[str, Any], int]] = {}

    def leaf(self, node: Node) -> dict[str, Any] | None:
        """Return the term of a node, or None if a file of tensors does not hold it."""
        whole = self._whole(node) if type(node) is PlainTensor else None
        if whole is not None:
            return whole
        term = None
        if isinstance(node, Blob):
            name = self.parts.blobs.get(id(node))
            term = name and self._blob(name, self.parts.orders.get(id(node)))
        elif isinstance(node, Persistent) and id(node) in self.graph.ids:
            term = self._storage(node)
        elif isinstance(node, Call) and id(node) in self.parts.shown:
            term = self._tensor(node)
        if term:
            self.fingerprint.add(node)
        return term or None

    def _whole(self, node: PlainTensor) -> dict[str, Any] | None:
        """Return the term of a compact tensor that is the whole of a part, as nearly all are."""
        form, shown = compact_form(node), self.parts.shown.get(id(node))
        if form is None or shown is None or shown[1] is not None:
            return None
        storage, part = self.graph.ids[id(node.storage)], shown[0]
        alike = id(form), storage.dtype, storage.tag, self.dtypes[part]
        known = self._alike.get(alike)
        if known is None:
            rest = {key: said for key, said in self._tensor(node).items() if key not in ("$", "of")}
            self._alike[alike] = rest, self.fingerprint.add(node)
            return {"$": "tensor", "of": part, **rest}
        self.fingerprint.add_again(known[1])
        return {"$": "tensor", "of": part, **known[0]}

    def _blob(self, name: str, order: Order | None) -> dict[str, Any]:
        term: dict[str, Any] = {"$": "blob", "of": name}
        if order is not None:
            term.update((flag, True) for flag in _ORDERS if getattr(order, flag))
            if order.dtype != self.dtypes[name]:
                term["dtype"] = order.dtype
        return term

    def _storage(self, node: Persistent) -> dict[str, Any]:
        found = self.graph.ids[id(node)]
        term: dict[str, Any] = {"$": "storage", "of": self.parts.whole[found.id]}
        if found.dtype is not None:
            term["dtype"] = found.dtype
        if found.location != "cpu":
            term["device"] = str(found.location)
        return term

    def _tensor(self, node: Call) -> dict[str, Any]:
        storage_node, requires_grad = _storage_and_grad(node)
        storage = self.graph.ids[id(storage_node)]
        part, view = self.parts.shown[id(node)]
        dtype = view.dtype if view is not None else _dtype(node, storage.dtype)
        term: dict[str, Any] = {"$": "tensor", "of": part}
        if dtype != self.dtypes[part]:
            term["dtype"] = dtype
        if view is not None:
            term["shape"] = list(view.shape)
            if view.stride != contiguous_stride(view.shape):
                term["stride"] = list(view.stride)
            if view.offset:
                term["offset"] = view.offset
            for flag in ("conj", "neg"):
                if getattr(view, flag):
                    term[flag] = True
        if storage.location != "cpu":
            term["device"] = str(storage.location)
        if requires_grad is True:
            term["grad"] = True
        if storage.dtype != (dtype if dtype in TYPED else None):
            term["storage"] = storage.dtype or _UNTYPED
        return term


def _storage_and_grad(node: Call) -> tuple[Node, Node]:
    """Return the node of a plain tensor's storage, and whether it requires a gradient."""
    form = compact_form(node)
    if form is not None and isinstance(node, PlainTensor):
        return node.storage, form.requires_grad
    assert isinstance(node.args, Tuple)
    return node.args.items[0], node.args.items[4]


def _dtype(node: Call, dtype: str | None) -> str:
    """Return the dtype of a plain tensor."""
    if compact_form(node) is not None:
        return dtype or "uint8"
    items = node.args.items if isinstance(node.args, Tuple) else []
    own = items[6] if node.qualname == "torch._utils._rebuild_tensor_v3" else None
    return getattr(own, "name", None) or dtype or "uint8"


class FileTensor(Protocol):
    """A tensor of a file: its name, torch's dtype and shape, and its size in bytes."""

    @property
    def dtype(self) -> str:
        """As above."""

    @property
    def shape(self) -> tuple[int, ...]:
        """As above."""

    @property
    def nbytes(self) -> int:
        """As above."""


class MissingTensor(CorruptError):
    """Raised if a term names a tensor that the file doesn't have."""


class TermReader:
    """Builds nodes from terms and the tensors of a file."""

    def __init__(self, entries: Mapping[str, FileTensor], folder: str = "") -> None:
        """`entries` are the tensors by name; `folder` is the prefix of storage ids."""
        #: keeps the nodes of storages
        self.graph = Graph(None)
        self.entries = entries
        self._folder = folder
        #: the names of tensors that terms refer to
        self.used: set[str] = set()
        #: `id()` of long bytes → their tensor, and their order, if it differs from the tensor's
        self.blobs: dict[int, tuple[str, Order | None]] = {}
        #: whether the file has a tree
        self.terms = False
        #: whether something other than whole tensors, containers and numbers was built
        self.composed = False
        self._again = 0
        self._dtypes: dict[str, str | None] = {}
        self._locations: dict[str, str] = {}

    def leaf(self, term: dict[str, Any]) -> Node:
        """Return the node for a term of `Speller.leaf`.

        MissingTensor if the file doesn't have the tensor, CorruptError if the term contradicts it.
        """
        kind, name = term.get("$"), term.get("of")
        if kind == "tensor" and type(name) is str and name not in self.used:
            entry = self.entries.get(name)
            if entry is not None and is_whole(term, entry):  # nearly all
                self.used.add(name)
                return self.whole(name, term.get("device", "cpu"))
        self.composed = True
        if not isinstance(name, str):
            raise CorruptError("its tree names a tensor by something that is not a string")
        if name not in self.entries:
            raise MissingTensor(f"its tree mentions a tensor {name!r} that is missing")
        self._again += name in self.used and "shape" not in term
        if self._again > _MOST_AGAIN:
            raise CorruptError("its tree repeats its tensors too often")
        self.used.add(name)
        if kind == "tensor" and term.keys() <= _TENSOR:
            return self.tensor(name, term)
        said = {key: value for key, value in term.items() if key not in ("$", "of")}
        if kind == "storage" and said.keys() <= {"dtype", "device"}:
            dtype = said.get("dtype")
            if dtype is not None and not _is_among(dtype, TYPED):
                raise self._malformed(name)
            return self._storage(name, dtype, said.get("device", "cpu"))
        if kind == "blob" and said.keys() <= {"dtype", *_ORDERS}:
            return self._blob(name, said)
        raise self._malformed(name)

    def _blob(self, name: str, said: Mapping[str, Any]) -> Blob:
        entry, order = self.entries[name], None
        if said:
            dtype = said.get("dtype", entry.dtype)
            flags = {flag: said.get(flag, False) for flag in _ORDERS}
            if not _is_among(dtype, DTYPES) or not all(isinstance(f, bool) for f in flags.values()):
                raise self._malformed(name)
            shape = self._shape(name, dtype, {})
            if len(shape) < 2 * flags["fortran"] or 0 in shape or entry.nbytes > MAX_NBYTES:
                raise self._malformed(name)
            order = Order(dtype, shape, **flags)
        blob = Blob(0, entry.nbytes, None)
        self.blobs[id(blob)] = name, order
        return blob

    def check_arrays(self, root: Node) -> None:
        """Compare numpy arrays with the tensors that hold their bytes.

        CorruptError if dtypes or shapes differ, or if the object made from a tensor's bytes is not
        an array, although the tensor is more than a row of bytes.
        """
        typed = {known: name for known, (name, order) in self.blobs.items() if order is not None}
        for known, (name, _) in self.blobs.items():
            if self.entries[name].dtype != "uint8" or len(self.entries[name].shape) != 1:
                typed[known] = name
        for node in nodes_of(root) if self.blobs else ():
            content = content_of(node)
            if id(content) in self.blobs:
                name, order = self.blobs[id(content)]
                array = array_of(node)
                if array is None or (id(content) in typed and not self._fits(array, name, order)):
                    raise CorruptError(f"its tree says that {name!r} is another array than it is")
                typed.pop(id(content), None)
        if typed:
            name = next(iter(typed.values()))
            raise CorruptError(f"its tree takes {name!r} for bytes, though it is a tensor")

    def _fits(self, array: Array, name: str, order: Order | None) -> bool:
        entry = self.entries[name]
        dtype, last = CARRIERS.get(array.dtype, (array.dtype, 0))
        shape = (*array.shape, last) if last else array.shape
        return (dtype, shape, order) == (entry.dtype, tuple(entry.shape), order_of(array))

    def whole(self, name: str, location: object = "cpu") -> Call:
        """Return a whole tensor of the file."""
        entry = self.entries[name]
        if entry.dtype in TYPED:
            storage = self._storage(name, entry.dtype, location)
            return self.graph.whole_tensor(storage, entry.shape)
        storage, stride = self._storage(name, None, location), contiguous_stride(entry.shape)
        return self.graph.tensor(storage, entry.dtype, entry.shape, stride, 0)

    def tensor(self, name: str, said: Mapping[str, Any]) -> Call:
        """Return a tensor of the file, or a view of one, from the fields of its term."""
        entry = self.entries[name]
        if is_whole(said, entry):
            return self.whole(name, said.get("device", "cpu"))
        dtype = said.get("dtype", entry.dtype)
        flags = {flag: said[flag] for flag in _FLAGS if flag in said}
        if not _is_among(dtype, BITS) or not all(isinstance(flag, bool) for flag in flags.values()):
            raise self._malformed(name)
        shape, offset = self._shape(name, dtype, said), said.get("offset", 0)
        sizes = [*shape, offset] if "shape" in said else [offset]  # others come from the header
        if len(shape) > MOST_DIMENSIONS or not _are_sizes(sizes):
            raise self._malformed(name)
        stride = tuple(said["stride"]) if "stride" in said else contiguous_stride(shape)
        if not _are_sizes(stride):
            raise self._malformed(name)
        if len(stride) != len(shape) or reach_of(shape, stride, offset, dtype) > entry.nbytes:
            raise CorruptError(f"its tree says that {name!r} holds more than it does")
        of = said.get("storage", dtype if dtype in TYPED else _UNTYPED)
        if not _is_among(of, (*TYPED, _UNTYPED)):
            raise self._malformed(name)
        grad = flags.pop("grad", False)
        storage = self._storage(name, None if of == _UNTYPED else of, said.get("device", "cpu"))
        return self.graph.tensor(
            storage, dtype, shape, stride, offset, requires_grad=grad, flags=flags
        )

    def _shape(self, name: str, dtype: str, said: Mapping[str, Any]) -> tuple[int, ...]:
        shape = said.get("shape")
        if shape is not None:
            if not isinstance(shape, list) or not isinstance(said.get("stride", []), list):
                raise self._malformed(name)
            return tuple(shape)
        entry = self.entries[name]
        carrier, last = CARRIERS.get(dtype, (dtype, 0))
        if carrier != entry.dtype or (last and entry.shape[-1:] != (last,)) or "stride" in said:
            raise self._malformed(name)
        return entry.shape[:-1] if last else entry.shape

    def _storage(self, name: str, dtype: str | None, location: object) -> Persistent:
        nbytes, tag = self.entries[name].nbytes, self.location_of(name, dtype, location)
        return self.graph.storage(self._folder + name, dtype, nbytes, tag)

    def location_of(self, name: str, dtype: str | None, location: object) -> str:
        """The location of a storage; CorruptError if its terms disagree on it, or on its dtype."""
        if not is_location(location):
            raise self._malformed(name)
        if self._dtypes.setdefault(name, dtype) != dtype:
            raise CorruptError(f"its tree says that {name!r} is of several dtypes")
        if dtype is not None and self.entries[name].nbytes % _ELEMENT_NBYTES[dtype]:
            raise CorruptError(f"its tree says that {name!r} is of another dtype than it can be")
        if self._locations.setdefault(name, location) != location:
            raise CorruptError(f"its tree says that {name!r} is on several devices")
        return location

    def _malformed(self, name: str) -> CorruptError:
        return CorruptError(f"its tree describes {name!r} in an unknown way")


def is_location(said: object) -> TypeGuard[str]:
    """Whether the term of a tensor may say this as its device."""
    return isinstance(said, str) and len(said) <= _LONGEST


def is_whole(term: Mapping[str, Any], entry: FileTensor) -> bool:
    """Whether the term of a tensor says only its name and device, and its shape is the entry's."""
    is_bare = len(term) == (3 if "device" in term else 2)  # "$" and "of"
    return is_bare and entry.dtype in _USUAL and len(entry.shape) <= MOST_DIMENSIONS


def has_whole_elements(entry: FileTensor) -> bool:
    """Whether the size of a tensor of a usual dtype is that of a number of elements."""
    return not entry.nbytes % _ELEMENT_NBYTES[entry.dtype]


def _is_among(name: object, names: Container[str]) -> bool:
    return isinstance(name, str) and name in names


def _are_sizes(numbers: Sequence[object]) -> bool:
    return all([type(n) is int and 0 <= n < 1 << 63 for n in numbers])
