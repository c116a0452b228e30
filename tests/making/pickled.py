"""Plain pickles: each storage is bytes that hold a legacy stream of its own.

A storage is written again for each tensor on it: sharing is lost, but for a tensor met twice.
"""

from __future__ import annotations

import functools
import io
import pickle
import pickletools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.making.expected import Expected, FileMaker, expecting, raw
from tests.making.legacy import UNSAVEABLE, WRITE_ONLY, StorageIds, python2_protocol_2, stream
from tests.making.modules import TiedNet
from tests.making.objects import Metric
from tests.making.python2 import Long, Unicode
from tests.making.python2 import dumps as python2_dumps
from tests.making.registry import MAKERS

Dumps = Callable[[object], bytes]

TRAINING_NAMES = ("cpu", "cuda:0", "cuda:1", "cpu")  # devices that its arguments name


def save_pickle(
    saved: object,
    path: Path,
    tag: str,
    elsewhere: tuple[str, ...] = (),
    dumps: Dumps = pickle.dumps,
) -> Expected:
    """Write `dumps(saved)` as a machine would on which its tensors were on `tag`."""
    with expecting(saved, tag, elsewhere) as expected:
        path.write_bytes(dumps(saved))
    return expected


def by_protocol(protocol: int) -> Dumps:
    return functools.partial(pickle.dumps, protocol=protocol)


def squeezed(protocol: int) -> Dumps:
    """A pickle without unused PUTs, in new frames."""
    return lambda saved: pickletools.optimize(pickle.dumps(saved, protocol=protocol))


def python_pickler(protocol: int) -> Dumps:
    slow: Any = pickle
    dumps: Dumps = functools.partial(slow._dumps, protocol=protocol)
    return dumps


def _training(path: Path, tag: str, dumps: Dumps) -> Expected:
    return save_pickle(MAKERS["adamw_training"](), path, tag, TRAINING_NAMES, dumps)


def whole(path: Path, tag: str) -> Expected:
    """A module and its optimizer, whose parameters are the same objects."""
    return save_pickle(MAKERS["whole_optimizer"](), path, tag, dumps=by_protocol(4))


def whole_tied(path: Path, tag: str) -> Expected:
    """A module with tied weights and attributes that name devices."""
    return save_pickle(TiedNet(), path, tag, ("cuda:0", "cuda:0"))


def shared(path: Path, tag: str) -> Expected:
    """Views of one storage: each is written with all of it."""
    base = torch.arange(10.0)
    saved = {"base": base, "view": base[2:4], "again": base, "last": base[9], "none": base[:0]}
    return save_pickle(saved, path, tag)


def large(path: Path, tag: str, protocol: int) -> Expected:
    """Storages on either side of 64 KiB: those above it are outside the frames."""
    sizes = (10, 16_000, 16_384, 20_000, 5)
    saved = {f"of_{size}": torch.arange(float(size)) for size in sizes}
    return save_pickle(saved, path, tag, dumps=by_protocol(protocol))


def arrays(path: Path, tag: str) -> Expected:
    """NumPy arrays and scalars beside tensors, one of which shares an array's memory."""
    array = np.arange(6.0)
    saved = {
        "array": array,
        "fortran": np.asfortranarray(np.ones((2, 3))),
        "scalar": np.float32(1.5),
        "tensor": torch.from_numpy(array),
        "bytes": b"\x80\x02not a pickle",
    }
    return save_pickle(saved, path, tag)


# Bytes that hold checkpoints


def nested(path: Path, tag: str, protocol: int = 4) -> Expected:
    """Values that are the bytes of a zip, a legacy stream, and a pickle within a pickle."""
    leaf = {"weight": torch.arange(3.0), "device": "cuda:0"}
    saved = {
        "zip": dict(leaf, weight=torch.arange(4.0)),
        "legacy": dict(leaf, weight=torch.arange(5)),
        "pickle": {"inner": dict(leaf, weight=torch.ones(2)), "own": torch.ones(1)},
        "weight": torch.zeros(2),
    }

    def dumps(_: object) -> bytes:
        inside = {"zip": to_zip, "legacy": to_legacy, "pickle": _pickled_pickle}
        parts = {name: inside.get(name, _same)(part) for name, part in saved.items()}
        return pickle.dumps(parts, protocol=protocol)

    return save_pickle(saved, path, tag, ("cuda:0",) * 3, dumps)


def _same(part: object) -> object:
    return part


