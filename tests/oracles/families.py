"""Files of each family, read by what reads them: torch, pickle, torch.jit."""

from __future__ import annotations

import io
import pickle
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.making.expected import Restored, having_every_device, raw, storage_bytes
from tests.making.subclasses import one_process_group
from tests.making.wrapped import QuantizedTensor
from tests.oracles.readers import inert_pickle

PICKLES = ("data", "constants", "traced_inputs", "bytecode")


class Found(NamedTuple):
    """What a reader found in a file."""

    tree: object
    #: name → device of each tensor, as the file has it; of scripts, pickle/key → device
    devices: dict[str, str]
    storages: dict[str, bytes]  #: name → bytes of the storage under it


def read(family: str, name: str, path: Path) -> Found:
    """What the format's own library finds, on a machine with every device."""
    with warnings.catch_warnings(), having_every_device() as restored, one_process_group():
        warnings.simplefilter("ignore")  # of classes without source text
        return READERS[family](name, path, restored)


def _by_torch(name: str, path: Path, restored: Restored) -> Found:
    with path.open("rb") as file:
        if name == "at_an_offset":  # which only the caller knows
            file.seek(path.read_bytes().index(b"\x80\x02\x8a\x0a"))
        return _found(torch.load(file, weights_only=False), restored)


def _wrapped(name: str, path: Path, restored: Restored) -> Found:
    """Tensors that store a device: that device, and where their parts are."""
    devices: dict[str, str] = {}
    storages: dict[str, bytes] = {}

    def stay(device: str) -> str:
        devices["weight"] = device  # which is not here
        return "cpu"

    with pytest.MonkeyPatch.context() as patch:
        if name.startswith("storageless"):
            patch.setattr(torch._utils, "_get_restore_location", stay)
        loaded: Any = torch.load(path, weights_only=False)
    for at, tensor in loaded.items():
        for part, inner in _held(tensor, at):
            storages[part] = raw(inner.untyped_storage())
            if part not in devices:
                devices[part] = restored.device(inner)
        if isinstance(tensor, QuantizedTensor):
            devices[at] = str(tensor.device)
        if hasattr(tensor, "local_tensor"):
            shards = tensor.metadata().shards_metadata
            devices[f"{at}.placement"] = str(shards[0].placement.device())
    return Found(None, devices, storages)


def _held(tensor: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Name → tensor, of the tensors that make up a tensor."""
    if isinstance(tensor, QuantizedTensor):
        parts = tensor.__tensor_flatten__()[0]
        yield from ((f"{name}.{at}", getattr(tensor, at)) for at in parts)
    else:
        yield name, tensor.local_tensor() if hasattr(tensor, "local_tensor") else tensor


def _by_pickle(name: str, path: Path, restored: Restored) -> Found:
    encoding = "bytes" if name.startswith("python2") else "ASCII"
    with path.open("rb") as file:
        loaded = pickle.load(file, encoding=encoding)
    if name.startswith("python2"):
        loaded = {key.decode(): value for key, value in loaded.items()}
    if name.startswith("nested"):
        loaded = unfolded(loaded)
    if name.startswith("estimator"):
        loaded = vars(loaded)  # which it would pickle otherwise
    return _found(loaded, restored)


def _found(loaded: object, restored: Restored) -> Found:
    return Found(loaded, restored.devices(loaded), storage_bytes(loaded))


def unfolded(value: Any) -> Any:
    """The value with nested checkpoints loaded from their bytes."""
    if isinstance(value, dict):
        return {key: unfolded(each) for key, each in value.items()}
    if isinstance(value, bytes) and value[:4] in (b"PK\3\4", b"\x80\x02\x8a\x0a"):
        return torch.load(io.BytesIO(value), weights_only=False)
    if isinstance(value, bytes) and value[:1] == b"\x80" and value[-1:] == b".":
        return unfolded(pickle.loads(value))
    return value


def _by_jit(name: str, path: Path, restored: Restored) -> Found:
    """Tensors as torch.jit loads them; devices and all else by an inert reader."""
    loaded: Any = torch.jit.load(path, map_location="cpu")
    tensors = dict([*loaded.named_parameters(), *loaded.named_buffers()])
    trees, devices = [], {}
    records = script_records(path)
    for kind in PICKLES:
        if f"{kind}.pkl" in records:
            tree, locations = inert_pickle(io.BytesIO(records[f"{kind}.pkl"]))
            trees.append(tree)
            devices.update({f"{kind}/{key}": where for key, where in locations})
    rest = {at: data for at, data in records.items() if not at.endswith(".pkl")}
    return Found([tensors, trees, rest], devices, storage_bytes(tensors))


def script_records(path: Path) -> dict[str, bytes]:
    """Record name without the prefix → its data."""
    with zipfile.ZipFile(path) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


#: Families that `read` knows. To have another one tested, say here what reads it.
READERS: dict[str, Callable[[str, Path, Restored], Found]] = {
    "legacy": _by_torch,
    "pickled": _by_pickle,
    "script": _by_jit,
    "wrapped": _wrapped,
}
