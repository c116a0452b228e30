"""Rewrite a saved object as one graph in one canonical form, whatever its format.

Each storage is `('storage', class, id, location, elements)`, the persistent id of torch.save since
1.6. Each plain tensor is a call of `_rebuild_tensor_v2`, or of `_rebuild_tensor_v3` if its dtype
has no storage class. What older formats keep elsewhere (tensors by number, parts of storages,
classes with their source, storages loaded from bytes) is brought into these forms, and calls that
old protocols use for plain values become these values (`normalize`). All other nodes stay as they
are. Source: torch/_tensor.py (`_reduce_ex_internal`), torch/serialization.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache, cached_property, lru_cache
from typing import NamedTuple

from ..manifest.dtypes import STORAGE_CLASSES, storage_element_nbytes
from ..manifest.manifest import Section, Storage
from ..pickles.nodes import (
    Blob,
    Call,
    Dict,
    Global,
    List,
    Node,
    Persistent,
    Set,
    Text,
    Tuple,
    without_source_text,
)
from ..pickles.nodes import Mapping as MappingNode
from ..pickles.opcodes.pairs import change_each, with_each_changed
from ..pickles.opcodes.plain_tensors import (
    Form,
    PlainTensor,
    RecalledNames,
    StorageForm,
    StorageReference,
    compact_form,
)
from ..sources.source import Readable
from ..torch_pickle.values.numpy_arrays import array_of, put_content
from ..torch_pickle.values.persistent_ids import StorageId, TensorId
from ..torch_pickle.values.strided import Tensor, contiguous_stride
from ..torch_pickle.values.tensors import Recogniser, variable_of
from .normalize import normalize, text_of
from .plain_tensors import FLAGS, V2, V3, is_untouched
from .traversal import Composite, held_by, nodes_of

_PLAIN = {f"torch._utils.{name}" for name in ("_rebuild_tensor", V2, V3)}
_CLASSES = {dtype: name for name, dtype in STORAGE_CLASSES.items()}


class StorageSlice(NamedTuple):
    """A part of a storage, in bytes."""

    storage: str
    start: int
    nbytes: int


class Graph:
    """A graph in canonical form."""

    def __init__(self, root: Node) -> None:
        self.root = root
        #: `id()` of the node of a persistent id → the storage that it describes
        self.ids: dict[int, StorageId] = {}
        #: id of a storage → its only node
        self.storages: dict[str, StorageReference] = {}
        #: id of a storage that is a part of another in the file → which part
        self.cut: dict[str, StorageSlice] = {}
        #: name of a tensor at the top → its section, if the tree doesn't tell
        self.sections: dict[str, Section] = {}
        #: `id()` of bytes, or of their stand-in → the object saved in them
        self.within: dict[int, Node] = {}
        self._at = 0
        self._locations: dict[str, Text] = {}
        self._recogniser: Recogniser | None = None

    @property
    def recogniser(self) -> Recogniser:
        """The recogniser of its tensors, kept until a tensor or storage is rewritten."""
        if self._recogniser is None:
            self._recogniser = Recogniser(self.ids)
        return self._recogniser

    def storage(
        self,
        key: str,
        dtype: str | None,
        nbytes: int,
        location: str,
        node: StorageReference | None = None,
    ) -> StorageReference:
        """Return the node of a storage, made on first use, or by rewriting `node`."""
        found = self.storages.get(key)
        if found is None:
            found = node or StorageReference(_NO_STORAGE, key, "")
            self.storages[key] = found
            self.retype(key, dtype, nbytes, location)
        return found

    def retype(self, key: str, dtype: str | None, nbytes: int, location: str) -> None:
        """Give a storage another dtype, size or location."""
        self._recogniser = None
        node = self.storages[key]
        text = self._locations.get(location)
        if text is None:
            text = self._locations[location] = self.text(location)
        known, form = _form_of_storage(dtype, nbytes)
        node.respell(form, key, text)
        said = key, key, text, known, nbytes, nbytes, 0
        self.ids[id(node)] = tuple.__new__(StorageId, said)  # fast: there may be very many

    def text(self, value: str) -> Text:
        """Return a new string node, so that each use has its own identity."""
        self._at += 1
        return Text(value, -self._at)

    def tensor(
        self,
        storage: Persistent,
        dtype: str,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        offset: int,
        *,
        requires_grad: bool = False,
        flags: Mapping[str, bool] | None = None,
    ) -> Call:
        """Return a plain tensor on the node of a storage, with the flags `conj` and `neg` as given.

        Strides and offset are in elements, the latter from the start of the storage.
        """
        metadata = Dict()
        if flags and any(flags.values()):
            metadata.pairs = [(self.text(name), True) for name in FLAGS if flags.get(name)]
        elif self.ids[id(storage)].dtype == dtype:
            return PlainTensor(_form(offset, shape, stride, requires_grad), storage)
        node = Call(None, None, "REDUCE", 0)
        rest = (metadata,) if metadata.pairs else ()
        self.respell(node, storage, dtype, shape, stride, offset, requires_grad, _no_hooks(), rest)
        return node

    def whole_tensor(self, storage: Persistent, shape: tuple[int, ...]) -> PlainTensor:
        """Return a contiguous tensor that is the whole of a storage of its dtype."""
        return PlainTensor(_whole_form(shape), storage)

    def respell_compact(self, node: Call, storage: Persistent, dtype: str) -> bool:
        """Put a compact tensor on this storage, with this dtype; False if it can't be compact."""
        form = compact_form(node)
        if form is None or self.ids[id(storage)].dtype != dtype:
            return False
        assert isinstance(node, PlainTensor)
        self._recogniser = None
        node.respell(form, storage)
        return True

    def respell(
        self,
        node: Call,
        storage: Persistent,
        dtype: str,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        offset: int,
        requires_grad: Node,
        hooks: Node,
        metadata: tuple[Node, ...] = (),
    ) -> None:
        """Make a call rebuild this plain tensor; the arguments are those of `tensor`."""
        self._recogniser = None
        sizes = [Tuple(list(each), 0) for each in (shape, stride)]
        typed = self.ids[id(storage)].dtype == dtype
        node.function = _name("torch._utils", V2 if typed else V3)
        items: list[Node] = [storage, offset, *sizes, requires_grad, hooks]
        node.args = Tuple([*items, *([] if typed else [_name("torch", dtype)]), *metadata], 0)


