"""Take a subtree of a graph, and rename the keys of its state dicts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from ...display.phrases import join_names
from ...errors import RefusedError, UsageError
from ...manifest.manifest import Section
from ...manifest.paths import Path, spell, spell_apart
from ...pickles.nodes import Call, Dict, List, Node, Text, Tuple
from ...pickles.nodes import Mapping as MappingNode
from ...torch_pickle.children import children_of
from ...torch_pickle.pickled_modules import attributes_of, is_frame
from ...torch_pickle.sections.sections import holds_weights, section_of
from ...torch_pickle.values.tensors import Recogniser

_SED = re.compile(
    r"""s(?P<end>[^\\\s\w])
        (?P<old>(?:\\.|(?!(?P=end)).)*)(?P=end)
        (?P<new>(?:\\.|(?!(?P=end)).)*)(?P=end)
        (?P<flags>[gi]*)""",
    re.VERBOSE,
)
_OF_TORCH = ("_metadata",)  # an attribute of each state dict
_Rename = Callable[[str], str]


# -- a subtree --------------------------------------------------------------------------------


def subtree(root: Node, name: str) -> tuple[Node, Path, list[str]]:
    """Return the node with a name, its path, and the names of everything beside it.

    Keys may be quoted, as `paths.spell_apart` does. RefusedError if no entry or several entries
    have that name; then their keys must be quoted.
    """
    found: dict[int, Sequence[tuple[Node, Path]]] = {}
    todo: list[tuple[Node, str, tuple[tuple[Node, Path], ...]]] = [(root, name, ())]
    while todo:
        node, rest, above = todo.pop()
        module = attributes_of(node) is not None
        for keys, child in _children(node):
            way = (*above, (node, keys))
            if not keys or (module and is_frame(keys)):
                todo.append((child, rest, way))
                continue
            for key in {spell(keys), spell_apart(keys)}:
                if rest == key:
                    found.setdefault(id(child), way)
                elif rest.startswith(f"{key}."):
                    todo.append((child, rest[len(key) + 1 :], way))
    shown = {n: way for n, way in found.items() if spell_apart(_path_of(way)) == name}
    found = shown if len(shown) == 1 else found
    if len(found) > 1:
        names = [spell_apart(_path_of(way)) for way in found.values()]
        raise RefusedError(
            f"several entries are called {name!r}", hint=f"quote keys: {' or '.join(names)}"
        )
    for taken in found.values():
        node, keys = taken[-1]
        child = next(child for each, child in _children(node) if each == keys)
        return child, _path_of(taken), beside(taken)
    own = attributes_of(root) is None  # most attributes of a module are of no interest
    known = [
        spell(keys) for keys in (_keys_in_names(root) if own else _state(root)) if keys != _OF_TORCH
    ]
    raise RefusedError(
        f"it has nothing under the name {name!r}",
        hint=f"at the top it has {join_names(known)}" if known else None,
    )


def _path_of(way: Sequence[tuple[Node, Path]]) -> Path:
    return tuple(key for _, keys in way for key in keys)


def way_to(root: Node, path: Path) -> list[tuple[Node, Path]]:
    """Return the nodes on a path with the keys from each; the last is the entry, without keys.

    Empty if the path does not exist.
    """
    todo: list[tuple[Node, int, tuple[tuple[Node, Path], ...]]] = [(root, 0, ())]
    while todo:
        node, depth, above = todo.pop()
        if depth == len(path):
            return [*above, (node, ())]
        for keys, child in _children(node):
            if path[depth : depth + len(keys)] == keys:
                todo.append((child, depth + len(keys), (*above, (node, keys))))
    return []


def beside(way: Sequence[tuple[Node, Path]]) -> list[str]:
    """Return the names beside the path: for each node, all children except those of some keys."""
    paths: list[Path] = []
    prefix: Path = ()
    for node, taken in way:
        module = attributes_of(node) is not None
        paths += [
            (*prefix, *keys) for keys in _keys_in_names(node, taken) if taken and keys != taken
        ]
        prefix = prefix if module and is_frame(taken) else (*prefix, *taken)
    counts = Counter(map(spell, paths))
    return [spell(path) if counts[spell(path)] == 1 else spell_apart(path) for path in paths]


def _keys_in_names(node: Node, taken: Path = ()) -> Iterator[Path]:
    """Return the keys in the names of a node's children; a module has those of its state dict.

    Children under the `taken` keys are not visited.
    """
    module = attributes_of(node) is not None
    for keys, child in _children(node):
        if not (module and is_frame(keys)):
            yield keys
        elif keys != taken:
            yield from (inner for inner, _ in _children(child))


def _state(module: Node) -> Iterator[Path]:
    """Return the keys of the parts of a module's state dict."""
    for keys, child in _children(module):
        if is_frame(keys):
            yield from (inner for inner, _ in _children(child))


def _children(node: Node) -> Iterator[tuple[Path, Node]]:
    if isinstance(node, (Call, Dict, List, Tuple)):
        yield from children_of(node)


# -- names ------------------------------------------------------------------------------------


def renaming(
    rename: Sequence[str], strip_prefix: str | None, add_prefix: str | None
) -> _Rename | None:
    """Return a function that renames keys as the user wants, or None.

    `rename`: substitutions as sed spells them, `s/old/new/`, with `g` and `i`; in turn. The prefix
    to strip may lack its dot. UsageError if a substitution is malformed.
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
        raise UsageError(
            f"{text!r} does not have the form s/OLD/NEW/", hint="e.g. 's/^module\\.//'"
        )
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
    """Rename the keys of state dicts and of their `_metadata`; return how many.

    RefusedError if two keys would become one.
    """
    changed = 0
    told: dict[int, MappingNode] = {}  # a copy of a state dict shares it
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
                raise RefusedError(f"{other!r} and {str(key)!r} would both get the name {name!r}")
            if name != key:
                new = Text(name, key.at if isinstance(key, Text) else 0)
                changed += 1
        pairs.append((new, value))
    node.pairs = pairs
    return changed


def _rename_metadata(metadata: MappingNode, renamed: _Rename) -> None:
    """Rename the keys, which are names of modules: prefixes of the keys of tensors."""
    named: dict[str, tuple[Node, Node]] = {}
    for key, value in metadata.pairs:
        if isinstance(key, str):
            name = renamed(f"{key}.").removesuffix(".") if key else renamed("").removesuffix(".")
            named.pop(name, None)
            named[name] = (Text(name, 0), value)
    metadata.pairs = list(named.values())


def state_dicts(root: Node, recogniser: Recogniser) -> list[MappingNode]:
    """Return the outermost state dicts of models in a tree."""
    found: list[MappingNode] = []
    met: set[int] = set()
    todo = [root]
    while todo:
        node = todo.pop()
        if id(node) in met or not isinstance(node, (Call, Dict, List, Tuple)):
            continue
        met.add(id(node))
        if isinstance(node, MappingNode) and node.pairs and holds_weights(node):
            found.append(node)
            continue
        if isinstance(node, MappingNode) and section_of(node) is Section.OPTIMIZER:
            continue
        if isinstance(node, Call) and recogniser.tensor(node) is not None:
            continue
        todo.extend(reversed([child for _, child in children_of(node)]))
    return found
