"""The trained model in DeepSpeed files: whole weights, and the state of the optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple

from ....errors import CorruptError
from ....manifest.dtypes import BITS
from ....pickles.nodes import Dict, List, Node
from ..saved_file import SavedFile, by_name, shapes_in
from .flat import Elements, FlatTensors, Whole, share

#: The key of all optimizer state in an optimizer's file.
INNER = "optimizer_state_dict"
Value = Whole | Elements | bool | int | float | str | None
Shapes = Mapping[str, tuple[int, ...]]
#: The weights and buffers in the model's files, by name.
Module = Mapping[str, tuple[SavedFile, Node]]


class ParameterGroup(NamedTuple):
    """A group of parameters."""

    names: Sequence[str]
    #: the other fields of the group in the optimizer
    about: Dict | None


class TrainedState:
    """The merged weights and optimizer state of all ranks."""

    def __init__(self) -> None:
        #: the trained weights, by name
        self.weights: dict[str, Whole] = {}
        #: the optimizer state of each parameter, by its name in the optimizer
        self.state: dict[str, dict[str, Value]] = {}
        self.groups: list[ParameterGroup] = []
        #: weights that were not trained
        self.frozen: dict[str, Whole] = {}
        #: other entries of the optimizer's file of the first rank, by name
        self.rest: list[tuple[str, Node]] = []
        #: whether the model's files have no weights, as in stage 3
        self.is_divided = False


def abouts_of(file: SavedFile, within: Dict, count: int) -> Sequence[Node]:
    """The param_groups of the optimizer, of which there must be `count`."""
    listed = within.get("param_groups")
    items = listed.items if isinstance(listed, List) else ()
    if len(items) != count:
        raise file.malformed_error("the number of its param_groups")
    if len(set(map(id, items))) < count:  # each is copied
        raise file.malformed_error("that two of its param_groups are one")
    return items


def groups_of(shapes: Sequence[Shapes], abouts: Sequence[Node]) -> list[ParameterGroup]:
    """The groups of parameters with these shapes."""
    return [
        ParameterGroup(list(group), about if isinstance(about, Dict) else None)
        for group, about in zip(shapes, abouts, strict=True)
    ]


def frozen_in(model: Sequence[SavedFile]) -> dict[str, Whole]:
    """The weights that were not trained; each of the model's files has a part of them."""
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
        rows = [FlatTensors([part], width) for part in parts]
        wholes[name] = Whole(dtype, shape, numel, rows, 0, len(parts) > 1)
    return wholes


def rest_of(file: SavedFile, within: Dict, apart: Iterable[str]) -> list[tuple[str, Node]]:
    """The entries of an optimizer's file other than the optimizer and the keys in `apart`."""
    found, known = list[tuple[str, Node]](), {*apart, INNER}
    pairs = within.pairs if within is file.root else [*within.pairs, *file.root.pairs]
    for key, node in pairs:
        if not isinstance(key, str):
            raise file.malformed_error("a name in it")
        if key not in known:
            found.append((str(key), node))
    return found