def canonical(
    root: Node,
    ids: Mapping[int, StorageId],
    tensors: Mapping[int, TensorId],
    storages: Mapping[str, Storage],
    blobs: Mapping[int, Readable] | None = None,
    within: Mapping[int, Node] | None = None,
) -> Graph:
    """Bring a graph into canonical form; its nodes are changed, not copied.

    These arguments map the `id()` of a node: `ids` to its storage, `tensors` to its tensor, `blobs`
    to the place of bytes that were passed over, and `within` to the object saved in bytes, which
    gets the canonical form too. UnsupportedError if a part of a storage is used in a way that has
    no canonical form, or text is too long.
    """
    return _Canoniser(root, ids, tensors, storages, blobs or {}).run(within or {})


class _Canoniser:
    def __init__(
        self,
        root: Node,
        ids: Mapping[int, StorageId],
        tensors: Mapping[int, TensorId],
        storages: Mapping[str, Storage],
        blobs: Mapping[int, Readable],
    ) -> None:
        self.graph = Graph(root)
        self.blobs = blobs
        self.stored = storages
        self.old = ids
        self.tensors = tensors
        self.recogniser = Recogniser(ids, tensors)
        self.kept: list[Node] = [root]  # kept alive, so that no other node gets the same `id()`
        self.new: dict[int, Node] = {}
        self.encoded: dict[int, bytes | None] = {}
        self.done: set[int] = set()  # tensors that hold nothing else to visit

    def run(self, within: Mapping[int, Node]) -> Graph:
        met = set[int]()
        self.graph.root = self.walked(self.graph.root, met)
        for maker, root in within.items():
            self.kept.append(root)
            self.graph.within[maker] = self.walked(root, met)
        for maker, new in self.new.items():
            if maker in within:
                self.graph.within[id(new)] = self.graph.within[maker]
        return self.graph

    def walked(self, root: Node, met: set[int]) -> Node:
        found = self.replaced(root)
        for _ in nodes_of(found, self.enter, self.done, met):
            pass  # each was entered
        return found

    def enter(self, node: Composite) -> None:
        """Replace the children of a node."""
        if type(node) is PlainTensor and self.compact(node):
            self.done.add(id(node))
            return
        if isinstance(node, Call):
            self.parameter(node)
            if self.tensor(node):
                self.done.add(id(node))
                return
            self.array(node)
            node.function, node.args = self.replaced(node.function), self.replaced(node.args)
            node.kwargs, node.state = self.replaced(node.kwargs), self.replaced(node.state)
        if isinstance(node, MappingNode):
            node.pairs = with_each_changed(node.pairs, self.replaced)
        if isinstance(node, (Tuple, List, Set, Call)):
            change_each(node.items, self.replaced)

    def replaced(self, node: Node) -> Node:
        if type(node) is PlainTensor or not isinstance(node, (Persistent, Call, bytes, Blob)):
            return node
        known = id(node)
        if known not in self.new:
            self.kept.append(node)
            self.new[known] = self.counterpart(node)
        return self.new[known]

    def counterpart(self, node: Persistent | Call | bytes | Blob) -> Node:
        if isinstance(node, Blob):
            text = text_of(node, self.blobs.get(id(node)))
            return node if text is None else self.graph.text(text)
        found = self.old.get(id(node))
        if found is not None:
            part = found.view_at or found.nbytes != found.whole_nbytes
            return self.part(found) if part else self.storage(found)
        if isinstance(node, Persistent) and id(node) in self.tensors:
            said = self.tensors[id(node)]
            tensor = self.recogniser.outside(node)
            assert tensor is not None
            return self.graph.tensor(
                self.storage(said.storage), tensor.dtype, said.shape, said.stride, tensor.offset
            )
        value = normalize(
            without_source_text(node), lambda held: self.uses[id(held)] == 1, self.encoded
        )
        # the bytes of an encoded text stand for all calls that encode it
        return self.replaced(value) if isinstance(value, bytes) and value is not node else value

    @cached_property
    def uses(self) -> Counter[int]:
        """Count the references to each list, by its `id()`."""
        holders = nodes_of(self.graph.root)
        return Counter(id(held) for n in holders for held in held_by(n) if isinstance(held, List))

    def part(self, found: StorageId) -> Persistent:
        """Turn a part of a storage that is used as a storage into one, as newer formats require."""
        stored = self.stored[found.id]
        start = found.view_at * storage_element_nbytes(stored.dtype or "uint8")
        key = f"{stored.id}[{start}:{start + found.nbytes}]"
        self.graph.cut[key] = StorageSlice(stored.id, start, found.nbytes)
        return self.graph.storage(key, stored.dtype, found.nbytes, stored.location)

    def storage(self, found: StorageId, node: StorageReference | None = None) -> Persistent:
        """Return the node of a storage; `node` becomes it if there is none yet."""
        known = self.graph.storages.get(found.id)
        if known is not None:
            return known
        stored = self.stored[found.id]
        nbytes = max(stored.nbytes, found.whole_nbytes)  # example inputs have no bytes
        return self.graph.storage(stored.id, stored.dtype, nbytes, stored.location, node)

    def parameter(self, node: Call) -> None:
        """Bring a parameter of torch 0.1 to 0.3 into the present form."""
        found = variable_of(node)
        if found is None or self.recogniser.tensor(node) is None:
            return
        data, requires_grad, hooks = found
        if node.qualname == "torch.nn.parameter.Parameter":
            self.kept += [node.args, node.state]
            node.function, node.opcode = Global("torch._utils", "_rebuild_parameter", 0), "REDUCE"
            node.args = Tuple([data, requires_grad, _no_hooks() if hooks is None else hooks], 0)
            node.state, node.built = None, False

    def array(self, node: Call) -> None:
        """Make a numpy array of Python 2 from bytes instead of a string."""
        found = array_of(node)
        content = None if found is None else found.content
        if isinstance(content, Blob):
            content.string = False
        elif isinstance(content, str):
            self.kept.append(node.state)
            put_content(node, content.encode("ascii"))

    def tensor(self, node: Call) -> bool:
        """Normalize a plain tensor; True if it holds nothing else to visit."""
        if node.qualname not in _PLAIN or not isinstance(node.args, Tuple):
            return False
        items = node.args.items
        if not items or id(items[0]) not in self.old:
            return False
        tensor = self.recogniser.tensor(node)
        assert isinstance(tensor, Tensor)
        self.kept.append(node.args)
        found = self.old[id(items[0])]
        grad: Node = items[4] if len(items) > 4 else False
        hooks: Node = items[5] if len(items) > 5 else None
        if hooks is None:
            hooks = _no_hooks()
        rest = items[7:] if node.qualname.endswith(V3) else items[6:]
        shape, stride = tensor.shape, tensor.stride
        self.graph.respell(
            node,
            self.storage(found),
            tensor.dtype,
            shape,
            stride,
            tensor.offset,
            grad,
            hooks,
            tuple(rest),
        )
        return not rest and isinstance(grad, bool) and is_untouched(node)

    def compact(self, node: PlainTensor) -> bool:
        """Make a compact tensor refer to its storage's node; return whether it stays compact."""
        form, before = compact_form(node), node.storage
        found = self.old.get(id(before))
        if form is None or found is None or found.dtype is None:
            return False
        self.recogniser.check_reach(form, found, found.dtype)
        after = self.storage(found, before if type(before) is StorageReference else None)
        if after is before:
            return self.graph.ids[id(after)].dtype == found.dtype
        self.kept.append(before)
        return self.graph.respell_compact(node, after, found.dtype)


