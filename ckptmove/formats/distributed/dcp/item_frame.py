"""What torch.save writes around the elements of a chunk, and around a value: see `items`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from ....graph.canonical import Graph
from ....pickles.emit import emit
from ....plans.plan import Write
from ....torch_pickle.values.strided import contiguous_stride
from ...torch.frame import Frame

#: What torch.save calls a file that it writes into another.
STEM = "archive"


class ItemFrame:
    """An item but for its elements: `head`, then the elements at `data_at`, then `tail`."""

    def __init__(self, pickle: bytes, nbytes: int, stem: str = STEM) -> None:
        self._frame = Frame(stem, pickle, [(nbytes, 0)])
        self.nbytes = self._frame.nbytes  #: of all of it
        self.data_at = self._frame.data_at(0)
        self._end = self.data_at + nbytes
        writes = self._frame.writes()
        self.head = _painted(0, self.data_at, [each for each in writes if each.at < self.data_at])
        self._after = [each for each in writes if each.at >= self._end]

    def tail(self, crc32: int) -> bytes:
        """What follows the elements, which have this checksum."""
        return _painted(
            self._end, self.nbytes, [*self._after, *self._frame.final_writes({0: crc32})]
        )


@lru_cache(1024)
def tensor_frame(dtype: str, shape: tuple[int, ...], nbytes: int, stem: str = STEM) -> ItemFrame:
    """The frame of a chunk of this shape, whose elements follow each other."""
    graph = Graph(None)
    storage = graph.storage("0", dtype, nbytes, "cpu")
    tensor = graph.tensor(storage, dtype, shape, contiguous_stride(shape), 0)
    return ItemFrame(emit(tensor), nbytes, stem)


def value_item(pickle: bytes, stem: str = STEM) -> bytes:
    """The item of a value in which there are no tensors."""
    frame = Frame(stem, pickle, [])
    return _painted(0, frame.nbytes, [*frame.writes(), *frame.final_writes({})])


def _painted(start: int, end: int, writes: Sequence[Write]) -> bytes:
    """What these write in a range, outside of which they write nothing."""
    made = bytearray(end - start)
    for at, data in writes:
        made[at - start : at - start + len(data)] = data
    return bytes(made)
