"""Show a saved object as a tree: a line for each value in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from ..display.phrases import show_name
from ..display.text import cut, shape, size
from ..manifest.manifest import Manifest
from ..manifest.paths import Path, spell
from ..pickles.nodes import (
    Call,
    Dict,
    Global,
    List,
    Node,
    Persistent,
    Set,
    Text,
    Tuple,
)
from ..torch_pickle.children import children_of
from ..torch_pickle.tree import join_roots
from ..torch_pickle.values.tensors import device_text

LONGEST_KEY = 200  # characters of a key
LONGEST_VALUE = 60  # of a value
_MOST_ITEMS = 32  # of a list shown on one line
_USUAL_DEPTH, _MOST_DEEPER = 64, 1 << 20  # keys of a path; keys beyond them, of all paths together


def tree(manifest: Manifest, select: Sequence[str] = ()) -> Iterator[str]:
    """Show the saved object, one line per value, with each container shown once.

    `select` has globs on names, or sections; only matches and their containers are shown.
    """
    lines = _tree_lines(manifest)
    if select:
        chosen: set[Path] = set()
        entries = {entry.path: entry for entry in manifest.tensors}
        for path, _ in lines:
            entry = entries.get(path)
            name, section = (entry.name, str(entry.section)) if entry else (spell(path), None)
            if section in select or any(fnmatchcase(name, glob) for glob in select):
                chosen.update(path[:depth] for depth in range(len(path) + 1))
        lines = [line for line in lines if line[0] in chosen]
    shown: set[Path] = set()
    for path, text in lines:
        depth = len(path) - 1
        while depth > 0 and path[:depth] not in shown:
            depth -= 1
        for n in range(depth + 1, len(path)):  # of several states, none has a line
            shown.add(path[:n])
            yield f"{_label(path[:n])}:"
        shown.add(path)
        yield f"{_label(path)}: {text}" if path else text
    for record in manifest.records:
        chosen_too = not select or any(fnmatchcase(record.name, glob) for glob in select)
        if chosen_too and (record.name,) not in shown:
            name = cut(record.name, LONGEST_KEY)
            yield f"<{name}>: {record.kind}, {size(record.nbytes)}"


def _label(path: Path) -> str:
    return "  " * (len(path) - 1) + cut(show_name(spell(path[-1:])), LONGEST_KEY)


def _tree_lines(manifest: Manifest) -> list[tuple[Path, str]]:
    """Yield path and text of each line; raw bytes have a line, but no node."""
    lines = list(_lines_of(manifest, manifest.tree))
    shown = {path for path, _ in lines}
    raw = [e.path for e in manifest.tensors if e.part_of is None and e.path not in shown]
    if not raw:
        return lines
    tree = join_roots([((), manifest.tree), *((path, None) for path in raw)])
    return list(_lines_of(manifest, tree))


def _lines_of(manifest: Manifest, root: Node) -> Iterator[tuple[Path, str]]:
    entries = {entry.path: entry for entry in manifest.tensors}
    attributes = _attributes_of_tensors(manifest)
    first: dict[int, Path] = {}
    deeper = 0
    todo: list[Iterator[tuple[Node, Path]]] = [iter([(root, ())])]
    while todo:
        step = next(todo[-1], None)
        if step is None:
            todo.pop()
            continue
        node, path = step
        if len(path) > _USUAL_DEPTH:  # each path has all keys above it
            deeper += len(path) - _USUAL_DEPTH
            if deeper > _MOST_DEEPER:
                yield path, "too deep to show, like what follows it here"
                todo.pop()
                continue
        entry = entries.get(path)
        before = first.setdefault(id(node), path) if _holds(node) else path
        if entry is not None:
            device = "" if manifest.is_untagged(entry) else f" {entry.device}"
            yield path, f"{entry.dtype}{shape(entry.shape)}{device}"
            if path in attributes:
                todo.append(_shown_children(attributes.pop(path), path))
        elif before is not path:
            yield path, f"(the same as {cut(show_name(spell(before)), LONGEST_KEY)})"
        elif id(node) in manifest.nested:
            roots = manifest.nested[id(node)]
            todo.append(iter([(root, (*path, *keys)) for keys, root in roots]))
        else:
            yield path, value_text(node)
            todo.append(_shown_children(node, path))


def _attributes_of_tensors(manifest: Manifest) -> dict[Path, Node]:
    """Return path of a tensor → tensors in its attributes, listed right after it."""
    found: dict[Path, list[tuple[Path, Node]]] = {}
    around: list[Path] = []
    for entry in manifest.tensors:
        while around and entry.path[: len(around[-1])] != around[-1]:
            around.pop()
        if around and entry.path != around[-1] and entry.part_of is None:
            found.setdefault(around[-1], []).append((entry.path[len(around[-1]) :], None))
        around.append(entry.path)
    return {path: join_roots(held) for path, held in found.items()}


def _holds(node: Node) -> bool:
    if isinstance(node, Tuple):
        return bool(node.items)
    return isinstance(node, (List, Dict, Set, Call))


def _shown_children(node: Node, path: Path) -> Iterator[tuple[Node, Path]]:
    """Children with their own lines; not a state dict's `_metadata`, nor lists of scalars."""
    if not isinstance(node, (Tuple, List, Set, Dict, Call)) or device_text(node) is not None:
        return
    if isinstance(node, (Tuple, List, Set)) and all(map(_is_scalar, node.items)):
        return
    for keys, child in children_of(node):
        if not (isinstance(node, Call) and keys == ("_metadata",) and _is_metadata(node, child)):
            yield child, (*path, *keys)


def _is_metadata(node: Call, child: Node) -> bool:
    """Whether this is torch's attribute of a state dict, not the user's key."""
    return isinstance(node.state, Dict) and node.state.get("_metadata") is child


def _is_scalar(node: Node) -> bool:
    return node is None or isinstance(node, (bool, int, float, str, bytes))


def value_text(node: Node) -> str:
    """Return a short text for a value: `3`, `dict of 8`, `list of 3: 1, 2, 3`."""
    if isinstance(node, Call):
        device = device_text(node)
        if device is not None:
            return f"torch.device({device!r})"
        name = (node.qualname or "object").removeprefix("collections.")
        return f"{name} of {len(node.pairs):,}" if node.pairs or name == "OrderedDict" else name
    if isinstance(node, Global):
        return node.qualname
    if isinstance(node, Persistent):
        return "storage"
    if isinstance(node, Dict):
        return f"dict of {len(node.pairs):,}"
    if isinstance(node, (Tuple, List, Set)):
        kind = f"{type(node).__name__.lower()} of {len(node.items):,}"
        if not node.items or not all(map(_is_scalar, node.items)):
            return kind
        items = ", ".join(map(_scalar, node.items[:_MOST_ITEMS]))
        return f"{kind}: {_start(items)}"
    return _scalar(node)


def _scalar(node: Node) -> str:
    if isinstance(node, int) and node.bit_length() > 1024:
        return _start(hex(node))
    if isinstance(node, Text):
        return _start(repr(str(node[: LONGEST_VALUE + 1])))
    if isinstance(node, (str, bytes)):
        return _start(repr(node[: LONGEST_VALUE + 1]))
    return str(node)


def _start(text: str) -> str:
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…"
