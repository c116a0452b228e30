"""Copy bytes of files to tensors on a device, through buffers in pinned memory.

A tensor that is mapped from a file lies in pageable memory. To copy it to a GPU, the driver copies
it through one pinned buffer of its own, and waits for each page of the file in turn. Here several
threads read blocks of the file into pinned buffers; each has a stream, on which the GPU fetches the
block while the thread reads the next one. Ranges that lie close together are read with one call and
fetched as one block, which the GPU then distributes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from operator import itemgetter
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from ..errors import CkptmoveError, DeviceError
from ..sources.source import Source

_BLOCK = 1 << 23  # bytes of a buffer
_GAP = 1 << 12  # bytes between two ranges that are read with them rather than skipped
_THREADS = 4
#: The hint for a missing device. It is part of the message, because tracebacks show no hints.
REMEDY = 'map_location="cpu" loads it on the CPU'


def device_error(location: object, error: Exception) -> DeviceError:
    """The error for tensors that a device can't hold."""
    why = str(error).partition("\n")[0].split(". ")[0]
    return DeviceError(f"no tensor can be put on {str(location)!r} here: {why}; {REMEDY}")


class _Range(NamedTuple):
    """A range of a file, and the bytes on the device that it is for."""

    source: int
    at: int
    end: int
    target: torch.Tensor


class DeviceCopies:
    """Copies from files to devices: collected first, then made in the order of the files."""

    def __init__(self) -> None:
        self._sources: dict[int, Source] = {}
        self._ranges: dict[torch.device, list[_Range]] = {}

    def storage(
        self, nbytes: int, device: torch.device, source: Source, at: int
    ) -> torch.UntypedStorage:
        """A new storage on a device; `finish` fills it from an offset of a file.

        Raises DeviceError if the device has too little memory.
        """
        try:
            made = torch.empty(nbytes, dtype=torch.uint8, device=device)
        except Exception as error:  # each backend has its own
            raise device_error(device, error) from error
        self._sources[id(source)] = source
        self._ranges.setdefault(device, []).append(_Range(id(source), at, at + nbytes, made))
        return made.untyped_storage()

    def finish(self) -> None:
        """Fill all storages.

        Raises InputError if a file can't be read, CorruptError if it shrank, DeviceError if the
        device fails.
        """
        for device, ranges in self._ranges.items():
            try:
                self._copy(device, ranges)
            except (CkptmoveError, MemoryError):
                raise
            except Exception as error:
                raise device_error(device, error) from error
        self._ranges.clear()

    def _copy(self, device: torch.device, ranges: list[_Range]) -> None:
        blocks = list(_blocks(ranges))
        threads = min(len(blocks), _THREADS if device.type == "cuda" else 1)
        lanes = [_Lane(device) for _ in range(threads)]
        free: SimpleQueue[_Lane] = SimpleQueue()
        for lane in lanes:
            free.put(lane)
        inference = torch.is_inference_mode_enabled()

        def copy(block: list[_Range]) -> None:
            lane = free.get()
            try:
                with torch.inference_mode(inference):  # each thread has a mode of its own
                    lane.copy(self._sources[block[0].source], block)
            finally:
                free.put(lane)

        try:
            with ThreadPoolExecutor(threads) as pool:
                try:
                    copied = pool.map(copy, blocks) if threads > 1 else map(copy, blocks)
                except RuntimeError:  # Python is about to exit, and starts no more threads
                    copied = map(copy, blocks)
                for _ in copied:
                    pass
        finally:
            for lane in lanes:
                lane.wait()


class _Lane:
    """Two buffers: one is filled from a file while the device copies the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._stream: Any = None
        if self._is_cuda:  # new tensors may be in memory that earlier work still uses
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._buffers = [self._buffer() for _ in range(2 if self._is_cuda else 1)]

    def _buffer(self) -> _Buffer:
        memory = torch.empty(_BLOCK, dtype=torch.uint8, device="cpu", pin_memory=self._is_cuda)
        return _Buffer(memory, torch.cuda.Event() if self._is_cuda else None)

    def copy(self, source: Source, block: list[_Range]) -> None:
        """Read the ranges of a block from a file, and start to copy them to the device."""
        self._buffers.reverse()
        memory, copied = self._buffers[0]
        start = block[0].at
        nbytes = max(each.end for each in block) - start
        if copied is not None:
            copied.synchronize()
        source.read_into(start, _writable(memory, nbytes))
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            fetched = memory[:nbytes]
            if self._is_cuda and len(block) > 1:
                fetched = fetched.to(self._device, non_blocking=True)
            parts = [fetched[each.at - start : each.end - start] for each in block]
            targets = [each.target for each in block]
            torch._foreach_copy_(targets, parts, non_blocking=self._is_cuda)
            if copied is not None:
                copied.record()

    def wait(self) -> None:
        """Wait until the device has copied everything."""
        if self._stream is not None:
            self._stream.synchronize()


class _Buffer(NamedTuple):
    """Memory, and the event that the device has copied it; without an event, copies wait."""

    memory: torch.Tensor
    copied: Any


def _blocks(ranges: list[_Range]) -> Iterator[list[_Range]]:
    """Ranges in the order of the files, in groups that each fit in a buffer."""
    block: list[_Range] = []
    for whole in sorted(ranges, key=itemgetter(0, 1)):
        for part in [whole] if whole.end - whole.at <= _BLOCK else _split(whole):
            if block and not _is_next(part, block):
                yield block
                block = []
            block.append(part)
    if block:
        yield block


def _split(whole: _Range) -> Iterator[_Range]:
    source, at, end, target = whole
    for part in target.split(_BLOCK):
        yield _Range(source, at, min(end, at + _BLOCK), part)
        at += _BLOCK


def _is_next(part: _Range, block: list[_Range]) -> bool:
    """Whether a range is so close behind a block, and so short, that one read gets both."""
    first, last = block[0], block[-1]
    near = part.source == last.source and first.at <= part.at <= last.end + _GAP
    return near and part.end - first.at <= _BLOCK


def _writable(memory: torch.Tensor, nbytes: int) -> memoryview:
    """The first bytes of a tensor on the CPU, to write to them."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(memory.data_ptr())).cast("B")
