"""Remove the source of an item after its complete output was read again.

The ledger entry is on disk before a file is removed. If a run is killed in between, the next one
finds the item done, reads the output again, and removes the rest of the source.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..errors import InputError, UsageError, WriteError
from ..reports.batch.items import LedgerEntry, Task
from ..sources import place_of
from .fingerprints import key_of, source_stamp
from .trees import tree_at

#: Options with which an output may hold less than its source.
_NARROWING = (*("select", "exclude_tensors", "root", "weights", "preset", "dtype", "drop", "bare"),)


def check_removal(verb: str, options: Mapping[str, Any]) -> None:
    """Raises UsageError if sources cannot be removed with these options of the verb."""
    if verb in ("inspect", "validate") or options.get("in_place"):
        raise UsageError("--delete-source needs relocate or convert, and a destination")
    narrowing = [name for name in _NARROWING if name in options]
    if narrowing:
        option = narrowing[0].replace("_", "-")
        raise UsageError(
            f"--delete-source cannot be combined with --{option}: the output may lack something"
        )


def why_kept(task: Task, entry: LedgerEntry, *, copied: bool) -> str:
    """Return why the source of a finished item must stay; empty if it can be removed."""
    item, tree = task.item, tree_at(task.item.output)
    files = item.files or (item.path,)
    if item.kind == "folder":
        return "its source is a folder, which may hold more"
    if any(os.path.islink(each) for each in files):
        return "its source is a link"
    if key_of(task, source_stamp(item)) != entry.key:
        return "its source has changed"
    there = tree.output(summed=True)
    if (there.nbytes, there.stamp, there.crc32) != (entry.nbytes, entry.stamp, entry.crc32):
        return "its output has changed"
    if copied and not tree.same(tree_at(item.path)):
        return "its output is another"
    return ""


def remove_source(task: Task) -> None:
    """Remove the files of an item, an index first. Raises WriteError."""
    for path in reversed(task.item.files or (task.item.path,)):
        place = place_of(path)
        try:
            if place.opens_by_path:
                os.unlink(path)
            else:
                _remove_object(path)
        except FileNotFoundError:  # an earlier run removed it
            continue
        except (OSError, InputError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise WriteError(f"the source can't be removed: {why}", path=path) from error


def _remove_object(url: str) -> None:
    from ..sources.filesystem import open_store  # imported only for URLs
    from ..writing.upload.errors import with_write_retries

    def remove() -> None:
        store = open_store(url)
        store.fs.rm_file(store.path)

    with_write_retries(remove, url)
