"""Damaged and forged files: one kind of error, or an answer that torch shares."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pickle
import random
import struct
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import ckptmove
from ckptmove.errors import CkptmoveError
from tests.conftest import ROOT
from tests.making.building import CODES, at_most
from tests.making.checkpoints import MAKERS, rezip, save
from tests.making.python2 import text_or_bytes
from tests.oracles.readers import Inert, assert_same_records, load
from tests.oracles.sameness import assert_same_tree
from tests.servers.warm_python import WarmCommand

SECONDS = 30  # far more than any of these takes
KINDS = ("adam_mixed_capturable", "tied_weights", "rng_state_file", "cpu_string_first")


def originals(folder: Path) -> list[Path]:
    """Some small files by torch.save, and the same records packed by zipfile."""
    paths = [save(folder / f"{name}.pt", MAKERS[name](), "cuda:0") for name in KINDS]
    small = save(folder / "small.pt", {"a": [torch.ones(3), "cpu"], "b": torch.ones(0)}, "cpu")
    return [*paths, small, rezip(small, folder / "packed.pt"), rezip(paths[1], folder / "more.pt")]


def mutated(data: bytes, dice: random.Random) -> bytes:
    """Some bytes flipped, cut out, doubled, moved or set, mostly where headers are."""
    changed = bytearray(data)
    for _ in range(dice.choice([1, 1, 1, 2, 4])):
        at = interesting(changed, dice)
        how, length = dice.random(), dice.choice([1, 1, 2, 4, 8, 40, 400])
        if how < 0.4:
            changed[at] ^= 1 << dice.randrange(8)
        elif how < 0.55:
            changed[at : at + length] = dice.choice([b"\0", b"\xff"]) * length
        elif how < 0.65:
            del changed[at : at + length]
        elif how < 0.75:
            start = interesting(changed, dice)
            changed[at:at] = changed[start : start + length]
        elif how < 0.9:
            start = interesting(changed, dice)
            changed[at : at + length] = changed[start : start + length]
        else:
            del changed[at:]
        changed = changed or bytearray(b"P")
    return bytes(changed)


def interesting(data: bytes | bytearray, dice: random.Random) -> int:
    """An offset: often near a zip header's magic."""
    magic = dice.choice([b"PK\3\4", b"PK\1\2", b"PK\5\6", b"PK\6\6", b"PK\6\7", b"PK\7\x08", b""])
    found = data.find(magic, dice.randrange(len(data))) if magic else -1
    at = dice.randrange(len(data)) if found < 0 else found + dice.randrange(56)
    return min(at, len(data) - 1)


def error_of(act: Callable[[], object]) -> CkptmoveError | None:
    """What it refuses with; any other exception fails the test, and so does taking for ever."""
    try:
        with at_most(SECONDS):
            act()
    except CkptmoveError as error:
        return error
    return None


def inspected(path: Path) -> bool:
    """Whether inspect reads it."""
    error = error_of(lambda: ckptmove.inspect(path).to_json())
    assert error is None or (error.exit_code == 3 and "\n" not in str(error))
    return error is None


def relocated(path: Path, to: str) -> Path | None:
    """What relocate wrote; or nothing, of which no trace is left."""
    out, before = path.with_name("out.pt"), path.read_bytes()
    error = error_of(lambda: ckptmove.relocate(path, out, to=to, all=True))
    assert path.read_bytes() == before
    if error is not None:
        assert error.exit_code in (3, 4), f"{error}"
        assert [each.name for each in path.parent.iterdir()] == [path.name]
        return None
    with contextlib.suppress(NotImplementedError):  # zipfile refuses versions of the future
        assert_same_records(path, out)
    return out


class Outcome(NamedTuple):
    """What another reader makes of a file."""

    tree: object = None
    error: type[BaseException] | None = None
    locations: tuple[str, ...] = ()


def by_torch(path: Path) -> Outcome:
    """Load it as torch does for untrusted files."""
    try:
        return Outcome(load(path, weights_only=True))
    except Exception as error:
        return Outcome(error=type(error))


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(6))
def test_a_damaged_file_is_refused_or_means_what_torch_takes_it_for(
    seed: int, tmp_path: Path
) -> None:
    dice = random.Random(seed)
    sources = [path.read_bytes() for path in originals(tmp_path)]
    folder = tmp_path / "damaged"
    folder.mkdir()
    read = 0
    for _ in range(500):
        path = folder / "in.pt"
        path.write_bytes(mutated(dice.choice(sources), dice))
        if not inspected(path):
            continue
        read += 1
        out = relocated(path, "cuda:1")
        if out is not None:
            ours, theirs = by_torch(path), by_torch(out)
            assert ours.error is theirs.error
            assert_same_tree(ours.tree, theirs.tree)
            out.unlink()
    assert 10 < read < 250


# A sound zip around a damaged pickle


@functools.cache
def _stub(module: str, name: str) -> type:
    return type(f"{module}.{name}", (Inert,), {})


