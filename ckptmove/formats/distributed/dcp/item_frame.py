"""The bytes that torch.save writes around the elements of a chunk or a value: see `items`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from ....graph.canonical import Graph
from ....pickles.emit import emit
from ....plans.plan import Write
from ....torch_pickle.values.strided import contiguous_stride
from ...torch.frame import Frame

#: The name that torch.save uses for a file that it writes into another one.
STEM = "archive"


class ItemFrame:
    """An item without its elements: `head`, then the elements at `data_at`, then `tail`."""

    def __init__(self, pickle: bytes, nbytes: int, stem: str = STEM) -> None:
        self._frame = Frame(stem, pickle, [(nbytes, 0)])
        self.nbytes = self._frame.nbytes  #: the size of the whole item
        self.data_at = self._frame.data_at(0)
        self._end = self.data_at + nbytes
        writes = self._frame.writes()
        self.head = _painted(0, self.data_at, [each for each in writes if each.at < self.data_at])
        self._after = [each for each in writes if each.at >= self._end]

    def tail(self, crc32: int) -> bytes:
        """The bytes after the elements, given the checksum of the elements."""
        return _painted(
            self._end, self.nbytes, [*self._after, *self._frame.final_writes({0: crc32})]
        )


@lru_cache(1024)
def tensor_frame(dtype: str, shape: tuple[int, ...], nbytes: int, stem: str = STEM) -> ItemFrame:
    """The frame of a chunk of this shape, with contiguous elements."""
    graph = Graph(None)
    storage = graph.storage("0", dtype, nbytes, "cpu")
    tensor = graph.tensor(storage, dtype, shape, contiguous_stride(shape), 0)
    return ItemFrame(emit(tensor), nbytes, stem)


def value_item(pickle: bytes, stem: str = STEM) -> bytes:
    """The item of a value without tensors."""
    frame = Frame(stem, pickle, [])
    return _painted(0, frame.nbytes, [*frame.writes(), *frame.final_writes({})])


def _painted(start: int, end: int, writes: Sequence[Write]) -> bytes:
    """The bytes of a range after these writes; outside of them it is zero."""
    made = bytearray(end - start)
    for at, data in writes:
        made[at - start : at - start + len(data)] = data
    return bytes(made)
