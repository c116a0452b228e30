"""Iterate over a loader's batches on a device, and copy the next batch while one is in use.

Copies are queued on their own stream. It first waits for everything queued on the current stream:
the work of the loader, and the last use of memory that copies may reuse. The current stream waits
for the copies before the batch is returned. The host waits for them before it requests the next
batch from the loader, so that the source of the copies stays unchanged.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from ...display.phrases import class_name
from ...errors import UsageError
from .devices import reachable
from .to_device import Delivery, deliver, patterns_of, to_device

Batch = TypeVar("Batch")

_OWN = ("_loader", "_device", "_keep")


class PrefetchingLoader(Generic[Batch]):
    """The result of `ckptmove.prefetch`: a loader with batches on a device.

    It has all attributes of the loader.
    """

    def __init__(
        self, loader: Iterable[Batch], device: Any, keep: str | Iterable[str] = ()
    ) -> None:
        _check(loader)
        self._loader = loader
        self._device = reachable(device)
        self._keep = patterns_of(keep)

    def __iter__(self) -> Iterator[Batch]:
        iterator = iter(self._loader)
        streams = streams_of(self._device)
        steps = self._each(iterator) if streams is None else self._ahead(iterator, streams)
        try:
            for ready in steps:
                yield ready.pop()  # no reference to the batch stays here
        finally:
            steps.close()
            if iterator is not self._loader:
                _shut(iterator)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return bool(self._loader)

    def __repr__(self) -> str:
        return f"<{self._loader!r} on {self._device}>"

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:  # `copy` reads attributes before they are set
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            super().__setattr__(name, value)
        else:
            setattr(self._loader, name, value)

    def _each(self, iterator: Iterator[Batch]) -> Generator[list[Batch], None, None]:
        """The batches, each moved when it is requested."""
        while True:
            try:
                batch = next(iterator)
            except StopIteration:
                return
            ready = [to_device(batch, self._device, keep=self._keep)]
            del batch
            yield ready

    def _ahead(self, iterator: Iterator[Batch], streams: Any) -> Generator[list[Batch], None, None]:
        """The batches, each copied before it is requested."""
        side = streams.Stream(device=self._device)
        coming = self._sent(iterator, streams, side)
        try:
            while coming is not None:
                delivery = coming.received()
                current = streams.current_stream(self._device)
                current.wait_stream(side)
                _record(delivery, current)
                ready = [delivery.value]
                is_ahead = coming.is_copy
                side.synchronize()
                del delivery
                coming = self._sent(iterator, streams, side) if is_ahead else None
                yield ready
                if not is_ahead:  # nothing was copied; the next batch is probably there, too
                    coming = self._sent(iterator, streams, side)
        finally:
            side.synchronize()

    def _sent(self, iterator: Iterator[Batch], streams: Any, side: Any) -> _Coming | None:
        """The next batch with its copies queued; None at the end."""
        try:
            batch = next(iterator)
        except StopIteration:
            return None
        except Exception as error:  # raised when this batch is requested
            return _Coming(error=error)
        side.wait_stream(streams.current_stream(self._device))
        try:
            with streams.stream(side):
                delivery = deliver(
                    batch, self._device, non_blocking=True, keep=self._keep, pin=True
                )
        except Exception as error:
            return _Coming(error=error)
        return _Coming(batch, delivery)


@dataclass
class _Coming:
    """A batch with its copies queued, or the exception that the loader or a copy raised."""

    source: Any = None  #: the loader's batch, whose memory is being read
    delivery: Delivery | None = None  #: the batch on the device
    error: Exception | None = None  #: the exception, if one was raised

    @property
    def is_copy(self) -> bool:
        return self.delivery is not None and self.delivery.value is not self.source

    def received(self) -> Delivery:
        """The batch on the device; raises the exception if there is one."""
        if self.delivery is None:
            error, self.error = self.error, None  # its traceback refers to this object
            assert error is not None
            raise error
        return self.delivery


def streams_of(device: torch.device) -> Any:
    """The torch module with the streams of a device; None if copies can't overlap there."""
    if device.type in ("cpu", "meta"):  # the streams of torch.cpu queue nothing
        return None
    module = getattr(torch, device.type, None)
    has = all(hasattr(module, name) for name in ("Stream", "current_stream", "stream"))
    return module if has else None


def _check(loader: Any) -> None:
    """Refuse a loader without batches before it is iterated."""
    if isinstance(loader, torch.nn.Module):  # some can be iterated
        raise UsageError(
            f"a model ({type(loader).__name__}) is not a loader of batches",
            hint="use ckptmove.move to move a model; prefetch takes the loader of its batches",
        )
    can = any(hasattr(type(loader), name) for name in ("__iter__", "__getitem__"))
    if not can or isinstance(loader, (str, bytes, bytearray)):
        raise UsageError(
            f"{class_name(loader)} is not a loader of batches",
            hint="pass a DataLoader, or any iterable of batches",
        )


def _record(delivery: Delivery, stream: Any) -> None:
    """Prevent the reuse of a delivery's memory until this stream is done."""
    for each in (*delivery.tensors, *delivery.movers):
        # Objects that can't be recorded, such as sparse tensors, are safe, too: the other stream
        # waits for this one before it allocates memory again.
        with suppress(NotImplementedError, AttributeError):
            each.record_stream(stream)


def _shut(iterator: Any) -> None:
    """End an iterator and its workers, unless they persist for the next one."""
    end = getattr(iterator, "_shutdown_workers", None)  # of a DataLoader
    if end is not None and not getattr(iterator, "_persistent_workers", False):
        end()
    end = getattr(iterator, "close", None)
    if callable(end):
        end()
