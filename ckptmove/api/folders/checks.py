"""Check the files of a folder against each other, including files that are not checkpoints."""

from __future__ import annotations

from typing import NamedTuple

from ... import formats
from ...display.phrases import join_names, plural
from ...display.text import first_names
from ...errors import CkptmoveError
from ...formats.checkpoint import Checkpoint
from ...formats.folders.agreement import disagreements, uncounted_note
from ...formats.folders.companions import check_companions
from ...formats.folders.model_folder import checkpoints_beside
from ...formats.folders.training_folder import FolderCheckpoint, FolderPart
from ...manifest.folder_files import NO_PART
from .weight_copies import MOST_NAMED, differing_tensors

_BESIDE = "checked by itself, not loaded"


class FolderChecks(NamedTuple):
    """The results of checking a folder."""

    faults: list[str]
    details: list[str]  #: results that are not faults
    not_checked: list[str]  #: names of files that could not be checked


def check_folder(found: Checkpoint, path: str, *, follow_links: bool) -> FolderChecks:
    """Check a folder, except for the bytes of the checkpoint that was opened in it."""
    faults = [f"{name} was not checked: {NO_PART}" for name in found.left]
    details = list[str]()
    if isinstance(found, FolderCheckpoint):
        checks = _check_files(found, follow_links=follow_links)
    elif found.folder is None:
        return FolderChecks(faults, details, [])
    else:
        checked, beside = {source.path for source in found.files}, set(checkpoints_beside(found))
        with formats.open_whole_folder(path, follow_links=follow_links) as folder:
            for part, about in zip(folder.parts, folder.manifest.files, strict=False):
                if checked.isdisjoint(source.path for source in part.checkpoint.files):
                    damage = part.checkpoint.damage(lambda nbytes: None)
                    faults += [f"{part.name}: {fault}" for fault in damage]
                    if part.name in beside:
                        what = f"{about.format}, {plural(about.tensors, 'tensor')}"
                        details.append(f"{part.name} ({what}) is no part of it: {_BESIDE}")
            checks = _check_files(folder, follow_links=follow_links)
    return checks._replace(faults=[*faults, *checks.faults], details=[*details, *checks.details])


def _check_files(found: FolderCheckpoint, *, follow_links: bool) -> FolderChecks:
    """Compare files that should be equal, read the configurations, and look for missing files."""
    companions = check_companions(found)
    faults = [*disagreements(found), *companions.faults]
    details = [each for each in (uncounted_note(found),) if each is not None]
    by_name = {part.name: part for part in found.parts}
    for part in found.parts:
        if part.copy_of is None:
            continue
        same, sentence = _compare(found, by_name[part.copy_of], part, follow_links=follow_links)
        (details if same else faults).append(sentence)
    if companions.not_checked:
        many = plural(len(companions.not_checked), "file")
        names = first_names(companions.not_checked, MOST_NAMED)
        details.append(f"{many} of no known form, not checked: {names}")
    if companions.without_end:
        names = first_names(companions.without_end, MOST_NAMED)
        details.append(f"no new line at the end, not known whether nothing is missing: {names}")
    return FolderChecks(faults, details, companions.not_checked)


def _compare(
    found: FolderCheckpoint, first: FolderPart, second: FolderPart, *, follow_links: bool
) -> tuple[bool, str]:
    """Return whether two files hold the same tensors, and a sentence about it."""
    names = f"{second.name} and {first.name}"
    folder = found.container.source.path
    try:
        differing, tensors = differing_tensors(
            folder, first.name, second.name, follow_links=follow_links
        )
    except CkptmoveError as error:
        return False, f"{names} were not compared: {error}"
    if differing:
        return False, f"{names} hold different tensors: {join_names(differing, MOST_NAMED)}"
    return True, f"{names} hold the same tensors, {tensors:,}, byte for byte"
