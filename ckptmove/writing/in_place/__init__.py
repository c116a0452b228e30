"""Change a checkpoint in place, and undo that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .find_journal import is_journaled

if TYPE_CHECKING:
    from ...errors import StrPath


def recover_if_interrupted(path: StrPath) -> tuple[str, ...]:
    """Undo an interrupted change before a file is read; return notes for the user."""
    if not is_journaled(path):
        return ()
    from .undo import notes_of_undoing  # hardly any file needs this import

    return notes_of_undoing(path)
