"""Readers that share no code with ckptmove: torch's own, the standard library's, the C++ one.

All but the zip checks unpickle, even `inert_tree`, which imports nothing: use them only for files
made by the tests.
"""

from __future__ import annotations

import copy
import functools
import pickle
import struct
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.serialization import config

from tests.making.walking import named_tensors
from tests.oracles.sameness import assert_same_tree

Expected = Mapping[str, str] | Callable[[str, str], str]

SERIALIZATION_ID = ".data/serialization_id"  # an identity that nobody verifies


def assert_same_checkpoint(
    source: Path,
    relocated: Path,
    expected_location: Expected,
    *,
    trust: bool = False,
    skip: Container[str] = (),
    in_memory: bool = True,
) -> None:
    """`relocated` is `source` except for its locations, to every reader.

    `expected_location` maps old locations to new ones (others stay), or is a function of a
    storage's key and old location. `trust` unpickles where weights_only can't. `skip` names values
    that may differ, with all below them. `in_memory=False` is for giants: only memory-mapped loads.
    """
    assert_sound_zip(relocated, source)
    assert_same_records(source, relocated)
    assert_locations(source, relocated, expected_location)
    assert_same_tree(inert_tree(source), inert_tree(relocated), skip=skip)
    safe, still_safe = (loads_safely(path, mmap=not in_memory) for path in (source, relocated))
    assert safe == still_safe, "weights_only loads one but not the other"
    if safe or trust:
        assert_same_loads(source, relocated, weights_only=safe, skip=skip, in_memory=in_memory)


def assert_same_loads(
    source: Path,
    relocated: Path,
    *,
    weights_only: bool,
    skip: Container[str] = (),
    in_memory: bool = True,
) -> None:
    """torch.load gives the same from both, plain, memory-mapped and by computed offsets."""
    ours = load(source, weights_only=weights_only, mmap=not in_memory)
    if in_memory:
        assert_same_tree(ours, load(relocated, weights_only=weights_only), skip=skip)
    if not any(info.compress_type for info in storage_records(relocated)):  # mmap can't inflate
        mapped = load(relocated, weights_only=weights_only, mmap=True)
        assert_same_tree(ours, mapped, skip=skip)
        computed = loads_with_computed_offsets(relocated, weights_only=weights_only)
        assert_same_tree(ours, computed, skip=skip)


def assert_locations(source: Path, relocated: Path, expected: Expected) -> None:
    """Every persistent id has the expected location."""
    wanted = [(key, _expect(expected, key, old)) for key, old in pid_locations(source)]
    found = pid_locations(relocated)
    assert found == wanted, f"locations are {found}, not {wanted}"


def _expect(expected: Expected, key: str, old: str) -> str:
    return expected.get(old, old) if isinstance(expected, Mapping) else expected(key, old)


# Loading


def load(path: Path, *, weights_only: bool, **options: Any) -> object:
    """torch.load without its warnings, onto the CPU by default."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.load(path, weights_only=weights_only, **{"map_location": "cpu", **options})


def loads_safely(path: Path, *, mmap: bool = False) -> bool:
    try:
        load(path, weights_only=True, mmap=mmap)
    except pickle.UnpicklingError:
        return False
    return True


def loads_with_computed_offsets(path: Path, *, weights_only: bool = True) -> object:
    """A memory-mapped load that predicts where storages lie; torch asserts each prediction."""
    computing = config.patch({"load.calculate_storage_offsets": True})  # type: ignore[attr-defined]
    with computing, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_SERIALIZATION_DEBUG", "1")
        return load(path, weights_only=weights_only, mmap=True)


def labels(path: Path) -> dict[str, str]:
    """Name → device of every tensor as torch reads the labels, without data or devices."""
    # Without no_grad, a subclass that requires grad would end the process on a CPU-only build.
    with FakeTensorMode(), torch.no_grad():
        tree = load(path, weights_only=False, map_location=None)
    return {name: str(tensor.device) for name, tensor in named_tensors(tree)}


def cpp_unpickler_accepts(path: Path) -> bool:
    """Whether libtorch's own unpickler reads it.

    It supports tensors in lists, dicts and tuples, and loads to the device: use `cpu` or `meta`.
    """
    try:
        torch._C._pickle_load_obj(path.read_bytes())
    except (RuntimeError, UnicodeDecodeError):
        return False
    return True


# The pickle, inert


class Pid(NamedTuple):
    """A storage as the pickle names it, without its location."""

    storage_type: object
    key: str
    numel: int


class Inert:
    """A stand-in for an object: how it would be made; it never is."""

    def __new__(cls, *args: object, **kwargs: object) -> Inert:
        self = super().__new__(cls)
        vars(self).update(args=args, kwargs=kwargs, items=[], state=None)
        return self

    def __init__(self, *_: object, **__: object) -> None: ...

    def __setstate__(self, state: object) -> None:
        vars(self).update(state=state)

    def __setitem__(self, key: object, value: object) -> None:
        vars(self)["items"].append((key, value))

    def append(self, item: object) -> None:
        vars(self)["items"].append(item)

    add = append

    def __repr__(self) -> str:
        return f"{type(self).__name__}{vars(self)['args']!r}"

    def __reduce_ex__(self, _protocol: object) -> tuple[object, ...]:
        return type(self), (), vars(self)


@functools.cache
def _stub(module: str, name: str) -> type:
    if (module, name) == ("collections", "OrderedDict"):
        return OrderedDict  # so that a state dict's names are its own
    return type(f"{module}.{name}", (Inert,), {})


class _InertUnpickler(pickle.Unpickler):
    """Imports nothing, calls only stubs, and notes each persistent id's location."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, encoding="latin1")
        self.locations: list[tuple[str, str]] = []

    def find_class(self, module: str, name: str) -> type:
        return _stub(module, name)

    def persistent_load(self, pid: Any) -> Pid:
        kind, storage_type, key, location, numel = pid
        assert kind == "storage", f"a persistent id of kind {kind!r}"
        self.locations.append((key, location))
        return Pid(storage_type, key, numel)


