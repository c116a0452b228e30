"""A summary of the leaves of a tree: equal for a graph and for the graph read from its text.

Tensors count by their dtype, shape and device, not by how their storages are divided among files.
"""

from __future__ import annotations

from array import array
from functools import lru_cache

from ..pickles.nodes import Blob, Call, Node, Persistent
from .canonical import Graph

#: The number of what each leaf shows, and what the numbers stand for.
Content = tuple["array[int]", list[str]]


@lru_cache(1 << 7)  # limited, because sizes can be chosen to have equal hashes
def _of_tensor(dtype: str, shape: tuple[int, ...], device: str) -> str:
    return str(("tensor", dtype, shape, device, False))


class Fingerprint:
    """The running summary of the plain tensors, storages and long bytes of a graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._order = array("Q")  # for each leaf, the number of its content
        #: content → its number; as text, because sizes can be chosen to have equal hashes
        self._numbers: dict[str, int] = {}

    def add(self, node: Node) -> int:
        """Add the next leaf; return the number of its content."""
        number = self._number(node)
        self._order.append(number)
        return number

    def add_again(self, number: int) -> None:
        """Add a leaf with content that has a number."""
        self._order.append(number)

    def add_tensor(self, dtype: str, shape: tuple[int, ...], device: str) -> None:
        """Count a plain tensor that requires no gradient."""
        self._order.append(self._number_of(_of_tensor(dtype, shape, device)))

    def _number(self, node: Node) -> int:
        said: tuple[object, ...] = ()
        if isinstance(node, Blob):
            said = "blob", node.nbytes
        elif isinstance(node, Persistent):
            found = self.graph.ids[id(node)]
            said = "storage", found.dtype, found.nbytes, str(found.location)
        elif isinstance(node, Call):
            tensor = self.graph.recogniser.tensor(node)
            assert tensor is not None
            said = "tensor", *tensor[:3], tensor.requires_grad
        return self._number_of(str(said))

    def _number_of(self, said: str) -> int:
        return self._numbers.setdefault(said, len(self._numbers))

    def content(self) -> Content:
        """Return the summary of the added leaves, without the graph."""
        return self._order, list(self._numbers)
