"""One side of a comparison: the tensors of a checkpoint, and texts for its values."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from ...errors import UnsupportedError
from ...manifest.dtypes import nbytes_of
from ...pickles.nodes import Blob, Call, Global, Node, Persistent
from ...pickles.opcodes.plain_tensors import Form, compact_form
from ...pickles.terms import Term, to_terms
from ...reports.difference import Kind
from ...sources.source import Memory, Readable
from ...torch_pickle.values.strided import Tensor
from ..draft import CheckpointGraph, StorageBytes, View
from ..edges import COMPOSITE, bytes_of, type_of
from ..plain_tensors import data_of, flags_of, is_plain
from ..traversal import held_by, nodes_of
from .difference import ComparedTensor, StorageSpan, StoredElements, span_in_storage
from .tree_position import TreePosition

_LARGEST_TERM = 100  # most nodes of a value that is shown completely
#: Most characters, bytes or bits of a scalar that is shown completely; others are shortened.
LONGEST_TERM = 4096


class Side:
    """One of the checkpoints."""

    def __init__(self, draft: CheckpointGraph, added: bool) -> None:
        self.draft = draft
        self.recogniser = draft.graph.recogniser
        self.kind = Kind.VALUE_ADDED if added else Kind.VALUE_REMOVED
        self.spelled: set[int] = set()  # nodes that state the device of a tensor
        self.views: dict[tuple[int, str], tuple[View, StorageSpan]] = {}  # by form and dtype
        self.alone: list[ComparedTensor] = []
        self.met: set[int] = set()  # for content that only this side has

    @property
    def breadth(self) -> int:
        """The number of references from one object to another."""
        graph, met = self.draft.graph, set[int]()
        roots = (graph.root, *graph.within.values())
        return sum(len(held_by(node)) for root in roots for node in nodes_of(root, met=met))

    def tensor(self, node: Node) -> Tensor | None:
        """Return the tensor of a node, if it is one."""
        if isinstance(node, Call):
            return self.recogniser.tensor(node)
        return self.recogniser.outside(node) if isinstance(node, Persistent) else None

    def tensor_at(self, where: TreePosition, node: Node, tensor: Tensor) -> ComparedTensor:
        """Return a tensor with its place; the node of its device does not count as a value."""
        form = compact_form(node)
        if form is not None and tensor.storage is not None:
            return self.compact(where, node, tensor, form, self.draft.stored[tensor.storage])
        self.spelled.update(map(id, tensor.spelled))
        extent, left_out = None, False
        if tensor.storage is not None:
            extent = span_in_storage(tensor).within(self.draft.stored[tensor.storage])
            left_out = extent is None
        shown = None if left_out else self.elements(data_of(node), tensor)
        return ComparedTensor(where, node, tensor, shown, self.draft, left_out, extent)

    def compact(
        self, where: TreePosition, node: Node, tensor: Tensor, form: Form, stored: StorageBytes
    ) -> ComparedTensor:
        """As `tensor_at`, but common properties of many tensors are found only once."""
        known = self.views.get((id(form), tensor.dtype))
        if known is None:
            view = View(tensor.dtype, tensor.shape, tensor.stride, tensor.offset)
            known = self.views[id(form), tensor.dtype] = view, span_in_storage(tensor)
        view, span = known
        draft, extent = self.draft, span.within(stored)
        # constructors would take longer, and there may be very many
        shown = None if extent is None else tuple.__new__(StoredElements, (draft, stored, view))
        return tuple.__new__(
            ComparedTensor, (where, node, tensor, shown, draft, extent is None, extent)
        )

    def elements(self, node: Node, tensor: Tensor) -> StoredElements | None:
        """Return the elements of a storage or a plain tensor."""
        flags: Mapping[str, bool] | None = {} if isinstance(node, Persistent) else None
        if isinstance(node, Call) and is_plain(node):
            flags = flags_of(node)
        if flags is None or tensor.storage is None:
            return None
        view = View(tensor.dtype, tensor.shape, tensor.stride, tensor.offset, **flags)
        stored = self.draft.stored[tensor.storage]
        bare = id(node) in self.draft.graph.ids
        if bare and nbytes_of(prod(tensor.shape), tensor.dtype) < stored.nbytes:
            view = View("uint8", (stored.nbytes,), (1,), 0)  # quantized: several elements in a byte
        return StoredElements(self.draft, stored, view)

    def bytes_of(self, node: Node) -> Readable | None:
        """Return the bytes of a node, in any spelling."""
        path = self.draft.path
        if isinstance(node, Blob):
            held = self.draft.blobs.get(id(node))
            return held if node.content is None else Memory(node.content, path)
        content = bytes_of(node)
        return None if content is None else Memory(content, path)

    def term(self, node: Node) -> Term:
        """Return a value as plain data, shortened if it is long."""
        if isinstance(node, str) and len(node) > LONGEST_TERM:
            return to_terms(f"{node[:LONGEST_TERM]}…", self.leaf)
        if isinstance(node, int) and node.bit_length() > LONGEST_TERM:
            return {"$": "int", "bits": node.bit_length()}
        if isinstance(node, Global):
            return {"$": "name", "of": f"{node.module}:{node.name}"[:LONGEST_TERM]}
        content = self.bytes_of(node)
        if content is not None and content.nbytes > LONGEST_TERM:
            return {"$": "bytes", "nbytes": content.nbytes}
        if content is not None:
            return to_terms(content.read(0, content.nbytes), self.leaf)
        if self.values(node) is None:
            return {"$": type_of(node)}
        try:
            return to_terms(node, self.leaf)
        except UnsupportedError:
            return {"$": type_of(node)}

    def values(self, node: Node) -> list[Node] | None:
        """Return all nodes of a small value; None if it is large, or holds a tensor."""
        found: list[Node] = []
        todo = [node]
        while todo:
            each = todo.pop()
            found.append(each)
            if len(found) > _LARGEST_TERM or self.is_tensor(each) or _is_long(each):
                return None
            if isinstance(each, COMPOSITE):
                todo.extend(held_by(each))
        return found

    def is_tensor(self, node: Node) -> bool:
        """Whether a node is a tensor."""
        return isinstance(node, (Call, Persistent)) and self.tensor(node) is not None

    def leaf(self, node: Node) -> dict[str, Term] | None:
        """Return the term of bytes that may be a checkpoint: their size."""
        return {"$": "bytes", "nbytes": node.nbytes} if isinstance(node, Blob) else None


def _is_long(node: Node) -> bool:
    return isinstance(node, (str, bytes)) and len(node) > LONGEST_TERM
