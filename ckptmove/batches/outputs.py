"""The name and path of the output of each item in a batch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import PurePath
from typing import Any

from .. import formats
from ..formats.folders.weight_names import INDEX, stem_for
from ..reports.batch.items import Item
from ..sources import place_of

_REPORT = ".validation.json"


def output_namer(
    verb: str, root: str | None, options: Mapping[str, Any], *, keep_suffix: bool
) -> Callable[[Item], str]:
    """Return a function that returns the path of an item's output; empty without a destination."""
    bare = str if keep_suffix else bare_name
    format = formats.writable(options.get("format", formats.WRITABLE[0]))
    divided = options.get("max_shard_size") is not None or format.is_folder

    def named(item: Item) -> str:
        if root is None:
            return ""
        name = item.name
        if verb == "validate":
            name += _REPORT
        elif verb == "convert" and item.kind != "folder":
            name = name.removesuffix(INDEX)
            if divided:
                name = bare(name)
            elif not name.endswith(format.suffixes):
                name = bare(name)
                if format.name == "safetensors":
                    folder, slash, stem = name.rpartition("/")
                    name = folder + slash + stem_for(stem, is_safe=True)
                name += format.suffixes[0]
        return place_of(root).child(name).path

    return named


def named_in(root: str, output: str, digests: Mapping[str, str]) -> dict[str, str]:
    """Return the digests of the files of an output, by their names in the destination."""
    base = output[len(root.rstrip("/")) :].replace(os.sep, "/").lstrip("/")
    return {"/".join(filter(None, (base, name))): each for name, each in digests.items()}


@cache
def _suffixes() -> list[str]:
    """Return the suffixes of all formats, the longest first."""
    every = {each for row in formats.FORMATS for each in row.format.suffixes}
    return sorted(every, key=len, reverse=True)


def bare_name(name: str) -> str:
    """Return a name without the suffix of a format."""
    for suffix in _suffixes():
        if name.lower().endswith(suffix) and len(PurePath(name).name) > len(suffix):
            return name[: -len(suffix)]
    return name


def clashes(
    items: Iterable[Item],
    unopened: Iterable[Item],
    is_item: Callable[[Item], bool],
    file_of: Callable[[str], str] = str,
) -> dict[str, str]:
    """Return items whose output would be, or lie in, the output of another, with its name.

    Of the `unopened` items, `is_item` opens only those that would clash. Paths with the same
    `file_of` are one file.
    """
    items = list(items)
    ours = {item.name for item in items}
    made: dict[str, list[Item]] = {}
    for item in (*items, *unopened):
        made.setdefault(file_of(item.output), []).append(item)
    for item in [item for group in made.values() for item in group[:1]]:
        above = os.path.dirname(file_of(item.output))
        while above and above != os.path.dirname(above):
            if above in made:
                made[above].append(item)
            above = os.path.dirname(above)
    found = dict[str, str]()
    for group in made.values():
        if len(group) < 2 or ours.isdisjoint(item.name for item in group):
            continue
        names = [item.name for item in group if item.name in ours or is_item(item)]
        for name in names if len(names) > 1 else ():
            if name in ours:
                found.setdefault(name, next(other for other in names if other != name))
    return found
