"""A file that a rank saved with torch.save, and what is looked up in it."""

from __future__ import annotations

from math import prod

from ...errors import CorruptError, UnsupportedError
from ...manifest.dtypes import BITS
from ...pickles.nodes import Call, Dict, List, Mapping, Node, Tuple
from ...plans.plan import Proof
from ...sources.source import Source
from ...torch_pickle.streams import Container
from ...torch_pickle.values.persistent_ids import is_size
from ...torch_pickle.values.strided import MOST_DIMENSIONS, is_contiguous
from ...torch_pickle.values.tensors import Recogniser
from .flat import Elements


class SavedFile:
    """A file of a rank."""

    def __init__(self, name: str, number: int, source: Source, container: Container) -> None:
        """`number`: that of the source among all."""
        self.name = name
        self.number = number
        self.source = source
        self.container = container
        roots = container.roots
        if len(roots) != 1 or roots[0][0] or container.big_endian:
            raise UnsupportedError("is not what DeepSpeed saves", path=source.path)
        #: what was saved
        self.top = roots[0][1]
        self._recogniser = Recogniser(container.ids, container.tensors)

    @property
    def root(self) -> Dict:
        """What was saved, where that is a dict; UnsupportedError if it is not."""
        if not isinstance(self.top, Dict):
            raise UnsupportedError("is not what DeepSpeed saves", path=self.source.path)
        return self.top

    def elements(self, node: Node) -> Elements | None:
        """Where the elements of a tensor lie; None if it is none, or these do not follow a row."""
        tensor = self._recogniser.tensor(node) if isinstance(node, Call) else None
        storage = None if tensor is None else self.container.storages.get(tensor.storage or "")
        if tensor is None or storage is None or tensor.layout != "strided" or tensor.composite:
            return None
        if BITS[tensor.dtype] < 8 or not is_contiguous(tensor.shape, tensor.stride):
            return None
        numel, width = prod(tensor.shape), BITS[tensor.dtype] // 8
        if storage.extent is None:
            if numel:
                raise UnsupportedError("has compressed tensors", path=self.source.path)
            return Elements(self.source, 0, tensor.dtype, tensor.shape, 0)
        start, nbytes = storage.extent.start, storage.extent.nbytes
        crc32 = self.container.crc32(storage.id)
        proof = Proof(nbytes, crc32, storage.id, self.number, start) if crc32 else None
        at = start + tensor.offset * width
        return Elements(self.source, at, tensor.dtype, tensor.shape, numel, proof)

    def malformed(self, what: str) -> CorruptError:
        """The error that something in it is not as it should be."""
        return CorruptError(f"{what} is not what DeepSpeed saves", path=self.source.path)


def shapes_in(file: SavedFile, key: str, *, grouped: bool) -> list[dict[str, tuple[int, ...]]]:
    """The shapes of parameters by name, in each group."""
    told = file.root.get(key)
    if not grouped and told is None:
        return [{}]
    groups = told.items if grouped and isinstance(told, List) else [told]
    shapes = list[dict[str, tuple[int, ...]]]()
    known = set[str]()
    for group in groups:
        if not isinstance(group, (Dict, Call)):
            raise file.malformed(f"its {key}")
        shapes.append({})
        for name, size in group.pairs:
            if not isinstance(name, str) or name in known:
                raise file.malformed(f"its {key}")
            known.add(str(name))
            shapes[-1][str(name)] = _size(file, size)
    return shapes


def _size(file: SavedFile, node: Node) -> tuple[int, ...]:
    """What a torch.Size says."""
    args = node.args if isinstance(node, Call) and node.qualname == "torch.Size" else None
    inner = args.items[0] if isinstance(args, Tuple) and len(args.items) == 1 else node
    items = inner.items if isinstance(inner, (Tuple, List)) else [None]
    if len(items) > MOST_DIMENSIONS or not all(map(is_size, items)):
        raise file.malformed("the shape of a parameter")
    return tuple(each for each in items if isinstance(each, int))


def dict_in(file: SavedFile, within: Dict, key: str) -> Dict:
    """The dict under a key; CorruptError if there is none."""
    found = within.get(key)
    if not isinstance(found, Dict):
        raise file.malformed(f"its {key}")
    return found


def by_number(node: Node) -> dict[int, Node]:
    """What a list, or a dict with numbers for keys, has under each number."""
    if isinstance(node, List):
        return dict(enumerate(node.items))
    pairs = node.pairs if isinstance(node, Dict) else ()
    return {key: value for key, value in pairs if type(key) is int}


def by_name(node: Node) -> dict[str, Node]:
    """What a kind of dict has under each name."""
    pairs = node.pairs if isinstance(node, Mapping) else ()
    return {str(key): value for key, value in pairs if isinstance(key, str)}
