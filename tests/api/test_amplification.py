"""What convert writes is planned from references, and is not many times as long as the source."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptmove
from ckptmove import CorruptError, RefusedError, convert
from ckptmove.pickles.emit import emit
from ckptmove.pickles.walk import walk
from ckptmove.sources import open_source
from tests.conftest import RunCli
from tests.making.bombs import MODULUS, dict_of, items, zipped
from tests.making.building import at_most

MIB = 1 << 20


def recalled(content: bytes, times: int) -> bytes:
    """A pickle of a list of something that is memoised, and recalled so many times."""
    return b"\x80\2(" + content + b"q\0" + b"h\0" * times + b"l."


def text(value: str) -> bytes:
    """A string as an opcode."""
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


LARGE = {
    "text": text("x" * 400_000),
    "other text": text("\U0001f600" * 100_000),
    "bytes": b"B" + struct.pack("<I", 60_000) + b"\xff" * 60_000,
    "number": b"\x8b" + struct.pack("<i", 200_000) + b"\1" * 200_000,
}


@pytest.mark.parametrize("kind", LARGE)
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_what_is_referred_to_often_is_written_once(kind: str, suffix: str, tmp_path: Path) -> None:
    path, out = tmp_path / "in.pt", tmp_path / f"out{suffix}"
    path.write_bytes(zipped(recalled(LARGE[kind], 200)))
    convert(path, out)
    assert out.stat().st_size < 8 * path.stat().st_size
    assert ckptmove.diff(path, out).equal


def test_a_long_number_is_emitted_once() -> None:
    data = recalled(LARGE["number"], 200)
    assert len(emit(walk(data).root)) < 210_000
    assert pickle.loads(emit(walk(data).root)) == pickle.loads(data)


def test_short_texts_of_wide_characters_are_refused(tmp_path: Path, run_cli: RunCli) -> None:
    """Each takes two bytes of the pickle, and hundreds in JSON."""
    path = tmp_path / "in.pt"
    path.write_bytes(zipped(recalled(text("\U0001f600" * 64), 5_000)))
    for options in ([], ["--dry-run"]):
        done = run_cli("convert", path, "out.safetensors", *options, exit=4)
        assert "more than 8 times as many (--force writes them all the same)" in done.stderr
        assert len(done.stderr.encode()) <= 300
        assert not (tmp_path / "out.safetensors").exists()
    run_cli("convert", path, "out.safetensors", "--force", exit=0)


def test_expanded_views_and_duplicates_are_refused(tmp_path: Path) -> None:
    row = torch.arange(64.0)
    torch.save({"expanded": row.expand(16_384, 64)}, tmp_path / "expanded.pt")
    base = torch.arange(100_000.0)
    torch.save({f"{n}": base for n in range(20)}, tmp_path / "shared.pt")
    pairs: tuple[tuple[str, Any], ...] = (("expanded", "keep"), ("shared", "duplicate"))
    for name, shared in pairs:
        for dry_run in (True, False):
            with pytest.raises(RefusedError, match="more than 8 times as many"):
                convert(tmp_path / f"{name}.pt", "x.safetensors", shared=shared, dry_run=dry_run)
        convert(tmp_path / f"{name}.pt", tmp_path / "x.safetensors", shared=shared, force=True)
    convert(tmp_path / "shared.pt", tmp_path / "x.safetensors", force=True)
    assert (tmp_path / "x.safetensors").stat().st_size < 2 * base.nbytes


@pytest.mark.slow
def test_what_many_paths_lead_to_is_refused_as_dcp(tmp_path: Path) -> None:
    tree: Any = {"x": torch.zeros(1)}
    for _ in range(24):
        tree = {"a": tree, "b": tree}
    torch.save(tree, tmp_path / "paths.pt")
    values = [str(n) for n in range(20_000)]
    torch.save({str(n): values for n in range(800)}, tmp_path / "values.pt")
    for name in ("paths", "values"):
        with pytest.raises(RefusedError, match="more than 8 times as many"), at_most(20):
            convert(tmp_path / f"{name}.pt", tmp_path / "out", format="dcp")
        assert not (tmp_path / "out").exists()


def test_small_files_and_casts_are_not_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1).expand(200_000)}, tmp_path / "small.pt")
    convert(tmp_path / "small.pt", tmp_path / "small.safetensors")
    save_file({"a": torch.zeros(1 << 20, dtype=torch.float16)}, tmp_path / "half.safetensors")
    convert(tmp_path / "half.safetensors", tmp_path / "wide.pt", dtype="float64")


_MULTIPLES = [n * MODULUS for n in range(1, 30_000)]
COLLIDING = {
    "numbers": dict_of(_MULTIPLES),
    "a set": b"\x80\2c__builtin__\nset\n](" + items(_MULTIPLES) + b"e\x85R.",
    "a frozen set": b"\x80\2c__builtin__\nfrozenset\n](" + items(_MULTIPLES) + b"e\x85R.",
    "tuples": dict_of((number, 0) for number in _MULTIPLES),
    "a tuple in many dicts": b"\x80\2((" + b"K\1" * 4000 + b"tq\0" + b"}h\0Ns" * 60_000 + b"l.",
    "a doubled tuple": b"\x80\2})" + b"q\0h\0\x86" * 60 + b"Ns.",
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", COLLIDING)
def test_keys_of_one_hash_are_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "in.pt"
    path.write_bytes(zipped(COLLIDING[kind]))
    with at_most(60):
        for verb in (
            lambda: ckptmove.inspect(path),
            lambda: ckptmove.load(path),
            lambda: ckptmove.diff(path, path),
            lambda: ckptmove.convert(path, tmp_path / "out.safetensors"),
            lambda: ckptmove.validate(path).raise_if_failed(),
        ):
            with pytest.raises(ckptmove.CkptmoveError, match=r"the same hash|too large"):
                verb()


def test_equal_and_ordinary_keys_are_not(tmp_path: Path) -> None:
    ordinary: dict[object, int] = {n: n for n in range(5000)}
    ordinary |= {(n, n): n for n in range(5000)}
    torch.save({"a": ordinary, "b": {f"{n}" for n in range(500)}}, tmp_path / "in.pt")
    assert ckptmove.load(tmp_path / "in.pt")["a"] == ordinary
    again = zipped(b"\x80\2}(" + b"K\1N" * 500 + b"u.")
    (tmp_path / "again.pt").write_bytes(again)
    assert ckptmove.load(tmp_path / "again.pt") == {1: None}
    assert ckptmove.inspect(tmp_path / "again.pt").tensors == ()


def test_a_file_that_needs_too_much_memory_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(CorruptError, match="needs more memory") as raised,
        open_source(__file__),
    ):
        raise MemoryError
    assert raised.value.path == __file__
