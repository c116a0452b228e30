"""Call the local or the remote implementation of a tree, depending on its path."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from ...sources import place_of
from . import local_tree
from .local_tree import Listed, Output

_T = TypeVar("_T")
_R = TypeVar("_R")


class Place(Protocol):
    """The interface of a local or remote tree; see `local_tree`."""

    def each(self, call: Callable[[_T], _R], given: Iterable[_T], /) -> Iterator[_R]:
        """As `local_tree.each`."""

    def listings(self, root: str, /) -> Callable[[str], list[Listed]]:
        """As `local_tree.listings`."""

    def stamp_of(self, files: Sequence[str], root: str = "", /) -> str:
        """As `local_tree.stamp_of`."""

    def files_of(self, path: str, /) -> Sequence[str]:
        """As `local_tree.files_of`."""

    def nbytes_of(self, files: Iterable[str], /) -> int:
        """As `local_tree.nbytes_of`."""

    def output_of(self, path: str, /, *, summed: bool) -> Output:
        """As `local_tree.output_of`."""

    def sizes_of(self, path: str, /) -> dict[str, int]:
        """As `local_tree.sizes_of`."""

    def same(self, one: str, other: str, /) -> bool:
        """As `local_tree.same`."""

    def holds(self, path: str, data: bytes, /) -> bool:
        """As `local_tree.holds`."""

    def is_taken(self, path: str, /) -> bool:
        """As `local_tree.is_taken`."""

    def make_folder(self, path: str, /) -> None:
        """As `local_tree.make_folder`."""


def at(path: str) -> Place:
    """The module for the tree of a path or a URL."""
    if place_of(path).opens_by_path:
        return local_tree
    from . import remote_tree  # what has no URL needs none of this

    return remote_tree
