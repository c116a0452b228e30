"""Where a tree is: here, or in a store; the same is asked of both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from ..sources import is_url
from . import disk
from .disk import Listed, Output

_T = TypeVar("_T")
_R = TypeVar("_R")


class Place(Protocol):
    """What can be asked about the files of a tree; see `disk`."""

    def each(self, call: Callable[[_T], _R], given: Iterable[_T], /) -> Iterator[_R]:
        """As `disk.each`."""

    def listings(self, root: str, /) -> Callable[[str], list[Listed]]:
        """As `disk.listings`."""

    def stamp_of(self, files: Sequence[str], root: str = "", /) -> str:
        """As `disk.stamp_of`."""

    def files_of(self, path: str, /) -> Sequence[str]:
        """As `disk.files_of`."""

    def nbytes_of(self, files: Iterable[str], /) -> int:
        """As `disk.nbytes_of`."""

    def output_of(self, path: str, /, *, summed: bool) -> Output:
        """As `disk.output_of`."""

    def sizes_of(self, path: str, /) -> dict[str, int]:
        """As `disk.sizes_of`."""

    def same(self, one: str, other: str, /) -> bool:
        """As `disk.same`."""

    def holds(self, path: str, data: bytes, /) -> bool:
        """As `disk.holds`."""

    def is_taken(self, path: str, /) -> bool:
        """As `disk.is_taken`."""

    def make_folder(self, path: str, /) -> None:
        """As `disk.make_folder`."""


def at(path: str) -> Place:
    """Whom to ask about a path, or a URL."""
    if not is_url(path):
        return disk
    from . import bucket  # what has no URL needs none of this

    return bucket
