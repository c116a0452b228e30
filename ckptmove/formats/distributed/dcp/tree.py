"""Restore the tree of a state dict that torch.distributed.checkpoint flattened.

Flattening loses entries without a value: an empty dict disappears, and numbers that are keys of a
dict become text. In an optimizer both can be restored: its groups identify parameters by number,
and it always has a state.

Source: torch/distributed/checkpoint/_nested_dict.py, _traverse.py; torch/optim/optimizer.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from ....errors import CorruptError
from ....graph.canonical import Graph
from ....graph.edit.optimizer_ids import params_of
from ....pickles.nodes import Dict, List, Mapping, Node
from .metadata import Keys

_MOST_HOLES = 1 << 16  # indexes, in all lists, without a saved value
_STATE, _GROUPS = "state", "param_groups"


def state_by_number(node: Mapping) -> Mapping | None:
    """The state of an optimizer whose keys, if stored as text, become numbers again."""
    state, params = node.get(_STATE), params_of(node)
    if params is None or not isinstance(state, Mapping) or not state.pairs:
        return None
    known = all(type(n) is int for n in params) and {n for n in params if isinstance(n, int)}
    return state if known and all(type(n) is int and n in known for n, _ in state.pairs) else None


class _Inner:
    """A dict or list that is being filled."""

    def __init__(self) -> None:
        self.held: dict[str | int, _Inner | tuple[Node]] = {}


def tree_of(leaves: Iterable[tuple[Keys, Node]], graph: Graph, warnings: list[str]) -> Node:
    """One node with each leaf at its path; adds a warning for everything that was restored."""
    top = _Inner()
    for keys, leaf in leaves:
        inner = top
        for key in keys[:-1]:
            found = inner.held.setdefault(key, _Inner())
            if not isinstance(found, _Inner):
                raise CorruptError(f"{'.'.join(map(str, keys)):.100} is below what is a value")
            inner = found
        if keys[-1] in inner.held:
            raise CorruptError(f"{'.'.join(map(str, keys)):.100} is there twice")
        inner.held[keys[-1]] = (leaf,)
    return _Tree(graph, warnings).node_of(top)


class _Tree:
    def __init__(self, graph: Graph, warnings: list[str]) -> None:
        self.graph = graph
        self.warnings = warnings
        self.holes = 0

    def node_of(self, top: _Inner) -> Node:
        root = self.empty(top)
        todo = [(top, root)]
        optimizers = list[Dict]()
        while todo:  # without recursion: a path may be long
            inner, node = todo.pop()
            for key, held in self.entries(inner):
                child: Node = None
                if isinstance(held, _Inner):
                    container = child = self.empty(held)
                    todo.append((held, container))
                elif held is not None:
                    (child,) = held
                if isinstance(node, Dict):
                    node.pairs.append((self.graph.text(str(key)), child))
                else:
                    assert isinstance(node, List)
                    node.items.append(child)
            if isinstance(node, Dict) and _GROUPS in inner.held:
                optimizers.append(node)
        for each in optimizers:
            self.restore(each)
        return root

    def empty(self, inner: _Inner) -> Dict | List:
        """The container for these keys."""
        kinds = {type(key) for key in inner.held}
        if len(kinds) > 1:
            raise CorruptError("something is both a list and a dict")
        return List([]) if kinds == {int} else Dict()

    def entries(self, inner: _Inner) -> Iterable[tuple[str | int, _Inner | tuple[Node] | None]]:
        """The entries of a container, in order.

        In a list also the indexes without a saved value.
        """
        if not inner.held or isinstance(next(iter(inner.held)), str):
            return inner.held.items()
        last = max(int(key) for key in inner.held)
        holes = last + 1 - len(inner.held)
        self.holes += holes
        if self.holes > _MOST_HOLES:
            raise CorruptError(f"lists have {self.holes:,} places that nothing was saved for")
        if holes:
            self.warnings.append(f"a list has {holes:,} places that nothing was saved for: None")
        return [(n, inner.held.get(n)) for n in range(last + 1)]

    def restore(self, optimizer: Dict) -> None:
        """Restore an optimizer's state, and its keys as numbers if its groups have numbers."""
        state, params = optimizer.get(_STATE), params_of(optimizer)
        if params is None:
            return
        if state is None:
            optimizer.pairs.insert(0, (self.graph.text(_STATE), Dict()))
            self.warnings.append("an optimizer had an empty state, which the format does not store")
        elif isinstance(state, Dict) and all(type(n) is int for n in params):
            said = {str(n): n for n in params}
            if state.pairs and all(str(key) in said for key, _ in state.pairs):
                state.pairs = [(said[str(key)], value) for key, value in state.pairs]
                self.warnings.append(
                    "an optimizer's state has numbers for keys again; they were stored as text"
                )
