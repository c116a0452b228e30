"""A tree in an object store, with the functions of `local_tree`; requests run in parallel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from ...errors import InputError
from ...sources import place_of
from ...sources.fetch_pool import many
from ...sources.filesystem import info_of, open_store, size_in
from ...sources.filesystem import stamp_of as stamp_of_object
from ...sources.remote_place import RemotePlace
from .local_tree import FILE, FOLDER, NAMELESS, Listed, Output, as_one, is_ours

_T = TypeVar("_T")
_R = TypeVar("_R")


def each(call: Callable[[_T], _R], given: Iterable[_T]) -> Iterator[_R]:
    """As `local_tree.each`, several at once."""
    return many(call, given)


def listings(root: str) -> Callable[[str], list[Listed]]:
    """As `local_tree.listings`: the whole tree is listed at once."""
    base = root.rstrip("/")
    found: dict[str, list[Listed]] = {base: []}
    for name, path, _, nbytes, stamp in RemotePlace(root).files_below():
        parts = name.split("/")
        if any(map(is_ours, parts)):
            continue
        if not all(map(_is_name, parts)):
            found[base].append(Listed(name, path, NAMELESS))
            continue
        above = base
        for part in parts[:-1]:
            folder = place_of(above).child(part).path
            if folder not in found:
                found[folder] = []
                found[above].append(Listed(part, folder, FOLDER))
            above = folder
        found[above].append(Listed(parts[-1], path, FILE, nbytes, stamp))
    return lambda folder: sorted(found[base if folder == root else folder])


def _is_name(part: str) -> bool:
    """Whether a file may be called so: objects may have any name, and lead anywhere by it."""
    return part not in ("", ".", "..") and "\0" not in part


def stamp_of(files: Sequence[str], root: str = "") -> str:
    """As `local_tree.stamp_of`, by what the store says of each."""
    stamps = (stamp for _, stamp in many(_facts, files))
    return as_one([(path[len(root) :], stamp) for path, stamp in zip(files, stamps, strict=True)])


def files_of(path: str) -> Sequence[str]:
    """As `local_tree.files_of`."""
    return [each.path for each in _there(path)]


def _there(path: str) -> list[Listed]:
    """The object itself, or all that are in a folder and below, by few requests."""
    about = info_of(open_store(path))
    if about.get("type") != "directory":
        return [Listed("", path, FILE, size_in(about), stamp_of_object(about))]
    return [
        Listed(each.name, each.path, FILE, each.nbytes, each.stamp)
        for each in RemotePlace(path).files_below()
        if not any(map(is_ours, each.name.split("/")))
    ]


def _facts(url: str) -> tuple[int, str]:
    return RemotePlace(url).size_and_stamp()


def nbytes_of(files: Iterable[str]) -> int:
    """As `local_tree.nbytes_of`."""

    def size(path: str) -> int:
        try:
            return _facts(path)[0]
        except InputError:
            return 0

    return sum(many(size, files))


def output_of(path: str, *, summed: bool) -> Output:
    """As `local_tree.output_of`, but never read: what the store says changes with the bytes."""
    there = _there(path)
    stamp = as_one([(each.path[len(path) :], each.stamp) for each in there])
    return Output(sum(each.nbytes for each in there), stamp)


def sizes_of(path: str) -> dict[str, int]:
    """As `local_tree.sizes_of`."""
    return {each.name: each.nbytes for each in _there(path)}


def same(one: str, other: str) -> bool:
    """As `local_tree.same`; the other is a file or a folder here."""
    here = Path(other)
    theirs = sizes_of(one)
    ours = {
        str(each.relative_to(here)) if each != here else "": each.stat().st_size
        for each in ([here] if here.is_file() else here.rglob("*"))
        if each.is_file()
    }
    if theirs != ours:
        return False
    return all(
        _same_bytes(place_of(one).child(name).path if name else one, str(here / name))
        for name in theirs
    )


def _same_bytes(one: str, other: str) -> bool:
    with place_of(one).open() as first, place_of(other).open() as second:
        return all(data == second.read(at, len(data)) for at, data in first.chunks(0, first.nbytes))


def holds(path: str, data: bytes) -> bool:
    """As `local_tree.holds`."""
    if sizes_of(path) != {"": len(data)}:
        return False
    with place_of(path).open() as source:
        return source.read(0, source.nbytes) == data


def is_taken(path: str) -> bool:
    """As `local_tree.is_taken`."""
    return place_of(path).exists()


def make_folder(path: str) -> None:
    """As `local_tree.make_folder`: there is nothing to be made."""
