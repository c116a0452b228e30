"""Walk two graphs in parallel, pair tensors at the same path, and find what else differs.

The spelling of a value in the file does not count: sets, bytes and devices are compared by value,
everything else by structure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from typing import NamedTuple

from ...errors import CorruptError
from ...manifest.paths import Path
from ...pickles.nodes import Blob, Call, Dict, Items, List, Node, Tuple
from ...pickles.nodes import Mapping as MappingNode
from ...pickles.opcodes.plain_tensors import PlainTensor
from ...pickles.opcodes.rows import same_numbers
from ...pickles.terms import Term
from ...reports.difference import Difference, Kind
from ...torch_pickle.children import children_of
from ...torch_pickle.pickled_modules import attributes_of
from ...torch_pickle.values.strided import Tensor
from ..draft import CheckpointGraph
from ..edges import (
    COMPOSITE,
    Edges,
    children_edges,
    device_of,
    edges_of,
    have_same_keys,
    is_leaf,
    is_mutable,
    scalar_of,
    signature_of,
    type_of,
    types_of,
)
from ..traversal import Composite
from .difference import ComparedTensor, can_cast, sharing_differences, unlike
from .excerpts import first_unlike, of_bytes, of_scalars
from .names_alike import NamesAlike
from .side import Side
from .tree_position import TreePosition

_DEEPEST = 1000  # keys in a path
_LEAST_ROOM = 1 << 20  # steps
_LONGEST_AT_ONCE = 64  # longer values are compared only once, not at every place
_MOST_AGAIN = 1 << 14  # most places listed for containers that were met before

_Place = tuple[Node, Node, TreePosition]
_Sides = tuple[Term, Term] | None


class Pairing(NamedTuple):
    """The common and differing content of two checkpoints, except the bytes of tensors."""

    #: how many tensors both have
    both: int
    #: tensors that only the old one has, or only the new one
    old: list[ComparedTensor]
    new: list[ComparedTensor]
    differences: list[Difference]
    #: how many device differences were ignored
    passed: int


def pair(
    old: CheckpointGraph,
    new: CheckpointGraph,
    each: Callable[[ComparedTensor, ComparedTensor], None],
    *,
    chosen: Set[str] | None = None,
    ignore_devices: bool = False,
    cast: bool = False,
) -> Pairing:
    """Compare two checkpoints, except the bytes of their tensors.

    `each` is called with the tensors that both have at the same place, as they are found.
    `chosen` names the entries to compare, with everything below them; None for all.
    `ignore_devices` ignores the devices of tensors and values, and `cast` ignores dtypes that can
    be cast to each other. CorruptError if a tensor leads to the same objects in too many ways.
    """
    return _Pairing(old, new, each, chosen, ignore_devices, cast).run()


class _Pairing:
    def __init__(
        self,
        old: CheckpointGraph,
        new: CheckpointGraph,
        each: Callable[[ComparedTensor, ComparedTensor], None],
        chosen: Set[str] | None,
        ignore_devices: bool,
        cast: bool,
    ) -> None:
        self.old, self.new = Side(old, False), Side(new, True)
        self.each = each
        self.chosen = chosen
        self.ignore_devices = ignore_devices
        self.cast = cast
        self.room = _LEAST_ROOM
        self.counted = False
        # For each pair of containers on the path: an iterator of the children left to visit.
        self.todo: list[Iterator[_Place]] = []
        self.later: list[_Place] = []
        self.met: set[tuple[int, int]] = set()
        self.opened: set[tuple[int, int]] = set()  # bytes that hold checkpoints
        self.both = 0
        self.found: list[Difference] = []
        self.passed = 0
        self.compared: dict[tuple[int, int], _Sides] = {}  # values that take long to compare
        self.again = 0  # how often containers were met again
        self.objects: list[tuple[TreePosition, int, int]] = []

    def run(self) -> Pairing:
        whole = self.chosen is None or "" in self.chosen
        alike = NamesAlike(self.old.draft, self.new.draft)
        root = TreePosition(None, (), 0, whole, False, alike)
        self.later.append((self.old.draft.graph.root, self.new.draft.graph.root, root))
        while self.todo or self.later:
            if not self.todo:
                self.todo.append(iter(self.later))
                self.later = []
            place = next(self.todo[-1], None)
            if place is None:
                self.todo.pop()
            else:
                self.visit(*place)
        places = [where for where, _, _ in self.objects]
        olds, news = [old for _, old, _ in self.objects], [new for _, _, new in self.objects]
        self.found += sharing_differences(places, olds, news)
        return Pairing(self.both, self.old.alone, self.new.alone, self.found, self.passed)

    # -- one place -----------------------------------------------------------------------------

    def visit(self, old: Node, new: Node, where: TreePosition) -> None:
        self.step()
        if where.depth > _DEEPEST:
            raise CorruptError(f"the checkpoint is nested more than {_DEEPEST} levels deep")
        if type(old) is PlainTensor and type(new) is PlainTensor:  # fast: there may be very many
            mine, other = self.old.tensor(old), self.new.tensor(new)
            if mine is not None and other is not None:
                self.tensors(old, new, mine, other, where)
                return
        if (id(old), id(new)) in self.compared:
            self.leaves(old, new, where)
            return
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

    def differ(self, kind: Kind, where: TreePosition, old: Term = None, new: Term = None) -> None:
        if where.chosen:
            self.found.append(Difference(kind, where.name, old, new))

    def apart(self, old: Node, new: Node, where: TreePosition) -> None:
        """Add two values that have only their place in common."""
        self.only(self.old, old, where)
        self.only(self.new, new, where)

    def inside(self, where: TreePosition, keys: Path, *, rest: bool = False) -> TreePosition:
        """Return the place of a child of the container at `where`."""
        depth = where.depth + len(keys)
        fields = where, keys, depth, where.chosen, where.rest or rest, where.alike
        place: TreePosition = tuple.__new__(TreePosition, fields)  # fast: there may be very many
        if self.chosen is None or where.chosen or not keys:
            return place
        return place._replace(chosen=place.name in self.chosen)

    # -- tensors -------------------------------------------------------------------------------

    def tensors(
        self, old: Node, new: Node, mine: Tensor, other: Tensor, where: TreePosition
    ) -> None:
        known = (id(old), id(new)) in self.met
        if known and where.rest:
            return
        self.met.add((id(old), id(new)))
        pair = self.old.tensor_at(where, old, mine), self.new.tensor_at(where, new, other)
        if where.chosen:
            self.both += 1
            self.each(*pair)
        alike = self.attributes(pair, where)
        if known:
            return
        if alike and (pair[0].shown is None or pair[1].shown is None):
            self.below(old, new, self.inside(where, (), rest=True))
        if mine.children or other.children:
            olds, news = children_edges(mine.children), children_edges(other.children)
            self.edges(olds, news, where)

    def attributes(self, pair: tuple[ComparedTensor, ComparedTensor], where: TreePosition) -> bool:
        """Whether two tensors are alike, ignoring device and elements."""
        alike = True
        for kind, mine, other in unlike(*pair):
            if kind is Kind.MOVED:
                if not where.rest:
                    self.move(kind, where, mine, other)
            elif kind is Kind.VALUE:
                self.differ(kind, self.inside(where, ("requires_grad",)), mine, other)
            elif kind is not Kind.RETYPED or not (self.cast and can_cast(mine, other)):
                alike = False
                self.differ(kind, where, mine, other)
        return alike

    def move(self, kind: Kind, where: TreePosition, old: Term, new: Term) -> None:
        """Add a difference of devices."""
        if self.ignore_devices:
            self.passed += where.chosen
        else:
            self.differ(kind, where, old, new)

    # -- values --------------------------------------------------------------------------------

    def leaves(self, old: Node, new: Node, where: TreePosition) -> None:
        if id(old) in self.old.spelled and id(new) in self.new.spelled:
            return
        known = id(old), id(new)
        sides = self.compared[known] if known in self.compared else self.sides_of(old, new)
        if _takes_long(old) or _takes_long(new):
            self.compared[known] = sides
        if sides is None:
            return
        if scalar_of(old)[0] == scalar_of(new)[0] and _name_devices(old, new):
            self.move(Kind.VALUE, where, *sides)
        else:
            self.differ(Kind.VALUE, where, *sides)

    def sides_of(self, old: Node, new: Node) -> _Sides:
        """Return texts of two values that differ, or None if they are equal."""
        mine, other = self.old.bytes_of(old), self.new.bytes_of(new)
        if mine is None or other is None:
            return None if scalar_of(old) == scalar_of(new) else self.told_apart(old, new)
        at = first_unlike(mine, other)
        if at is None:
            return None
        sides = self.told_apart(old, new)
        return sides if sides[0] != sides[1] else (of_bytes(mine, at), of_bytes(other, at))

    def told_apart(self, old: Node, new: Node) -> tuple[Term, Term]:
        """Return different terms for two different values."""
        sides = self.old.term(old), self.new.term(new)
        return (of_scalars(old, new) or sides) if sides[0] == sides[1] else sides

    # -- containers ----------------------------------------------------------------------------

    def containers(self, old: Composite, new: Composite, where: TreePosition) -> None:
        if is_mutable(old) and is_mutable(new) and where.chosen:
            self.note_object(where, id(old), id(new))
        if (id(old), id(new)) in self.met:
            return
        self.met.add((id(old), id(new)))
        if signature_of(old) != signature_of(new):
            self.differ(Kind.TYPE, where, *types_of(old, new))
        self.below(old, new, where)

    def note_object(self, where: TreePosition, old: int, new: int) -> None:
        """Note the place of an object, and its further places, unless there are very many."""
        self.again += (old, new) in self.met
        if (old, new) not in self.met or self.again <= _MOST_AGAIN:
            self.objects.append((where, old, new))

    def below(self, old: Node, new: Node, where: TreePosition) -> None:
        assert isinstance(old, COMPOSITE)
        assert isinstance(new, COMPOSITE)
        if isinstance(old, (List, Tuple)) and isinstance(new, (List, Tuple)):
            self.step(len(old.items) + len(new.items))
            if not same_numbers(old.items, new.items):
                self.rows(old.items, new.items, where)
            return
        if isinstance(old, Dict) and isinstance(new, Dict) and have_same_keys(old, new):
            self.step(2 * len(old.pairs))
            self.todo.append(self.unlike_pairs(old, new, where))
            return
        olds, news = edges_of(old), edges_of(new)
        if isinstance(old, MappingNode) and isinstance(new, MappingNode):
            both = [key for key in olds if key in news]
            if both != [key for key in news if key in olds]:
                self.differ(Kind.ORDER, where)
        self.edges(olds, news, where, module=attributes_of(old) is not None)

    def edges(self, olds: Edges, news: Edges, where: TreePosition, *, module: bool = False) -> None:
        """Return the children of two containers by key; for modules, the state dict comes first."""
        self.step(len(olds) + len(news))
        pairs: list[tuple[Node, Node, TreePosition]] = []
        for key, (keys, child) in olds.items():
            place = self.inside(where, keys)
            if key in news:
                (self.later if module and keys else pairs).append((child, news[key][1], place))
            else:
                self.only(self.old, child, place)
        for key, (keys, child) in news.items():
            if key not in olds:
                self.only(self.new, child, self.inside(where, keys))
        self.todo.append(iter(pairs))

    def rows(self, olds: Items, news: Items, where: TreePosition) -> None:
        """Iterate over the children of two rows, without making a list."""
        both = min(len(olds), len(news))
        for side, items in ((self.old, olds), (self.new, news)):
            for n in range(both, len(items)):
                self.only(side, items[n], self.inside(where, (n,)))
        self.todo.append(self.unlike_items(olds, news, where))

    def unlike_items(self, olds: Items, news: Items, where: TreePosition) -> Iterator[_Place]:
        """Yield the items of two rows that may differ."""
        in_part = self.chosen is not None and not where.chosen
        for n, (old, new) in enumerate(zip(olds, news, strict=False)):
            if in_part or not self.is_known(old, new):
                yield old, new, self.inside(where, (n,))

    def unlike_pairs(self, old: Dict, new: Dict, where: TreePosition) -> Iterator[_Place]:
        """Yield the values of two dicts with equal keys that may differ."""
        in_part = self.chosen is not None and not where.chosen
        for (keys, value), (_, other) in zip(children_of(old), new.pairs, strict=True):
            if in_part or not self.is_known(value, other):
                yield value, other, self.inside(where, keys)

    def is_known(self, old: Node, new: Node) -> bool:
        """Whether two nodes need not be compared, as for most items of a long row."""
        kind = type(old)
        if kind is not type(new) or kind is PlainTensor:
            return False
        if isinstance(old, str) and len(old) <= _LONGEST_AT_ONCE:
            return old == new
        if old is None or kind is bool or kind is int:
            return old == new
        key = id(old), id(new)
        if isinstance(old, (Tuple, List, Dict)):
            if isinstance(old, Tuple):
                return key in self.met
            return self.again > _MOST_AGAIN and key in self.met
        return key in self.opened or (key in self.compared and self.compared[key] is None)

    def only(self, side: Side, root: Node, where: TreePosition) -> None:
        """Add all content of a value that only one checkpoint has."""
        todo = [(root, where)]
        while todo:
            node, place = todo.pop()
            self.step()
            if place.depth > _DEEPEST:
                raise CorruptError(f"the checkpoint is nested more than {_DEEPEST} levels deep")
            tensor = side.tensor(node)
            if tensor is not None and place.chosen:
                side.alone.append(side.tensor_at(place, node, tensor))
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

    def lone(self, side: Side, place: TreePosition, term: Term) -> Difference:
        old, new = (term, None) if side is self.old else (None, term)
        return Difference(side.kind, place.name, old, new)


def _takes_long(node: Node) -> bool:
    """Whether a value may be so long that it is compared only once, not at each of its places."""
    return isinstance(node, (Blob, Call)) or (
        isinstance(node, (str, bytes)) and len(node) > _LONGEST_AT_ONCE
    )


def _name_devices(old: Node, new: Node) -> bool:
    """Whether both values name a device; `meta` counts only if the other value names a device."""
    named = [device_of(each) is not None for each in (old, new)]
    return any(named) and all(named[n] or each == "meta" for n, each in enumerate((old, new)))
