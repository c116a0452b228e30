"""Refuse to write a pickle that calls unknown code when the source runs nothing.

A reader of safetensors runs no code, so nobody checks what the tree in its header names; a pickle
made from it would run it. From one pickle to another the risk stays the same, so the report only
lists the names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from .. import formats
from ..errors import RefusedError
from ..formats.unknown_callables import judge, unknown_callables
from ..formats.writing import WriteOptions, WritePlan
from ..graph.draft import CheckpointGraph
from ..graph.edit.callables import Place, leave_out, places_of
from ..graph.patterns import covers
from ..phrases import short
from ..reports.convert import Loss

_ROOM = 140  # bytes of a line for places
_HINT = "--trust-objects writes them, such as classes of your own; --drop GLOB leaves them out"


def plan_trusted(
    draft: CheckpointGraph,
    format: formats.WritableFormat,
    options: WriteOptions,
    drop: Sequence[str],
    *,
    trusted: bool,
) -> tuple[WritePlan, list[Loss], tuple[str, ...]]:
    """Plan how to write a draft, and list the untrusted callables in it.

    Args:
        draft: what is to be written.
        format, options: how.
        drop: patterns of what may be left out because of the callables that it names.
        trusted: whether to write them, whatever the source.

    Returns:
        How to write it, what is left out, and the unknown callables that it names.

    Raises:
        RefusedError: it names unknown callables, which the source could not run.
    """
    writing = format.plan_write(draft, options)
    unknown = _unknown(writing, draft)
    if trusted or not draft.inert or not unknown:
        return writing, [], unknown
    places = list[Place]()
    left = _without(drop, _places(writing, draft), places)
    refuse_places(left)
    leave_out(places)
    tensors = writing.tensors
    writing = format.plan_write(draft, options)
    if tensors and not writing.tensors:
        raise RefusedError("no tensor is left: all are held by what would be left out")
    unknown = _unknown(writing, draft)
    if unknown:  # the listing of what would be written counts, wherever it is
        refuse_places(Place("", name, None, 0) for name in unknown)
    return writing, [_loss(place) for place in places], ()


def refuse_places(places: Iterable[Place], *, hint: str = _HINT) -> None:
    """Do nothing if there are none.

    Raises:
        RefusedError: there are; it names the first.
    """
    told, more, room = list[str](), 0, _ROOM
    for place in places:
        at = f" at {short(place.name)!r}" if place.name else ""
        text = f"{short(place.callable)}{at}"
        room -= len(text.encode()) + 2
        if told and (more or room < 0):
            more += 1
        else:
            told.append(text)
    if told:
        rest = f" and {more:,} more" if more else ""
        raise RefusedError(
            f"would write callables that are not known to be harmless: {', '.join(told)}{rest}",
            hint=hint,
        )


def _unknown(writing: WritePlan, draft: CheckpointGraph) -> tuple[str, ...]:
    return unknown_callables(writing.pickle, draft.path) if writing.pickle else ()


def _places(writing: WritePlan, draft: CheckpointGraph) -> Iterator[Place]:
    """The places where unknown callables are, each once."""
    yield from writing.places
    known = {(id(each.holder), each.slot) for each in writing.places}
    for place in places_of(draft.graph.root, judge(draft.path)):
        if (id(place.holder), place.slot) not in known:
            yield place


def _without(drop: Sequence[str], places: Iterable[Place], dropped: list[Place]) -> Iterator[Place]:
    """The places that no pattern speaks of; the others are added to those that are dropped."""
    for place in places:
        if any(covers(each, place.name) for each in drop):
            dropped.append(place)
        else:
            yield place


def _loss(place: Place) -> Loss:
    return Loss(place.name, f"is made by {place.callable}, which is not known to be harmless")
