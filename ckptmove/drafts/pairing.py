"""Walk two graphs in step: which tensors stand in the same place, and what else is not the same.

What stands in the same place has the same path. How a file spells a thing does not count: sets,
bytes and devices are compared by what they are, everything else by its structure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from math import prod
from typing import NamedTuple

from ..contents.modules import attributes_of
from ..contents.strided import Tensor
from ..dtypes import nbytes_of
from ..errors import CorruptError, UnsupportedError
from ..paths import Path
from ..pickles.nodes import Blob, Call, Global, List, Node, Persistent, Tuple
from ..pickles.nodes import Mapping as MappingNode
from ..pickles.terms import Term, to_terms
from ..source import Memory, Readable
from .canonical import Composite, data_of, flags_of, held_by, is_plain, nodes_of
from .differing import Difference, Held, Kind, Shown, can_cast, is_left_out, regrouped, unlike
from .draft import Draft, View
from .excerpts import first_unlike, of_bytes, of_scalars
from .meaning import (
    COMPOSITE,
    Edges,
    bytes_of,
    children_edges,
    device_of,
    edges_of,
    is_leaf,
    is_mutable,
    plainly_same,
    scalar_of,
    signature_of,
    type_of,
    types_of,
)
from .where import Where

_DEEPEST = 1000  # keys in a path
_LEAST_ROOM = 1 << 20  # steps
_LARGEST_TERM = 100  # nodes of a value that is told as a whole
_LONGEST_TERM = 4096  # characters, bytes or bits of a scalar that is


class Pairs(NamedTuple):
    """What two checkpoints have in common, and what not.

    Attributes:
        both: tensors under the same name.
        old, new: tensors that only one of them has.
        differences: all that is known without a look at the bytes of tensors.
        passed: how many differences in devices were let pass.
    """

    both: list[tuple[Held, Held]]
    old: list[Held]
    new: list[Held]
    differences: list[Difference]
    passed: int


def pair(
    old: Draft,
    new: Draft,
    *,
    chosen: Set[str] | None = None,
    ignore_devices: bool = False,
    cast: bool = False,
) -> Pairs:
    """Compare two checkpoints but for the bytes of their tensors.

    Args:
        old, new: the checkpoints.
        chosen: names of what is to be compared, with all that is below; None for everything.
        ignore_devices: whether to let pass that tensors, or values, name other devices.
        cast: whether to let pass that tensors have other dtypes that they can be cast to.

    Raises:
        CorruptError: a tensor makes no sense, or one leads to the same things in too many ways.
    """
    return _Pairing(old, new, chosen, ignore_devices, cast).run()


class _Side:
    """One of the checkpoints."""

    def __init__(self, draft: Draft, added: bool) -> None:
        self.draft = draft
        self.recogniser = draft.graph.recogniser
        self.kind = Kind.VALUE_ADDED if added else Kind.VALUE_REMOVED
        self.spelled: set[int] = set()  # what says the device of a tensor
        self.alone: list[Held] = []
        self.met: set[int] = set()  # of what the other one has not

    @property
    def breadth(self) -> int:
        """How many things are held by others."""
        graph, met = self.draft.graph, set[int]()
        roots = (graph.root, *graph.within.values())
        return sum(len(held_by(node)) for root in roots for node in nodes_of(root, met=met))

    def tensor(self, node: Node) -> Tensor | None:
        if isinstance(node, Call):
            return self.recogniser.tensor(node)
        return self.recogniser.outside(node) if isinstance(node, Persistent) else None

    def held(self, name: str, node: Node, tensor: Tensor) -> Held:
        self.spelled.update(map(id, tensor.spelled))
        return Held(name, node, tensor, self.shown(node, tensor), self.draft)

    def shown(self, node: Node, tensor: Tensor) -> Shown | None:
        """The elements of a storage, a plain tensor, or a parameter that is one."""
        node = data_of(node)
        flags: Mapping[str, bool] | None = {} if isinstance(node, Persistent) else None
        if isinstance(node, Call) and is_plain(node):
            flags = flags_of(node)
        if flags is None or tensor.storage is None or is_left_out(tensor, self.draft):
            return None
        view = View(tensor.dtype, tensor.shape, tensor.stride, tensor.offset, **flags)
        stored = self.draft.stored[tensor.storage]
        bare = id(node) in self.draft.graph.ids
        if bare and nbytes_of(prod(tensor.shape), tensor.dtype) < stored.nbytes:
            view = View("uint8", (stored.nbytes,), (1,), 0)  # quantized: several in a byte
        return Shown(self.draft, stored, view)

    def bytes_of(self, node: Node) -> Readable | None:
        """Bytes, however they are spelled."""
        path = self.draft.path
        if isinstance(node, Blob):
            held = self.draft.blobs.get(id(node))
            return held if node.content is None else Memory(node.content, path)
        content = bytes_of(node)
        return None if content is None else Memory(content, path)

    def term(self, node: Node) -> Term:
        """A value as plain data, shortened where it is long."""
        if isinstance(node, str) and len(node) > _LONGEST_TERM:
            return to_terms(f"{node[:_LONGEST_TERM]}…", self.leaf)
        if isinstance(node, int) and node.bit_length() > _LONGEST_TERM:
            return {"$": "int", "bits": node.bit_length()}
        if isinstance(node, Global):
            return {"$": "name", "of": f"{node.module}:{node.name}"[:_LONGEST_TERM]}
        content = self.bytes_of(node)
        if content is not None and content.nbytes > _LONGEST_TERM:
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
        """All that a small value is made of; None if it is large, or holds a tensor."""
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
        return isinstance(node, (Call, Persistent)) and self.tensor(node) is not None

    def leaf(self, node: Node) -> dict[str, Term] | None:
        return {"$": "bytes", "nbytes": node.nbytes} if isinstance(node, Blob) else None


class _Pairing:
    def __init__(
        self,
        old: Draft,
        new: Draft,
        chosen: Set[str] | None,
        ignore_devices: bool,
        cast: bool,
    ) -> None:
        self.old, self.new = _Side(old, False), _Side(new, True)
        self.chosen = chosen
        self.ignore_devices = ignore_devices
        self.cast = cast
        self.room = _LEAST_ROOM
        self.counted = False
        self.todo: list[tuple[Node, Node, Where]] = []
        self.later: list[tuple[Node, Node, Where]] = []
        self.met: set[tuple[int, int]] = set()
        self.opened: set[tuple[int, int]] = set()  # bytes that hold checkpoints
        self.both: list[tuple[Held, Held]] = []
        self.found: list[Difference] = []
        self.passed = 0
        self.objects: list[tuple[Where, int, int]] = []

    def run(self) -> Pairs:
        whole = self.chosen is None or "" in self.chosen
        alike = self.old.draft.listed().alike | self.new.draft.listed().alike
        root = Where(None, (), 0, whole, False, alike)
        self.todo.append((self.old.draft.graph.root, self.new.draft.graph.root, root))
        while self.todo or self.later:
            if not self.todo:
                self.todo, self.later = self.later[::-1], []
            self.visit(*self.todo.pop())
        self.found += self.regrouped()
        return Pairs(self.both, self.old.alone, self.new.alone, self.found, self.passed)

    def regrouped(self) -> Iterator[Difference]:
        """Which containers are one and the same in one of them only."""
        labels = [(a, b) for _, a, b in self.objects]
        olds, news = [a for a, _ in labels], [b for _, b in labels]
        if len(set(olds)) == len(olds) and len(set(news)) == len(news):
            return
        yield from regrouped([where.name for where, _, _ in self.objects], olds, news)

    # -- one place -----------------------------------------------------------------------------

    def visit(self, old: Node, new: Node, where: Where) -> None:
        self.step()
        if where.depth > _DEEPEST:
            raise CorruptError(f"the checkpoint is nested more than {_DEEPEST} levels deep")
        within = self.old.draft.graph.within, self.new.draft.graph.within
        if id(old) in within[0] and id(new) in within[1]:
            if (id(old), id(new)) not in self.opened:
                self.opened.add((id(old), id(new)))
                self.visit(within[0][id(old)], within[1][id(new)], where)
            return
        mine, other = self.old.tensor(old), self.new.tensor(new)
        if mine is not None and other is not None:
            self.tensors(old, new, mine, other, where)
        elif mine is not None or other is not None:
            self.apart(old, new, where)
        elif is_leaf(old) and is_leaf(new):
            self.leaves(old, new, where)
        elif is_leaf(old) or is_leaf(new):
            if self.old.values(old) is None or self.new.values(new) is None:
                self.apart(old, new, where)
            else:
                self.differ(Kind.VALUE, where, self.old.term(old), self.new.term(new))
        else:
            assert isinstance(old, COMPOSITE)
            assert isinstance(new, COMPOSITE)
            self.containers(old, new, where)

    def step(self, steps: int = 1) -> None:
        self.room -= steps
        if self.room < 0 and not self.counted:
            self.counted = True
            self.room += 4 * (self.old.breadth + self.new.breadth)
        if self.room < 0:
            raise CorruptError("the same objects are reached on too many paths")

    def differ(self, kind: Kind, where: Where, old: Term = None, new: Term = None) -> None:
        if where.chosen:
            self.found.append(Difference(kind, where.name, old, new))

    def apart(self, old: Node, new: Node, where: Where) -> None:
        """Two things that have nothing in common but their place."""
        self.only(self.old, old, where)
        self.only(self.new, new, where)

    def inside(self, where: Where, keys: Path, *, rest: bool = False) -> Where:
        """The place of something that is held by what is at `where`."""
        depth = where.depth + len(keys)
        place = Where(where, keys, depth, where.chosen, where.rest or rest, where.alike)
        if self.chosen is None or where.chosen or not keys:
            return place
        return place._replace(chosen=place.name in self.chosen)

    # -- tensors -------------------------------------------------------------------------------

    def tensors(self, old: Node, new: Node, mine: Tensor, other: Tensor, where: Where) -> None:
        known = (id(old), id(new)) in self.met
        if known and where.rest:
            return
        self.met.add((id(old), id(new)))
        name = where.name
        pair = self.old.held(name, old, mine), self.new.held(name, new, other)
        if where.chosen:
            self.both.append(pair)
        alike = self.attributes(mine, other, where)
        if known:
            return
        if alike and (pair[0].shown is None or pair[1].shown is None):
            self.below(old, new, self.inside(where, (), rest=True))
        olds, news = children_edges(mine.children), children_edges(other.children)
        self.edges(olds, news, where)

    def attributes(self, old: Tensor, new: Tensor, where: Where) -> bool:
        """Whether two tensors are alike, but for their device and what they hold."""
        alike = True
        for kind, mine, other in unlike(old, new):
            if kind is Kind.MOVED:
                if not where.rest:
                    self.move(kind, where, mine, other)
            elif kind is Kind.VALUE:
                self.differ(kind, self.inside(where, ("requires_grad",)), mine, other)
            elif kind is not Kind.RETYPED or not (self.cast and can_cast(old.dtype, new.dtype)):
                alike = False
                self.differ(kind, where, mine, other)
        return alike

    def move(self, kind: Kind, where: Where, old: Term, new: Term) -> None:
        """Another device."""
        if self.ignore_devices:
            self.passed += where.chosen
        else:
            self.differ(kind, where, old, new)

    # -- values --------------------------------------------------------------------------------

    def leaves(self, old: Node, new: Node, where: Where) -> None:
        if id(old) in self.old.spelled and id(new) in self.new.spelled:
            return
        mine, other = self.old.bytes_of(old), self.new.bytes_of(new)
        if mine is not None and other is not None:
            at = first_unlike(mine, other)
            if at is not None:
                sides = self.told_apart(old, new)
                if sides[0] == sides[1]:
                    sides = of_bytes(mine, at), of_bytes(other, at)
                self.differ(Kind.VALUE, where, *sides)
            return
        if scalar_of(old) == scalar_of(new):
            return
        devices = device_of(old), device_of(new)
        if None not in devices and scalar_of(old)[0] == scalar_of(new)[0]:
            self.move(Kind.VALUE, where, self.old.term(old), self.new.term(new))
        else:
            self.differ(Kind.VALUE, where, *self.told_apart(old, new))

    def told_apart(self, old: Node, new: Node) -> tuple[Term, Term]:
        """The terms of two values, such that these differ as well."""
        sides = self.old.term(old), self.new.term(new)
        return (of_scalars(old, new) or sides) if sides[0] == sides[1] else sides

    # -- containers ----------------------------------------------------------------------------

    def containers(self, old: Composite, new: Composite, where: Where) -> None:
        if is_mutable(old) and is_mutable(new) and where.chosen:
            self.objects.append((where, id(old), id(new)))
        if (id(old), id(new)) in self.met:
            return
        self.met.add((id(old), id(new)))
        if signature_of(old) != signature_of(new):
            self.differ(Kind.TYPE, where, *types_of(old, new))
        self.below(old, new, where)

    def below(self, old: Node, new: Node, where: Where) -> None:
        assert isinstance(old, COMPOSITE)
        assert isinstance(new, COMPOSITE)
        if isinstance(old, (List, Tuple)) and isinstance(new, (List, Tuple)):
            self.step(len(old.items))
            if plainly_same(old.items, new.items):
                return
        olds, news = edges_of(old), edges_of(new)
        if isinstance(old, MappingNode) and isinstance(new, MappingNode):
            both = [key for key in olds if key in news]
            if both != [key for key in news if key in olds]:
                self.differ(Kind.ORDER, where)
        self.edges(olds, news, where, module=attributes_of(old) is not None)

    def edges(self, olds: Edges, news: Edges, where: Where, *, module: bool = False) -> None:
        """What two things hold, by its keys; of modules what their state dicts hold comes first."""
        self.step(len(olds) + len(news))
        pairs: list[tuple[Node, Node, Where]] = []
        for key, (keys, child) in olds.items():
            place = self.inside(where, keys)
            if key in news:
                (self.later if module and keys else pairs).append((child, news[key][1], place))
            else:
                self.only(self.old, child, place)
        for key, (keys, child) in news.items():
            if key not in olds:
                self.only(self.new, child, self.inside(where, keys))
        self.todo.extend(reversed(pairs))

    def only(self, side: _Side, root: Node, where: Where) -> None:
        """Everything in what only one of them has."""
        todo = [(root, where)]
        while todo:
            node, place = todo.pop()
            self.step()
            if place.depth > _DEEPEST:
                raise CorruptError(f"the checkpoint is nested more than {_DEEPEST} levels deep")
            tensor = side.tensor(node)
            if tensor is not None and place.chosen:
                side.alone.append(side.held(place.name, node, tensor))
            if tensor is not None:
                edges = children_edges(tensor.children)
            elif isinstance(node, COMPOSITE) and not is_leaf(node):
                edges = edges_of(node)
            else:
                edges = {}
            if id(node) in side.met and edges:
                if tensor is None and place.chosen:
                    self.found.append(self.lone(side, place, {"$": type_of(node)}))
                continue
            if edges:
                side.met.add(id(node))
            elif tensor is None and place.chosen:
                self.found.append(self.lone(side, place, side.term(node)))
            inner = [(child, self.inside(place, keys)) for keys, child in edges.values()]
            todo.extend(reversed(inner))

    def lone(self, side: _Side, place: Where, term: Term) -> Difference:
        old, new = (term, None) if side is self.old else (None, term)
        return Difference(side.kind, place.name, old, new)


def _is_long(node: Node) -> bool:
    return isinstance(node, (str, bytes)) and len(node) > _LONGEST_TERM
