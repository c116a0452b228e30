"""Fingerprints that say whether an item is already done: digests of everything it depends on.

These are: the version of ckptmove, the verb and its options (with the content of files that they
name), the stamp of the source, and the stamp of the checkpoint it is compared with. For a file
changed in place, the stamp after the change counts, without inode and version: moving the tree or
updating ckptmove must not change a file twice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from ..errors import InputError
from ..reports.batch.items import Item, LedgerEntry, Task
from ..sources import place_of
from ..version import __version__
from .discovery import checkpoint_files, item_checkpoint
from .options import absolute, code_of, from_root
from .trees import Output, tree_at


def request_of(verb: str, options: Mapping[str, Any]) -> str:
    """Return the part of the digest that is the same for all items."""
    named = from_root(options).items()
    said = {name: each for name, each in named if name not in ("force", "against")}
    code = code_of(options.get("model"))
    stamp = None if code is None else _stamp_of_all(code)
    version = None if options.get("in_place") else __version__
    return _digest([version, verb, said, stamp])


def key_of(task: Task, stamp: str) -> str:
    """Return the digest of a task; `stamp` is the stamp of the item's files."""
    if task.in_place:  # moving the tree changes inodes; a folder's stamp has all
        stamp = stamp.rpartition("-")[0] or stamp
    return _digest([task.request, stamp, _stamp_against(task.options.get("against"))])


def begun_key_of(task: Task) -> str:
    """Return the digest for a begun change in place; it does not depend on how far that got."""
    if task.item.kind == "folder":
        return _digest([task.request, "begun", tree_at(task.item.path).sizes()])
    nbytes, _, inode = place_of(task.item.path).size_and_stamp()[1].split("-")
    return _digest([task.request, "begun", f"{nbytes}-{inode}"])


def tags_of(task: Task) -> str:
    """Return a digest of everything in an item that a change of devices can change."""
    with item_checkpoint(task.item, follow_links=bool(task.options.get("follow_links"))) as opened:
        found = opened.manifest
    return _digest(
        [
            [(each.id, each.location) for each in found.storages.values()],
            [(each.name, each.device) for each in found.tensors],
            [(each.name, each.value) for each in found.values_naming_devices],
        ]
    )


def source_stamp(item: Item) -> str:
    """Return the present stamp of an item's files. Raises InputError if a file is gone."""
    if item.kind == "folder":
        return _stamp_of_all(item.path)
    return tree_at(item.path).stamp_of(item.files or (item.path,))


def _stamp_of_all(path: str) -> str:
    """The stamp of a file, or of all files in a folder."""
    tree = tree_at(path)
    return tree.stamp_of([each.path for each in tree.files()])


def _stamp_against(path: object) -> str | None:
    if not isinstance(path, str):
        return None
    try:
        stamp = tree_at(path).stamp_of(checkpoint_files(path))
    except InputError:
        stamp = ""  # a missing file becomes a finding
    return f"{absolute(path)}: {stamp}"


def _digest(said: object) -> str:
    text = json.dumps(said, sort_keys=True, default=_text_of)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _text_of(value: object) -> str:
    """Return text for a value that JSON lacks, such as a function; the same in each process."""
    name = getattr(value, "__qualname__", None)
    return repr(value) if name is None else f"{getattr(value, '__module__', '')}.{name}"


def is_done(entry: LedgerEntry, task: Task, key: str) -> bool:
    """Whether the ledger's entry of an item is still true, judged without reading the output."""
    if entry.outcome != "done" or entry.key != key:
        return False
    if task.in_place:
        return True
    try:
        return tree_at(task.item.output).output(summed=False).stamp == entry.stamp
    except (OSError, InputError):
        return False


def refresh_entry(entry: LedgerEntry, task: Task, key: str) -> LedgerEntry | None:
    """Return the new entry of a moved output; None unless its bytes are unchanged."""
    if entry.outcome != "done" or entry.key != key or task.in_place:
        return None
    tree = tree_at(task.item.output)
    try:
        there = tree.output(summed=False)
        if there.nbytes != entry.nbytes:
            return None
        there = tree.output(summed=True, digests=task.digests)
    except (OSError, InputError):
        return None
    if not _is_equal(entry, there):
        return None
    return entry._replace(stamp=there.stamp, digests=there.digests or entry.digests)


def _is_equal(entry: LedgerEntry, there: Output) -> bool:
    """Whether the output still has the written bytes; in a store, its stamp decides."""
    told = there.crc32 == entry.crc32 if entry.crc32 else there.stamp == entry.stamp
    return there.nbytes == entry.nbytes and told


def is_ours(entry: LedgerEntry | None, output: str) -> bool:
    """Whether an output is the one recorded in the ledger, regardless of its source."""
    if entry is None or entry.outcome == "begun":
        return False
    return _is_equal(entry, tree_at(output).output(summed=True))
