"""Leave of a draft what is wanted: a part by its name, a model's weights, what patterns select."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..contents.listing import Contents
from ..contents.tensors import Recogniser
from ..errors import RefusedError
from ..manifest import Section
from ..paths import Path
from ..words import counted, listed
from .draft import Draft
from .patterns import is_name
from .selecting import prune
from .shaping import subtree
from .weights import Weights, one_of, section_asked, state_of, weights_in

_MOST_TOLD = 4  # weights


@dataclass(frozen=True)
class Wanted:
    """What was left of a draft.

    Attributes:
        left_out: names of what was not, not repeating what is below them.
        weights: the one model's weights, or averages, that were asked for.
        others: the other weights that there are.
    """

    left_out: list[str] = field(default_factory=list)
    weights: Weights | None = None
    others: Sequence[Weights] = ()

    def to_json(self) -> dict[str, Any] | None:
        """Whose weights they are, and whose are there too, as plain data."""
        if self.weights is None:
            return None
        return {**_json(self.weights), "others": [_json(each) for each in self.others]}


def _json(weights: Weights) -> dict[str, Any]:
    return {"name": weights.name, "section": str(weights.section), "tensors": weights.count}


def leave(
    draft: Draft,
    *,
    root: str | None = None,
    weights: str | None = None,
    select: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> Wanted:
    """Leave what is wanted of a draft; it is changed.

    Args:
        draft: the draft.
        root: the name of what shall be all there is.
        weights: `model` or `ema`: the state dict of one model, or its averages, shall be.
        select, exclude: patterns on names below the root; the latter win.

    Raises:
        UsageError: `weights` is neither.
        RefusedError: there is nothing of that kind, it can't be told which is meant, or no tensor
            would be left though that wasn't asked for.
    """
    if root is None and weights is None and not select and not exclude:
        return Wanted()
    graph = draft.graph
    before = draft.listed()
    path: Path = ()
    left_out = list[str]()
    if root is not None:
        graph.root, path, left_out = subtree(graph.root, root)
    model = None if weights is None else one_of(before, section_asked(weights), path)
    if select or exclude:
        listing = draft.listed() if root is not None else before
        pruned, meant = prune(graph.root, Recogniser(graph.ids), select, exclude, listing)
        within = "" if root is None else f"{root}."
        left_out += [f"{within}{name}" for name in pruned]
        model = model or meant
    if model is not None and weights is not None:
        graph.root, gone = state_of(model, graph.root, draft.listed(), path)
        left_out += gone
        if model.nameless:
            draft.warnings.append(f"nothing tells what the model calls the tensors of {model.name}")
    there = weights_in(before)
    plain = bool(select) and not (exclude or weights) and all(map(is_name, select))
    if before.tensors and not plain and not draft.listed().tensors:
        raise _none_left(before, there)
    if model is None:
        return Wanted(left_out)
    held = {id(entry) for entry, _ in model.held}
    others = [each for each in there if not held.issuperset(id(entry) for entry, _ in each.held)]
    return Wanted(left_out, model, others)


def _none_left(before: Contents, there: Sequence[Weights]) -> RefusedError:
    """Nothing that is wanted is a tensor, though there are some."""
    many = counted(len(before.tensors), "tensor")
    hint = "ckptmove inspect lists them; --select NAME takes a value that is none"
    if there:
        told = [f"{each.name!r} ({counted(each.count, 'tensor')})" for each in there]
        hint = f"the weights are under {listed(told, _MOST_TOLD)}"
        if there[0].section is Section.EMA:
            hint += "; --weights ema takes them"
    return RefusedError(f"none of its {many} is among what is wanted", hint=hint)
