"""What files of DeepSpeed hold of a model that was trained: whole weights, and optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple

from ....errors import CorruptError
from ....manifest.dtypes import BITS
from ....pickles.nodes import Dict, List, Node
from ..saved_file import SavedFile, by_name, shapes_in
from .flat import Elements, Row, Whole, share

#: Under which an optimizer's file has all that is of the optimizer.
INNER = "optimizer_state_dict"
Value = Whole | Elements | bool | int | float | str | None
Shapes = Mapping[str, tuple[int, ...]]
#: Where the model's files have the weights and buffers, by name.
Module = Mapping[str, tuple[SavedFile, Node]]


class Group(NamedTuple):
    """A group of parameters."""

    names: Sequence[str]
    #: what the optimizer says of it
    about: Dict | None


class Trained:
    """The weights and the optimizer state of all ranks, put together."""

    def __init__(self) -> None:
        #: the trained weights, by name
        self.weights: dict[str, Whole] = {}
        #: what the optimizer has of each, by its name there
        self.state: dict[str, dict[str, Value]] = {}
        self.groups: list[Group] = []
        #: the weights that were not trained
        self.frozen: dict[str, Whole] = {}
        #: what else the optimizer's file of the first rank holds, by name
        self.rest: list[tuple[str, Node]] = []
        #: whether the model's files have no weights, as with stage 3
        self.is_divided = False


def abouts_of(file: SavedFile, within: Dict, count: int) -> Sequence[Node]:
    """What the optimizer says of each of so many groups."""
    listed = within.get("param_groups")
    items = listed.items if isinstance(listed, List) else ()
    if len(items) != count:
        raise file.malformed("the number of its param_groups")
    if len(set(map(id, items))) < count:  # each is copied
        raise file.malformed("that two of its param_groups are one")
    return items


def groups_of(shapes: Sequence[Shapes], abouts: Sequence[Node]) -> list[Group]:
    """The groups of parameters with these shapes."""
    return [
        Group(list(group), about if isinstance(about, Dict) else None)
        for group, about in zip(shapes, abouts, strict=True)
    ]


def frozen_in(model: Sequence[SavedFile]) -> dict[str, Whole]:
    """The weights that were not trained, of which each of the model's files has a part."""
    wholes: dict[str, Whole] = {}
    (shapes,) = shapes_in(model[0], "frozen_param_shapes", grouped=False)
    held = [by_name(file.root.get("frozen_param_fragments")) for file in model]
    for name, shape in shapes.items():
        parts = list[Elements]()
        for file, fragments in zip(model, held, strict=True):
            part = file.elements(fragments.get(name))
            if part is None:
                raise CorruptError(f"has no weight of {name!r:.100}", path=file.source.path)
            parts.append(part)
        numel, dtype, width = prod(shape), parts[0].dtype, BITS[parts[0].dtype] // 8
        each = share(numel, len(parts))
        if any(part.numel != each or part.dtype != dtype for part in parts):
            raise CorruptError(f"ranks differ in the weight of {name!r:.100}")
        rows = [Row([part], width) for part in parts]
        wholes[name] = Whole(dtype, shape, numel, rows, 0, len(parts) > 1)
    return wholes


def rest_of(file: SavedFile, within: Dict, apart: Iterable[str]) -> list[tuple[str, Node]]:
    """What an optimizer's file holds besides the optimizer and what is told apart."""
    found, known = list[tuple[str, Node]](), {*apart, INNER}
    pairs = within.pairs if within is file.root else [*within.pairs, *file.root.pairs]
    for key, node in pairs:
        if not isinstance(key, str):
            raise file.malformed("a name in it")
        if key not in known:
            found.append((str(key), node))
    return found
