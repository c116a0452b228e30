"""Turn the numpy arrays of a state dict into tensors."""

from __future__ import annotations

from typing import NamedTuple

from ...manifest.dtypes import STORAGE_CLASSES
from ...manifest.manifest import Role
from ...pickles.nodes import Blob, Call, Node
from ...pickles.nodes import Mapping as MappingNode
from ...pickles.opcodes.plain_tensors import PlainTensor
from ...sources.source import MAX_NBYTES
from ...torch_pickle.listed_tensors import PickleContents
from ...torch_pickle.sections.sections import is_state_dict
from ...torch_pickle.values.numpy_arrays import Array, array_of, put_content
from ...torch_pickle.values.strided import contiguous_stride
from ..array_order import Order, ReorderedArray, order_of
from ..draft import CheckpointGraph, StorageBytes, View
from ..traversal import nodes_of

_TYPED = frozenset(STORAGE_CLASSES.values())


def tensors_for_arrays(draft: CheckpointGraph) -> frozenset[str]:
    """Replace the arrays in state dicts of a draft by tensors; return their storages."""
    keys: list[str] = []
    made: dict[int, tuple[Node, Call]] = {}  # keeps the arrays, so that no id is reused
    for node in nodes_of(draft.graph.root, compact=False):
        if not isinstance(node, MappingNode) or not is_state_dict(node):
            continue
        for n, (key, value) in enumerate(node.pairs):
            array = None if type(value) is PlainTensor else _array_of(value)
            if array is None:
                continue
            if id(value) not in made:
                made[id(value)] = value, _tensor(draft, array, keys)
            node.pairs[n] = key, made[id(value)][1]
    return frozenset(keys)


class ArrayBytes(NamedTuple):
    """The bytes of an array that will be written as a tensor."""

    #: their node in the graph
    blob: Blob
    stored: StorageBytes
    #: the elements in the order of the tensor
    view: View
    #: the array's order, if it differs from the tensor's
    order: Order | None


def bytes_of_arrays(draft: CheckpointGraph, contents: PickleContents) -> dict[int, ArrayBytes]:
    """Turn the bytes of arrays into separate blobs; return them by `id()` of the array.

    An array stays an array in the graph. Its bytes become a tensor of the file, and the tree
    records how to convert back. This applies to arrays of state dicts, and to other long arrays. A
    short array elsewhere, such as the state of a generator, is a value and stays in the tree. An
    array too large to be brought back into its order stays a row of bytes.
    """
    found: dict[int, ArrayBytes] = {}
    own: dict[int, ArrayBytes] = {}  # by `id()` of the blob: a bytearray may make several arrays
    listed = zip(contents.tensors, contents.nodes, strict=True)
    nodes = [node for entry, node in listed if entry.role is Role.ARRAY]
    for node in (*nodes, *(node for _, node in contents.loose)):
        array = _array_of(node) if id(node) not in found else None
        if array is None or not isinstance(node, Call):
            continue
        known = own.get(id(array.content))
        if known is not None:
            found[id(node)] = known
            continue
        order = order_of(array)
        if order is not None and array.nbytes > MAX_NBYTES:
            continue
        stored, view = _storage_and_view(draft, array, "bytes")
        blob = _blob(draft, array)
        put_content(node, blob)
        found[id(node)] = own[id(blob)] = ArrayBytes(blob, stored, view, order)
    return found


def _blob(draft: CheckpointGraph, array: Array) -> Blob:
    content = array.content
    if isinstance(content, Blob) and content.content is None:
        blob = Blob(0, array.nbytes, None)
        draft.blobs[id(blob)] = draft.blobs[id(content)]
        return blob
    return Blob(0, array.nbytes, _bytes_of(content))


def _tensor(draft: CheckpointGraph, array: Array, keys: list[str]) -> Call:
    graph = draft.graph
    key = f"numpy/{len(keys)}"
    keys.append(key)
    stored, view = _storage_and_view(draft, array, key)
    draft.stored[key] = stored
    storage = graph.storage(key, stored.dtype, array.nbytes, "cpu")
    return graph.tensor(storage, view.dtype, view.shape, view.stride, 0)


def _storage_and_view(draft: CheckpointGraph, array: Array, key: str) -> tuple[StorageBytes, View]:
    """Return the storage of an array's bytes, and the view of its elements."""
    dtype, content = array.dtype if array.dtype in _TYPED else None, array.content
    view = View(array.dtype, array.shape, array.stride, 0)
    stored = StorageBytes(key, "cpu", dtype, array.nbytes, big_endian=array.big_endian)
    if not isinstance(content, Blob) or content.content is not None:
        return stored._replace(content=_bytes_of(content)), view
    window = draft.blobs[id(content)]
    if isinstance(window, ReorderedArray) and window.order == order_of(array):
        window = window.tensor
        view = view._replace(stride=contiguous_stride(array.shape))
        stored = stored._replace(big_endian=False)
    if window.start is None:
        return stored._replace(content=window.read(0, array.nbytes)), view
    return stored._replace(source=draft.number_of(window), start=window.start), view


def _array_of(node: Node) -> Array | None:
    """Return an array whose content is bytes; a call that can't be encoded stays."""
    array = array_of(node)
    return array if array is not None and isinstance(array.content, (bytes, Blob)) else None


def _bytes_of(content: bytes | str | Blob | Call) -> bytes:
    """Return bytes in memory."""
    held = content.content if isinstance(content, Blob) else content
    assert isinstance(held, bytes)
    return held
