"""Have tensors stand for the numpy arrays that a state dict holds instead of them."""

from __future__ import annotations

from collections.abc import Iterator

from ..contents.arrays import Array, array_of
from ..contents.sections import is_state_dict
from ..dtypes import STORAGE_CLASSES
from ..errors import RefusedError
from ..pickles.nodes import Blob, Call, Node
from ..pickles.nodes import Mapping as MappingNode
from ..words import counted
from .canonical import is_plain, nodes_of
from .draft import Draft, Stored

_TYPED = frozenset(STORAGE_CLASSES.values())


def tensors_for_arrays(draft: Draft) -> int:
    """Have tensors stand for the arrays in state dicts of a draft; gives how many."""
    made: dict[int, tuple[Node, Call]] = {}  # holds the arrays, so that no id is used again
    for node, n, array in _arrays(draft):
        key, value = node.pairs[n]
        if id(value) not in made:
            made[id(value)] = value, _tensor(draft, array, len(made))
        node.pairs[n] = key, made[id(value)][1]
    return len(made)


def _arrays(draft: Draft) -> Iterator[tuple[MappingNode, int, Array]]:
    """The arrays in state dicts: what holds each, under which of its pairs, and what it is."""
    for node in nodes_of(draft.graph.root):
        if isinstance(node, MappingNode) and is_state_dict(node):
            for n, (_, value) in enumerate(node.pairs):
                array = array_of(value)
                if array is not None:
                    yield node, n, array


def note_arrays(draft: Draft, *, force: bool) -> None:
    """Warn of arrays in state dicts that a file of tensors keeps in its tree, as text.

    Args:
        draft: what is written.
        force: whether it may hold none, though the draft has weights.

    Raises:
        RefusedError: it would hold none.
    """
    count = len({id(node.pairs[n][1]) for node, n, _ in _arrays(draft)})
    if count and not force and not any(map(is_plain, nodes_of(draft.graph.root))):
        raise RefusedError(
            f"no tensor would be written: its weights are {counted(count, 'numpy array')}",
            hint="--select model writes arrays as tensors; --force keeps them in the tree alone",
        )
    if count:
        draft.warnings.append(
            f"{counted(count, 'numpy array')} kept in the tree, not as tensors: "
            "--select model writes arrays as tensors"
        )


def _tensor(draft: Draft, array: Array, number: int) -> Call:
    key, graph = f"numpy/{number}", draft.graph
    dtype, content = array.dtype if array.dtype in _TYPED else None, array.content
    stored = Stored(key, "cpu", dtype, array.nbytes, big_endian=array.big_endian)
    if isinstance(content, Blob) and content.content is None:
        window = draft.blobs[id(content)]
        if window.start is None:
            stored = stored._replace(content=window.read(0, array.nbytes))
        else:
            stored = stored._replace(source=draft.number_of(window), start=window.start)
    else:
        stored = stored._replace(content=_held(content))
    draft.stored[key] = stored
    storage = graph.storage(key, dtype, array.nbytes, "cpu")
    return graph.tensor(storage, array.dtype, array.shape, array.stride, 0)


def _held(content: bytes | str | Blob | Call) -> bytes:
    """Bytes in memory; calls that encode text were replaced by what they give."""
    if isinstance(content, Blob):
        content = content.content or b""
    if isinstance(content, str):
        return content.encode("ascii")
    assert isinstance(content, bytes)
    return content
