"""Everything beside the tensors: keys, numbers, containers, values that name devices."""

from __future__ import annotations

import datetime
import enum
import pathlib
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.making.registry import maker


class Phase(enum.Enum):
    WARMUP = "warmup"
    TRAIN = "train"


class Metric(NamedTuple):
    name: str
    value: torch.Tensor


@dataclass
class Settings:
    device: str
    where: torch.device
    buffer: torch.Tensor


@maker
def cpu_string_first() -> object:
    """The user's "cpu" comes before the tag: it defines the memo slot that the tag fetches."""
    return {"device": "cpu", "cpu": torch.arange(3.0), "more": [torch.ones(2), "cpu"]}


@maker
def cpu_string_last() -> object:
    """The tag comes before the user's "cpu": the tag defines the slot."""
    return {"weight": torch.arange(3.0), "device": "cpu", "devices": ["cpu", "mps", "meta", "cpu"]}


@maker
def cpu_key_between() -> object:
    inner = {"cpu": torch.ones(2), "storage": "storage"}
    return {"a": torch.ones(1), "cpu": inner, "b": torch.ones(3)}


@maker
def non_string_keys() -> object:
    keys: list[object] = [0, -1, 2**40, (1, "a"), (), None, True, 2.5, b"raw", torch.float32]
    return {key: torch.tensor([i]) for i, key in enumerate(keys)}


@maker
def odd_names() -> object:
    names = ("", ".", "a.b", "a", "ключ", "键", "😀", "with space", "new\nline", "a/b", "\x00", "-")
    return {"a": {"b": torch.ones(1)}, "names": {name: torch.ones(1) for name in names}}


@maker
def integers() -> object:
    """Values on either side of each opcode's range: BININT1 to LONG1 with 255 bytes."""
    edges = [0, 2**8, 2**16, 2**31, 2**32, 2**63, 2**64, 2**2039 - 1]
    return [sign * edge + delta for edge in edges for delta in (-1, 0, 1) for sign in (1, -1)]


@maker
def huge_integers() -> object:
    """LONG4, which weights_only refuses."""
    return [2**2039, -(2**4000)]


@maker
def scalars() -> object:
    floats = [0.0, -0.0, 1e-310, float("inf"), float("-inf"), float("nan")]
    return {"floats": floats, "complex": 1 - 2j, "bools": [True, False], "none": None}


@maker
def binary() -> object:
    blob = bytes(range(256))
    return {"bytes": [blob, blob, b"x" * 300], "array": bytearray(b"abc"), b"key": {b"k": blob}}


@maker
def strings() -> object:
    return ["", "a" * 255, "b" * 256, "c" * 70_000, "\udc80", "é", "same", "same"]


@maker
def sets() -> object:
    return {"set": {1, 2, 3}, "empty": set(), "nested": {(1, 2)}}


@maker
def frozen_sets() -> object:
    return {"frozen": frozenset({1, 2}), "empty": frozenset(), "inside": {frozenset({3})}}


@maker
def collections_kinds() -> object:
    attributed = OrderedDict(a=torch.ones(1))
    vars(attributed)["note"] = "kept"
    return {
        "ordered": attributed,
        "default": defaultdict(list, a=[torch.ones(2)]),
        "counter": Counter("hello"),
        "deque": deque([1, torch.ones(1)], maxlen=5),
        "tuples": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
        "empty": [{}, [], OrderedDict()],
    }


@maker
def long_containers() -> object:
    """Longer than pickle's batches of 1000."""
    return {"list": list(range(2500)), "dict": {str(i): i for i in range(2500)}}


@maker
def deep_tree() -> object:
    tree: Any = torch.ones(1)
    for level in range(100):
        tree = {"next": tree} if level % 2 else [tree]
    return tree


@maker
def recursive() -> object:
    loop: list[object] = [torch.ones(1)]
    loop.append(loop)
    ring: dict[str, object] = {"loop": loop}
    ring["self"] = ring
    return ring


@maker
def shared_containers() -> object:
    common = {"lr": 0.1, "weight": torch.ones(2)}
    return {"a": common, "b": common, "list": [common, [common]]}


@maker
def torch_values() -> object:
    """Not memory formats: protocol 2 can't pickle them."""
    return {
        "size": torch.Size([2, 3]),
        "dtype": [torch.float32, torch.bfloat16, torch.float8_e4m3fn],
        "layout": [torch.strided, torch.sparse_coo],
        "qscheme": torch.per_tensor_affine,
        "tensor": torch.ones(1),
    }


@maker
def device_values() -> object:
    """Devices that no storage tag names: values, strings, attributes."""
    devices = [torch.device(name) for name in ("cpu", "cuda", "cuda:3", "mps")]
    return {
        "devices": devices,
        "strings": ["cuda:0", "cuda", "cpu:0", "mps:0"],
        "settings": Settings("cuda:0", torch.device("cuda:0"), torch.ones(2)),
        "keyed": {torch.device("cpu"): torch.ones(1)},
    }


@maker
def generator() -> object:
    return {"generator": torch.Generator().manual_seed(5), "tensor": torch.ones(1)}


@maker
def numpy_values() -> object:
    return {
        "scalar": np.float32(1.5),
        "array": np.arange(6).reshape(2, 3),
        "fortran": np.asfortranarray(np.ones((2, 3))),
        "strings": np.array(["a", "bc"]),
        "dtype": np.dtype("float64"),
        "tensor": torch.from_numpy(np.arange(3)),
    }


@maker
def python_objects() -> object:
    return {
        "phase": Phase.TRAIN,
        "metric": Metric("loss", torch.tensor(0.5)),
        "metrics": {Phase.WARMUP: [Metric("loss", torch.tensor(0.7))]},
        "when": datetime.datetime(2024, 1, 2, tzinfo=datetime.timezone.utc),
        "path": pathlib.PurePosixPath("runs/last.pt"),
        "slice": slice(1, None, 2),
        "range": range(3),
        "constants": [..., NotImplemented, b""],
        "class": Metric,
        "function": torch.nn.functional.relu,
    }


@maker
def no_tensors() -> object:
    return {"epoch": 3, "device": "cpu", "note": "nothing to move"}


@maker
def none() -> object:
    return None
