"""Implements `ckptmove.recover`: undo interrupted changes in place, and remove temporary files."""

from __future__ import annotations

import os

from ..errors import CkptmoveError, InputError, RefusedError, StrPath
from ..reports.recover import Recovered, RecoverReport
from ..sources import place_of
from ..writing.abandoned import remove_abandoned
from ..writing.in_place.journal_name import SUFFIX, UNFINISHED
from ..writing.in_place.undo import journaled_files, undo


def recover(path: StrPath) -> RecoverReport:
    """Undo an interrupted `relocate(in_place=True)`, and restore the file byte for byte.

    A change counts as done once its journal is removed, which is the last step. Before that, it is
    undone, no matter how far it got. Temporary files of killed processes are removed.

    Args:
        path: a file, which may be a destination that was not written; or a folder, which is
            searched at any depth; or the destination of a batch in S3, whose unfinished uploads by
            killed processes are aborted.

    Returns:
        What was done to each file.

    Raises:
        InputError: a journal does not belong to the file as it is now, the file is missing, or
            another process is changing it.
        RefusedError: the file or its folder cannot be written, or the store does not allow listing
            or aborting uploads.
        WriteError: undoing failed; it can be tried again.
    """
    path = os.fspath(path)
    if not place_of(path).changes_in_place:
        return _recover_uploads(path)
    if not os.path.isdir(path):
        if path.endswith((SUFFIX, SUFFIX + UNFINISHED)):
            raise InputError("is a journal", path=path, hint="name the file that it is beside")
        recovered, files = undo(path), remove_abandoned(path)
        if recovered.outcome == "nothing" and not files and not os.path.exists(path):
            raise InputError("can't be read: there is no such file", path=path)
        if recovered.outcome != "nothing" or not files:
            files.insert(0, recovered)
        return RecoverReport(path, tuple(files))
    files, failed = remove_abandoned(path), list[CkptmoveError]()
    for name in journaled_files(path):
        try:
            recovered = undo(name)
            if recovered.outcome != "nothing":  # except for an unfinished journal
                files.append(recovered)
        except CkptmoveError as error:  # the others come first
            failed.append(error)
    if failed:
        raise failed[0]
    return RecoverReport(path, tuple(files))


def _recover_uploads(url: str) -> RecoverReport:
    """Abort the unfinished uploads of killed batch runs below a URL."""
    from ..writing.upload.unfinished import abort_dead  # imported only for URLs

    place = place_of(url)
    if place.exists() and not place.is_folder():
        raise RefusedError(
            "is in an object store, where files are never changed in place",
            path=url,
            hint="name the destination of a batch in S3",
        )
    found = abort_dead(url)
    for each in found:
        if each.refusal is not None:  # the others come first
            raise each.refusal
    return RecoverReport(
        url,
        tuple(Recovered(each.url, "aborted" if each.aborted else "uploading") for each in found),
    )
