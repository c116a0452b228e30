"""The names of journals: beside the file that changes, or in the folder."""

from __future__ import annotations

import os

SUFFIX = ".ckptmove-journal"
FOLDER_JOURNAL = SUFFIX  # the name of a folder's journal, in it
UNFINISHED = "-new"  # suffix of the journal's name until it is complete
_LONGEST_NAME = 255  # bytes


def file_of(path: str) -> str | None:
    """Return the name of the file that a journal's name refers to; None for other names."""
    folder, journal = os.path.split(path)
    name = journal.removesuffix(UNFINISHED)[1:].removesuffix(SUFFIX)
    whole = journal_name(name)
    return os.path.join(folder, name) if journal in (whole, whole + UNFINISHED) else None


def journal_name(name: str) -> str:
    """The name of the journal beside a file: `.NAME.ckptmove-journal`.

    If that would be too long for file systems, it has the start of NAME and a digest of NAME.
    """
    whole = f".{name}{SUFFIX}"
    raw = os.fsencode(name)
    if len(raw) + len(SUFFIX + UNFINISHED) < _LONGEST_NAME:
        return whole
    from hashlib import sha256  # it is slow to import, and few names are so long

    return f".{os.fsdecode(raw[:200])}.{sha256(raw).hexdigest()[:16]}{SUFFIX}"
