"""Files that torch takes for something else than they seem are refused, or told as torch does.

Each case was a way to show one thing and load another.
"""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch

from ckptmove import CheckFailed, InputError, inspect, relocate
from tests.making.building import Part, build_zip
from tests.making.checkpoints import save
from tests.oracles.readers import pid_locations

BYTES = [struct.pack("<4f", 1, 2, 3, 4), struct.pack("<4f", 5, 6, 7, 8)]


def text(value: str) -> bytes:
    """BINUNICODE."""
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def pid(key: str, cls: str = "FloatStorage", location: bytes = text("cpu")) -> bytes:
    """A persistent id of four elements."""
    return b"(" + text("storage") + f"ctorch\n{cls}\n".encode() + text(key) + location + b"K\x04tQ"


def tensor(key: str, *, size: int = 4, cls: str = "FloatStorage") -> bytes:
    """A vector on a storage."""
    dims = bytes([ord("K"), size]) + b"\x85K\x01\x85"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + pid(key, cls) + b"K\x00" + dims + b"\x89NtR"


def write(path: Path, pickle: bytes, **changed: bytes) -> Path:
    """A zip as torch reads it, around a pickle."""
    records = {"data.pkl": b"\x80\x02" + pickle + b".", "byteorder": b"little"}
    records |= {f"data/{n}": content for n, content in enumerate(BYTES)}
    records |= {"version": b"3\n"} | changed
    path.write_bytes(build_zip([Part(f"a/{name}", content) for name, content in records.items()]))
    return path


REFUSED = {
    "a tensor that is set anew": b"}" + text("w") + tensor("0") + b"(" + pid("1") + b"tbs",
    "attributes that replace the data": (
        b"}" + text("w") + b"ctorch._tensor\n_rebuild_from_type_v2\n("
        b"ctorch._utils\n_rebuild_tensor_v2\nctorch\nTensor\n("
        + pid("0") + b"K\x00K\x04\x85K\x01\x85\x89Nt}" + text("data") + tensor("1") + b"stRs"
    ),
    "a storage of two dtypes": (
        b"}(" + text("a") + tensor("0") + text("b") + tensor("0", cls="IntStorage") + b"u"
    ),
    "an octal number": b"I010\n",
    "a pid of six": b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu")
    + b"K\x04NtQ",
    "a view beyond its storage": b"}" + text("w") + tensor("0", size=5) + b"s",
    "a shape without end": (
        b"ctorch._utils\n_rebuild_meta_tensor_no_storage\n(ctorch\nfloat32\n("
        + b"\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x40" * 20 + b"t(tNtR"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_torch_would_take_for_another_thing_is_refused(what: str, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        inspect(write(tmp_path / "a.pt", REFUSED[what]))


@pytest.mark.parametrize(
    "records",
    [
        {"byteorder": b"little\n"},
        {"ByteOrder": b"big"},
        {"version": b"99\n"},
        {"version": b""},
        {"data/": b"1234"},
    ],
    ids=repr,
)
def test_records_that_torch_minds_are_minded(records: dict[str, bytes], tmp_path: Path) -> None:
    good = b"}" + text("w") + tensor("0") + b"s"
    assert inspect(write(tmp_path / "good.pt", good)).verdict == "uniform cpu"
    with pytest.raises(InputError):
        inspect(write(tmp_path / "a.pt", good, **records))


def test_of_equal_keys_the_last_counts(tmp_path: Path) -> None:
    twice = b"}(" + text("w") + tensor("0") + text("w") + tensor("1", size=2) + b"u"
    manifest = inspect(write(tmp_path / "a.pt", twice))
    assert [(entry.shape, entry.storage) for entry in manifest.tensors] == [((2,), "data/1")]


def test_what_is_built_and_dropped_is_listed(tmp_path: Path) -> None:
    """A setter of state, as the six-item `__reduce__` makes one, keeps its tensors to itself."""
    setter = b"}q\x07ca\nset\nh\x07" + tensor("1") + b"\x86R0"
    manifest = inspect(write(tmp_path / "a.pt", setter + text("w") + tensor("0") + b"s"))
    assert [entry.storage for entry in manifest.tensors] == ["data/0", "data/1"]
    assert manifest.unknown_callables == ("a.set",)


def test_an_rng_state_always_comes_home(tmp_path: Path) -> None:
    saved = {"w": torch.ones(1), "rng": torch.get_rng_state()}
    source = save(tmp_path / "a.pt", saved, "cuda:1")
    report = relocate(source, to="cuda:0")
    assert pid_locations(tmp_path / "a.cuda-0.pt") == [("0", "cuda:0"), ("1", "cpu")]
    assert [(kept.name, kept.device) for kept in report.kept] == [("rng", "cpu")]
    inspect(tmp_path / "a.cuda-0.pt", require="cuda:0")


def test_a_storage_that_nobody_uses_is_minded_too(tmp_path: Path) -> None:
    hidden = b"}" + text("w") + tensor("0") + b"s" + pid("1", location=text("cuda:3")) + b"0"
    path = write(tmp_path / "a.pt", hidden)
    assert set(inspect(path).devices) == {"cpu", "cuda:3"}
    with pytest.raises(CheckFailed):
        inspect(path, require="cpu")


def test_members_of_sets_and_keys_are_never_rewritten(tmp_path: Path) -> None:
    """Two of them could become one."""
    devices = torch.device("cuda", 0), torch.device("cuda", 1)
    saved = {"set": {"cuda:0", "cuda:1"}, "keys": dict.fromkeys(devices), "w": torch.ones(1)}
    source = save(tmp_path / "a.pt", saved, "cuda:1")
    report = relocate(source, to="cuda:0", values=True)
    assert report.values_rewritten == ()
    assert len(report.values_naming_devices) == 4


def test_a_selection_of_nothing_is_on_no_device(tmp_path: Path) -> None:
    source = save(tmp_path / "a.pt", {"w": torch.ones(1)}, "cpu")
    with pytest.raises(CheckFailed, match="there are no tensors"):
        inspect(source, select="optimzer.*", require="cpu")
