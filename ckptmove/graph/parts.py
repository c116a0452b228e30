"""Divide storages into tensors that share no bytes, as safetensors files require.

Tensors of one storage that have bytes in common form a cluster. If one contiguous tensor covers the
cluster, that tensor is written and the others are views of it. A tensor alone in its cluster is
written by itself, its elements one after the other. For other clusters, and for storages that other
objects than plain tensors refer to, the bytes of the cluster are written as a flat tensor, and all
are views of it. Bytes of a storage that no tensor uses are not written.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import starmap
from math import prod
from typing import NamedTuple

from ..errors import RefusedError
from ..manifest.dtypes import BITS, CARRIERS, nbytes_of
from ..pickles.nodes import Blob, Call, Node, Persistent
from ..pickles.opcodes.plain_tensors import PlainTensor, compact_form
from ..torch_pickle.values.strided import is_contiguous, reach_of
from .array_order import Order
from .draft import CheckpointGraph, StorageBytes, View
from .edit.numpy_arrays import ArrayBytes
from .plain_tensors import data_of, flags_of, is_bare_tensor, is_plain
from .traversal import nodes_of

_SHARED = ("keep", "duplicate", "error")
_LARGEST_EXPANDED = 1 << 30  # most bytes of a tensor that repeats the same bytes
_MOST_EXPANDED = 256  # most repetitions in a larger one
_WIDEST = 16  # bytes of the largest element
_OTHER_NAMES = {"": "tensor", "(root)": "tensor", "__metadata__": "__metadata__~"}


class Part(NamedTuple):
    """A tensor of the target file."""

    name: str
    #: as written: some dtypes, and so shapes, are stored as others
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    #: the storage with its bytes
    stored: StorageBytes
    #: their offset in the storage, if they are contiguous
    start: int = 0
    #: the view to gather from the storage, if not
    view: View | None = None


class TensorView(NamedTuple):
    """A plain tensor as the whole of a part, or as a view of its bytes."""

    #: the name of the part
    part: str
    #: the view, from the start of the part; None for the whole part
    view: View | None


@dataclass(eq=False, repr=False)
class Parts:
    """The parts of a file of tensors that hold a draft."""

    #: the tensors to be written
    parts: list[Part] = field(default_factory=list)
    #: `id()` of the node of a plain tensor → its view
    shown: dict[int, TensorView] = field(default_factory=dict)
    #: id of a storage with direct references → the part that holds it
    whole: dict[str, str] = field(default_factory=dict)
    #: `id()` of bytes within the graph → the part that holds them
    blobs: dict[int, str] = field(default_factory=dict)
    #: those bytes of arrays that the part has in another order → their own order
    orders: dict[int, Order] = field(default_factory=dict)
    #: parts that repeat bytes of others
    duplicates: list[str] = field(default_factory=list)
    #: names of tensors that share bytes with one that is written → its name
    shared: dict[str, str] = field(default_factory=dict)


class Use(NamedTuple):
    """A plain tensor in a graph, or an array's bytes, with its names; the first is the main one."""

    node: Node
    names: list[str]
    view: View
    start: int
    end: int


def parts_of(
    draft: CheckpointGraph,
    names: Iterable[tuple[str, Node]],
    *,
    shared: str,
    bare: bool,
    blob: Callable[[Blob], StorageBytes],
    arrays: Iterable[ArrayBytes] = (),
) -> Parts:
    """Divide the storages of a draft.

    `names` has each tensor and bare storage, in order; a node may come under several. `shared` is
    `keep` to write shared bytes once, `duplicate` to write them under each name too, or `error` to
    refuse them. `bare`: the file will have no record of views, so each different view is written as
    a separate tensor. `blob` returns the origin of a blob's bytes.
    """
    return _Division(draft, shared, bare, blob, arrays).run(names)


