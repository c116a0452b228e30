"""The place of a value in a tree, linked to the place of its container."""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

from ...manifest.paths import Path, spell, spell_apart


class Where(NamedTuple):
    """A place in a tree: the place of what holds it, and the keys from there.

    Attributes:
        within: the place of what holds it.
        keys: from there; none at the root.
        depth: how many keys lead to it.
        chosen: whether it is to be compared.
        rest: whether it only spells what a tensor is made of.
        alike: names that several tensors would have, which quote their keys.
    """

    within: Where | None
    keys: Path
    depth: int
    chosen: bool
    rest: bool
    alike: Set[str]

    @property
    def name(self) -> str:
        """The dotted name."""
        parts: list[Path] = []
        place: Where | None = self
        while place is not None:
            parts.append(place.keys)
            place = place.within
        path = tuple(key for keys in reversed(parts) for key in keys)
        name = spell(path)
        return spell_apart(path) if name in self.alike else name
