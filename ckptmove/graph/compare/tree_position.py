"""A place in the tree of a checkpoint, which has a dotted name."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from ...manifest.paths import Path, spell, spell_apart


class TreePosition(NamedTuple):
    """A place in a tree: the place of its container, and the keys from there."""

    within: TreePosition | None
    #: None at the root
    keys: Path
    #: how many keys lead to it
    depth: int
    #: whether to compare it
    chosen: bool
    #: whether it is only a part of a tensor's spelling
    rest: bool
    #: names of several tensors, whose keys must be quoted
    alike: Container[str]

    @property
    def name(self) -> str:
        """The dotted name."""
        parts: list[Path] = []
        place: TreePosition | None = self
        while place is not None:
            parts.append(place.keys)
            place = place.within
        path = tuple(key for keys in reversed(parts) for key in keys)
        name = spell(path)
        return spell_apart(path) if name in self.alike else name
