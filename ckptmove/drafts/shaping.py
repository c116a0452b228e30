"""Change what a checkpoint holds before it is written: a part of it, under other names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..contents.listing import children_of
from ..contents.sections import is_module_state, is_state_dict, section_of
from ..contents.tensors import Recogniser
from ..errors import RefusedError, UsageError
from ..manifest import Section
from ..paths import Path, spell
from ..pickles.nodes import Call, Dict, List, Node, Text, Tuple
from ..pickles.nodes import Mapping as MappingNode
from .patterns import covers, unheard

_SED = re.compile(
    r"""s(?P<end>[^\\\s\w])
        (?P<old>(?:\\.|(?!(?P=end)).)*)(?P=end)
        (?P<new>(?:\\.|(?!(?P=end)).)*)(?P=end)
        (?P<flags>[gi]*)""",
    re.VERBOSE,
)
_Rename = Callable[[str], str]
#: The most places of what was met before: few objects can lie in very many.
_MOST_AGAIN = 200_000


# -- a subtree --------------------------------------------------------------------------------


def subtree(root: Node, name: str) -> tuple[Node, list[str]]:
    """What is saved under a name, and the names of all else, not repeating what is below them.

    Raises:
        RefusedError: nothing is.
    """
    todo: list[tuple[Node, str, tuple[tuple[Node, Path], ...]]] = [(root, name, ())]
    while todo:
        node, rest, above = todo.pop()
        for keys, child in _children(node):
            key = spell(keys) if keys else ""
            way = (*above, (node, keys))
            if rest == key:
                return child, _beside(way)
            if not keys:
                todo.append((child, rest, way))
            elif rest.startswith(f"{key}."):
                todo.append((child, rest[len(key) + 1 :], way))
    known = [spell(keys) for keys, _ in _children(root) if keys]
    raise RefusedError(
        f"there is nothing under {name!r}",
        hint=f"at the top there are {', '.join(known[:8])}" if known else None,
    )


def _beside(way: Sequence[tuple[Node, Path]]) -> list[str]:
    """The names of what is not taken on the way down: of each node, all but what some keys hold."""
    names: list[str] = []
    prefix: Path = ()
    for node, taken in way:
        names += [spell((*prefix, *keys)) for keys, _ in _children(node) if keys != taken]
        prefix = (*prefix, *taken)
    return names


def _children(node: Node) -> Iterator[tuple[Path, Node]]:
    if isinstance(node, (Call, Dict, List, Tuple)):
        yield from children_of(node)


# -- a selection ------------------------------------------------------------------------------


class _Edge(NamedTuple):
    """A place in the tree: of what lies in several places, one for each.

    Attributes:
        parent: index of the edge that leads to what holds it, or -1.
        holder: what holds it.
        slot: where in the holder.
        node: what is there.
        name: what it is called.
        chosen: whether it is selected, with all that is below it but for what is excluded.
        excluded: whether it is excluded, with all that is below it.
    """

    parent: int
    holder: list[Node] | list[tuple[Node, Node]]
    slot: int
    node: Node
    name: str
    chosen: bool
    excluded: bool


def prune(
    root: Node,
    recogniser: Recogniser,
    select: Sequence[str],
    exclude: Sequence[str],
    sections: Mapping[str, Section],
) -> list[str]:
    """Take everything out of a tree that is not selected, or that is excluded.

    Args:
        root: the tree; it is changed.
        recogniser: tells what is a tensor.
        select: patterns; without any, all is selected.
        exclude: patterns; they win.
        sections: name of a tensor → what it serves.

    Returns:
        The names of what was taken out, not repeating what was below them.

    Raises:
        RefusedError: a pattern speaks of nothing, or of an object in one of its places alone; or
            nothing is left.
    """
    return _Pruning(root, recogniser, select, exclude, sections).run()


def named_by(
    root: Node,
    recogniser: Recogniser,
    select: Sequence[str],
    sections: Mapping[str, Section],
) -> tuple[set[str], list[str]]:
    """The names that patterns speak of, with those below them; that of the root is empty.

    The arguments are those of `prune`; nothing is changed.

    Returns:
        The names, and the patterns that speak of nothing.
    """
    pruning = _Pruning(root, recogniser, select, (), sections)
    edges, silent = pruning.searched()
    names = {edge.name for edge in edges if edge.chosen}
    return (names | {""} if pruning.speaks_of_all() else names), silent


class _Pruning:
    def __init__(
        self,
        root: Node,
        recogniser: Recogniser,
        select: Sequence[str],
        exclude: Sequence[str],
        sections: Mapping[str, Section],
    ) -> None:
        self.root = root
        self.recogniser = recogniser
        self.sections = sections
        self.select = [_Pattern(text) for text in select]
        self.exclude = [_Pattern(text) for text in exclude]

    def run(self) -> list[str]:
        edges, silent = self.searched()
        if silent:
            raise unheard(silent[0])
        return self.cut(edges)

    def searched(self) -> tuple[list[_Edge], list[str]]:
        """Every place in the tree, and the patterns that speak of none."""
        patterns = [*self.select, *self.exclude]
        edges = self.edges()
        silent = [each for each in patterns if not each.heard]
        if any([each.by_section() for each in silent]):
            edges = self.edges()
            silent = [each for each in patterns if not each.heard]
        return edges, [each.text for each in silent]

    def speaks_of_all(self) -> bool:
        """Whether a pattern speaks of the whole tree."""
        section = self.section(self.root, "", Section.OTHER)
        return any([each.speaks_of("", section, section) for each in self.select])

    def edges(self) -> list[_Edge]:
        """Every place in the tree that can be taken out, what holds it first.

        Raises:
            RefusedError: they are absurdly many.
        """
        found: list[_Edge] = []
        met: set[int] = set()
        whole: set[int] = set()  # what is kept with all that is below it
        within: set[int] = set()  # what is being looked into
        again = 0
        section = self.section(self.root, "", Section.OTHER)
        chosen = self.speaks_of_all() or not self.select
        todo: list[tuple[int, Node, str, bool, Section] | int]
        todo = [(-1, self.root, "", chosen, section)]
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
            begin = len(found)
            within.add(id(node))
            todo.append(id(node))
            for holder, slot, key, child in _slots(node):
                name = f"{prefix}.{key}" if prefix else key
                serves = self.section(child, name, section)
                excluded = any([p.speaks_of(name, serves, section) for p in self.exclude])
                inside = any([p.speaks_of(name, serves, section) for p in self.select]) or chosen
                found.append(_Edge(parent, holder, slot, child, name, inside, excluded))
                if not excluded and isinstance(child, (Call, Dict, List, Tuple)):
                    todo.append((len(found) - 1, child, name, inside, serves))
            again += len(found) - begin if id(node) in met else 0
            met.add(id(node))
            if again > _MOST_AGAIN:
                raise RefusedError("its parts lie in too many places to be chosen from")
        return found

    def section(self, node: Node, name: str, around: Section) -> Section:
        """What a part of the tree serves; within an optimizer everything is the optimizer's."""
        if around not in (Section.OTHER, Section.MODEL):
            return around
        own = section_of(node) if isinstance(node, MappingNode) else None
        return own or self.sections.get(name) or around

    def is_tensor(self, node: Call) -> bool:
        return self.recogniser.tensor(node) is not None

    def cut(self, edges: list[_Edge]) -> list[str]:
        kept = [edge.chosen and not edge.excluded for edge in edges]
        if edges and not any(kept):
            raise RefusedError("nothing of it is left: what is selected is excluded too")
        for n in range(len(edges) - 1, -1, -1):
            if kept[n] and edges[n].parent >= 0:
                kept[edges[n].parent] = True
        places: dict[tuple[int, int], int] = {}  # of each, the first edge that leads there
        gone = []
        for n, edge in enumerate(edges):
            if edge.parent >= 0 and not kept[edge.parent]:
                continue
            first = places.setdefault((id(edge.holder), edge.slot), n)
            if kept[first] != kept[n]:
                raise RefusedError(
                    f"{edges[first].name!r} and {edge.name!r} are one object: "
                    "it can't stay in one place and go from the other",
                    hint="select both, or neither",
                )
            if not kept[n]:
                gone.append(edge.name)
        for n in sorted(places.values(), key=lambda n: -edges[n].slot):
            if not kept[n]:
                del edges[n].holder[edges[n].slot]
        return gone


