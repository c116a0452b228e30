"""What is known of a file by construction, and what torch finds in it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch.serialization import _package_registry, register_package

from tests.making.saving import keep_none, kept_on_cpu, tagging
from tests.making.walking import named_tensors
from tests.oracles.census import parts, storage_of

Storage = torch.UntypedStorage


class Expected(NamedTuple):
    """What a file holds, computed from the live objects."""

    devices: Mapping[str, str]  #: dotted name → device; shared tensors under each of their names
    #: name → bytes of the whole storage under that tensor or its part
    storages: Mapping[str, bytes]
    #: each device that values, strings and code name, as often as they do, without keys of dicts;
    #: None if unknown
    elsewhere: tuple[str, ...] | None = ()
    start: int = 0  #: where in the file the checkpoint starts
    readable: bool = True  #: False for what torch writes and cannot read


FileMaker = Callable[[Path, str], Expected]


def once(make: FileMaker) -> FileMaker:
    """The same maker, which writes the bytes of before when it is asked for the same file again."""
    made: dict[tuple[str, str], tuple[bytes, Expected]] = {}

    @functools.wraps(make)
    def again(path: Path, tag: str) -> Expected:
        key = path.name, tag  # torch writes the name into some files
        if key not in made:
            expected = make(path, tag)
            made[key] = path.read_bytes(), expected
            return expected
        content, expected = made[key]
        path.write_bytes(content)
        return expected

    return again


@contextmanager
def expecting(
    saved: object, tag: str, elsewhere: tuple[str, ...] = (), *, keep_host: bool = True
) -> Iterator[Expected]:
    """Save `saved` inside with the tag; the expectation is complete when the block ends.

    `elsewhere` are devices that the object names beside its tensors; `keep_host` leaves step
    counters, RNG states and the like on the CPU.
    """
    devices: dict[str, str] = {}
    with tagging(tag, kept_on_cpu(saved) if keep_host else keep_none) as tags:
        yield Expected(devices, storage_bytes(saved), elsewhere)
    for name, tensor in named_tensors(saved):
        devices[name] = _given(tensor, tags) or str(tensor.device)


def _given(tensor: torch.Tensor, tags: Mapping[int, str]) -> str | None:
    if (storage := storage_of(tensor)) is not None:
        return tags.get(storage._cdata)
    return next((given for part in inner(tensor) if (given := _given(part, tags))), None)


def inner(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that hold a composite tensor's values, values first if it has them."""
    if tensor.is_sparse:
        yield from (tensor._values(), tensor._indices())
    elif (local := getattr(tensor, "_local_tensor", None)) is not None:
        yield local
    elif hasattr(tensor, "__tensor_flatten__") and not tensor.is_nested:
        yield from (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    else:
        yield from sorted_parts(tensor).values()


def sorted_parts(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """A composite tensor's parts, its values first."""
    return dict(sorted(parts(tensor), key=lambda part: part[0] != "values"))


def storage_bytes(saved: object) -> dict[str, bytes]:
    """Name → bytes of the whole storage under each tensor or under its parts."""
    found = {}
    for name, tensor in named_tensors(saved):
        if (storage := storage_of(tensor)) is not None:
            found[name] = raw(storage)
        elif not tensor.is_meta:
            for part, value in sorted_parts(tensor).items():
                if (under := storage_of(value)) is not None:
                    found[f"{name}.{part}"] = raw(under)
    return found


def raw(storage: Storage) -> bytes:
    data: bytes = torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()
    return data


class Restored:
    """The locations that a load restored."""

    def __init__(self) -> None:
        self.tags: dict[int, str] = {}
        self._roots: list[tuple[Storage, str]] = []  # kept, so that no address is used again

    def note(self, storage: Storage, tag: str) -> Storage:
        """Leave the storage where it is, and remember its tag."""
        self._roots.append((storage, tag))
        self.tags[storage._cdata] = tag
        return storage

    def device(self, tensor: torch.Tensor) -> str:
        """The device that a loaded tensor would be on."""
        found = _given(tensor, self.tags)
        storage = storage_of(tensor)
        if found or storage is None:
            return found or str(tensor.device)
        return next(tag for root, tag in self._roots if _inside(storage, root))

    def devices(self, loaded: object) -> dict[str, str]:
        """Name → device of every loaded tensor."""
        return {name: self.device(tensor) for name, tensor in named_tensors(loaded)}


def _inside(storage: Storage, root: Storage) -> bool:
    start = storage.data_ptr() - root.data_ptr()
    return 0 <= start < max(1, root.nbytes()) or storage.nbytes() == 0


@contextmanager
def having_every_device() -> Iterator[Restored]:
    """Inside, storages of any location load into host memory: the reverse of `tagging`."""
    restored = Restored()
    before = list(_package_registry)
    register_package(4, lambda _: None, restored.note)  # type: ignore[arg-type]
    try:
        yield restored
    finally:
        _package_registry[:] = before
