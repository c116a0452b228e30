"""The name and path of the output of each item in a batch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePath
from typing import Any

from .. import formats
from ..errors import RefusedError
from ..reports.batch_items import Item
from ..sources import place_of

_REPORT = ".validation.json"
_SUFFIXES = sorted({each for format in formats.FORMATS for each in format.suffixes}, key=len)
_MOST_TOLD = 4  # clashes


def output_namer(verb: str, root: str | None, options: Mapping[str, Any]) -> Callable[[Item], str]:
    """A function that gives the path of an item's output, or nothing without a destination."""
    suffixes = next(
        each.suffixes
        for each in formats.WRITABLE
        if each.name == options.get("format", formats.WRITABLE[0].name)
    )
    divided = options.get("max_shard_size") is not None

    def named(item: Item) -> str:
        if root is None:
            return ""
        name = item.name
        if verb == "validate":
            name += _REPORT
        elif verb == "convert" and item.kind != "folder":
            name = name.removesuffix(".index.json")
            if divided:
                name = bare_name(name)
            elif not name.endswith(suffixes):
                name = bare_name(name) + suffixes[0]
        return place_of(root).child(name).path

    return named


def bare_name(name: str) -> str:
    """A name without what says the format."""
    for suffix in reversed(_SUFFIXES):
        if name.lower().endswith(suffix) and len(PurePath(name).name) > len(suffix):
            return name[: -len(suffix)]
    return name


def refuse_clashes(items: Iterable[Item]) -> None:
    """Raises RefusedError if two items would have one name, or one would lie in another."""
    made: dict[str, list[str]] = {}
    for item in items:
        made.setdefault(item.output, []).append(item.name)
    folders: dict[str, str] = {}
    for output, names in made.items():
        above = os.path.dirname(output)
        while above and above not in folders:
            folders[above] = names[0]
            above = os.path.dirname(above) if os.path.dirname(above) != above else ""
    clashes = [" and ".join(names) for names in made.values() if len(names) > 1]
    clashes += [
        f"{names[0]} and {folders[output]}" for output, names in made.items() if output in folders
    ]
    if clashes:
        told = "; ".join(clashes[:_MOST_TOLD])
        more = len(clashes) - _MOST_TOLD
        told += f"; and {more:,} more" if more > 0 else ""
        raise RefusedError(
            f"would have the same name in the destination: {told}",
            hint="use --exclude to leave out all but one",
        )