class _Pattern:
    """A pattern, and whether anything was heard of it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.heard = False
        self.section: Section | None = None

    def by_section(self) -> bool:
        """Have it speak of a section from now on, if there is one of that name."""
        self.section = next((each for each in Section if each.value == self.text), None)
        return self.section is not None

    def speaks_of(self, name: str, section: Section, around: Section) -> bool:
        """Whether it speaks of what is there, and not already of what is around it."""
        if not name:  # all there is: of a Llama's state dict `model` is not just the keys below it
            found = section.value == self.text
        elif self.section is None:
            found = covers(self.text, name)
        else:
            found = section is self.section and around is not section
        self.heard |= found
        return found


def _slots(
    node: Node,
) -> Iterator[tuple[list[Node] | list[tuple[Node, Node]], int, str, Node]]:
    """What a node holds that can be taken out: where it is held, its key, and itself."""
    if isinstance(node, (List, Tuple)):
        for n, item in enumerate(node.items):
            yield node.items, n, str(n), item
    if isinstance(node, MappingNode):
        for n, (key, value) in enumerate(node.pairs):
            yield node.pairs, n, spell((key,)) if _is_key(key) else str(n), value  # type: ignore[arg-type]
    if isinstance(node, Call) and not node.pairs:
        states = node.state.items if isinstance(node.state, Tuple) else [node.state]
        for state in states:
            if isinstance(state, Dict):
                yield from _slots(state)


def _is_key(node: Node) -> bool:
    return node is None or isinstance(node, (str, int, float, bytes))


# -- names ------------------------------------------------------------------------------------


def renaming(
    rename: Sequence[str], strip_prefix: str | None, add_prefix: str | None
) -> _Rename | None:
    """What the user wants keys to be called, or None if nothing.

    Args:
        rename: substitutions as sed spells them, `s/old/new/`, with `g` and `i`; in turn.
        strip_prefix: what keys begin with, a dot or not, and shall no more.
        add_prefix: what they shall begin with.

    Raises:
        UsageError: a substitution is malformed.
    """
    steps: list[_Rename] = [_substitution(text) for text in rename]
    if strip_prefix is not None:
        start = strip_prefix.rstrip(".") + "."
        steps.append(lambda key: key.removeprefix(start))
    if add_prefix is not None:
        begin = add_prefix.rstrip(".") + "."
        steps.append(lambda key: begin + key)
    if not steps:
        return None

    def renamed(key: str) -> str:
        for step in steps:
            key = step(key)
        return key

    return renamed


def _substitution(text: str) -> _Rename:
    found = _SED.fullmatch(text)
    if found is None:
        raise UsageError(f"{text!r} is not of the form s/old/new/", hint="e.g. 's/^module\\.//'")
    end = found["end"]
    old, new = (found[part].replace(f"\\{end}", end) for part in ("old", "new"))
    try:
        pattern = re.compile(old, re.IGNORECASE if "i" in found["flags"] else 0)
        pattern.sub(new, "")
    except (re.error, IndexError) as error:
        raise UsageError(f"{text!r} can't be understood: {error}") from error
    count = 0 if "g" in found["flags"] else 1
    return lambda key: pattern.sub(new, key, count=count)


def rename_keys(dicts: Sequence[MappingNode], renamed: _Rename) -> int:
    """Rename the keys of state dicts, and those of what they say about their modules.

    Args:
        dicts: the state dicts.
        renamed: gives the new key.

    Returns:
        How many keys changed.

    Raises:
        RefusedError: two keys would become one.
    """
    changed = 0
    told: dict[int, MappingNode] = {}  # which a copy of a state dict has in common with it
    for node in dicts:
        changed += _rename_pairs(node, renamed)
        state = node.state if isinstance(node, Call) else None
        metadata = state.get("_metadata") if isinstance(state, Dict) else None
        if isinstance(metadata, MappingNode):
            told[id(metadata)] = metadata
    for each in told.values():
        _rename_metadata(each, renamed)
    return changed


def _rename_pairs(node: MappingNode, renamed: _Rename) -> int:
    taken: dict[str, str] = {}
    pairs: list[tuple[Node, Node]] = []
    changed = 0
    for key, value in node.pairs:
        new = key
        if isinstance(key, str):
            name = renamed(str(key))
            other = taken.setdefault(name, str(key))
            if other != key:
                raise RefusedError(f"{other!r} and {str(key)!r} would both be called {name!r}")
            if name != key:
                new = Text(name, key.at if isinstance(key, Text) else 0)
                changed += 1
        pairs.append((new, value))
    node.pairs = pairs
    return changed


def _rename_metadata(metadata: MappingNode, renamed: _Rename) -> None:
    """Its keys are names of modules, which the keys of their tensors begin with."""
    named: dict[str, tuple[Node, Node]] = {}
    for key, value in metadata.pairs:
        if isinstance(key, str):
            name = renamed(f"{key}.").removesuffix(".") if key else renamed("").removesuffix(".")
            named.pop(name, None)
            named[name] = (Text(name, 0), value)
    metadata.pairs = list(named.values())


def state_dicts(root: Node, recogniser: Recogniser) -> list[MappingNode]:
    """The outermost state dicts of models in a tree."""
    found: list[MappingNode] = []
    met: set[int] = set()
    todo = [root]
    while todo:
        node = todo.pop()
        if id(node) in met or not isinstance(node, (Call, Dict, List, Tuple)):
            continue
        met.add(id(node))
        if isinstance(node, MappingNode) and node.pairs and _is_of_model(node):
            found.append(node)
            continue
        if isinstance(node, MappingNode) and section_of(node) is Section.OPTIMIZER:
            continue
        if isinstance(node, Call) and recogniser.tensor(node) is not None:
            continue
        todo.extend(reversed([child for _, child in children_of(node)]))
    return found


def _is_of_model(node: MappingNode) -> bool:
    return is_module_state(node) or is_state_dict(node)