def inert_tree(path: Path) -> object:
    """The tree with stubs for objects and `Pid`s for storages; nothing is imported or run."""
    return _read_inert(path)[0]


def pid_locations(path: Path) -> list[tuple[str, str]]:
    """Key and location of every persistent id, in the order of the pickle."""
    return _read_inert(path)[1]


def _read_inert(path: Path) -> tuple[object, list[tuple[str, str]]]:
    with zipfile.ZipFile(path) as archive:
        info = next(info for info in archive.infolist() if info.filename.endswith("data.pkl"))
        with _unchecked(archive, info) as file:
            return inert_pickle(file)


def inert_pickle(file: IO[bytes]) -> tuple[object, list[tuple[str, str]]]:
    """The tree of one pickle, and the key and location of each of its persistent ids."""
    unpickler = _InertUnpickler(file)
    return unpickler.load(), unpickler.locations


# The zip


def record_name(info: zipfile.ZipInfo) -> str:
    return info.filename.partition("/")[2]


def storage_records(path: Path) -> list[zipfile.ZipInfo]:
    with zipfile.ZipFile(path) as archive:
        return [info for info in archive.infolist() if record_name(info).startswith("data/")]


def assert_same_records(source: Path, relocated: Path) -> None:
    """The same records in the same order, byte for byte but for the pickle and the identity."""
    with zipfile.ZipFile(source) as ours, zipfile.ZipFile(relocated) as theirs:
        pairs = [_comparable(archive) for archive in (ours, theirs)]
        assert list(pairs[0]) == list(pairs[1]), "records differ"
        for name, info in pairs[0].items():
            if name != "data.pkl":
                one, other = _unchecked(ours, info), _unchecked(theirs, pairs[1][name])
                assert _same_stream(one, other), f"{name} differs"


def _unchecked(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> IO[bytes]:
    """A record, read without a check of its CRC: it may be 0, not computed."""
    unchecked = copy.copy(info)
    unchecked.CRC = None  # type: ignore[assignment]
    return archive.open(unchecked)


def _comparable(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    records = {record_name(info): info for info in archive.infolist()}
    records.pop(SERIALIZATION_ID, None)
    return records


def _same_stream(one: IO[bytes], other: IO[bytes], step: int = 1 << 22) -> bool:
    while chunk := one.read(step):
        if chunk != other.read(step):
            return False
    return not other.read(1)


def assert_sound_zip(path: Path, source: Path | None = None) -> None:
    """Every CRC is right, in the directory and behind the record, unless `source` has none."""
    with zipfile.ZipFile(source or path) as archive:
        unchecked = {record_name(i) for i in archive.infolist() if i.file_size and not i.CRC}
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        for info in archive.infolist():
            assert_descriptor_agrees(file, info)
            if info.CRC or record_name(info) not in (unchecked if source else ()):
                assert _crc_holds(archive, info), f"{info.filename}: CRC"


def _crc_holds(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bool:
    try:
        with archive.open(info) as record:
            while record.read(1 << 22):
                pass
    except zipfile.BadZipFile:  # raised at the record's end
        return False
    return True


def assert_descriptor_agrees(file: IO[bytes], info: zipfile.ZipInfo) -> None:
    """The data descriptor, or else the local header, agrees with the central directory."""
    file.seek(info.header_offset)
    flags, crc, name, extra = struct.unpack("<6xH6xI8xHH", file.read(30))
    wanted = (info.CRC, info.compress_size, info.file_size)
    if not flags & 8 and info.file_size:
        assert crc == info.CRC, f"{info.filename}: local CRC"
    elif info.file_size:
        file.seek(info.header_offset + 30 + name + extra + info.compress_size)
        descriptor = file.read(24)
        forms = (struct.unpack_from("<4sIII", descriptor), struct.unpack_from("<4sIQQ", descriptor))
        assert (b"PK\7\x08", *wanted) in forms, f"{info.filename}: data descriptor"
