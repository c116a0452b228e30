"""Zips of checkpoints: each is read under its record's name, and moves where it lies.

The oracles are `zipfile.testzip` and `torch.load` of what is in the records.
"""

from __future__ import annotations

import io
import pickle
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptmove import CorruptError, InputError, inspect, relocate
from tests.making.saving import tagging
from tests.sameness import assert_same_tree

CUDA = "cuda:0"
TEXT = b"not a checkpoint\n" * 40


def saved(value: object, tag: str = CUDA, **options: Any) -> bytes:
    """What torch.save writes on a machine with that device."""
    buffer = io.BytesIO()
    with tagging(tag):
        torch.save(value, buffer, **options)
    return buffer.getvalue()


def policy() -> dict[str, torch.Tensor]:
    return {"weight": torch.arange(6.0).view(2, 3), "bias": torch.tensor(float("nan"))}


def write(
    path: Path, method: int = zipfile.ZIP_STORED, more: Mapping[str, bytes] | None = None
) -> dict[str, bytes]:
    """A zip as stable-baselines3 writes it, with a comment, times and attributes."""
    records = {
        "data": TEXT,
        "policy.pth": saved(policy()),
        "policy.optimizer.pth": saved({"old": policy()}, _use_new_zipfile_serialization=False),
        "sub/empty.txt": b"",
        "vec.pkl": pickle.dumps({"t": torch.ones(2)}),
        "version": b"2.3.2",
        **(more or {}),
    }
    with zipfile.ZipFile(path, "w") as archive:
        archive.comment = b"of an agent"
        for n, (name, content) in enumerate(records.items()):
            info = zipfile.ZipInfo(name, (2024, 1, 1 + n, 12, 30, 2 * n))
            info.external_attr = 0o640 << 16
            info.comment = name.encode()
            info.extra = b"\x99\x99\x02\x00ab"
            archive.writestr(info, content, compress_type=method)
    return records


def loaded(path: Path, name: str) -> Any:
    with zipfile.ZipFile(path) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        content = archive.read(name)
        if name.endswith(".pkl"):
            return pickle.loads(content)
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def described(path: Path) -> list[tuple[Any, ...]]:
    """All that a zip says of its records but for checksums, sizes and places."""
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        found: list[tuple[Any, ...]] = [
            (i.filename, i.date_time, i.compress_type, i.external_attr, i.comment, i.extra)
            for i in archive.infolist()
        ]
        return [*found, (archive.comment,)]


METHODS = pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])


@METHODS
def test_it_shows_what_its_records_hold(tmp_path: Path, method: int) -> None:
    path = tmp_path / "agent.zip"
    write(path, method)
    manifest = inspect(path)
    assert manifest.format == "zip-bundle"
    assert {entry.name: entry.device for entry in manifest.tensors} == {
        "policy.pth.weight": CUDA,
        "policy.pth.bias": CUDA,
        "policy.optimizer.pth.old.weight": CUDA,
        "policy.optimizer.pth.old.bias": CUDA,
        "vec.pkl.t": "cpu",
    }
    data = path.read_bytes()
    for entry in manifest.tensors:
        extent = manifest.storages[entry.storage or ""].extent
        assert (extent is None) == (method == zipfile.ZIP_DEFLATED)
        if extent and entry.name.endswith("weight"):
            assert data[extent.start : extent.end] == policy()["weight"].numpy().tobytes()


@METHODS
@pytest.mark.parametrize("to", ["cpu", "xpu:3", "privateuseone:15"])
def test_it_moves_and_stays_else_the_same(tmp_path: Path, method: int, to: str) -> None:
    path, there, back = (tmp_path / name for name in ("in.zip", "there.zip", "back.zip"))
    records = write(path, method)
    report = relocate(path, there, map={CUDA: to})
    if method or to != "privateuseone:15":  # there, pickles may find room, or not
        assert report.method == ("relay" if method else "patch")
    devices = {entry.device for entry in inspect(there).tensors}
    assert devices == {to, "cpu"}
    assert described(there) == described(path)
    with zipfile.ZipFile(there) as archive:
        for name in ("data", "sub/empty.txt", "version", "vec.pkl"):
            assert archive.read(name) == records[name]
    for name in ("policy.pth", "policy.optimizer.pth", "vec.pkl"):
        assert_same_tree(loaded(there, name), loaded(path, name))
    if to != "cpu":
        relocate(there, back, map={to: CUDA})
        assert described(back) == described(path)
        assert_same_tree(loaded(back, "policy.pth"), loaded(path, "policy.pth"))


