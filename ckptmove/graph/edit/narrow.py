"""Reduce a graph to a subtree, a model's weights, or names that match globs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...display.phrases import plural, quote
from ...errors import RefusedError
from ...manifest.manifest import Section
from ...manifest.paths import Path, spell
from ...pickles.nodes import Call, Dict, List, Node, Set, Tuple
from ...torch_pickle.children import children_of
from ...torch_pickle.listed_tensors import PickleContents
from ...torch_pickle.pickled_modules import attributes_of, is_frame
from ...torch_pickle.values.tensors import Recogniser
from ..draft import CheckpointGraph
from ..patterns import is_name
from ..traversal import replace_nodes
from .model_weights import (
    WEIGHTS,
    Weights,
    one_of,
    places_of,
    section_asked,
    state_of,
    weights_in,
)
from .select import prune
from .subtree import subtree


@dataclass(frozen=True)
class ReducedGraph:
    """The result of reducing a draft."""

    #: names of removed entries, without names below them
    left_out: list[str] = field(default_factory=list)
    #: the weights that were requested, or that remain after a part was requested by name
    weights: Weights | None = None
    others: Sequence[Weights] = ()

    def to_json(self) -> dict[str, Any] | None:
        """Return the chosen weights, and the other weights in the checkpoint, as plain data."""
        if self.weights is None:
            return None
        return {**_json(self.weights), "others": [_json(each) for each in self.others]}


def _json(weights: Weights) -> dict[str, Any]:
    return {"name": weights.name, "section": str(weights.section), "tensors": weights.count}


def leave(
    draft: CheckpointGraph,
    *,
    root: str | None = None,
    weights: str | None = None,
    select: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> ReducedGraph:
    """Reduce a draft in place to the selected entries.

    These are the entries below `root`; or the state dict of one model (or its averages) if
    `weights` is `model` (or `ema`). `select` and `exclude` are patterns on names below the root;
    `exclude` wins. RefusedError if nothing matches, several models could be meant, or no tensor
    would be left by mistake.
    """
    if root is None and weights is None and not select and not exclude:
        return ReducedGraph()
    graph = draft.graph
    if root is not None:
        show_within(draft, lambda name: root == name or root.startswith(f"{name}."))
    while weights is not None and not weights_in(draft.list_contents()):
        names = set(names_within(draft))
        if not names:
            break
        show_within(draft, names.__contains__)
    before = draft.list_contents()
    path: Path = ()
    left_out = list[str]()
    if root is not None:
        graph.root, path, left_out = subtree(graph.root, root)
    model = None if weights is None else one_of(before, section_asked(weights), path)
    there = weights_in(before)
    if select or exclude:
        if graph.within and not there and not {*WEIGHTS}.isdisjoint(select):
            raise _inside_bytes(draft)
        listing = draft.list_contents() if root is not None else before
        pruned, meant = prune(graph.root, Recogniser(graph.ids), select, exclude, listing)
        within = "" if root is None else f"{root}."
        left_out += [f"{within}{name}" for name in pruned]
        model = model or meant
    elif root is not None and weights is None:
        model = _at(path, there)
    if model is not None and weights is not None:
        graph.root, gone = state_of(model, graph.root, draft.list_contents(), path)
        left_out += gone
        draft.warnings += before.doubts.sentences()
        if model.nameless:
            draft.warnings.append(f"nothing tells what the model calls the tensors of {model.name}")
    plain = bool(select) and not (exclude or weights) and all(map(is_name, select))
    if before.tensors and not plain and not draft.list_contents().tensors:
        raise _none_left(before, there)
    if model is None:
        return ReducedGraph(left_out)
    held = {id(entry) for entry, _ in model.held}
    others = [each for each in there if not held.issuperset(id(entry) for entry, _ in each.held)]
    return ReducedGraph(left_out, model, others)


def _at(path: Path, there: Sequence[Weights]) -> Weights | None:
    """Return the weights, if they are the whole content of a place."""
    found = [each for each in there if each.path[: len(path)] == path]
    return found[0] if len(found) == 1 and found[0].path == path else None


def _inside_bytes(draft: CheckpointGraph) -> RefusedError:
    """Return the error if the weights are only in checkpoints inside bytes."""
    names = names_within(draft)
    return RefusedError(
        f"its weights are in a checkpoint inside the bytes at {quote(names)}",
        hint=f"--weights model takes them, --root {names[0]!r} takes all of that checkpoint",
    )


def _none_left(before: PickleContents, there: Sequence[Weights]) -> RefusedError:
    """Return the error if no selected entry is a tensor, although there are tensors."""
    many = plural(len(before.tensors), "tensor")
    what = f"the options leave out all of its {many}"
    if not there:
        hint = "ckptmove inspect lists them; --select NAME takes a value that is no tensor"
        return RefusedError(what, hint=hint)
    averages = there[0].section is Section.EMA
    return RefusedError(
        f"{what}; {places_of(there)}", hint="--weights ema takes these" if averages else None
    )


def show_within(draft: CheckpointGraph, wanted: Callable[[str], bool]) -> None:
    """Replace bytes that have a wanted name and hold checkpoints with the saved objects.

    The draft is one made with `nested`.
    """
    within = draft.graph.within
    new = {id(node): within[id(node)] for name, node in _places(draft, wanted) if wanted(name)}
    if not new:
        return

    draft.graph.root = replace_nodes(draft.graph.root, new)


def names_within(draft: CheckpointGraph) -> list[str]:
    """Return the names of bytes that hold checkpoints, without nested ones."""
    return [name for name, _ in _places(draft, lambda name: False)]


def _places(draft: CheckpointGraph, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Node]]:
    """Yield bytes that hold checkpoints, with their names; nested ones only if wanted."""
    within = draft.graph.within
    met: set[int] = set()
    todo: list[tuple[Node, Path]] = [(draft.graph.root, ())]
    while todo:
        node, path = todo.pop()
        if id(node) in met:
            continue
        met.add(id(node))
        if id(node) in within:
            name = spell(path)
            yield name, node
            if wanted(name):
                todo.append((within[id(node)], path))
            continue
        if not isinstance(node, (Call, Dict, List, Set, Tuple)):
            continue
        module = attributes_of(node) is not None
        children = list(children_of(node))
        for keys, child in reversed(children):
            todo.append((child, path if module and is_frame(keys) else (*path, *keys)))