class Stubs(pickle._Unpickler):
    """Imports nothing; in Python, where a slot of 2^32 - 1 takes no memory."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self.locations: list[str] = []

    def find_class(self, module: str, name: str) -> Any:
        return _stub(module, name)

    def _decode_string(self, value: bytes) -> Any:
        return text_or_bytes(value)

    def persistent_load(self, pid: Any) -> Any:
        _, storage_type, key, location, numel = pid
        self.locations.append(str(location))
        return (storage_type.__name__, str(key), numel)


def pickle_of(path: Path) -> bytes:
    """The record data.pkl."""
    with zipfile.ZipFile(path) as archive:
        return archive.read(next(each for each in archive.namelist() if each.endswith("data.pkl")))


def damaged_pickles(data: bytes, dice: random.Random) -> Iterator[bytes]:
    """Opcodes and arguments changed, here and there."""
    while True:
        changed = bytearray(data)
        for _ in range(dice.choice([1, 1, 2, 3])):
            at = dice.randrange(len(changed))
            piece = dice.choice([*CODES.values(), dice.randbytes(1), dice.randbytes(1), b""])
            changed[at : at + dice.choice([0, 1, 1])] = piece
        yield bytes(changed)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", [*KINDS, "exotic"])
def test_a_damaged_pickle_is_refused_or_relocated_as_python_reads_it(
    name: str, tmp_path: Path
) -> None:
    dice = random.Random(name)
    source = save(tmp_path / "a.pt", MAKERS[name]() if name in MAKERS else exotic(), "cuda:0")
    forged, folder = damaged_pickles(pickle_of(source), dice), tmp_path / "damaged"
    folder.mkdir()
    count = 0
    for _ in range(400):
        rezip(source, folder / "in.pt", lambda _: False, lambda _: next(forged))
        if not inspected(folder / "in.pt"):
            continue
        out = relocated(folder / "in.pt", "privateuseone:15")
        if out is not None:
            count += 1
            ours, theirs = (by_python(pickle_of(path)) for path in (folder / "in.pt", out))
            assert ours.error is theirs.error
            assert_same_tree(ours.tree, theirs.tree)
            assert len(ours.locations) == len(theirs.locations)
            assert set(theirs.locations) <= {"privateuseone:15"}
            out.unlink()
    assert count > 20


@pytest.mark.parametrize("value", [b"h\x07", b"h\x07\x85", b"h\x07Nh\x07\x87"])
def test_a_storages_id_that_is_also_a_value_stays_or_is_refused(
    value: bytes, tmp_path: Path
) -> None:
    """No pickler hands out the tuple that it makes for a storage, but a forger may."""
    source = save(tmp_path / "a.pt", {"a": torch.ones(3)}, "cuda:0")
    forged = pickle_of(source)[:-2] + b"sX\x04\x00\x00\x00user" + value + b"s."
    assert b"tq\x07Q" in forged
    folder = tmp_path / "forged"
    folder.mkdir()
    rezip(source, folder / "in.pt", lambda _: False, lambda _: forged)
    out = relocated(folder / "in.pt", "mps")
    if out is not None:
        assert_same_tree(by_python(forged).tree, by_python(pickle_of(out)).tree)


def exotic() -> object:
    """Many kinds of tensor in one small tree, with devices."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sparse = torch.eye(3).to_sparse()
        return {
            "sparse": (sparse, torch.eye(3).to_sparse_csr()),
            "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 2, torch.quint8),
            "v3": torch.ones(3, dtype=torch.uint16),
            "devices": [torch.device("cuda", 0), torch.device("cpu"), "cuda:0"],
            "parameter": torch.nn.Parameter(torch.ones(3)),
            70_000: torch.ones((), dtype=torch.complex64),
        }


def by_python(data: bytes) -> Outcome:
    """Unpickle with stubs for whatever it names."""
    unpickler = Stubs(data)
    try:
        return Outcome(unpickler.load(), None, tuple(unpickler.locations))
    except Exception as error:
        return Outcome(None, type(error), tuple(unpickler.locations))


# Small files that stand for something vast

KEYED = b"X\x01\x00\x00\x00a"  # the key of the only tensor, in the pickle below
BIG = b"\x8b" + struct.pack("<I", 5_000) + b"\x7f" * 5_000
HOSTILE: dict[str, bytes] = {
    "2^60 tuples": b")" + b"2\x86" * 60,
    "2^60 lists": b"]" + b"q\xf0](h\xf0h\xf0e" * 60,
    "2^60 calls": b")" + b"q\xf0ca\nb\nh\xf0h\xf0\x86R" * 60,
    "a list in itself": b"]2a",
    "a dict in itself": b"}q\xf0K\x00h\xf0s",
    "a number of 12,000 digits": BIG,
    "a string of control characters": b"X\x04\x00\x00\x00\x1b[2J",
    "half a character": b"X\x03\x00\x00\x00\xed\xa0\x80",
}
#: Runs the module that the arguments name, in a gigabyte.
LIMITED = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
runpy._run_module_as_main(sys.argv.pop(1))
"""


@pytest.mark.sample(8)
@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("place", ["value", "key", "within a key"])
@pytest.mark.parametrize("option", ["--tree", "--json"])
def test_a_vast_tree_in_a_small_file_is_shown_or_refused(
    option: str, place: str, what: str, tmp_path: Path
) -> None:
    source, node = save(tmp_path / "a.pt", {"a": torch.ones(3)}, "cpu"), HOSTILE[what]
    value = b"X\x01\x00\x00\x00b" + node + b"s" + KEYED
    forms = {"value": value, "key": node, "within a key": node + b"\x85"}
    forged = pickle_of(source).replace(KEYED + b"q\x01", forms[place])
    rezip(source, tmp_path / "b.pt", lambda _: False, lambda _: forged)
    with WarmCommand(
        [sys.executable, "-c", LIMITED, "ckptmove", "inspect", option, str(tmp_path / "b.pt")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
    ) as process:
        out, said = process.communicate(timeout=100)
    assert process.returncode in (0, 3), said[-300:]
    assert len(out) < 1 << 20
    assert b"\x1b" not in out + said
