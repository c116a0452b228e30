"""Many changes of a pickle in order, in columns: most of them differ only in their place."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from operator import add

from ..sources.source import Readable

#: By offset: how many bytes are replaced, and the new ones. Equal pairs are one object.
Pieces = dict[int, tuple[int, bytes]]
#: The start and end of the replaced bytes, and the new ones.
Replacement = tuple[int, int, bytes]

_AT_ONCE = 1 << 12  # changes that are applied at once, to be compared


class Replacements:
    """Replacements of byte ranges; each takes 24 bytes."""

    def __init__(self, starts: array[int], nbytes: array[int], new: list[bytes]) -> None:
        """`nbytes`: how many bytes are replaced at each start."""
        self._starts, self._nbytes, self._new = starts, nbytes, new

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[Replacement]:
        ends = map(add, self._starts, self._nbytes)
        return zip(self._starts, ends, self._new, strict=True)

    def part(self, first: int, last: int) -> Replacements:
        """The changes from the number `first` up to `last`, without that."""
        here = slice(first, last)
        return Replacements(self._starts[here], self._nbytes[here], self._new[here])

    @property
    def start(self) -> int:
        """The start of the first change."""
        return self._starts[0]

    @property
    def end(self) -> int:
        """The end of the last change."""
        return self._starts[-1] + self._nbytes[-1]


def in_order(pieces: Pieces) -> Replacements:
    """Pieces in the order of their offsets."""
    starts = array("Q", sorted(pieces))
    nbytes = array("Q", [pieces[at][0] for at in starts])
    return Replacements(starts, nbytes, [pieces[at][1] for at in starts])


def apply_replacements(
    data: bytes, changes: Iterable[Replacement], start: int = 0, stop: int | None = None
) -> bytes:
    """Apply changes to `data`, or to its part from `start` to `stop`."""
    made, position = bytearray(), start
    for at, end, new in changes:
        made += data[position:at]
        made += new
        position = end
    made += data[position:stop]
    return bytes(made)


def is_applied(data: bytes, changes: Replacements, new: Readable) -> bool:
    """Whether changes make `new` of `data`; few of them are applied at a time, to save memory."""
    start = at = 0
    for n in range(0, len(changes), _AT_ONCE):
        some = changes.part(n, n + _AT_ONCE)
        made = apply_replacements(data, some, start, some.end)
        if at + len(made) > new.nbytes or new.read(at, len(made)) != made:
            return False
        start, at = some.end, at + len(made)
    return data[start:] == new.read(at, new.nbytes - at)
