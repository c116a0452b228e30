"""The tar that torch 0.1 wrote: sys_info, pickle, tensors, storages."""

from __future__ import annotations

import io
import pickle
import struct
import tarfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.making.expected import Expected, FileMaker, raw
from tests.making.legacy import SYS_INFO
from tests.making.python2 import dumps as python2_dumps
from tests.making.python2 import reduce_variable
from tests.making.walking import named_tensors

Dumps = Callable[..., bytes]
Locate = Callable[[torch.Tensor], str]

# Older tensor types, by the names of their storages; there is no half on a CPU of then.
TYPES = {
    torch.float64: "Double",
    torch.float32: "Float",
    torch.float16: "Half",
    torch.int64: "Long",
    torch.int32: "Int",
    torch.int16: "Short",
    torch.int8: "Char",
    torch.uint8: "Byte",
}


class TarPickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self.ids = Ids()

    def persistent_id(self, obj: object) -> object:
        """A number as text, or a class with the location of its source."""
        return self.ids(obj)

    def reducer_override(self, obj: object) -> Any:
        return reduce_variable(obj) if isinstance(obj, nn.Parameter) else NotImplemented


class Ids:
    """The persistent ids of a tar; tensors and storages by number."""

    def __init__(self) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self.storages: dict[int, torch.Tensor] = {}
        self.classes: set[type] = set()

    def __call__(self, obj: object) -> object:
        if isinstance(obj, type) and issubclass(obj, nn.Module) and obj not in self.classes:
            self.classes.add(obj)
            return (obj, "/usr/lib/net.py", None)
        if isinstance(obj, torch.Tensor) and not isinstance(obj, nn.Parameter):
            self.tensors[obj._cdata] = obj
            return str(obj._cdata)
        if isinstance(obj, torch.TypedStorage):
            return str(self.store(torch.empty(0, dtype=obj.dtype).set_(obj)))
        return None

    def store(self, on: torch.Tensor) -> int:
        """The number of the storage under a tensor."""
        key: int = on.untyped_storage()._cdata
        self.storages.setdefault(key, on)
        return key


def save_tar(
    saved: object,
    path: Path,
    locate: Locate,
    views: tuple[tuple[torch.Tensor, torch.Tensor, int], ...] = (),
    *,
    dumps: Dumps | None = None,
) -> None:
    """Write `saved` as torch 0.1 did; its tensors are of the eight old dtypes.

    `locate` gives a tensor's location tag. `views` are tensors whose storage is a view of
    another's, with its start in elements. `dumps` pickles an object, with persistent ids if given;
    by default as Python 3 did.
    """
    dumps = dumps or _dumps
    ids = Ids()
    body = dumps(saved, ids)
    tensors = [dumps(len(ids.tensors))] + [
        dumps((key, ids.store(tensor), getattr(torch, f"{TYPES[tensor.dtype]}Tensor")))
        + _shape(tensor)
        for key, tensor in ids.tensors.items()
    ]
    members = {
        "sys_info": dumps(SYS_INFO | {"protocol_version": 1000}),
        "pickle": body,
        "tensors": b"".join(tensors),
        "storages": _storages(ids, locate, views, dumps),
    }
    with tarfile.open(path, "w:", format=tarfile.PAX_FORMAT) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def _shape(tensor: torch.Tensor) -> bytes:
    """Sizes, strides and offset; the number of dimensions takes eight bytes, the last four 0."""
    numbers = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    return struct.pack(f"<{1 + len(numbers)}q", tensor.dim(), *numbers)


