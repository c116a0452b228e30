"""Find the model and the optimizer anywhere in the tree of a draft, and the rest of the tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ....display.phrases import join_names
from ....errors import RefusedError
from ....graph.draft import CheckpointGraph
from ....graph.edit.optimizer_ids import (
    call_parameters,
    group_flattened,
    groups_of,
    params_of,
)
from ....graph.edit.subtree import way_to
from ....manifest.manifest import Section
from ....manifest.paths import Path, spell
from ....pickles.nodes import Call, Dict, List, Node
from ....pickles.nodes import Mapping as MappingNode
from ....system.names import why_no_name

PARAMS = "params"
RESERVED = "optimizer_state.pt"  #: no parameter can have this name, because a file has it
_MOST_NAMED = 3


class ModelAndOptimizer(NamedTuple):
    """The model and the optimizer of a draft."""

    module: Dict | Call
    optimizer: MappingNode
    groups: Sequence[MappingNode]
    names: Sequence[Sequence[str]]  #: the names of the parameters of each group
    rest: Dict  #: the tree without both


def entry_of(node: Node, key: str) -> Node:
    """The value of a dict under a key; None if the node is not a dict."""
    return node.get(key) if isinstance(node, MappingNode) else None


def find(draft: CheckpointGraph) -> ModelAndOptimizer:
    """Find the model and the optimizer; its parameters are renamed from numbers to names."""
    if not isinstance(draft.graph.root, MappingNode):
        raise RefusedError("its top is not a dict, which holds a model and an optimizer")
    group_flattened(draft)
    path = _path_of_optimizer(draft.graph.root)
    call_parameters(draft, "name")
    optimizer = way_to(draft.graph.root, path)[-1][0]
    groups = groups_of(optimizer) if isinstance(optimizer, MappingNode) else None
    assert isinstance(optimizer, MappingNode)
    assert groups is not None
    names = [[str(each) for each in _items(group, PARAMS)] for group in groups]
    wanted = {name for group in names for name in group}
    _check_names(wanted)
    homes = dict[Path, set[str]]()
    for entry in draft.list_contents().tensors:
        if entry.section is Section.MODEL and entry.part_of is None and entry.path:
            homes.setdefault(entry.path[:-1], set()).add(str(entry.path[-1]))
    fitting = [home for home, held in homes.items() if wanted <= held]
    if len(fitting) != 1:
        why = "several state dicts have" if fitting else "no state dict of a model has"
        some = join_names(sorted(wanted), _MOST_NAMED)
        raise RefusedError(
            f"{why} all parameters of the optimizer ({some})",
            hint="--strip-prefix and --rename change the names of the model",
        )
    module = way_to(draft.graph.root, fitting[0])[-1][0]
    if not isinstance(module, (Dict, Call)) or not fitting[0]:
        raise RefusedError("the weights of its model are not in a dict of their own")
    rest = _without(_without(draft.graph.root, fitting[0]), path)
    assert isinstance(rest, Dict)
    return ModelAndOptimizer(module, optimizer, groups, names, rest)


def _items(group: MappingNode, key: str) -> Sequence[Node]:
    listed = group.get(key)
    return listed.items if isinstance(listed, List) else ()


def _path_of_optimizer(root: Node) -> Path:
    """The path of the only optimizer; RefusedError if there is none, or if there are several."""
    found = list[Path]()
    met = {id(root)}
    todo: list[tuple[Path, Node]] = [((), root)]
    while todo:
        path, node = todo.pop()
        if isinstance(node, MappingNode) and params_of(node) and path:
            found.append(path)
            continue
        for key, held in _children(node):
            if id(held) not in met and isinstance(held, (MappingNode, List)):
                met.add(id(held))
                todo.append(((*path, key), held))
    if len(found) == 1:
        return found[0]
    if not found:
        raise RefusedError(
            "it has no optimizer beside a model, which a universal checkpoint is made of",
            hint="--format safetensors or dcp writes weights alone",
        )
    named = join_names(sorted(map(spell, found)), _MOST_NAMED)
    raise RefusedError(
        f"it has {len(found):,} optimizers ({named})", hint="--exclude-tensors leaves one out"
    )


def _children(node: Node) -> Iterator[tuple[str | int, Node]]:
    if isinstance(node, List):
        yield from enumerate(node.items)
    elif isinstance(node, MappingNode):
        for key, held in node.pairs:
            if isinstance(key, (str, int)):
                yield (str(key) if isinstance(key, str) else key), held


def _without(root: Node, path: Path) -> Node:
    """A tree of dicts and lists without the node at a path, and without emptied containers."""
    way, node = list[Node](), root
    for key in path:
        way.append(node)
        node = next(held for each, held in _children(node) if each == key)
    kept: Node = None
    for key, holder in zip(reversed(path), reversed(way), strict=True):
        made: Dict | List
        if isinstance(holder, List):
            made = List([kept if n == key else e for n, e in enumerate(holder.items)])
            is_empty = all(each is None for each in made.items)
        else:
            assert isinstance(holder, MappingNode)
            made = Dict()
            pairs = [(k, kept if is_key(k, key) else v) for k, v in holder.pairs]
            made.pairs = [(k, v) for k, v in pairs if not is_key(k, key) or kept is not None]
            is_empty = not made.pairs
        kept = made if holder is root or not is_empty else None
    return kept


def is_key(node: Node, key: object) -> bool:
    """Whether a key of a dict equals `key`."""
    return (str(node) if isinstance(node, str) else node) == key


def _check_names(names: set[str]) -> None:
    """Raises RefusedError if a parameter can't be the name of a folder."""
    for name in sorted(names):
        why = "has a slash" if "/" in name else "has a NUL" if "\0" in name else why_no_name(name)
        if why or name == RESERVED:
            raise RefusedError(
                f"{name!r:.100} can't be the name of a folder{why and ': it '}{why}",
                hint="--rename gives the parameter another name",
            )
