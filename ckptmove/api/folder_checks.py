"""Check the files of a folder against each other, those that are no checkpoints among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..errors import CkptmoveError
from ..formats.folders.agreement import disagreements
from ..formats.folders.companions import check_companions
from ..formats.folders.training_folder import FolderCheckpoint, Part
from ..formats.folders.weight_names import NOT_COMPARED
from ..manifest.manifest import TensorEntry
from ..phrases import join_names, plural
from ..reports.diff import Kind
from ..reports.text import listed
from ..sources import place_of
from .diff import diff

_MOST_NAMED = 5
#: In what the tensors of two files differ; how their dicts and other values do, counts as nothing.
_OF_TENSORS = (Kind.CHANGED, Kind.RESHAPED, Kind.RETYPED, Kind.NOT_COMPARED, Kind.RENAMED)
_OF_ONE = (Kind.ADDED, Kind.REMOVED)


class FolderChecks(NamedTuple):
    """What came out of it."""

    faults: list[str]
    details: list[str]  #: what is no fault
    not_checked: list[str]  #: names of files of which nothing is known


def check_folder(found: FolderCheckpoint, *, follow_links: bool) -> FolderChecks:
    """Compare what should be the same, read the configurations, and look for what is missing."""
    companions = check_companions(found)
    faults = [*disagreements(found), *companions.faults]
    details = list[str]()
    by_name = {part.name: part for part in found.parts}
    for part in found.parts:
        if part.copy_of is None:
            continue
        same, sentence = _compare(found, by_name[part.copy_of], part, follow_links=follow_links)
        (details if same else faults).append(sentence)
    if companions.not_checked:
        many = plural(len(companions.not_checked), "file")
        names = listed(companions.not_checked, _MOST_NAMED)
        details.append(f"{many} of no known form, not checked: {names}")
    return FolderChecks(faults, details, companions.not_checked)


def _compare(
    found: FolderCheckpoint, first: Part, second: Part, *, follow_links: bool
) -> tuple[bool, str]:
    """Whether two files hold the same tensors, and a sentence that says so."""
    place, names = place_of(found.container.source.path), f"{second.name} and {first.name}"
    try:
        result = diff(
            place.child(first.name).path,
            place.child(second.name).path,
            ignore_devices=True,
            follow_links=follow_links,
        )
    except CkptmoveError as error:
        return False, f"{names} were not compared: {error}"
    aliases = {part.name: _aliases(part) for part in (first, second)}
    differing = list[str]()
    for each in result.differences:
        own = aliases[(second if each.kind is Kind.ADDED else first).name]
        is_alias = each.kind in _OF_ONE and each.name in own
        if each.kind in _OF_TENSORS or (each.kind in _OF_ONE and not is_alias):
            differing.append(f"{each.name} ({each.kind})")
    if differing:
        return False, f"{names} hold different tensors: {join_names(differing, _MOST_NAMED)}"
    return True, f"{names} hold the same tensors, {result.tensors:,}, byte for byte"


def _aliases(part: Part) -> set[str]:
    """The tensors of a file that another name in it has as well, as of tied weights.

    A file of safetensors holds but one of them.
    """
    named: dict[object, list[TensorEntry]] = {}
    for each in part.checkpoint.manifest.tensors:
        key = (each.storage, each.offset, each.shape, each.stride, each.dtype)
        named.setdefault(key, []).append(each)
    return {each.name for same in named.values() if len(same) > 1 for each in same}


def true_notes(notes: Sequence[str]) -> tuple[str, ...]:
    """Notes of a folder, without those that the checks make untrue."""
    return tuple(each for each in notes if not each.endswith(NOT_COMPARED))
