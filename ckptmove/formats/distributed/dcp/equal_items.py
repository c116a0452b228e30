"""Use the checksums of items to find tensors with the same bytes, and files that are copies.

Tied weights are saved under each of their names. And if the file of one rank was copied over that
of another, everything may seem to fit: the same shapes are at the same places. Equal files alone do
not prove this, since the data of two ranks may be equal: experts that were made from one layer, or
ranks with the same seed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from ....display.phrases import join_names
from ....errors import CorruptError
from ....sources.source import Source
from .items import Chunks, ReadChunks, is_uniform
from .metadata import SavedState
from .metadata_walk import ItemRange

_MOST_NAMED = 3
_MOST_LAYOUTS = 1 << 10  # that are looked for within each other
_MOST_WITHIN = 8  # times the number of items: places that are compared for that
_MOST_LOOKED_AT = 64  # parts of tensors that are checked in a file
_STEP = 1 << 20  # bytes that are compared at once

_Held = dict[tuple[int, int], int]  # the items of a file: place → checksum, or 0


def equal_tensors(dtypes: Mapping[str, str], read: ReadChunks) -> list[list[str]]:
    """Groups of tensor names with the same bytes; tensors with a single value are left out."""
    first = ((item.crc32, name) for name in dtypes for *_, item in read(name)[:1])
    equal = list[list[str]]()
    for names in _groups(first):  # nearly always the first chunk tells tensors apart
        chunks = ((name, read(name)) for name in names)
        equal += _groups(
            ((dtypes[name], *((box, item.stride, item.crc32) for box, _, item in each)), name)
            for name, each in chunks
            if all(item.crc32 for *_, item in each)
        )
    return [names for names in equal if not _is_uniform(read(names[0]))]


def _groups(keys: Iterable[tuple[Hashable, str]]) -> list[list[str]]:
    """The names that have a key in common; in each group there are several."""
    alike: dict[Hashable, list[str]] = {}
    for key, name in keys:
        alike.setdefault(key, []).append(name)
    return [names for names in alike.values() if len(names) > 1]


def same_files(
    saved: SavedState,
    names: Sequence[str],
    read: ReadChunks,
    files: Mapping[str, Source],
    rank_of: Callable[[str], int | None],
) -> list[str]:
    """Warnings about ranks' files of which all items have the same bytes in another rank's file.

    That may have more items, as when the file of a rank is replaced by the start of another.
    CorruptError if a file also has items of another that `.metadata` does not place in it: then it
    is a copy. `read` returns the chunks of a tensor in `names`.
    """
    layouts = _layouts(saved, files)
    held: dict[str, _Held] = {name: {} for each in layouts for name in each.files}
    if not held:
        return []
    for name in names:
        for _, span, item in read(name):
            if span.file in held:
                held[span.file][span.at, span.nbytes] = item.crc32
    for span in _spans(saved):
        if span.file in held:
            held[span.file].setdefault((span.at, span.nbytes), 0)
    found = list[str]()
    for layout in layouts:
        ranks = [name for name in layout.files if rank_of(name) is not None]
        for name in ranks:
            if held[name].keys() == layout.places:
                _check_rest(name, layout.files, files, held)
        for *others, last in _groups((_held_at(layout.places, held[name]), name) for name in ranks):
            apart = (name for name in others if rank_of(name) != rank_of(last))
            same = [name for name in apart if _are_same(files[last], files[name], held[last])]
            is_whole = held[last].keys() == layout.places
            if is_whole and same and _tells(last, names, read):
                found.append(_warning(same, last, files))
    return found


def _warning(others: Sequence[str], last: str, files: Mapping[str, Source]) -> str:
    same = f"{join_names([*others, last], _MOST_NAMED)} are the same bytes"
    if any(files[name].nbytes != files[last].nbytes for name in others):
        same = f"all items of {last} are also in {join_names(others, _MOST_NAMED)}"
    return f"{same}: either the data of these ranks are equal, or one file was copied over another"


class _Layout(NamedTuple):
    """Places of items."""

    places: frozenset[tuple[int, int]]
    files: list[str]  #: those that have items there; last those that have no others


def _layouts(saved: SavedState, files: Iterable[str]) -> list[_Layout]:
    """The places of all items of a file, if there are items in the same places of other files.

    Files with the same places are always found; those with more places only as far as that takes
    time in proportion to the items.
    """
    places: dict[str, set[tuple[int, int]]] = {name: set() for name in files}
    for span in _spans(saved):
        if span.file in places:
            places[span.file].add((span.at, span.nbytes))
    alike: dict[frozenset[tuple[int, int]], list[str]] = {}
    for name, each in places.items():
        alike.setdefault(frozenset(each), []).append(name)
    largest = sorted(filter(None, alike), key=len, reverse=True)
    room = _MOST_WITHIN * sum(map(len, places.values()))
    found = list[_Layout]()
    for n, layout in enumerate(largest):
        larger = list[str]()
        for more in largest[: n if n < _MOST_LAYOUTS else 0]:
            cost = len(layout) * len(alike[more])
            if cost <= room and layout <= more:
                room -= cost
                larger += alike[more]
        found.append(_Layout(layout, [*larger, *alike[layout]]))
    return [each for each in found if len(each.files) > 1]


def _spans(saved: SavedState) -> Iterator[ItemRange]:
    spans = (*(span for _, span in saved.items()), *saved.copies)
    return (span for span in spans if span.nbytes)


def _held_at(places: Iterable[tuple[int, int]], held: _Held) -> int:
    """A number that files with the same checksums in these places have in common."""
    return hash(frozenset((place, held[place]) for place in places))


def _check_rest(
    name: str, others: Sequence[str], files: Mapping[str, Source], held: Mapping[str, _Held]
) -> None:
    """CorruptError if a file is a copy of another: it ends with items that belong only there."""
    file, items = files[name], held[name]
    end = max((at + nbytes for at, nbytes in items), default=0)
    if not end < file.nbytes:
        return
    for other in others:
        more = held[other]
        if files[other].nbytes == file.nbytes and items.items() < more.items():
            places = [place for place in more if not more[place] or place not in items]
            if _are_same(file, files[other], dict.fromkeys(places, 0)):
                raise CorruptError(
                    f"{name} is a copy of {other}: it has items that belong only there",
                    hint="copy the files of all ranks again",
                )


def _are_same(one: Source, other: Source, items: _Held) -> bool:
    """Whether two files have the same bytes in the items without checksum."""
    ranges = ((at, at + nbytes) for (at, nbytes), crc32 in items.items() if not crc32)
    steps = (
        (start, min(_STEP, end - start)) for at, end in ranges for start in range(at, end, _STEP)
    )
    return all(one.read(*step) == other.read(*step) for step in steps)


def _tells(file: str, names: Sequence[str], read: ReadChunks) -> bool:
    """Whether a file has parts of tensors with more than one value."""
    parts = (
        (item, box.numel) for name in names for box, span, item in read(name) if span.file == file
    )
    return not all(is_uniform(*part) for part in islice(parts, _MOST_LOOKED_AT))


def _is_uniform(chunks: Chunks) -> bool:
    return all(is_uniform(item, box.numel) for box, _, item in chunks)
