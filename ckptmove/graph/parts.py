"""Divide storages into tensors that share no bytes, as safetensors files require.

Tensors of one storage that have bytes in common form a cluster. If one contiguous tensor covers the
cluster, that tensor is written and the others are views of it. A tensor alone in its cluster is
written by itself, its elements one after the other. For other clusters, and for storages that
something else than a plain tensor refers to, the bytes of the cluster are written as a flat tensor,
and all are views of it. Bytes of a storage that no tensor uses are not written.
"""

from __future__ import annotations

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
_LARGEST_EXPANDED = 1 << 30  # bytes of a tensor that shows the same ones again and again
_MOST_EXPANDED = 256  # how many times they may be shown in a larger one
_WIDEST = 16  # bytes of the largest element


class Part(NamedTuple):
    """A tensor of the target file."""

    name: str
    #: as written: some dtypes, and so shapes, are carried by others
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    #: what has its bytes
    stored: StorageBytes
    #: where in the storage they begin, if they follow each other there
    start: int = 0
    #: what to gather from the storage, if they do not
    view: View | None = None


class TensorView(NamedTuple):
    """How a plain tensor is seen in a part: the whole of it, or a view of its bytes."""

    #: the name of the part
    part: str
    #: what it shows, counted from the start of the part; None for all of it
    view: View | None


@dataclass
class Parts:
    """What a file of tensors holds of a draft."""

    #: the tensors to be written
    parts: list[Part] = field(default_factory=list)
    #: `id()` of the node of a plain tensor → how it is seen
    shown: dict[int, TensorView] = field(default_factory=dict)
    #: id of a storage that is referred to as such → the part that holds it
    whole: dict[str, str] = field(default_factory=dict)
    #: `id()` of bytes within the graph → the part that holds them
    blobs: dict[int, str] = field(default_factory=dict)
    #: of these, the bytes of arrays that the part has in another order → their own
    orders: dict[int, Order] = field(default_factory=dict)
    #: parts that repeat what others hold
    duplicates: list[str] = field(default_factory=list)
    #: names of tensors that share bytes with one that is written → its name
    shared: dict[str, str] = field(default_factory=dict)


class Use(NamedTuple):
    """A plain tensor in a graph, or an array's bytes, and its names: the first is its own."""

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
    refuse them. `bare` says that nothing will tell of views: then each that differs is a tensor of
    its own. `blob` tells where the bytes of a blob come from.
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
        self.met: set[int] = set()  # what was looked into
        self.looks: dict[str, View] = {}  # how a composite tensor sees a storage of its own

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
        """Find every plain tensor and storage, and what it is called."""
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
        self.met.update(compact)  # of which nothing is inside
        self.note_inside("unnamed", self.draft.graph.root, claimed)

    def note(self, name: str, node: Node) -> None:
        known = self.nodes.get(id(node))
        if known is None:
            self.nodes[id(node)] = node, [name]
        else:
            known[1].append(name)

    def note_look(self, node: Node) -> None:
        """How a tensor that is more than a view, a quantized one for instance, sees its storage."""
        tensor = self.recogniser.tensor(node) if isinstance(node, Call) else None
        if tensor is not None and tensor.storage is not None:
            view = View(tensor.dtype, tensor.shape, tensor.stride, tensor.offset)
            self.looks.setdefault(tensor.storage, view)

    def note_inside(self, name: str, root: Node, claimed: set[int]) -> None:
        """What a composite tensor is made of, where that has no name of its own."""
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
        """The id of the storage that a plain tensor is seen in."""
        if isinstance(node, PlainTensor) and compact_form(node) is not None:
            return self.draft.graph.ids[id(node.storage)].id
        tensor = self.recogniser.tensor(node)
        assert tensor is not None
        assert tensor.storage is not None
        return tensor.storage

    def view(self, node: Call) -> View:
        """What a plain tensor shows; what many have in common is there once."""
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
        """A name that no other tensor of the file has."""
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
            # as all would be in the end that nothing shares bytes with
            node, names = held[0]
            view = self.view(node)
            part = self.part(stored, view, _start(view), names[0])
            self.found.shown[id(node)] = TensorView(part.name, None)
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
        if any(start % _nbytes(use.view) for use in uses):  # no dtype's elements begin there
            start, owner = start - start % _WIDEST, None
        if owner is None and raw is None and len({use.view for use in uses}) == 1:
            self.alone(stored, uses)
            return
        if owner is None:
            # not the tensor's own name: under that, others expect it in its shape
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
        """Write what shows the same bytes in the same way, its elements one after the other."""
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
        """The further names of shared bytes, which become duplicates if that is wanted."""
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
        """A tensor as it is."""
        dtype, shape, nbytes, is_flat = _look_of(view)
        check_expanded(name, nbytes, stored)
        gathered = None if is_flat else view
        part = Part(self.name(name), dtype, shape, nbytes, stored, start, gathered)
        self.found.parts.append(part)
        return part

    def flat(self, stored: StorageBytes, start: int, end: int, name: str) -> Part:
        """Bytes of a storage as they lie there, in the shape that a composite tensor gives them."""
        look = self.looks.get(stored.id)
        if look is not None and BITS[look.dtype] >= 8 and _is_contiguous(look):
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
    """Those that have bytes in common, in the order of the storage."""
    clusters: list[list[Use]] = []
    end = -1
    for use in sorted(uses, key=lambda use: use.start):
        if use.start >= end:
            clusters.append([])
        clusters[-1].append(use)
        end = max(end, use.end)
    return clusters


def _covers(use: Use, start: int, end: int) -> bool:
    """Whether a tensor shows just these bytes, one after the other."""
    return _look_of(use.view).is_flat and (use.start, use.end) == (start, end)


class _Look(NamedTuple):
    """How what a tensor shows is written."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    #: whether its elements follow each other in the storage as they are
    is_flat: bool


@lru_cache(1 << 10)  # so few, since sizes can be chosen to have all one hash
def _look_of(view: View) -> _Look:
    dtype, last = CARRIERS.get(view.dtype, (view.dtype, 0))
    shape = (*view.shape, last) if last else view.shape
    is_flat = _is_contiguous(view) and not (view.conj or view.neg)
    return _Look(dtype, shape, nbytes_of(prod(view.shape), view.dtype), is_flat)


def _start(view: View) -> int:
    """Where what a tensor shows begins in the storage."""
    return view.offset * BITS[view.dtype] // 8


def _nbytes(view: View) -> int:
    """Bytes of one of its elements."""
    return max(1, BITS[view.dtype] // 8)


def allowed_name(wanted: str) -> str:
    """The name of a tensor as a file of tensors alone can hold it."""
    wanted = wanted.encode("utf-8", "backslashreplace").decode("utf-8")
    return {"": "tensor", "(root)": "tensor", "__metadata__": "__metadata__~"}.get(wanted, wanted)


def _is_contiguous(view: View) -> bool:
    return is_contiguous(view.shape, view.stride)
