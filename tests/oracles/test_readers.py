"""The oracles, tested themselves: one that can't fail proves nothing."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.making.checkpoints import (
    MAKERS,
    rezip,
    save,
)
from tests.oracles.readers import (
    assert_descriptor_agrees,
    assert_same_checkpoint,
    assert_same_loads,
    assert_sound_zip,
    cpp_unpickler_accepts,
    inert_tree,
    load,
    loads_safely,
    loads_with_computed_offsets,
    storage_records,
)
from tests.oracles.sameness import assert_same_tree


def tied(*, really: bool) -> list[torch.Tensor]:
    """Two equal tensors, of one storage or of two."""
    first = torch.arange(4.0)
    return [first, first.view(2, 2) if really else first.clone().view(2, 2)]


def attributed(note: str) -> torch.Tensor:
    tensor = torch.ones(1)
    vars(tensor)["note"] = note
    return tensor


def ordered(note: str) -> OrderedDict[str, int]:
    """A dict with a note as an attribute, as `_metadata` is one."""
    result = OrderedDict(a=1)
    vars(result)["note"] = note
    return result


def same_twice(*, really: bool) -> list[list[int]]:
    """A list that appears twice, or two equal lists."""
    inner = [1]
    return [inner, inner if really else list(inner)]


NAN = torch.tensor([0x7FC00001, 0x7FC00002], dtype=torch.int32).view(torch.float32)
SIX = torch.arange(6.0)
UNLIKE: dict[str, tuple[object, object]] = {
    "bytes": (torch.ones(2), torch.tensor([1.0, 2.0])),
    "NaN payload": (NAN[:1].clone(), NAN[1:].clone()),
    "negative zero": (torch.zeros(1), -torch.zeros(1)),
    "stride": (SIX.view(2, 3).clone(), SIX.clone().as_strided((2, 3), (1, 2))),
    "offset": (SIX[:2], SIX[1:3]),
    "shape": (SIX, SIX.view(2, 3)),
    "dtype": (torch.zeros(1), torch.zeros(1, dtype=torch.int32)),
    "requires_grad": (torch.ones(1), torch.ones(1, requires_grad=True)),
    "parameter": (torch.ones(1), nn.Parameter(torch.ones(1), requires_grad=False)),
    "storage size": (torch.zeros(4)[:2], torch.zeros(2)),
    "tie lost": (tied(really=True), tied(really=False)),
    "tie gained": (tied(really=False), tied(really=True)),
    "tensor attribute": (attributed("a"), attributed("b")),
    "dict attribute": (ordered("a"), ordered("b")),
    "dict order": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "key type": ({0: 1}, {"0": 1}),
    "bool for int": ([1], [True]),
    "float for int": ([1], [1.0]),
    "float sign": ([0.0], [-0.0]),
    "tuple for list": ([1], (1,)),
    "dict for OrderedDict": ({"a": 1}, OrderedDict(a=1)),
    "list aliasing": (same_twice(really=True), same_twice(really=False)),
    "list aliasing gained": (same_twice(really=False), same_twice(really=True)),
    "string": ({"device": "cpu"}, {"device": "cuda:0"}),
    "renamed key": ({"cpu": 1}, {"cuda:0": 1}),
    "device value": ([torch.device("cuda", 0)], [torch.device("cuda", 1)]),
    "set": ({1, 2}, {1, 3}),
    "bytearray": (bytearray(b"a"), bytearray(b"b")),
    "sparse values": (torch.eye(2).to_sparse(), (torch.eye(2) * 2).to_sparse()),
    "conjugate": (
        torch.ones(1, dtype=torch.complex64),
        torch.ones(1, dtype=torch.complex64).conj(),
    ),
    "generator": (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)),
    "module": (nn.Linear(1, 1), nn.Linear(1, 1)),
}


@pytest.mark.parametrize("what", UNLIKE)
def test_trees_that_differ_are_told_apart(what: str, tmp_path: Path) -> None:
    one, other = UNLIKE[what]
    assert_same_tree(one, one)
    with pytest.raises(AssertionError):
        assert_same_tree(one, other)
    paths = save(tmp_path / "a.pt", one), save(tmp_path / "b.pt", other)
    with pytest.raises(AssertionError):
        assert_same_loads(*paths, weights_only=loads_safely(paths[0]))
    with pytest.raises(AssertionError):
        assert_same_checkpoint(*paths, {}, trust=True)


BYTES_ALONE = {"bytes", "NaN payload", "negative zero", "sparse values", "generator", "module"}


@pytest.mark.parametrize("what", sorted(UNLIKE.keys() - BYTES_ALONE))
def test_inert_trees_tell_all_but_the_bytes(what: str, tmp_path: Path) -> None:
    one, other = (inert_tree(save(tmp_path / "a.pt", saved)) for saved in UNLIKE[what])
    with pytest.raises(AssertionError):
        assert_same_tree(one, other)


def test_a_difference_deep_inside_is_named() -> None:
    one, other = ({"net": OrderedDict(w=[torch.ones(1), bias])} for bias in (1, 2))
    with pytest.raises(AssertionError, match=r"^net\.w\.1: value: 1 is not 2$"):
        assert_same_tree(one, other)


def test_skip_looks_away_from_named_values() -> None:
    assert_same_tree({"a": [1, 2]}, {"a": [1, 3]}, skip={"a.1"})
    with pytest.raises(AssertionError, match=r"a\.1: value: 2 is not 3"):
        assert_same_tree({"a": [1, 2]}, {"a": [1, 3]}, skip={"a.0"})


@pytest.mark.parametrize("expected", [{}, {"cuda:0": "cpu"}, lambda key, _: f"cuda:{key}"])
def test_wrong_locations_are_caught(expected: Any, tmp_path: Path) -> None:
    saved = MAKERS["linear_state_dict"]()
    one, other = save(tmp_path / "a.pt", saved), save(tmp_path / "b.pt", saved, "cuda:1")
    with pytest.raises(AssertionError, match="locations are"):
        assert_same_checkpoint(one, other, expected)


def flip_storage_byte(path: Path) -> None:
    info = storage_records(path)[0]
    start = path.read_bytes().index(b"\x00\x00\x80?", info.header_offset)
    overwrite(path, start, b"\x01")


def spoil_descriptor(path: Path) -> None:
    """Damage the CRC behind the first storage; the central directory keeps the right one."""
    info = storage_records(path)[0]
    overwrite(path, path.read_bytes().index(b"PK\7\x08", info.header_offset) + 4, b"????")


def forget_crc(path: Path) -> None:
    overwrite(path, path.read_bytes().index(b"PK\1\2") + 16, bytes(4))


def add_record(path: Path) -> None:
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("made/data/99", b"more")


def overwrite(path: Path, start: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(data)


@pytest.mark.parametrize("spoil", [flip_storage_byte, spoil_descriptor, forget_crc, add_record])
def test_a_spoiled_zip_is_caught(spoil: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "spoiled").mkdir()
    source = save(tmp_path / "made.pt", torch.ones(3))
    spoiled = save(tmp_path / "spoiled" / "made.pt", torch.ones(3))
    assert_same_checkpoint(source, spoiled, {})
    spoil(spoiled)
    with pytest.raises(AssertionError):
        assert_same_checkpoint(source, spoiled, {})


def test_crcs_may_be_absent_where_the_source_has_none(tmp_path: Path) -> None:
    source = save(tmp_path / "made.pt", torch.ones(3))
    torch.serialization.set_crc32_options(False)
    try:
        bare = save(tmp_path / "bare.pt", torch.ones(3))
    finally:
        torch.serialization.set_crc32_options(True)
    assert_sound_zip(bare, bare)
    with pytest.raises(AssertionError, match="CRC"):
        assert_sound_zip(bare, source)


def test_a_local_crc_without_a_descriptor_is_checked(tmp_path: Path) -> None:
    path = rezip(save(tmp_path / "a.pt", torch.ones(3)), tmp_path / "b.pt")
    with path.open("r+b") as file, zipfile.ZipFile(path) as archive:
        info = archive.infolist()[0]
        assert_descriptor_agrees(file, info)
        file.seek(info.header_offset + 14)
        file.write(b"????")
        with pytest.raises(AssertionError, match="local CRC"):
            assert_descriptor_agrees(file, info)


def test_computed_offsets_notice_a_changed_layout(tmp_path: Path) -> None:
    source = save(tmp_path / "a.pt", MAKERS["linear_state_dict"](), "cpu")
    assert_same_tree(load(source, weights_only=True), loads_with_computed_offsets(source))
    with pytest.raises(RuntimeError, match="Incorrect offset"):
        loads_with_computed_offsets(rezip(source, tmp_path / "b.pt"))


def test_the_cpp_unpickler_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    saved = {"a": torch.ones(2), "b": [1, "cpu"]}
    assert cpp_unpickler_accepts(save(tmp_path / "a.pt", saved, "cpu"))
    assert cpp_unpickler_accepts(save(tmp_path / "a.pt", saved, "meta"))
    assert not cpp_unpickler_accepts(save(tmp_path / "b.pt", saved, "cpu", pickle_protocol=4))
    assert not cpp_unpickler_accepts(save(tmp_path / "c.pt", {1, 2}, "cpu"))


@pytest.mark.slow
def test_no_library_is_imported_by_a_stub(tmp_path: Path) -> None:
    """Names in the pickle are not imported, even if they could be."""
    path = save(tmp_path / "made.pt", MAKERS["python_objects"]())
    code = f"""
import sys
from pathlib import Path
from tests.oracles.readers import inert_tree
inert_tree(Path({str(path)!r}))
sys.exit("tests.making.objects" in sys.modules)
"""
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True)
