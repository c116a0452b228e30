"""Refuse to write a pickle that calls unknown code if the source runs no code.

A reader of safetensors runs no code, so nobody checks the callables that the tree in its header
names; a pickle made from it would run them. From one pickle to another the risk stays the same, so
the report only lists the names. If a folder has both, callables that its own pickles name are no
new risk.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ... import formats
from ...display.phrases import short
from ...errors import InputError, RefusedError
from ...formats.base import WritableFormat
from ...formats.writing import WriteOptions, WritePlan
from ...graph.draft import CheckpointGraph
from ...graph.edit.callables import CallablePlace, Judge, leave_out, places_of, unlisted_callable
from ...graph.patterns import covers
from ...pickles.nodes import Blob, Node
from ...reports.convert import Loss
from ...sources.source import Memory
from ...torch_pickle.streams import Container
from ...torch_pickle.unknown import unknown_callables_in

_ROOM = 140  # bytes of a message line, for the list of places
_HINT = "--trust-objects writes them, such as classes of your own; --drop GLOB leaves them out"


class TrustedPlan(NamedTuple):
    """The plan to write a draft without the unknown callables that it must not name."""

    weights: WritePlan
    dropped: tuple[Loss, ...]
    unknown_callables: tuple[str, ...]  #: the unknown callables that remain


def plan_trusted(
    draft: CheckpointGraph,
    format: WritableFormat,
    options: WriteOptions,
    drops: Sequence[str],
    *,
    trusted: bool,
) -> TrustedPlan:
    """Plan how to write a draft; `trusted` allows unknown callables whatever the source.

    Raises:
        RefusedError: it names unknown callables that the source could not run, where no pattern of
            `drops` matches.
    """
    plan = format.plan_write(draft, options)
    unknown = _unknown(plan, draft)
    added = _new_risks(unknown, draft)
    if trusted or not added:
        return TrustedPlan(plan, (), unknown)
    dropped = list[CallablePlace]()
    places = (each for each in _places(plan, draft) if _new_risks([each.callable], draft))
    refuse_places(_kept_places(drops, places, dropped))
    leave_out(dropped)
    tensors = plan.tensors
    plan = format.plan_write(draft, options)
    if tensors and not plan.tensors:
        raise RefusedError("no tensor is left: all are held by what would be left out")
    # decisive are the unknown callables of the new plan, wherever they are
    unknown = _unknown(plan, draft)
    refuse_places(CallablePlace("", name, None, 0) for name in _new_risks(unknown, draft))
    return TrustedPlan(plan, tuple(map(_loss, dropped)), unknown)


def _new_risks(unknown: Iterable[str], draft: CheckpointGraph) -> list[str]:
    """Return the unknown callables that no reader of the source would run."""
    return [] if draft.runs is None else [name for name in unknown if name not in draft.runs]


def refuse_places(places: Iterable[CallablePlace], *, hint: str = _HINT) -> None:
    """Raises RefusedError that names the first places, if there are any."""
    listed, more, room = list[str](), 0, _ROOM
    for place in places:
        at = f" at {short(place.name)!r}" if place.name else ""
        text = f"{short(place.callable)}{at}"
        room -= len(text.encode()) + 2
        if listed and (more or room < 0):
            more += 1
        else:
            listed.append(text)
    if listed:
        rest = f" and {more:,} more" if more else ""
        raise RefusedError(
            f"would write callables that are not known to be harmless: {', '.join(listed)}{rest}",
            hint=hint,
        )


def _unknown(plan: WritePlan, draft: CheckpointGraph) -> tuple[str, ...]:
    if plan.is_harmless or not plan.pickle:
        return ()
    return unknown_callables(plan.pickle, draft.path)


def _places(plan: WritePlan, draft: CheckpointGraph) -> Iterator[CallablePlace]:
    """Yield every place that has an unknown callable, each once."""
    yield from plan.places
    known = {(id(each.holder), each.slot) for each in plan.places}
    for place in places_of(draft.graph.root, judge(draft.path)):
        if (id(place.holder), place.slot) not in known:
            yield place


def _kept_places(
    drops: Sequence[str], places: Iterable[CallablePlace], dropped: list[CallablePlace]
) -> Iterator[CallablePlace]:
    """Yield the places that no pattern matches; add the others to `dropped`."""
    for place in places:
        if any(covers(glob, place.name) for glob in drops):
            dropped.append(place)
        else:
            yield place


def _loss(place: CallablePlace) -> Loss:
    return Loss(place.name, f"is made by {place.callable}, which is not known to be harmless")


def unknown_callables(pickle: bytes, path: str) -> tuple[str, ...]:
    """Return the unknown callables of a pickle that will be written, in the form of torch.save."""
    with formats.pause_collection():
        session = formats.new_session()
        session.folder()
        container = Container(Memory(pickle, path))
        container.streams.append(session.stream(container.source))
        return unknown_callables_in(container)


def judge(path: str) -> Judge:
    """Return a function that names the unknown callable of a node or in its bytes, if any."""
    session = formats.new_session()
    session.folder()

    def judged(node: Node) -> str | None:
        if not isinstance(node, Blob) or node.content is None:
            return unlisted_callable(node)
        with contextlib.suppress(InputError):
            container = session.open(Memory(node.content, path))
            if container is not None:
                return next(iter(unknown_callables_in(container)), None)
        return None

    return judged
