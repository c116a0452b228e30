"""The stream that torch wrote before 1.6: five pickles, then raw storages."""

from __future__ import annotations

import functools
import io
import pickle
import struct
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.serialization import MAGIC_NUMBER, PROTOCOL_VERSION

from tests.making import exotic, modules, objects, subclasses, tensors, training
from tests.making.expected import Expected, FileMaker, expecting, raw
from tests.making.python2 import Long
from tests.making.python2 import dumps as python2_dumps
from tests.making.registry import MAKERS
from tests.making.saving import as_a_tagger_returns

ROOMS = (exotic, modules, objects, subclasses, tensors, training)  # each fills MAKERS

SYS_INFO = {
    "protocol_version": PROTOCOL_VERSION,
    "little_endian": True,
    "type_sizes": {"short": 2, "int": 4, "long": 4},
}

# Two views of one storage as two dtypes, which this format can't hold.
UNSAVEABLE = {"same_storage_as_three_dtypes", "untyped_storage"}
# What torch writes and cannot read: dtypes without a storage class, and what must see its bytes
# when it is built, which is before they are read.
WRITE_ONLY = {
    *("every_dtype", "generator", "nested_strided"),
    *(f"dtype_{name}" for name in ("uint16", "uint32", "uint64", "complex32")),
    *(name for name in MAKERS if name.startswith(("dtype_float8", "dtype_float4", "dtype_bits"))),
}


def save_legacy(
    saved: object,
    path: Path,
    tag: str,
    protocol: int = 2,
    offset: int = 0,
    trailing: bytes = b"",
    elsewhere: tuple[str, ...] = (),
) -> Expected:
    """`torch.save` without a zip, as a machine with `tag` would write it.

    `offset` is the number of foreign bytes before it, `elsewhere` the devices that `saved` names
    beside its tensors.
    """
    with warnings.catch_warnings(), expecting(saved, tag, elsewhere) as expected:
        warnings.simplefilter("ignore")  # of classes without source text
        with path.open("wb") as file:
            file.write(b"\xab" * offset)
            options: Any = {"_use_new_zipfile_serialization": False, "pickle_protocol": protocol}
            torch.save(saved, file, **options)
            file.seek(0, io.SEEK_END)
            file.write(trailing)
    return expected._replace(start=offset)


# Streams that no torch of today writes


@dataclass(eq=False)
class Part:
    """A storage that was a view of another one's elements [start, start + size)."""

    root: torch.Tensor
    start: int
    size: int


@dataclass(eq=False)
class On:
    """A tensor on a storage or a part of one, as torch 0.2 and 0.3 pickled it: no requires_grad."""

    storage: Part | torch.Tensor
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        place = (self.offset, self.size, self.stride)
        return torch._utils._rebuild_tensor, (self.storage, *place)


@dataclass(eq=False)
class StorageIds:
    """The persistent ids of a stream, and the root storages by key.

    `tensors` stand for their own storages. `number` converts numbers: Python 2 had `long`s.
    """

    tag: str
    number: Callable[[int], int] = int
    sources: dict[type, str] | None = None

    def __post_init__(self) -> None:
        self.roots: dict[str, torch.Tensor] = {}

    def __call__(self, obj: object) -> object:
        if isinstance(obj, type) and obj in (self.sources or {}):
            return ("module", obj, "/usr/lib/net.py", (self.sources or {}).pop(obj))
        if isinstance(obj, Part):
            view = (str(id(obj)), self.number(obj.start), self.number(obj.size))
            return self._storage(obj.root, view)
        return self._storage(obj, None) if isinstance(obj, torch.Tensor) else None

    def _storage(self, root: torch.Tensor, view: object) -> object:
        typed = root.storage()
        key = str(root.untyped_storage()._cdata)
        self.roots[key] = root
        kind = getattr(torch, typed._pickle_storage_type())
        location = as_a_tagger_returns(self.tag)
        return ("storage", kind, key, location, self.number(typed.size()), view)


def stream(saved: object, ids: StorageIds, dumps: Callable[..., bytes]) -> bytes:
    """The stream of `saved` by `dumps(object[, persistent_id])`."""
    head = b"".join(map(dumps, (MAGIC_NUMBER, PROTOCOL_VERSION, SYS_INFO)))
    body = dumps(saved, ids)
    blobs = {key: raw(ids.roots[key].untyped_storage()) for key in sorted(ids.roots)}
    sizes = {key: root.storage().size() for key, root in ids.roots.items()}
    data = b"".join(struct.pack("<q", sizes[key]) + blob for key, blob in blobs.items())
    return head + body + dumps(sorted(blobs)) + data


def python3_dumps(
    obj: object, persistent_id: Callable[[object], object] | None = None, protocol: int = 2
) -> bytes:
    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: object) -> object:
            return persistent_id and persistent_id(obj)

    file = io.BytesIO()
    Pickler(file, protocol).dump(obj)
    return file.getvalue()


