"""Walk the trees of several ranks side by side: find divided, equal and different nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ...errors import CorruptError, UnsupportedError
from ...pickles.nodes import Blob, Call, Dict, Global, List, Node, Persistent, Set, Tuple, are_plain
from ...pickles.nodes import Mapping as MappingNode
from .divided_tensor import Placement, RankPart, divided_tensor
from .saved_file import SavedFile, TensorPiece

_LONGEST_NAME = 400  # characters
_LONG = 64  # bits of a number
_COMPOSITE = (Tuple, List, Set, Dict, Call)


class DividedLeaf(NamedTuple):
    """A tensor that is divided among ranks."""

    name: str
    node: Node  #: the node of the first rank
    parts: Mapping[int, tuple[SavedFile, Sequence[RankPart]]]  #: the parts of each rank


class Alike:
    """The common contents of ranks' files; the tree is that of the first file."""

    def __init__(self, files: Mapping[int, SavedFile]) -> None:
        """`files` by rank; InputError if their trees differ in places with divided tensors."""
        self.files = dict(sorted(files.items()))
        self.placed: list[DividedLeaf] = []
        #: tensors that all ranks have whole: name, node, and the piece of the first rank
        self.plain: list[tuple[str, Node, TensorPiece]] = []
        #: the names of entries that differ, and of the tensors among them
        self.differ: list[str] = []
        self.tensors_that_differ: list[str] = []
        self._placements = {rank: Placement(rank, file.numbers) for rank, file in files.items()}
        self._walk()

    def mesh_shapes(self) -> Iterator[str]:
        """The shapes of the device meshes over which its tensors are divided."""
        for each in self._placements.values():
            yield from each.mesh_shapes

    def _walk(self) -> None:
        met = set[tuple[int, ...]]()
        todo = [("", [file.top for file in self.files.values()])]
        while todo:  # without recursion: a tree may be deep
            name, nodes = todo.pop()
            first = nodes[0]
            if isinstance(first, (*_COMPOSITE, Persistent)):
                known = tuple(map(id, nodes))
                if known in met:
                    continue
                met.add(known)
            if any(divided_tensor(node) is not None for node in nodes):
                self._add_divided(name, nodes)
            elif isinstance(first, Call) and self._add_tensor(name, nodes):
                continue
            elif not self._same_kind(nodes):
                self._tell(name, nodes)
            else:
                inner = list(self._inner(name, nodes))
                todo += reversed(inner)

    def _add_divided(self, name: str, nodes: Sequence[Node]) -> None:
        parts: dict[int, tuple[SavedFile, Sequence[RankPart]]] = {}
        for (rank, file), node in zip(self.files.items(), nodes, strict=True):
            found = divided_tensor(node)
            if found is None:
                raise CorruptError(
                    f"has all of {name!r:.100}, other ranks have only parts: of another save?",
                    path=file.source.path,
                )
            try:
                parts[rank] = file, list(self._placements[rank].parts_of(found))
            except (CorruptError, UnsupportedError) as error:
                raise type(error)(f"{name:.100}: {error}", path=file.source.path) from error
        self.placed.append(DividedLeaf(name, nodes[0], parts))

    def _add_tensor(self, name: str, nodes: Sequence[Node]) -> bool:
        """If it is a tensor that all ranks have whole, add it; return whether it is a tensor."""
        files = list(self.files.values())
        if files[0].tensor(nodes[0]) is None:
            return False
        pieces = [file.piece(node) for file, node in zip(files, nodes, strict=True)]
        first = pieces[0]
        if any(
            (each is None) != (first is None)
            or (each is not None and first is not None and file.differs(each, first))
            for file, each in zip(files[1:], pieces[1:], strict=True)
        ):
            self.differ.append(name)
            self.tensors_that_differ.append(name)
        if first is not None:
            self.plain.append((name, nodes[0], first))
        return True

    @staticmethod
    def _same_kind(nodes: Sequence[Node]) -> bool:
        """Whether all nodes are the same value, or containers of equal size and keys."""
        first = nodes[0]
        for each in nodes[1:]:
            if isinstance(first, Persistent):
                raise UnsupportedError("holds storages that are in no tensor")
            if isinstance(first, str) and isinstance(each, str):
                same = str(first) == str(each)
            elif type(each) is not type(first):
                same = False
            elif isinstance(first, Global) and isinstance(each, Global):
                same = first.qualname == each.qualname
            elif isinstance(first, Blob) and isinstance(each, Blob):
                same = first.content is not None and first.content == each.content
            elif isinstance(first, MappingNode) and isinstance(each, MappingNode):
                same = _by_key(first).keys() == _by_key(each).keys()
                if isinstance(first, Call) and isinstance(each, Call):
                    same = same and first.qualname == each.qualname
                    same = same and len(first.items) == len(each.items)
            elif isinstance(first, (Tuple, List, Set)) and isinstance(each, (Tuple, List, Set)):
                same = len(first.items) == len(each.items)
            elif isinstance(first, float):
                same = repr(first) == repr(each)
            # an integer may be too long to be converted to text
            elif isinstance(first, (int, bytes)):
                same = first == each
            else:  # None
                same = True
            if not same:
                return False
        return True

    def _inner(self, name: str, nodes: Sequence[Node]) -> Iterator[tuple[str, list[Node]]]:
        """The children of containers of the same kind, side by side."""
        first = nodes[0]
        if isinstance(first, MappingNode):
            told = [_by_key(node) for node in nodes]
            for key in told[0]:
                yield _below(name, key[1]), [each[key] for each in told]
        if isinstance(first, Call):
            calls = [node for node in nodes if isinstance(node, Call)]
            for held in ("args", "kwargs", "state"):
                yield name, [getattr(node, held) for node in calls]
        if isinstance(first, (Tuple, List, Set, Call)):
            rows = [node.items for node in nodes if isinstance(node, (Tuple, List, Set, Call))]
            if not all(map(are_plain, rows)):
                for n, row in enumerate(zip(*rows, strict=True)):
                    yield _below(name, str(n)), list(row)
            elif any(list(each) != list(rows[0]) for each in rows):
                self.differ.append(name)

    def _tell(self, name: str, nodes: Sequence[Node]) -> None:
        """Note an entry that differs; UnsupportedError if it contains tensors."""
        held = zip(self.files.values(), nodes, strict=True)
        if any(file.holds_tensors(node) for file, node in held):
            raise UnsupportedError(
                f"ranks have different entries with tensors in them under {name!r:.100}: no file "
                "says how to merge them"
            )
        self.differ.append(name)


def _by_key(node: Node) -> dict[tuple[str, str], Node]:
    """The values of a dict, by the types and texts of its keys."""
    pairs = node.pairs if isinstance(node, MappingNode) else ()
    return {_kind_and_text(key): value for key, value in pairs}


def _kind_and_text(key: Node) -> tuple[str, str]:
    if isinstance(key, str):
        return "str", str(key)
    texts, todo = list[str](), list[Node]([key])
    while todo:  # without recursion; the size of a key was limited when it was read
        each = todo.pop()
        if isinstance(each, Tuple):
            texts.append(f"tuple/{len(each.items)}")
            todo += reversed(each.items)
        elif isinstance(each, Call):
            texts.append(f"{each.qualname}, made of")
            todo.append(each.args)
        elif isinstance(each, Global):
            texts.append(each.qualname)
        elif isinstance(each, int) and each.bit_length() > _LONG:  # decimal conversion is slow
            texts.append(hex(each))
        else:
            texts.append(repr(str(each) if isinstance(each, str) else each))
    return type(key).__name__, " ".join(texts)


def _below(name: str, key: str) -> str:
    return f"{name}.{key}"[:_LONGEST_NAME] if name else key
