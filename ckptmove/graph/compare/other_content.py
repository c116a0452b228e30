"""Compare the other records of two checkpoints: code, and the user's own files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ...errors import UnsupportedError
from ...manifest.other_records import HeldRecord, OtherRecord, RecordKind
from ...reports.difference import Difference, Kind
from ..draft import CheckpointGraph
from .excerpts import changed_lines, first_unlike, of_bytes

_CLASS = "__torch__."  # how the names of a program's own classes begin
_OF_RECORDS = (Kind.RECORD, Kind.RECORD_ADDED, Kind.RECORD_REMOVED)
_OF_VALUES = (
    *(Kind.VALUE, Kind.VALUE_ADDED, Kind.VALUE_REMOVED, Kind.TYPE, Kind.ORDER),
    *(Kind.SHARED, Kind.UNSHARED),
)


class Beside(NamedTuple):
    """The result of `compare_beside`."""

    differences: list[Difference]
    #: how many records both have
    compared: int
    #: how many differ only in device names, which were ignored
    devices: int


def compare_beside(
    old: CheckpointGraph, new: CheckpointGraph, *, ignore_devices: bool = False
) -> Beside:
    """Compare metadata and other records of two checkpoints; name what can't be compared.

    If both checkpoints have the same format, records are compared by name. A different format has
    no place for them, so each is listed as not compared. `ignore_devices` ignores the devices that
    code names.
    """
    mine, others = _by_name(old), _by_name(new)
    found = list(_unlike_metadata(old, new))
    compared = devices = 0
    if old.format != new.format:
        found += _apart(old, None)
        found += _apart(None, new)
    else:
        for name in {**mine, **others}:
            if name not in mine or name not in others:
                found.append(_alone(mine.get(name), others.get(name)))
                continue
            compared += 1
            difference = _unlike(mine[name], others[name], no_devices=False)
            if difference is not None and ignore_devices:
                difference = _unlike(mine[name], others[name], no_devices=True)
                devices += difference is None
            found += [] if difference is None else [difference]
        coded = any(
            each.record.kind is RecordKind.CODE for each in (*mine.values(), *others.values())
        )
        for text in () if coded else dict.fromkeys((*old.beside, *new.beside)):
            one, two = (text if text in each.beside else None for each in (old, new))
            found.append(Difference(Kind.NOT_COMPARED, f"<{text}>", one, two))
    return Beside(found, compared, devices)


def is_code(difference: Difference, old: CheckpointGraph, new: CheckpointGraph) -> bool:
    """Whether a difference concerns only code, or content that can't be compared.

    Code means records of code and, in the saved object of a TorchScript program, the names of its
    classes and the instructions compiled for phones.
    """
    kind = difference.kind
    if kind is Kind.NOT_COMPARED:
        return True
    if kind in _OF_RECORDS:
        sides = (difference.old, difference.new)
        return any(side is not None and side["of"] == RecordKind.CODE for side in sides)
    compiled = old.bytecode or new.bytecode
    if kind is Kind.TYPE and str(difference.old) != str(difference.new):
        sides = (str(difference.old), str(difference.new))
        # beside compiled code the module is shown as a dict
        names = [side.startswith(_CLASS) or (bool(compiled) and side == "dict") for side in sides]
        if all(names) and any(side.startswith(_CLASS) for side in sides):
            return True
    within = difference.name == compiled or difference.name.startswith(f"{compiled}.")
    return bool(compiled) and within and kind in _OF_VALUES


def _unlike_metadata(old: CheckpointGraph, new: CheckpointGraph) -> Iterator[Difference]:
    """Yield differences in the metadata of safetensors headers, whichever file has it."""
    one, two = _metadata(old), _metadata(new)
    for key in {**one, **two}:
        name = f"__metadata__.{key}"
        if key not in one:
            yield Difference(Kind.VALUE_ADDED, name, None, two[key])
        elif key not in two:
            yield Difference(Kind.VALUE_REMOVED, name, one[key], None)
        elif one[key] != two[key]:
            yield Difference(Kind.VALUE, name, one[key], two[key])


def _metadata(draft: CheckpointGraph) -> dict[str, str]:
    """Return the metadata without further names of tensors, which are compared as tensors."""
    if not draft.metadata:
        return {}
    names = {entry.name for entry in draft.list_contents().tensors}
    return {key: text for key, text in draft.metadata.items() if key not in names}


def _by_name(draft: CheckpointGraph) -> dict[str, HeldRecord]:
    """Return the records to compare, by name."""
    return {held.record.name: held for held in draft.records if held.record.kind.is_content}


def _record_term(record: OtherRecord) -> dict[str, Any]:
    return {"$": "record", "of": str(record.kind), "nbytes": record.nbytes}


def _apart(old: CheckpointGraph | None, new: CheckpointGraph | None) -> Iterator[Difference]:
    """Yield the records of one of two checkpoints with different formats, as not compared."""
    draft = old or new
    assert draft is not None
    names = [f"<{text}>" for text in draft.beside]
    names += [
        name
        for name, held in _by_name(draft).items()
        if held.record.kind is RecordKind.DATA or not names
    ]
    for name in names:
        sides = (None, draft.format) if old is None else (draft.format, None)
        yield Difference(Kind.NOT_COMPARED, name, *sides)


def _alone(old: HeldRecord | None, new: HeldRecord | None) -> Difference:
    if old is not None:
        return Difference(Kind.RECORD_REMOVED, old.record.name, _record_term(old.record), None)
    assert new is not None
    return Difference(Kind.RECORD_ADDED, new.record.name, None, _record_term(new.record))


def compare_records(old: dict[str, HeldRecord], new: dict[str, HeldRecord]) -> Beside:
    """Compare records by name; those that only one side has are differences."""
    found, both = list[Difference](), 0
    for name in {**old, **new}:
        if name not in old or name not in new:
            found.append(_alone(old.get(name), new.get(name)))
            continue
        both += 1
        difference = _unlike(old[name], new[name], no_devices=False)
        found += [] if difference is None else [difference]
    return Beside(found, both, 0)


def _unlike(old: HeldRecord, new: HeldRecord, *, no_devices: bool) -> Difference | None:
    """Return how two records with the same name differ, or None if they are equal."""
    name = old.record.name
    try:
        mine, other = old.content(no_devices), new.content(no_devices)
    except UnsupportedError as error:
        return Difference(Kind.NOT_COMPARED, name, str(error), str(error))
    at = first_unlike(mine, other)
    if at is None:
        return None
    return Difference(
        Kind.RECORD,
        name,
        {**of_bytes(mine, at), **_record_term(old.record)},
        {**of_bytes(other, at), **_record_term(new.record)},
        lines=changed_lines(mine, other),
    )