def to_zip(saved: object) -> bytes:
    torch.save(saved, buffer := io.BytesIO())
    return buffer.getvalue()


def to_legacy(saved: object) -> bytes:
    """`torch.save` to memory, without a zip."""
    torch.save(saved, buffer := io.BytesIO(), _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def _pickled_pickle(part: Any) -> bytes:
    return pickle.dumps({"inner": pickle.dumps(part["inner"], 2), "own": part["own"]}, 3)


class Estimator:
    """Pickled like the nets of skorch: what may be on a device is `torch.save`d to bytes."""

    def __init__(self, module: object, save: Callable[[object], bytes]) -> None:
        self.module = module
        self.device = "cuda:0"
        self._save = save

    def __getstate__(self) -> dict[str, object]:
        dependent = self._save({"module": self.module})
        return {"device": self.device, "__cuda_dependent_attributes__": dependent}

    def __setstate__(self, state: dict[str, Any]) -> None:
        inside = io.BytesIO(state.pop("__cuda_dependent_attributes__"))
        vars(self).update(state, **torch.load(inside, weights_only=False))


def estimator(path: Path, tag: str, save: Callable[[object], bytes] = to_zip) -> Expected:
    """An object whose state is the bytes of a checkpoint."""
    return save_pickle(Estimator(TiedNet(), save), path, tag, ("cuda:0",) * 3)


class Reduced:
    """An object that a function builds from tensors."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def __reduce__(self) -> tuple[type[Reduced], tuple[torch.Tensor, ...]]:
        return Reduced, self.tensors


def objects(path: Path, tag: str) -> Expected:
    """Tensors as arguments, in a named tuple, twice in one tuple."""
    tensor = torch.arange(3.0)
    saved = [Reduced(tensor, torch.ones(2)), Metric("loss", tensor), (tensor, tensor.clone())]
    return save_pickle(saved, path, tag)


# Python 2


@dataclass(eq=False)
class Stored:
    """A tensor as torch 0.3 on Python 2 pickled it: its storage is a byte string."""

    tensor: torch.Tensor
    tag: str

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        tensor = self.tensor
        place = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        return torch._utils._rebuild_tensor, (Blob(self), *place)


@dataclass(eq=False)
class Blob:
    of: Stored

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        saved = stream(self.of.tensor, StorageIds(self.of.tag, Long), python2_protocol_2)
        return torch.storage._load_from_bytes, (saved,)


def python2(path: Path, tag: str, protocol: int) -> Expected:
    """As `cPickle.dump` on Python 2 wrote it; `pickle.load(encoding="bytes")` reads it."""
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(400)[5:], "c": torch.ones(1)}
    stored = {name: Stored(tensor, tag) for name, tensor in tensors.items()}
    tree = OrderedDict({**stored, "device": "cuda:0", "where": Unicode("cuda:1 é"), "n": Long(7)})
    path.write_bytes(python2_dumps(tree, protocol))
    storages = {name: raw(tensor.untyped_storage()) for name, tensor in tensors.items()}
    return Expected(dict.fromkeys(tensors, tag), storages, ("cuda:0",))


# The register


def _saved_by_name(name: str) -> FileMaker:
    def make(path: Path, tag: str) -> Expected:
        expected = save_pickle(MAKERS[name](), path, tag)
        return expected._replace(readable=name not in WRITE_ONLY | UNSAVEABLE, elsewhere=None)

    return make


PICKLED_MAKERS: dict[str, FileMaker] = {
    **{f"saved_{name}": _saved_by_name(name) for name in MAKERS},
    **{f"protocol_{n}": functools.partial(_training, dumps=by_protocol(n)) for n in range(6)},
    **{f"squeezed_{n}": functools.partial(_training, dumps=squeezed(n)) for n in (0, 2, 4, 5)},
    **{f"python_{n}": functools.partial(_training, dumps=python_pickler(n)) for n in (2, 4)},
    **{f"large_{n}": functools.partial(large, protocol=n) for n in (2, 3, 4, 5)},
    **{f"nested_{n}": functools.partial(nested, protocol=n) for n in (0, 2, 3, 5)},
    **{f"python2_{n}": functools.partial(python2, protocol=n) for n in (0, 1, 2)},
    **{make.__name__: make for make in (whole, whole_tied, shared, arrays, objects, estimator)},
    "estimator_legacy": functools.partial(estimator, save=to_legacy),
}
