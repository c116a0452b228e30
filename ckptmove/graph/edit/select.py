"""Remove the entries of a tree that the user's globs do not select, or exclude."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, MutableSequence, Sequence
from typing import NamedTuple

from ...errors import RefusedError
from ...manifest.manifest import Section
from ...manifest.paths import Key, Path, spell, spell_apart
from ...pickles.nodes import Call, Dict, Items, List, Node, Persistent, Tuple
from ...pickles.nodes import Mapping as MappingNode
from ...torch_pickle.children import spell_key
from ...torch_pickle.listed_tensors import PickleContents
from ...torch_pickle.pickled_modules import FRAME, INNER, PASSING, attributes_of, is_compiled
from ...torch_pickle.values.tensors import Recogniser
from ..patterns import covers, no_match
from .model_weights import WEIGHTS, Weights, one_called, one_of

#: The most places of objects that were met before, which can be very many.
_MOST_AGAIN = 200_000
#: Keys of an object's parts that can't be removed from it (`children.children_of`).
_INNER = ("<args>", "<kwargs>", "<state>")


class _Edge(NamedTuple):
    """A place in the tree; an object in several places has one for each."""

    #: index of the edge to its container, or -1
    parent: int
    holder: Items | MutableSequence[tuple[Node, Node]]
    slot: int
    node: Node
    #: the keys of the last step
    key: Key
    name: str
    #: whether it is selected
    chosen: bool
    #: whether it is selected with everything below it
    excluded: bool
    #: whether it stays with its container, because a module needs it
    stays: bool


def prune(
    root: Node,
    recogniser: Recogniser,
    select: Sequence[str],
    exclude: Sequence[str],
    contents: PickleContents,
) -> tuple[list[str], Weights | None]:
    """Remove everything from a tree that is not selected, or that is excluded.

    Without patterns to select, everything is selected; patterns to exclude win. Returns the names
    of removed entries, without names below them; and the model that the pattern `model` means, if
    no entry has that name.

    RefusedError if a pattern matches nothing, or matches an object in only one of its places; if
    nothing is left; or if `model` is selected and several models could be meant.
    """
    pruning = _Pruning(root, recogniser, select, exclude, contents)
    return pruning.run(), pruning.model


def named_by(
    root: Node,
    recogniser: Recogniser,
    select: Sequence[str],
    contents: PickleContents,
) -> tuple[set[str], list[str]]:
    """Return the names that patterns match, with names below them; and patterns without a match.

    The name of the root is empty. Nothing is changed.
    """
    pruning = _Pruning(root, recogniser, select, (), contents)
    edges, silent = pruning.searched()
    names = {edge.name for edge in edges if edge.chosen}
    return (names | {""} if pruning.is_all else names), silent


class _Pruning:
    def __init__(
        self,
        root: Node,
        recogniser: Recogniser,
        select: Sequence[str],
        exclude: Sequence[str],
        contents: PickleContents,
    ) -> None:
        self.root = root
        self.recogniser = recogniser
        self.contents = contents
        self.sections = {entry.name: entry.section for entry in contents.tensors}
        for entry in contents.tensors:  # an object has the section of the tensors in its arguments
            made = (n for n, key in enumerate(entry.path) if key in _INNER)
            for n in itertools.islice(made, 1):
                self.sections.setdefault(spell(entry.path[:n]), entry.section)
        self.whole = self.section(root, "(root)", Section.OTHER)
        self.select = [_Pattern(text, contents, self.whole) for text in select]
        self.exclude = [_Pattern(text, contents, self.whole) for text in exclude]

        self.model: Weights | None = None

    def run(self) -> list[str]:
        for pattern in self.select:
            if pattern.section is Section.MODEL:
                self.model = one_of(self.contents, Section.MODEL)
                pattern.within = self.model.name
            elif pattern.text == Section.MODEL.value:
                self.model = one_called(self.contents, pattern.text)
        edges, silent = self.searched()
        if silent and silent[0] in WEIGHTS:
            one_of(self.contents, Section(silent[0]))  # the error names the alternatives
        if silent:
            raise no_match(silent[0])
        return self.cut(edges)

    def searched(self) -> tuple[list[_Edge], list[str]]:
        """Return every place in the tree, and the patterns that match none."""
        edges = self.edges()
        return edges, [each.text for each in (*self.select, *self.exclude) if not each.heard]

    @property
    def is_all(self) -> bool:
        """Whether a pattern matches the whole tree."""
        alone = {entry.section for entry in self.contents.tensors} == {self.whole}
        alone = alone and (self.whole is not Section.OTHER or self.is_leaf(self.root))
        found = [each for each in self.select if alone and each.section is self.whole]
        for each in found:
            each.heard = True
        return bool(found)

    def edges(self) -> list[_Edge]:
        """Return every removable place in the tree, each after its container.

        RefusedError if there are far too many.
        """
        found: list[_Edge] = []
        met: set[int] = set()
        whole: set[int] = set()  # kept with everything below
        within: set[int] = set()  # being visited
        again = 0
        todo: list[tuple[int, Node, str, bool, Section] | int]
        todo = [(-1, self.root, "", self.is_all or not self.select, self.whole)]
        while todo:
            step = todo.pop()
            if isinstance(step, int):
                within.discard(step)
                continue
            parent, node, prefix, chosen, section = step
            if id(node) in within or (isinstance(node, Call) and self.is_tensor(node)):
                continue
            if chosen and not self.exclude and all(each.heard for each in self.select):
                if id(node) in whole:
                    continue
                whole.add(id(node))
            begin, attributes = len(found), attributes_of(node)
            within.add(id(node))
            todo.append(id(node))
            for holder, slot, key, child in _slots(node):
                own = attributes is not None and holder is attributes.pairs
                plain = f"{prefix}.{spell((key,))}" if prefix else spell((key,))
                if own and key in FRAME:  # names come from the state dict
                    plain = prefix
                name = plain
                if plain in self.contents.alike:
                    name = spell_apart((*_path_to(found, parent), key))
                serves = self.section(child, name, section)
                leaf = self.is_leaf(child)
                excluded = any([p.names(name) for p in self.exclude])
                if id(child) not in self.contents.mixed:
                    excluded |= any([p.serves(name, serves, leaf=leaf) for p in self.exclude])
                inside = any([p.names(name) for p in self.select]) or chosen
                told = any([p.serves(name, serves, leaf=leaf) for p in self.select])
                stays = own and (key in FRAME or key == PASSING)
                chosen_ = inside or told
                edge = _Edge(parent, holder, slot, child, key, name, chosen_, excluded, stays)
                found.append(edge)
                if not excluded and isinstance(child, (Call, Dict, List, Tuple)):
                    todo.append((len(found) - 1, child, plain, inside, serves))
            again += len(found) - begin if id(node) in met else 0
            met.add(id(node))
            if again > _MOST_AGAIN:
                raise RefusedError("its entries are in too many places to select from")
        return found

    def section(self, node: Node, name: str, around: Section) -> Section:
        """Return the section of a part of the tree; by default that of its container."""
        return self.sections.get(name) or self.contents.opened.get(id(node)) or around

    def is_leaf(self, node: Node) -> bool:
        """Whether this is a tensor, or an object without removable parts."""
        if not isinstance(node, Call):
            return isinstance(node, Persistent)
        return self.is_tensor(node) or next(_slots(node), None) is None

    def is_tensor(self, node: Call) -> bool:
        return self.recogniser.tensor(node) is not None

    def cut(self, edges: list[_Edge]) -> list[str]:
        kept = [edge.chosen and not edge.excluded for edge in edges]
        if edges and not any(kept):
            raise RefusedError(
                "nothing is left: --exclude-tensors matches everything that is selected"
            )
        for n in range(len(edges) - 1, -1, -1):
            if kept[n] and edges[n].parent >= 0:
                kept[edges[n].parent] = True
        for n, edge in enumerate(edges):
            kept[n] |= edge.stays and (edge.parent < 0 or kept[edge.parent])
        places: dict[tuple[int, int], int] = {}  # first edge to each node
        gone = []
        for n, edge in enumerate(edges):
            if edge.parent >= 0 and not kept[edge.parent]:
                continue
            first = places.setdefault((id(edge.holder), edge.slot), n)
            if kept[first] != kept[n]:
                raise RefusedError(
                    f"{edges[first].name!r} and {edge.name!r} are the same object: "
                    "it can't be kept under one name and left out under the other",
                    hint="select both, or neither",
                )
            if not kept[n]:
                gone.append(edge.name)
        for n in sorted(places.values(), key=lambda n: -edges[n].slot):
            if not kept[n]:
                del edges[n].holder[edges[n].slot]
        return gone


class _Pattern:
    """A glob, and whether it has matched anything.

    The name of a section does not match names (`by_name`) if the whole checkpoint is that section,
    as in the state dict of a Llama, whose names begin with `model.`; or if the entry with that name
    holds nothing of the section.
    """

    def __init__(self, text: str, contents: PickleContents, whole: Section) -> None:
        self.text = text
        #: whether it matched
        self.heard = False
        #: the name of the intended model, or None for the whole section
        self.within: str | None = None
        #: whether it matches names
        self.by_name = True
        found = [entry for entry in contents.tensors if entry.section.value == text]
        #: the section that it also matches, if it names one with tensors
        self.section = found[0].section if found else None
        if self.section is not None and self.section is whole and whole is not Section.OTHER:
            self.by_name = False
        elif self.section is Section.MODEL:
            self.by_name = any(covers(text, entry.name) for entry in found)
            self.section = None if self.by_name else self.section
        elif text == Section.MODEL.value:  # the entry may hold only averages
            self.by_name = not any(
                entry.section is Section.EMA and covers(text, entry.name)
                for entry in contents.tensors
            )

    def names(self, name: str) -> bool:
        """Whether it matches this name."""
        found = self.by_name and covers(self.text, name)
        self.heard |= found
        return found

    def serves(self, name: str, section: Section, *, leaf: bool) -> bool:
        """Whether it matches entries of a section; without a section, it matches only tensors."""
        if section is not self.section or (section is Section.OTHER and not leaf):
            return False
        inside = self.within in (None, "(root)", name) or name.startswith(f"{self.within}.")
        self.heard |= inside
        return inside


def _path_to(edges: Sequence[_Edge], n: int) -> Path:
    """Return the keys that lead to a place."""
    keys: list[Key] = []
    while n >= 0:
        keys.append(edges[n].key)
        n = edges[n].parent
    return tuple(reversed(keys))


def _slots(
    node: Node,
) -> Iterator[tuple[Items | MutableSequence[tuple[Node, Node]], int, Key, Node]]:
    """Yield the removable children of a node: container, key and child."""
    if isinstance(node, (List, Tuple)):
        for n, item in enumerate(node.items):
            yield node.items, n, n, item
    if isinstance(node, MappingNode):
        for n, (key, value) in enumerate(node.pairs):
            yield node.pairs, n, spell_key(key, n), value
    if isinstance(node, Call) and is_compiled(node) and isinstance(node.args, Tuple):
        yield node.args.items, 0, INNER, node.args.items[0]
    if isinstance(node, Call) and not node.pairs:
        states = node.state.items if isinstance(node.state, Tuple) else [node.state]
        attributes = attributes_of(node)
        for state in states if attributes is None else [attributes]:
            if isinstance(state, Dict):
                yield from _slots(state)