def _storages(
    ids: Ids,
    locate: Locate,
    views: tuple[tuple[torch.Tensor, torch.Tensor, int], ...],
    dumps: Dumps,
) -> bytes:
    table = []
    for view, root, start in views:
        key = view.untyped_storage()._cdata
        if ids.storages.pop(key, None) is not None:
            table.append((key, ids.store(root), start, view.storage().size()))
    written = [dumps(len(ids.storages))]
    for key, tensor in ids.storages.items():
        data = raw(tensor.untyped_storage())
        kind = getattr(torch, f"{TYPES[tensor.dtype]}Storage")
        head = struct.pack("<q", len(data) // tensor.itemsize)
        written.append(dumps((key, locate(tensor), kind)) + head + data)
    return b"".join([*written, dumps(table)])


def _dumps(obj: object, ids: Ids | None = None) -> bytes:
    file = io.BytesIO()
    pickler = TarPickler(file, 2)
    pickler.ids = ids or pickler.ids
    pickler.dump(obj)
    return file.getvalue()


def _python2_dumps(obj: object, *ids: Ids) -> bytes:
    return python2_dumps(obj, 2, *ids)


# The register


def _made(
    path: Path, tree: dict[str, Any], tag: Locate | str, **options: Any
) -> dict[str, torch.Tensor]:
    locate = tag if callable(tag) else lambda _: tag
    save_tar(tree, path, locate, **options)
    return dict(named_tensors(tree))


def _expect(tensors: dict[str, torch.Tensor], locate: Locate) -> Expected:
    return Expected(
        {name: locate(tensor) for name, tensor in tensors.items()},
        {name: raw(tensor.untyped_storage()) for name, tensor in tensors.items()},
    )


def state_dict(path: Path, tag: str, dumps: Dumps | None = None) -> Expected:
    """Nested, with shared storages, parameters, every old dtype, 0-dim and empty tensors."""
    weight = torch.arange(12.0)
    tree: dict[str, Any] = {
        "model": OrderedDict(weight=weight.view(3, 4), bias=torch.ones(3)),
        "tied": {"weight": weight.view(3, 4).t(), "tail": weight[7:]},
        "parameters": {"one": nn.Parameter(torch.arange(3.0)), "device": "cuda:0"},
        "dtypes": {name: torch.arange(5).to(dtype) for dtype, name in TYPES.items()},
        "number": torch.tensor([7]),
        "epoch": 3,
    }
    tensors = _made(path, tree, tag, dumps=dumps)
    return _expect(tensors, lambda _: tag)._replace(elsewhere=("cuda:0",))


def mixed_devices(path: Path, tag: str) -> Expected:
    """Storages on the CPU, on `tag` and on cuda:1."""
    tree = {"a": torch.ones(2), "b": torch.zeros(3), "c": torch.arange(4.0)}
    places = {2: "cpu", 3: tag, 4: "cuda:1"}

    def locate(tensor: torch.Tensor) -> str:
        return places[tensor.numel()]

    return _expect(_made(path, tree, locate), locate)


def storage_views(path: Path, tag: str) -> Expected:
    """Storages that are views of one that is saved too, and of one that nothing else names."""
    root, hidden = torch.arange(10.0), torch.arange(6)
    tree = {"part": root[2:6].clone(), "root": root, "of_hidden": hidden[1:4].clone()}
    views = ((tree["part"], root, 2), (tree["of_hidden"], hidden, 1))
    return _expect(_made(path, tree, tag, views=views), lambda _: tag)


def bare_storages(path: Path, tag: str) -> Expected:
    """A storage as a value, shared with a tensor."""
    tensor = torch.arange(3.0)
    tree = {"tensor": tensor, "storage": tensor.storage(), "alone": torch.ones(2).storage()}
    return _expect(_made(path, tree, tag), lambda _: tag)


def module_classes(path: Path, tag: str) -> Expected:
    """Classes of modules, whose ids are tuples."""
    tree = {"kind": nn.Linear, "weight": torch.ones(2, 3), "again": nn.Linear}
    return _expect(_made(path, tree, tag), lambda _: tag)


def python2(path: Path, tag: str) -> Expected:
    """As Python 2 wrote it: byte strings."""
    return state_dict(path, tag, _python2_dumps)


TAR_MAKERS: dict[str, FileMaker] = {
    make.__name__: make
    for make in (state_dict, mixed_devices, storage_views, bare_storages, module_classes, python2)
}