def _no_hooks() -> Call:
    """Return the empty backward hooks of a tensor."""
    return Call(_name("collections", "OrderedDict"), _NOTHING, "REDUCE", 0)


@cache
def _name(module: str, name: str) -> Global:
    """Return the shared node of a name that tensors import."""
    return Global(module, name, 0)


_NOTHING = Tuple([], 0)
_NO_STORAGE = StorageForm(Text("storage", 0), Global("torch.storage", "UntypedStorage", 0), 0)


@cache
def _names() -> RecalledNames:
    """Return the names that all compact tensors import."""
    return RecalledNames(_name("torch._utils", V2), _name("collections", "OrderedDict"), _NOTHING)


@lru_cache(1 << 7)  # limited, because sizes can be chosen to have equal hashes
def _form(
    offset: int, shape: tuple[int, ...], stride: tuple[int, ...], requires_grad: bool
) -> Form:
    """Return the shared form of similar tensors."""
    return Form(_names(), offset, shape, stride, requires_grad)


@lru_cache(1 << 7)
def _whole_form(shape: tuple[int, ...]) -> Form:
    return _form(0, shape, contiguous_stride(shape), False)


@lru_cache(1 << 12)
def _form_of_storage(dtype: str | None, nbytes: int) -> tuple[str | None, StorageForm]:
    """Return the dtype that a storage can have, and the form of its persistent id."""
    cls = _CLASSES.get(dtype or "")
    if cls is None:
        return None, _NO_STORAGE._replace(numel=nbytes)
    element = storage_element_nbytes(dtype or "")
    return dtype, StorageForm(_NO_STORAGE.word, _name("torch", cls), nbytes // element)
