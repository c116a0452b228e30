"""What convert writes is planned from references, and is not many times as long as the source."""

from __future__ import annotations

import contextlib
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


def _number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def _row(count: int) -> bytes:
    return b"](" + b"".join(map(_number, range(count))) + b"e"


def _dict(count: int) -> bytes:
    return b"}(" + b"".join(_number(n) + b"N" for n in range(count)) + b"u"


#: A numpy dtype and a shape in the slots 2 and 3, for arrays of a million bytes.
_DTYPE = (
    b"cnumpy\ndtype\n\x8c\2u1\x89\x88\x87R(K\3\x8c\1|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tbq\2"
)
_SHAPE = _number(1_000_000) + b"\x85q\3"
_ARRAY = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85C\1b\x87R"
#: An expanded tensor of a billion elements in slot 2.
_EXPANDED = (
    b"ctorch._utils\n_rebuild_tensor_v2\n((\x8c\7storagectorch\nFloatStorage\n\x8c\x010\x8c\3cpuK\1t"
    b"QK\0" + _number(1 << 30) + b"\x85K\0\x85\x89ccollections\nOrderedDict\n)RtRq\2"
)
_TEXT = text("x" * 1_000_000) + b"q\0" + text("latin1") + b"q\1"
_BYTES = b"B" + struct.pack("<I", 1_000_000) + b"x" * 1_000_000 + b"q\0"
#: What is shared (in slot 0), and the call that copies it.
COPYING: dict[str, tuple[bytes, bytes]] = {
    "encoded text": (_TEXT, b"c_codecs\nencode\nh\0h\1\x86R"),
    "a bytearray of text": (_TEXT, b"cbuiltins\nbytearray\nh\0h\1\x86R"),
    "bytes of text": (_TEXT, b"cbuiltins\nbytes\nh\0h\1\x86R"),
    "a bytearray of bytes": (_BYTES, b"cbuiltins\nbytearray\nh\0\x85R"),
    "bytes of a bytearray": (
        _BYTES + b"cbuiltins\nbytearray\nh\0\x85Rq\4",
        b"cbuiltins\nbytes\nh\4\x85R",
    ),
    "a new bytearray": (_BYTES, b"cbuiltins\nbytearray\nh\0\x85\x81"),
    "an object of a bytearray": (_BYTES, b"(cbuiltins\nbytearray\nh\0o"),
    "an instance of a bytearray": (_BYTES, b"(h\0ibuiltins\nbytearray\n"),
    "a bytearray with keywords": (_BYTES, b"cbuiltins\nbytearray\nh\0\x85}\x92"),
    "zeros": (b"Nq\0", b"cbuiltins\nbytearray\n" + _number(1_000_000) + b"\x85R"),
    "text of bytes": (_BYTES, b"cbuiltins\nstr\nh\0\x8c\5ascii\x86R"),
    "a path": (_TEXT, b"cpathlib\nPosixPath\nh\0\x85R"),
    "a list": (_row(20_000) + b"q\0", b"cbuiltins\nlist\nh\0\x85R"),
    "a tuple": (_row(20_000) + b"q\0", b"cbuiltins\ntuple\nh\0\x85R"),
    "a deque": (_row(20_000) + b"q\0", b"ccollections\ndeque\nh\0\x85R"),
    "a size": (_row(20_000) + b"q\0", b"ctorch\nSize\nh\0\x85R"),
    "a set": (_row(20_000) + b"q\0", b"cbuiltins\nset\nh\0\x85R"),
    "a frozen set": (_row(20_000) + b"q\0", b"cbuiltins\nfrozenset\nh\0\x85R"),
    "a counter": (_dict(20_000) + b"q\0", b"ccollections\nCounter\nh\0\x85R"),
    "an ordered dict": (_dict(20_000) + b"q\0", b"ccollections\nOrderedDict\nh\0\x85R"),
    "attributes": (_dict(20_000) + b"q\0", b"ccollections\nOrderedDict\n)Rh\0b"),
    "an array": (_BYTES + _DTYPE + _SHAPE, _ARRAY + b"(K\1h\3h\2\x89h\0tb"),
    "an array of text": (
        _TEXT + _DTYPE + _SHAPE + b"c_codecs\nencode\nh\0h\1\x86Rq\4",
        _ARRAY + b"(K\1h\3h\2\x89h\4tb",
    ),
    "an array in a buffer": (
        _BYTES + _DTYPE + _SHAPE,
        b"cnumpy.core.numeric\n_frombuffer\n(h\0h\2h\3\x8c\1CtR",
    ),
    "an indirect call": (
        _BYTES,
        b"ctorch._tensor\n_rebuild_from_type_v2\n(cbuiltins\nbytearray\ncbuiltins\nbytearray\n"
        b"h\0\x85NtR",
    ),
    "a cast": (
        _EXPANDED,
        b"ctorch._utils\n_rebuild_device_tensor_from_cpu_tensor\n(h\2ctorch\nfloat64\n"
        b"\x8c\3cpu\x89tR",
    ),
    "sparse indices": (
        _EXPANDED,
        b"ctorch._utils\n_rebuild_sparse_tensor\nctorch.serialization\n_get_layout\n"
        b"\x8c\x10torch.sparse_coo\x85R(h\2h\2K\1\x85\x89t\x86R",
    ),
}


def copied(kind: str, times: int) -> bytes:
    """A checkpoint with a value of a megabyte that so many calls copy."""
    shared, call = COPYING[kind]
    more = {"data/0": bytes(4)} if b"FloatStorage" in shared else {}
    return zipped(b"\x80\4(" + shared + call * times + b"l.", more=more)


@pytest.mark.parametrize("kind", COPYING)
def test_calls_do_not_copy_a_shared_value_very_often(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "in.pt"
    path.write_bytes(copied(kind, 200))
    for verb in (
        lambda: ckptmove.inspect(path),
        lambda: ckptmove.load(path),
        lambda: convert(path, tmp_path / "out.pt", force=True),
        lambda: ckptmove.validate(path).raise_if_failed(),
    ):
        with pytest.raises(ckptmove.CkptmoveError, match="far denser than what libraries write"):
            verb()


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("kind", ["encoded text", "a bytearray of text", "bytes of a bytearray"])
def test_what_calls_copy_a_few_times_is_written_once(
    kind: str, suffix: str, tmp_path: Path
) -> None:
    path, out = tmp_path / "in.pt", tmp_path / f"out{suffix}"
    path.write_bytes(copied(kind, 20))
    convert(path, out)
    assert out.stat().st_size < 2.1 * path.stat().st_size
    assert ckptmove.diff(path, out).equal
    loaded = ckptmove.load(out)
    assert loaded[-20:] == [b"x" * 1_000_000] * 20
    arrays = {id(each) for each in loaded[-20:] if type(each) is bytearray}
    assert len(arrays) == (20 if kind == "a bytearray of text" else 0)


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
            lambda: ckptmove.convert(path, tmp_path / "out.safetensors"),
            lambda: ckptmove.validate(path).raise_if_failed(),
        ):
            with pytest.raises(ckptmove.CkptmoveError, match=r"the same hash|too large"):
                verb()
        with contextlib.suppress(ckptmove.CkptmoveError):
            ckptmove.diff(path, path)  # it need not hash members of a set, but must end


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
