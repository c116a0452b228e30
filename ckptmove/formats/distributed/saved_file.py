"""A file that a rank saved with torch.save, and access to its tensors."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from collections.abc import Mapping as AbstractMapping
from math import prod
from typing import NamedTuple, Protocol

from ...errors import CorruptError, UnsupportedError
from ...graph.traversal import nodes_of
from ...manifest.dtypes import BITS
from ...pickles.nodes import Call, Dict, List, Mapping, Node, Persistent, Tuple
from ...plans.plan import Plan, Proof
from ...sources.source import Source
from ...torch_pickle.streams import Container, LocationEdits
from ...torch_pickle.values.persistent_ids import is_size
from ...torch_pickle.values.strided import MOST_DIMENSIONS, Tensor, is_contiguous
from ...torch_pickle.values.tensors import Recogniser
from ..folders.parts import PartsContainer
from ..torch.zip import TorchZipContainer
from .dcp.items import DcpItem, is_dense
from .deepspeed.flat import Elements

_BLOCK = 1 << 20  # bytes compared at once
_MOST_NUMBERS = 1 << 20
_MOST_COMPARED = 64 << 20  # bytes; a larger file allows more


class TensorPiece(NamedTuple):
    """A tensor in a file, whose elements are contiguous in some order of the dimensions."""

    item: DcpItem  #: the place of its elements
    dtype: str
    shape: tuple[int, ...]
    #: the checksum of the record that contains them, if it has one
    proof: Proof | None = None
    #: the device tag in its file
    tag: str = "cpu"

    @property
    def crc32(self) -> int | None:
        """The checksum of exactly these elements, if there is one."""
        return self.item.crc32 or None

    def differs(self, other: TensorPiece) -> bool:
        """Whether the other piece has different values or strides."""
        mine, theirs = self.item, other.item
        if (*self[1:3], mine.stride) != (*other[1:3], theirs.stride):
            return True
        if self.crc32 is not None and other.crc32 is not None:
            return self.crc32 != other.crc32
        return any(
            mine.source.read(mine.at + at, min(_BLOCK, mine.nbytes - at))
            != theirs.source.read(theirs.at + at, min(_BLOCK, mine.nbytes - at))
            for at in range(0, mine.nbytes, _BLOCK)
        )


class SavedFile:
    """A file of a rank."""

    def __init__(
        self, name: str, number: int, source: Source, container: TorchZipContainer
    ) -> None:
        """`number`: the number of the source among all."""
        self.name = name
        self.number = number
        self.source = source
        self.container = container
        roots = container.roots
        if len(roots) != 1 or roots[0][0] or container.big_endian:
            raise UnsupportedError("is not what DeepSpeed saves", path=source.path)
        #: the saved object
        self.top = roots[0][1]
        self._recogniser = Recogniser(container.ids, container.tensors)
        self._compared = 0  # bytes

    @property
    def root(self) -> Dict:
        """The saved object, if it is a dict; UnsupportedError if it is not."""
        if not isinstance(self.top, Dict):
            raise UnsupportedError("is not what DeepSpeed saves", path=self.source.path)
        return self.top

    @property
    def saved_name(self) -> str:
        """The file name, without its suffix, that was given to torch.save.

        Or torch's default name.
        """
        return self.container.prefix.rstrip("/")

    def tensor(self, node: Node) -> Tensor | None:
        """The tensor of a node; None if it is not a tensor."""
        return self._recogniser.tensor(node) if isinstance(node, Call) else None

    def holds_tensors(self, node: Node) -> bool:
        """Whether a node contains tensors."""
        return any(self.tensor(each) is not None for each in nodes_of(node))

    def elements(self, node: Node) -> Elements | None:
        """The elements of a tensor; None if it is not a tensor, or not contiguous."""
        piece = self.piece(node)
        if piece is None or not is_contiguous(piece.shape, piece.item.stride):
            return None
        item, numel = piece.item, prod(piece.shape)
        return Elements(
            item.source, item.at, piece.dtype, piece.shape, numel, piece.proof, piece.tag
        )

    def piece(self, node: Node) -> TensorPiece | None:
        """A tensor whose elements are contiguous in some order of dimensions.

        None for other nodes.
        """
        tensor = self.tensor(node)
        storage = None if tensor is None else self.container.storages.get(tensor.storage or "")
        if tensor is None or storage is None or tensor.layout != "strided" or tensor.composite:
            return None
        if BITS[tensor.dtype] < 8 or not is_dense(tensor.shape, tensor.stride):
            return None
        numel, width = prod(tensor.shape), BITS[tensor.dtype] // 8
        if storage.extent is None:
            if numel:
                raise UnsupportedError(
                    "has compressed tensors",
                    path=self.source.path,
                    hint="ckptmove convert FILE ELSEWHERE/FILE writes it without compression",
                )
            item = DcpItem(self.source, 0, 0, tensor.stride, 0)
            return TensorPiece(item, tensor.dtype, tensor.shape, None, storage.location)
        start, nbytes = storage.extent.start, storage.extent.nbytes
        crc32 = self.container.crc32(storage.id)
        proof = Proof(nbytes, crc32, storage.id, self.number, start) if crc32 else None
        at, own = start + tensor.offset * width, crc32 if nbytes == numel * width else 0
        item = DcpItem(self.source, at, numel * width, tensor.stride, own)
        return TensorPiece(item, tensor.dtype, tensor.shape, proof, storage.location)

    def differs(self, piece: TensorPiece, other: TensorPiece) -> bool:
        """Whether a piece in it differs from one in another file, in values or strides.

        UnsupportedError if its pieces share their bytes so often that comparing would take too
        long.
        """
        if piece.crc32 is None or other.crc32 is None:
            self._compared += piece.item.nbytes
        if self._compared > _MOST_COMPARED + 4 * self.source.nbytes:
            raise UnsupportedError(
                "has too many tensors that share their bytes", path=self.source.path
            )
        return piece.differs(other)

    def numbers(self, node: Node) -> Sequence[int]:
        """The numbers in a tensor of integers, such as a mesh of ranks."""
        found = self.elements(node)
        if found is None or found.dtype not in ("int32", "int64") or found.numel > _MOST_NUMBERS:
            raise CorruptError("something is not a list of ranks", path=self.source.path)
        letter = "i" if found.dtype == "int32" else "q"
        data = found.source.read(found.at, found.numel * BITS[found.dtype] // 8)
        return struct.unpack(f"<{found.numel}{letter}", data)

    def malformed_error(self, what: str) -> CorruptError:
        """The error for contents that DeepSpeed would not have saved."""
        return CorruptError(f"{what} is not what DeepSpeed saves", path=self.source.path)


def check_names(files: Collection[SavedFile]) -> None:
    """Raises CorruptError if a file was saved under the name of another of these files."""
    names = {each.name for each in files}
    for each in files:
        folder, slash, own = each.name.rpartition("/")
        stem, _, suffix = own.rpartition(".")
        if each.saved_name != stem and f"{folder}{slash}{each.saved_name}.{suffix}" in names:
            raise CorruptError(
                f"was saved as {each.saved_name}.{suffix}, which is the name of another file",
                path=each.source.path,
                hint="give each file the name that it was saved by",
            )


def keep_what_is_used(roots: Iterable[Node], files: Iterable[SavedFile]) -> None:
    """Remove the storages of files that no node in these trees refers to."""
    met = set[int]()
    used = {
        id(node)
        for root in roots
        for node in nodes_of(root, met=met)
        if isinstance(node, Persistent)
    }
    for file in files:
        container = file.container
        ids = {each.id for known, each in container.ids.items() if known in used}
        container.storages = {k: v for k, v in container.storages.items() if k in ids}


def shapes_in(file: SavedFile, key: str, *, grouped: bool) -> list[dict[str, tuple[int, ...]]]:
    """The shapes of parameters by name, for each group."""
    told = file.root.get(key)
    if not grouped and told is None:
        return [{}]
    groups = told.items if grouped and isinstance(told, List) else [told]
    shapes = list[dict[str, tuple[int, ...]]]()
    known = set[str]()
    for group in groups:
        if not isinstance(group, (Dict, Call)):
            raise file.malformed_error(f"its {key}")
        shapes.append({})
        for name, size in group.pairs:
            if not isinstance(name, str) or name in known:
                raise file.malformed_error(f"its {key}")
            known.add(str(name))
            shapes[-1][str(name)] = _size(file, size)
    return shapes


def _size(file: SavedFile, node: Node) -> tuple[int, ...]:
    """The numbers in a torch.Size."""
    args = node.args if isinstance(node, Call) and node.qualname == "torch.Size" else None
    inner = args.items[0] if isinstance(args, Tuple) and len(args.items) == 1 else node
    items = inner.items if isinstance(inner, (Tuple, List)) else [None]
    if len(items) > MOST_DIMENSIONS or not all(map(is_size, items)):
        raise file.malformed_error("the shape of a parameter")
    return tuple(each for each in items if isinstance(each, int))


def dict_in(file: SavedFile, within: Dict, key: str) -> Dict:
    """The dict under a key; CorruptError if there is none."""
    found = within.get(key)
    if not isinstance(found, Dict):
        raise file.malformed_error(f"its {key}")
    return found


def by_number(node: Node) -> dict[int, Node]:
    """Index → item of a list, or number → value of a dict with numbers as keys."""
    if isinstance(node, List):
        return dict(enumerate(node.items))
    pairs = node.pairs if isinstance(node, Dict) else ()
    return {key: value for key, value in pairs if type(key) is int}


def by_name(node: Node) -> dict[str, Node]:
    """Name → value of a dict or dict object."""
    pairs = node.pairs if isinstance(node, Mapping) else ()
    return {str(key): value for key, value in pairs if isinstance(key, str)}


class MadeOfRanks(Protocol):
    """A tensor that is assembled from the parts of ranks."""

    def tags(self) -> tuple[str, ...]:
        """The device tags of the files that hold parts of it."""


class MergedContainer(PartsContainer):
    """The merged contents of ranks' files; no file is a separate part of the checkpoint."""

    tags_storages = False
    #: storage id → the tensor that is assembled in it
    _wholes: AbstractMapping[str, MadeOfRanks]

    def tags(self) -> dict[str, tuple[str, ...]]:
        return {key: each.tags() for key, each in self._wholes.items()}

    @property
    def described_nbytes(self) -> int:
        """The size of the pickles."""
        return sum(part.described_nbytes for part in self.parts.values())

    def inner(self) -> Iterator[tuple[str, Container]]:
        """None: the other records in the files are only parts of their frames."""
        return iter(())

    def plan(self, spelling: LocationEdits) -> Plan:
        raise UnsupportedError(
            "is assembled from the files of ranks",
            hint="relocate the folder with these files by itself",
        )
