"""A numpy dtype in a pickle that lies about memory is no harmless callable; numpy's own are."""

from __future__ import annotations

import pickle
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptmove
from ckptmove import RefusedError, UntrustedError

#: As numpy itself pickles a dtype of each.
OWN: dict[str, Any] = {
    "number": "f8",
    "big-endian": ">i4",
    "boolean": "?",
    "text": "U3",
    "bytes": "S5",
    "no bytes": "S",
    "raw": "V7",
    "object": "O",
    "date": "M8[D]",
    "duration": "m8[25us]",
    "struct": [("a", "<i4"), ("b", "f8")],
    "aligned": np.dtype([("a", "i1"), ("b", "f8")], align=True),
    "titles": [(("a title", "a"), "f4"), ("b", "U2")],
    "within": [("a", [("b", "i2"), ("c", "O")]), ("d", "S3")],
    "subarray": [("a", "f4", (2, 3)), ("b", "i8", 2)],
    "objects": [("a", "O"), ("b", "O", (2,))],
    "overlapping": {"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [0, 2]},
    "padded": {"names": ["a"], "formats": ["i4"], "offsets": [8], "itemsize": 32},
    "of nothing": [],
    "metadata": np.dtype("f4", metadata={"a": 1}),
    "long double": "g",
    "complex": "c16",
}


class _Dtype:
    """A dtype with a state of our own."""

    def __init__(self, kind: str, *state: Any) -> None:
        self.made = (np.dtype, (kind, False, True), state)

    def __reduce__(self) -> Any:
        return self.made


class _Made:
    """What a call makes, and fills with a state."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], *state: Any) -> None:
        self.made = (function, args, state) if state else (function, args)

    def __reduce__(self) -> Any:
        return self.made


_REFERENCE = struct.pack("<Q", 0x4141414141414141)
_FAR = 1 << 24
_SCALAR: Any = np.float64(0).__reduce__()[0]
_F8, _O = np.dtype("f8"), np.dtype("O")


def _raw(fields: Any, *, sub: Any = None, nbytes: int = 8, flags: int = 0) -> _Dtype:
    names = tuple(fields) if fields else None
    return _Dtype("V8", 3, "|", sub, names, fields, nbytes, 1, flags)


def _array(dtype: Any, content: Any) -> _Made:
    made: Any = np.zeros(0).__reduce__()[0]
    return _Made(made, (np.ndarray, (0,), b"b"), 1, (1,), dtype, False, content)


#: What numpy reads or writes where it should not, or takes bytes for references.
LIES: dict[str, Any] = {
    "field beyond": _array(_raw({"a": (_F8, _FAR)}), _REFERENCE),
    "field beyond is written": _array(_raw({"a": (_F8, _FAR)}, flags=63), [(1.5,)]),
    "field before is written": _array(_raw({"a": (_F8, -_FAR)}, flags=63), [(1.5,)]),
    "object beyond is written": _array(_raw({"a": (_O, _FAR)}, flags=63), [(None,)]),
    "field in part": _array(_raw({"a": (_F8, 4)}), _REFERENCE),
    "second field": _array(_raw({"a": (_F8, 0), "b": (_F8, _FAR)}), _REFERENCE),
    "field of nothing": _array(_raw({"a": (1.5, 0)}), _REFERENCE),
    "field without a place": _array(_raw({"a": (_F8,)}), _REFERENCE),
    "subarray beyond": _array(_raw(None, sub=(_F8, (1000,)), flags=63), [([1.5] * 1000,)]),
    "subarray before": _array(_raw(None, sub=(_F8, (-1,))), _REFERENCE),
    "small element": _array(_raw({"a": (_F8, 0)}, nbytes=0), b""),
    "object as a number": _array(_Dtype("O8", 3, "|", None, None, None, -1, -1, 0), _REFERENCE),
    "objects as numbers": _array(_raw({"a": (_O, 0)}), _REFERENCE),
    "number as an object": _array(_Dtype("f8", 3, "<", None, None, None, -1, -1, 63), [1.5]),
    "fields of a number": _array(
        _Dtype("f8", 3, "<", None, ("a",), {"a": (_F8, _FAR)}, -1, -1, 0), _REFERENCE
    ),
    "older state": _array(_Dtype("V8", 1, "|", None, None, None, 8, 1, 0), _REFERENCE),
    "objects over bytes": _Made(np.ndarray, ((1,), "O", _REFERENCE)),
    "scalar beyond": _Made(_SCALAR, (_raw({"a": (_F8, _FAR)}), _REFERENCE)),
}


@pytest.mark.sample(44)
@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("kind", OWN)
def test_what_numpy_writes_is_known(kind: str, protocol: int, tmp_path: Path) -> None:
    dtype = np.dtype(OWN[kind])
    saved = {"w": torch.ones(1), "x": np.zeros(3, dtype), "dtype": dtype}
    torch.save(saved, tmp_path / "it.pt", pickle_protocol=max(protocol, 2))
    assert ckptmove.inspect(tmp_path / "it.pt").unknown_callables == ()
    (tmp_path / "it.pkl").write_bytes(pickle.dumps({"x": np.zeros(3, dtype)}, protocol))
    assert ckptmove.inspect(tmp_path / "it.pkl").unknown_callables == ()


@pytest.mark.parametrize("kind", LIES)
def test_what_lies_about_memory_is_not(kind: str, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1), "x": LIES[kind]}, tmp_path / "it.pt", pickle_protocol=2)
    found = ckptmove.inspect(tmp_path / "it.pt").unknown_callables
    assert found
    assert all(name.startswith("numpy.") for name in found)
    with pytest.raises(UntrustedError, match="numpy"):
        ckptmove.load(tmp_path / "it.pt", strict=True)
    ckptmove.convert(tmp_path / "it.pt", tmp_path / "it.safetensors")
    with pytest.raises(RefusedError, match="numpy"):
        ckptmove.convert(tmp_path / "it.safetensors", tmp_path / "again.pt")


@pytest.mark.parametrize("kind", ["field beyond is written", "objects over bytes"])
def test_such_a_lie_ends_the_process_that_believes_it(kind: str, tmp_path: Path) -> None:
    """So they are worth a list; where numpy no longer believes them, look at the list again."""
    (tmp_path / "it.pkl").write_bytes(pickle.dumps(LIES[kind], 2))
    code = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb')))"
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "it.pkl"], check=False)
    assert done.returncode < 0