@pytest.mark.parametrize("value", [torch.ones(2), {"a": {"b": [torch.ones(3)] * 3}}], ids=repr)
def test_what_grows_moves_the_rest(tmp_path: Path, value: object) -> None:
    path, there = tmp_path / "in.zip", tmp_path / "there.zip"
    first = saved(value, _use_new_zipfile_serialization=False)
    write(path, more={"one.pth": first, "two.pth": saved(value, "cpu"), "text": TEXT})
    report = relocate(path, there, to="privateuseone:15")
    assert report.method == "relay"
    assert described(there) == described(path)
    for name in ("one.pth", "two.pth", "policy.optimizer.pth"):
        assert_same_tree(loaded(there, name), loaded(path, name))
    assert {entry.device for entry in inspect(there).tensors} == {"privateuseone:15"}


def test_a_patch_is_the_file_that_saving_there_gives(tmp_path: Path) -> None:
    path, there = tmp_path / "in.zip", tmp_path / "there.zip"
    write(path)
    relocate(path, there, map={CUDA: "xpu:0"})
    with zipfile.ZipFile(there) as archive:
        for name in archive.namelist():
            info = archive.getinfo(name)
            raw = there.read_bytes()
            assert info.CRC.to_bytes(4, "little") == raw[info.header_offset + 14 :][:4]


def test_records_written_to_a_pipe_have_descriptors(tmp_path: Path) -> None:
    path, there = tmp_path / "in.zip", tmp_path / "there.zip"

    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return False

        def tell(self) -> int:
            raise OSError

    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        pipe = Pipe()
        with zipfile.ZipFile(pipe, "w", method) as archive:
            for name in ("a.pt", "b.pt"):
                archive.writestr(name, saved(policy()))
            archive.writestr("text", TEXT)
        path.write_bytes(pipe.getvalue())
        for to in ("cpu", "privateuseone:15"):
            relocate(path, there, to=to, force=True)
            assert described(there) == described(path)
            assert_same_tree(loaded(there, "b.pt"), policy())


def test_zip64_fields_are_kept(tmp_path: Path) -> None:
    path, there = tmp_path / "in.zip", tmp_path / "there.zip"
    with zipfile.ZipFile(path, "w") as archive:
        with archive.open("a.pt", "w", force_zip64=True) as file:
            file.write(saved(policy()))
        archive.writestr("text", TEXT)
    relocate(path, there, to="privateuseone:15")
    assert described(there) == described(path)
    assert_same_tree(loaded(there, "a.pt"), policy())


def test_damage_is_not_hidden_behind_a_new_checksum(tmp_path: Path) -> None:
    path = tmp_path / "in.zip"
    old = saved(policy(), _use_new_zipfile_serialization=False)
    write(path, more={"old.pth": old})
    data = bytearray(path.read_bytes())
    data[data.index(old) + len(old) - 3] ^= 1
    path.write_bytes(data)
    for to in ("cpu", "privateuseone:15"):
        with pytest.raises(CorruptError, match=r"'old.pth' is damaged: its checksum is wrong"):
            relocate(path, tmp_path / "out.zip", to=to)
    assert [p.name for p in tmp_path.iterdir()] == ["in.zip"]


def test_a_damaged_checkpoint_in_it_is_named(tmp_path: Path) -> None:
    path = tmp_path / "in.zip"
    write(path, more={"cut.pth": saved(policy())[:-30]})
    with pytest.raises(CorruptError, match=r"the record 'cut.pth'"):
        inspect(path)


def test_a_zip_without_checkpoints_is_refused_as_ever(tmp_path: Path) -> None:
    path = tmp_path / "in.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", TEXT)
        archive.writestr("b.pkl", pickle.dumps({"a": 1}))
    with pytest.raises(InputError, match="is a zip file, but not one"):
        inspect(path)


def test_what_only_starts_like_a_checkpoint_stays(tmp_path: Path) -> None:
    noise = {"noise.bin": b"\x80\x02" + bytes(range(100)), "zip.bin": b"PK\3\4" + bytes(100)}
    write(path := tmp_path / "in.zip", more=noise)
    relocate(path, out := tmp_path / "out.zip", to="cpu")
    assert sum("stays as it is" in text for text in inspect(path).warnings) == 2
    with zipfile.ZipFile(out) as archive:
        assert {name: archive.read(name) for name in noise} == noise


def test_a_checkpoint_that_is_cut_short_is_an_error(tmp_path: Path) -> None:
    write(path := tmp_path / "in.zip", more={"cut.pth": saved(policy())[:-200]})
    with pytest.raises(InputError, match=r"cut\.pth"):
        inspect(path)
