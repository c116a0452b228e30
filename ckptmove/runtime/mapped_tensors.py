"""Make plain tensors directly from files, with few calls of torch per tensor.

`storages` and `rebuild` make every tensor that a checkpoint may hold. But nearly all of a hundred
thousand tensors are plain. On the CPU, `torch.frombuffer` makes a tensor with a storage of its own
from a mapping of the file in a microsecond. As in `storages`, it is not checked that nobody
truncates a file while it is mapped. `device_copies` fills tensors on other devices, at the end.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from math import prod

import torch

from ..manifest.manifest import Storage
from ..sources.file import File
from ..sources.source import Source
from ..torch_pickle.values.strided import MOST_DIMENSIONS, contiguous_stride, reach_of
from .device_copies import DeviceCopies
from .storages import LARGEST_ALIGNMENT, WHOLE, Restoring, pages_of


class Odd(Exception):
    """The tensor is not plain; `storages` and `rebuild` must make it."""


class MappedTensors:
    """Makes tensors over unchanged bytes of files; methods raise Odd if a tensor is not plain."""

    def __init__(self, sources: Sequence[Source], restoring: Restoring) -> None:
        self._sources = sources
        self._restoring = restoring
        self._pages: dict[int, mmap.mmap] = {}
        self._copies = DeviceCopies()
        #: id of a storage → the first tensor on it
        self._first: dict[str, torch.Tensor] = {}

    def tensor(
        self,
        source: int,
        start: int | None,
        at: int,
        dtype: str,
        shape: tuple[int, ...],
        location: str = "cpu",
    ) -> torch.Tensor:
        """A contiguous tensor with a storage of its own.

        It begins `at` bytes after `start` in the file with the number `source`, and is within it.
        """
        kind, count = WHOLE.get(dtype), prod(shape)
        device = self._restoring.device_of(location)
        if kind is None or not count or start is None or device is None:
            raise Odd
        at += start
        if device.type != "cpu":
            nbytes = count * kind.itemsize
            storage = self._copies.storage(nbytes, device, self._file(source), at)
            made = torch.empty(0, dtype=kind, device=device)
            return made.set_(storage, 0, shape, contiguous_stride(shape))
        if at % min(kind.itemsize, LARGEST_ALIGNMENT):
            raise Odd
        pages = self._pages.get(source)
        if pages is None:
            pages = self._pages[source] = pages_of(self._file(source))
        made = torch.frombuffer(pages, dtype=kind, count=count, offset=at)
        return made if len(shape) == 1 else made.resize_(shape)

    def finish_copies(self) -> None:
        """Fill the tensors on other devices; InputError if a file can't be read."""
        self._copies.finish()

    def view(
        self,
        storage: Storage,
        offset: int,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        requires_grad: bool,
    ) -> torch.Tensor:
        """A tensor on a storage that its tensors share; offset and stride are in elements."""
        first, dtype = self._first.get(storage.id), storage.dtype or ""
        if dtype not in WHOLE or len(shape) > MOST_DIMENSIONS:
            raise Odd
        needed = reach_of(shape, stride, offset, dtype)
        if needed > storage.nbytes or storage.extent is None:
            raise Odd
        whole = not offset and needed == storage.nbytes
        if whole and first is None and stride == contiguous_stride(shape):
            made = self._make_tensor(storage, shape)
        else:
            if first is None:
                first = self._make_tensor(storage, (storage.nbytes // WHOLE[dtype].itemsize,))
            made = torch.empty(0, dtype=first.dtype, device=first.device)
            made.set_(first.untyped_storage(), offset, shape, stride)
        if requires_grad:
            if not (made.is_floating_point() or made.is_complex()):
                raise Odd
            made.requires_grad = True
        return made

    def _make_tensor(self, storage: Storage, shape: tuple[int, ...]) -> torch.Tensor:
        assert storage.extent is not None
        start, _, source = storage.extent
        made = self.tensor(source, start, 0, storage.dtype or "", shape, storage.location)
        self._first[storage.id] = made
        return made

    def _file(self, source: int) -> File:
        file = self._sources[source]
        if not isinstance(file, File):
            raise Odd
        return file