def view_metadata(path: Path, tag: str) -> Expected:
    """Storages that are views of others, as torch 0.2 to 0.4 wrote them.

    Roots that appear themselves, before and after their views; one that only its views name; a
    view named twice; two views that overlap; an empty one at the end; int64 as well as float32.
    """
    flat, hidden, whole = torch.arange(10.0), torch.arange(6), torch.arange(4.0)
    left, middle = Part(flat, 0, 4), Part(flat, 3, 4)
    inside, nothing = Part(hidden, 2, 3), Part(flat, 10, 0)
    tree = {
        "left": On(left, 0, (2, 2), (2, 1)),
        "flat": On(flat, 0, (10,), (1,)),
        "middle": On(middle, 1, (3,), (1,)),
        "again": On(middle, 0, (4,), (1,)),
        "inside": On(inside, 0, (3,), (1,)),
        "nothing": On(nothing, 0, (0,), (1,)),
        "whole": On(whole, 0, (2, 2), (1, 2)),
    }
    path.write_bytes(stream(tree, StorageIds(tag), python3_dumps))
    return Expected(dict.fromkeys(tree, tag), {name: on_bytes(on) for name, on in tree.items()})


def on_bytes(on: On) -> bytes:
    """The bytes of the storage, or part, that a tensor is on."""
    if isinstance(on.storage, torch.Tensor):
        return raw(on.storage.untyped_storage())
    part, width = on.storage, on.storage.root.itemsize
    whole = raw(part.root.untyped_storage())
    return whole[part.start * width : (part.start + part.size) * width]


def python2_stream(path: Path, tag: str) -> Expected:
    """A state dict as torch 0.3 on Python 2 wrote it: byte strings, longs, `_rebuild_tensor`."""
    weight, bias = torch.arange(6.0), torch.arange(300).to(torch.uint8)
    tree = OrderedDict(
        {
            "layer.weight": On(weight, 0, (2, 3), (3, 1)),
            "layer.weight_t": On(weight, 0, (3, 2), (1, 3)),
            "b" * 300: On(bias, 1, (299,), (1,)),
            "part": On(Part(weight, 2, 4), 0, (4,), (1,)),
        }
    )
    return _by_python2(path, tag, tree, StorageIds(tag, Long))


def python2_module(path: Path, tag: str) -> Expected:
    """A module as torch 0.4 on Python 2 wrote it: its source text under a persistent id."""
    weight = torch.arange(6.0)
    tree = [nn.Identity, {"weight": On(weight, 0, (2, 3), (3, 1)), "device": "cuda:0"}, nn.Identity]
    ids = StorageIds(tag, Long, {nn.Identity: "class Identity(Module):\n" + "    # é\n" * 40})
    blobs = _by_python2(path, tag, {"1.weight": tree[1]["weight"]}, ids, tree)  # type: ignore[index]
    return blobs._replace(elsewhere=("cuda:0",))


def python2_protocol_2(obj: object, *ids: StorageIds) -> bytes:
    """Pickled as Python 2 did for `torch.save`."""
    return python2_dumps(obj, 2, *ids)


def _by_python2(
    path: Path, tag: str, named: dict[str, Any], ids: StorageIds, tree: object = None
) -> Expected:
    path.write_bytes(stream(tree or named, ids, python2_protocol_2))
    return Expected(dict.fromkeys(named, tag), {name: on_bytes(on) for name, on in named.items()})


# The register


def _saved_by_name(name: str) -> FileMaker:
    def make(path: Path, tag: str) -> Expected:
        expected = save_legacy(MAKERS[name](), path, tag)
        return expected._replace(readable=name not in WRITE_ONLY, elsewhere=None)

    return make


def training_checkpoint() -> object:
    return MAKERS["adamw_training"]()


def _training(path: Path, tag: str, **options: Any) -> Expected:
    elsewhere = ("cpu", "cuda:0", "cuda:1", "cpu")  # of the arguments, in their order
    return save_legacy(training_checkpoint(), path, tag, elsewhere=elsewhere, **options)


LEGACY_MAKERS: dict[str, FileMaker] = {
    **{f"saved_{name}": _saved_by_name(name) for name in MAKERS if name not in UNSAVEABLE},
    **{
        f"protocol_{protocol}": functools.partial(_training, protocol=protocol)
        for protocol in (1, 2, 3, 4, 5)
    },
    "at_an_offset": functools.partial(_training, offset=517),
    "with_bytes_after": functools.partial(_training, trailing=b"\0" * 100 + b"more"),
    "view_metadata": view_metadata,
    "python2_stream": python2_stream,
    "python2_module": python2_module,
}

assert sys.byteorder == "little", "the numbers above are of little-endian machines"
