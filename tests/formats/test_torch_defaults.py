"""What torch loads with its defaults means to us what it means to torch."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptmove import convert, diff, inspect, load, relocate, validate
from tests.making.legacy import StorageIds, python2_protocol_2, stream
from tests.making.python2 import Long, Unicode, text_or_bytes
from tests.making.python2 import dumps as python2_dumps
from tests.oracles.sameness import assert_same_tree

# -- storages without bytes --------------------------------------------------------------------


def empty() -> dict[str, Any]:
    """One storage without bytes, which torch saves under as many dtypes as look at it."""
    none = torch.empty(0)
    return {
        "a": none,
        "b": none.view(torch.int32),
        "c": [none.view(torch.bfloat16), none.view(torch.float64)],
        "d": none.view(0, 3),
        "e": torch.ones(2),
    }


@pytest.mark.parametrize("zipped", [True, False])
def test_an_empty_storage_may_be_of_several_dtypes(zipped: bool, tmp_path: Path) -> None:
    source = tmp_path / "a.pt"
    torch.save(empty(), source, _use_new_zipfile_serialization=zipped)
    wanted = torch.load(source)
    dtypes = [each.dtype for each in inspect(source).tensors]
    assert dtypes == ["float32", "int32", "bfloat16", "float64", "float32", "float32"]
    validate(source).raise_if_failed()
    assert str(load(source)) == str(wanted)

    moved, back = tmp_path / "moved.pt", tmp_path / "back.pt"
    relocate(source, moved, to="cuda:0")
    inspect(moved).require("cuda:0")
    relocate(moved, back, to="cpu")
    assert str(torch.load(back)) == str(wanted)

    for step, name in (("a.pt", "b.pt"), ("a.pt", "c.safetensors"), ("c.safetensors", "d.pt")):
        convert(tmp_path / step, tmp_path / name)
        assert diff(source, tmp_path / name).equal
    for name in ("b.pt", "d.pt"):
        for mapped in (False, True):
            found = torch.load(tmp_path / name, mmap=mapped)
            assert str(found) == str(wanted)


# -- strings of Python 2 -----------------------------------------------------------------------

STRINGS: dict[Any, Any] = {
    "short": "hé",
    "like a zip": "PK\3\4" + "a" * 40,
    "not a letter a byte": "é" * 300,
    "longer than is read": "é" * 100_000,
    "twice": ["y" * 90_000] * 2,
    "b" * 70_000: 1,
    "unicode": Unicode("é"),
}
NO_TEXT: dict[Any, Any] = {
    "text": "a",
    "short": b"\xff\xfe",
    "like a pickle": b"\x80\x02" + b"\xff" * 40,
    "cut off": "é".encode()[:1],
    "long": b"a" * 70_000 + b"\xff",
    b"\xe9": 1,
}


def as_legacy(tree: object) -> bytes:
    return stream(tree, StorageIds("cpu", Long), python2_protocol_2)


WRITERS: dict[str, Callable[[object], bytes]] = {
    "torch-legacy": as_legacy,
    **{f"pickle {n}": functools.partial(python2_dumps, protocol=n) for n in range(3)},
}


def read(writer: str, path: Path, encoding: str) -> Any:
    with path.open("rb") as file:
        if writer == "torch-legacy":
            return torch.load(file, weights_only=False, encoding=encoding)
        return pickle.load(file, encoding=encoding)


def converted(source: Path) -> list[Any]:
    """What we load, and what torch loads of all that it is converted to."""
    folder = source.parent
    for step, name in (("a.pt", "b.pt"), ("a.pt", "c.safetensors"), ("c.safetensors", "d.pt")):
        convert(folder / step, folder / name)
        assert diff(source, folder / name).equal
    ours = [load(folder / name) for name in ("a.pt", "c.safetensors")]
    return ours + [torch.load(folder / name) for name in ("b.pt", "d.pt")]


@pytest.mark.sample(1)
@pytest.mark.parametrize("writer", WRITERS)
def test_a_string_of_python_2_is_text(writer: str, tmp_path: Path) -> None:
    source = tmp_path / "a.pt"
    source.write_bytes(WRITERS[writer](STRINGS))
    wanted = read(writer, source, "utf-8")  # torch's default
    assert wanted["like a zip"] == STRINGS["like a zip"]
    for found in converted(source):
        assert_same_tree(wanted, found)


@pytest.mark.parametrize("writer", WRITERS)
def test_a_string_of_python_2_that_is_no_text_is_bytes(writer: str, tmp_path: Path) -> None:
    """Torch loads none of it but with `encoding="bytes"`, which makes bytes of all."""
    source = tmp_path / "a.pt"
    source.write_bytes(WRITERS[writer](NO_TEXT))
    with pytest.raises(UnicodeDecodeError):
        read(writer, source, "utf-8")
    raw = read(writer, source, "bytes")
    wanted = {text_or_bytes(key): each for key, each in raw.items()} | {"text": "a"}
    for found in converted(source):
        assert_same_tree(wanted, found)