class _Division:
    def __init__(
        self,
        draft: CheckpointGraph,
        shared: str,
        bare: bool,
        blob: Callable[[Blob], StorageBytes],
        arrays: Iterable[ArrayBytes],
    ) -> None:
        assert shared in _SHARED
        self.draft = draft
        self.mode = shared
        self.bare = bare
        self.blob = blob
        self.arrays = {id(each.blob): each for each in arrays}
        self.recogniser = draft.graph.recogniser
        self.views: dict[tuple[int, str], View] = {}  # by form and dtype
        self.taken: set[str] = set()
        self.last: dict[str, int] = {}
        self.found = Parts()
        #: `id()` of a node → the node, and its names
        self.nodes: dict[int, tuple[Node, list[str]]] = {}
        self.met: set[int] = set()  # visited nodes
        self.looks: dict[str, View] = {}  # views of storages in composite tensors

    def run(self, names: Iterable[tuple[str, Node]]) -> Parts:
        self.collect(names)
        uses: dict[str, list[tuple[Call, list[str]]]] = defaultdict(list)
        raw: dict[str, str] = {}
        for known, (node, called) in self.nodes.items():
            if isinstance(node, Call):
                uses[self.storage_of(node)].append((node, called))
            elif isinstance(node, Persistent):
                raw.setdefault(self.draft.graph.ids[known].id, called[0])
            elif isinstance(node, Blob):
                self.write_blob(node, called)
        for storage in dict.fromkeys((*uses, *raw)):
            self.divide(self.draft.stored[storage], uses[storage], raw.get(storage))
        return self.found

    # -- what there is -------------------------------------------------------------------------

    def collect(self, names: Iterable[tuple[str, Node]]) -> None:
        """Find every plain tensor and storage, with its names."""
        listed = list(names)
        claimed = {id(node) for _, node in listed if is_plain(node)}
        for name, node in listed:
            if isinstance(node, Blob) or (isinstance(node, Call) and is_bare_tensor(node)):
                self.note(name, node)
            else:
                data = data_of(node)
                if data is not node and isinstance(data, Call) and is_bare_tensor(data):
                    self.note(name, data)
                self.note_look(node)
                self.note_inside(name, node, claimed)
        compact = (id(n) for n, _ in self.nodes.values() if compact_form(n) is not None)
        self.met.update(compact)  # it has no inner tensors
        self.note_inside("unnamed", self.draft.graph.root, claimed)

    def note(self, name: str, node: Node) -> None:
        known = self.nodes.get(id(node))
        if known is None:
            self.nodes[id(node)] = node, [name]
        else:
            known[1].append(name)

    def note_look(self, node: Node) -> None:
        """Note the view of a storage by a tensor that is not plain, for example a quantized one."""
        tensor = self.recogniser.tensor(node) if isinstance(node, Call) else None
        if tensor is not None and tensor.storage is not None:
            view = View(tensor.dtype, tensor.shape, tensor.stride, tensor.offset)
            self.looks.setdefault(tensor.storage, view)

    def note_inside(self, name: str, root: Node, claimed: set[int]) -> None:
        """Note the parts of a composite tensor that have no name of their own."""
        skipped: set[int] = set()
        for node in nodes_of(root, skip=skipped, met=self.met):
            if compact_form(node) is not None and id(node) in self.nodes:
                skipped.add(id(node))
            elif isinstance(node, Persistent):
                if id(node) not in self.nodes and id(node) in self.draft.graph.ids:
                    self.note(name, node)
                skipped.add(id(node))
            elif isinstance(node, Call) and is_bare_tensor(node):
                if id(node) not in claimed and id(node) not in self.nodes:
                    self.note(name, node)
                skipped.add(id(node))

    def storage_of(self, node: Call) -> str:
        """Return the id of a plain tensor's storage."""
        if isinstance(node, PlainTensor) and compact_form(node) is not None:
            return self.draft.graph.ids[id(node.storage)].id
        tensor = self.recogniser.tensor(node)
        assert tensor is not None
        assert tensor.storage is not None
        return tensor.storage

    def view(self, node: Call) -> View:
        """Return the view of a plain tensor; equal ones are shared."""
        if not isinstance(node, PlainTensor) or (form := compact_form(node)) is None:
            return self.other_view(node)
        storage = self.draft.graph.ids[id(node.storage)]
        if storage.dtype is None:
            return self.other_view(node)
        self.recogniser.check_reach(form, storage, storage.dtype)
        alike = id(form), storage.dtype
        if alike not in self.views:
            self.views[alike] = self.other_view(node)
        return self.views[alike]

    def other_view(self, node: Call) -> View:
        tensor = self.recogniser.tensor(node)
        assert tensor is not None
        flags = flags_of(node) or {}
        return View(tensor.dtype, tensor.shape, tensor.stride, tensor.offset, **flags)

    def use(self, node: Call, names: list[str]) -> Use:
        view = self.view(node)
        start = _start(view)
        end = reach_of(view.shape, view.stride, view.offset, view.dtype)
        return Use(node, names, view, start, max(start, end))

    def name(self, wanted: str) -> str:
        """Return a name that no other tensor of the file has."""
        name = wanted = allowed_name(wanted)
        while name in self.taken:
            self.last[wanted] = self.last.get(wanted, 1) + 1
            name = f"{wanted}~{self.last[wanted]}"
        self.taken.add(name)
        return name

    # -- how it is divided ---------------------------------------------------------------------

    def divide(
        self, stored: StorageBytes, held: Sequence[tuple[Call, list[str]]], raw: str | None
    ) -> None:
        """Divide one storage."""
        if raw is None and len(held) == 1 and len(held[0][1]) == 1:
            # shortcut for tensors that share no bytes
            node, names = held[0]
            view = self.view(node)
            part = self.part(stored, view, _start(view), names[0])
            self.found.shown[id(node)] = tuple.__new__(TensorView, (part.name, None))
            return
        uses = list(starmap(self.use, held))
        empty = [use for use in uses if use.start == use.end]
        uses = [use for use in uses if use.start < use.end]
        if raw is not None:
            self.cluster(stored, uses, 0, stored.nbytes, raw)
        else:
            for cluster in _clusters(uses):
                self.cluster(stored, cluster, cluster[0].start, max(u.end for u in cluster), None)
        for use in empty:
            self.alone(stored, [use])

    def cluster(
        self, stored: StorageBytes, uses: list[Use], start: int, end: int, raw: str | None
    ) -> None:
        """Write tensors that have bytes in common."""
        self.refuse(uses, raw)
        if self.bare and uses:
            alike: dict[View, list[Use]] = defaultdict(list)
            for use in uses:
                alike[use.view].append(use)
            for group in alike.values():
                self.alone(stored, group)
            uses = []
            if raw is None:
                return
        owner = next((use for use in uses if _covers(use, start, end)), None)
        if any(start % _nbytes(use.view) for use in uses):  # no dtype is aligned to this offset
            start, owner = start - start % _WIDEST, None
        if owner is None and raw is None and len({use.view for use in uses}) == 1:
            self.alone(stored, uses)
            return
        if owner is None:
            # not the tensor's own name, under which readers expect its shape
            part = self.flat(stored, start, end, raw or f"{uses[0].names[0]}~bytes")
        else:
            part = self.part(stored, owner.view, owner.start, owner.names[0])
        if raw is not None:
            self.found.whole[stored.id] = part.name
        for use in uses:
            view = use.view._replace(offset=use.view.offset - start // _nbytes(use.view))
            same = owner is not None and use.view == owner.view
            self.show(use, part.name, None if same else view)
            self.note_shared(stored, use, part.name, owner is use)

    def alone(self, stored: StorageBytes, uses: list[Use]) -> None:
        """Write tensors with the same view as one part, its elements in row-major order."""
        part = self.part(stored, uses[0].view, uses[0].start, uses[0].names[0])
        for n, use in enumerate(uses):
            self.show(use, part.name, None)
            self.note_shared(stored, use, part.name, n == 0)

    def refuse(self, uses: Sequence[Use], raw: str | None) -> None:
        names = [name for use in uses for name in use.names]
        names += [] if raw is None else [raw]
        if self.mode == "error" and len(names) > 1:
            raise RefusedError(
                f"{names[0]!r} and {names[1]!r} share their bytes",
                hint="--shared keep writes them once; --shared duplicate writes them "
                "under each name",
            )

    def note_shared(self, stored: StorageBytes, use: Use, part: str, owns: bool) -> None:
        """Note the further names of shared bytes, which become duplicates if wanted."""
        for name in use.names[1:] if owns else use.names:
            if name == part:
                continue
            if self.mode == "duplicate":
                copy = self.part(stored, use.view, use.start, name)
                self.found.duplicates.append(copy.name)
            else:
                self.found.shared[name] = part

    def show(self, use: Use, part: str, view: View | None) -> None:
        self.found.shown[id(use.node)] = TensorView(part, view)

    # -- the tensors that are written ----------------------------------------------------------

    def part(self, stored: StorageBytes, view: View, start: int, name: str) -> Part:
        """Return a part for a whole tensor."""
        dtype, shape, nbytes, is_flat = _look_of(view)
        check_expanded(name, nbytes, stored)
        place = stored, start, None if is_flat else view
        part: Part = tuple.__new__(Part, (self.name(name), dtype, shape, nbytes, *place))
        self.found.parts.append(part)
        return part

    def flat(self, stored: StorageBytes, start: int, end: int, name: str) -> Part:
        """Return a part for contiguous bytes of a storage, in a composite tensor's shape."""
        look = self.looks.get(stored.id)
        if look is not None and BITS[look.dtype] >= 8 and is_contiguous(look.shape, look.stride):
            nbytes = nbytes_of(prod(look.shape), look.dtype)
            if not look.offset and (start, end) == (0, nbytes):
                return self.part(stored, look, start, name)
        own = stored.dtype or "uint8"
        dtype, last = CARRIERS.get(own, (own, 0))
        item = max(1, BITS[own] // 8)
        if BITS[own] < 8 or start % item or end % item:
            dtype, last, item = "uint8", 0, 1
        count = (end - start) // item
        part = Part(
            name=self.name(name),
            dtype=dtype,
            shape=(count, last) if last else (count,),
            nbytes=end - start,
            stored=stored,
            start=start,
        )
        self.found.parts.append(part)
        return part

    def write_blob(self, blob: Blob, names: list[str]) -> None:
        array = self.arrays.get(id(blob))
        if array is not None:
            use = Use(blob, names, array.view, 0, blob.nbytes)
            self.refuse([use], None)
            self.alone(array.stored, [use])
            self.found.blobs[id(blob)] = self.found.shown[id(blob)].part
            if array.order is not None:
                self.found.orders[id(blob)] = array.order
            return
        name = self.found.blobs[id(blob)] = self.name(names[0])
        self.found.parts.append(Part(name, "uint8", (blob.nbytes,), blob.nbytes, self.blob(blob)))


def check_expanded(name: str, nbytes: int, stored: StorageBytes) -> None:
    """Raises RefusedError if a tensor shows the bytes of its storage far too many times."""
    if nbytes > max(_LARGEST_EXPANDED, _MOST_EXPANDED * stored.nbytes):
        raise RefusedError(
            f"{name!r} is expanded: written out, its {stored.nbytes:,} bytes would take {nbytes:,}",
            hint=f"leave it out: --exclude-tensors '{name}'",
        )


def _clusters(uses: list[Use]) -> list[list[Use]]:
    """Yield groups of tensors that share bytes, in the order of the storage."""
    clusters: list[list[Use]] = []
    end = -1
    for use in sorted(uses, key=lambda use: use.start):
        if use.start >= end:
            clusters.append([])
        clusters[-1].append(use)
        end = max(end, use.end)
    return clusters


def _covers(use: Use, start: int, end: int) -> bool:
    """Whether a tensor covers exactly these bytes, in row-major order."""
    return _look_of(use.view).is_flat and (use.start, use.end) == (start, end)


class _Look(NamedTuple):
    """How the view of a tensor is written."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    #: whether its elements are contiguous in the storage and need no change
    is_flat: bool


@lru_cache(1 << 7)  # limited, because sizes can be chosen to have equal hashes
def _look_of(view: View) -> _Look:
    dtype, last = CARRIERS.get(view.dtype, (view.dtype, 0))
    shape = (*view.shape, last) if last else view.shape
    is_flat = is_contiguous(view.shape, view.stride) and not (view.conj or view.neg)
    return _Look(dtype, shape, nbytes_of(prod(view.shape), view.dtype), is_flat)


def _start(view: View) -> int:
    """Return the offset of a tensor's view in the storage."""
    return view.offset * BITS[view.dtype] // 8


def _nbytes(view: View) -> int:
    """Return the size of an element in bytes."""
    return max(1, BITS[view.dtype] // 8)


def allowed_name(wanted: str) -> str:
    """Return a tensor's name in a form that a file of tensors can hold."""
    if not wanted.isascii():
        wanted = wanted.encode("utf-8", "backslashreplace").decode("utf-8")
    return _OTHER_NAMES.get(wanted, wanted)
