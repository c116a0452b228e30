"""What the checksums of items tell: tensors with the same bytes, and files that are copies.

Tied weights are saved by each of their names. And if the file of a rank was copied over that of
another one, all fits together: the same shapes are at the same places. Then the parts of each
tensor that both have are the same, which else only those are in which all elements are one value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice

from ....errors import CorruptError
from ..boxes import Box
from .items import Item, is_uniform
from .metadata_walk import Lies

_MOST_LOOKED_AT = 64  # tensors of two ranks that look alike
_ENOUGH = 2  # tensors whose parts should differ, and do not

#: The chunks of a tensor, where they lie, and their items.
Chunks = Sequence[tuple[Box, Lies, Item]]
Read = Callable[[str], Chunks]


def equal_tensors(dtypes: Mapping[str, str], read: Read) -> list[list[str]]:
    """The names of tensors that have the same bytes, but not of those that are one value."""
    alike: dict[int, list[str]] = {}
    for name, dtype in dtypes.items():
        sums = [(box, item.stride, item.crc32) for box, _, item in read(name)]
        if sums and all(crc32 for *_, crc32 in sums):
            alike.setdefault(hash((dtype, *sums)), []).append(name)
    several = [found for found in alike.values() if len(found) > 1]
    return [found for found in several if not _is_uniform(read(found[0]))]


def check_copies(names: Sequence[str], read: Read, rank_of: Callable[[str], int | None]) -> None:
    """Raises CorruptError if all that two ranks have of the same tensors is the same."""
    same: dict[tuple[int, int], list[str]] = {}  # names, by two ranks
    for name in names:
        first: dict[int, int] = {}  # by what it holds: the rank
        for _, lies, item in read(name):
            rank = rank_of(lies.file)
            if rank is not None and item.crc32:
                other = first.setdefault(hash((item.nbytes, item.crc32)), rank)
                if other != rank:
                    same.setdefault((other, rank), []).append(name)
    for (one, other), alike in same.items():
        some = (name for name in alike[:_MOST_LOOKED_AT] if not _is_uniform(read(name)))
        if len(list(islice(some, _ENOUGH))) < _ENOUGH:
            continue
        both = sum({one, other} <= {rank_of(lies.file) for _, lies, _ in read(n)} for n in names)
        if both == len(set(alike)):
            raise CorruptError(
                f"the files of ranks {one:,} and {other:,} hold the same parts of all tensors: "
                "one was copied over the other",
                hint="copy the files of all ranks again",
            )


def _is_uniform(chunks: Chunks) -> bool:
    return all(is_uniform(item, box.numel) for box, _, item in chunks)
