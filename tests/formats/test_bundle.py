"""Zips of checkpoints: each is read under its record's name, and moves where it lies.

The oracles are `zipfile.testzip` and `torch.load` of what is in the records.
"""

from __future__ import annotations

import io
import json
import pickle
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmove
from ckptmove import (
    CorruptError,
    InputError,
    RefusedError,
    convert,
    diff,
    inspect,
    relocate,
    validate,
)
from tests.conftest import RunCli, corpus_files
from tests.making.saving import tagging
from tests.oracles.sameness import assert_same_tree

CUDA = "cuda:0"
META = pickle.dumps({"epochs": [1, 2]})
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


# -- records that are no checkpoints -------------------------------------------------------------


def records_of(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist()}


def test_all_records_are_listed(tmp_path: Path, run_cli: RunCli) -> None:
    write(path := tmp_path / "agent.zip")
    held = {"data": len(TEXT), "sub/empty.txt": 0, "version": 5}
    listed = {
        each.name: each.nbytes for each in inspect(path).records if "/.data/" not in each.name
    }
    assert listed == held
    said = json.loads(run_cli("inspect", "--json", path, exit=0).stdout)
    assert {"name": "version", "kind": "data", "nbytes": 5} in said["records"]
    assert f"data (data, {len(TEXT)} B)" in run_cli("inspect", path, exit=0).stdout
    assert f"data: {len(TEXT)} bytes" in run_cli("inspect", "--tree", path, exit=0).stdout


@METHODS
@pytest.mark.parametrize("via", ["there.safetensors", "there.pt"])
def test_a_bundle_comes_back(tmp_path: Path, method: int, via: str) -> None:
    path, there, back = tmp_path / "agent.zip", tmp_path / via, tmp_path / "back.zip"
    records = write(path, method, {"more.bin": bytes(9000), "sub/": b"", "meta.pkl": META})
    with pytest.raises(RefusedError, match=r"vec.pkl, which holds tensors"):
        convert(path, back)
    assert not convert(path, there).dropped
    report = convert(there, back, drop="vec.pkl")
    assert (report.format, [loss.name for loss in report.dropped]) == ("zip-bundle", ["vec.pkl"])
    found = records_of(back)
    assert list(found) == list(records)
    for name in ("data", "sub/empty.txt", "version", "more.bin", "sub/"):
        assert found[name] == records[name]
    assert pickle.loads(found["meta.pkl"]) == pickle.loads(META)
    for name in ("policy.pth", "policy.optimizer.pth"):
        assert_same_tree(loaded(back, name), loaded(path, name))
    for other in (there, back):
        assert diff(path, other).equal
        assert diff(other, path).equal
        validate(other, against=path).raise_if_failed()
    assert ckptmove.load(path, map_location="cpu")["data"] == TEXT
    assert ckptmove.load(there, map_location="cpu")["version"] == b"2.3.2"


def test_a_gathered_and_cast_checkpoint_has_the_right_checksum(tmp_path: Path) -> None:
    path, back = tmp_path / "agent.zip", tmp_path / "back.zip"
    big = {"t": torch.arange(3e5).view(300, 1000).t(), "e": torch.ones(0), "n": torch.tensor(1)}
    write(path, more={"big.pth": saved(big), "one.pth": saved([1, "a"])})
    convert(path, back, dtype="float16", drop="vec.pkl")
    assert records_of(back)["data"] == TEXT
    assert loaded(back, "one.pth") == [1, "a"]
    assert loaded(back, "big.pth")["t"].dtype is torch.float16
    convert(path, back, drop="vec.pkl", force=True)
    assert_same_tree(loaded(back, "big.pth"), big)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["data", "version", "policy.pth", "vec.pkl", "sub/empty.txt"])
def test_a_record_that_differs_is_named(tmp_path: Path, name: str, run_cli: RunCli) -> None:
    path, other = tmp_path / "a.zip", tmp_path / "b.zip"
    write(path)
    new = {"policy.pth": saved({"weight": torch.zeros(2, 3), "bias": torch.ones(())})}
    new["vec.pkl"] = pickle.dumps({"t": torch.zeros(2)})
    records = write(other, more={name: new.get(name, b"another")})
    assert records[name] != b""
    found = diff(path, other)
    assert {each.name.partition(".w")[0].partition(".b")[0] for each in found.differences} <= {
        name,
        f"{name}.t",
    }
    assert found.differences
    convert(other, tmp_path / "b.safetensors")
    assert not diff(path, tmp_path / "b.safetensors").equal
    assert name in run_cli("diff", path, other, exit=1).stdout
    run_cli("validate", other, "--against", path, exit=1)


def test_only_dicts_of_files_become_a_bundle(tmp_path: Path) -> None:
    torch.save(policy(), tmp_path / "a.pt")
    with pytest.raises(RefusedError, match="'weight' in it is a tensor, not a file"):
        convert(tmp_path / "a.pt", tmp_path / "a.zip")
    for value in (
        [1],
        {"a": b"1"},
        {1: policy()},
        {"A": policy(), "a": {}},
        {"data.pkl": policy()},
    ):
        torch.save(value, tmp_path / "b.pt")
        with pytest.raises(RefusedError):
            convert(tmp_path / "b.pt", tmp_path / "b.zip")
    assert not list(tmp_path.glob("*.zip"))
    both = policy()
    torch.save({"a.pth": both, "b.pth": {"x": both["weight"]}}, tmp_path / "c.pt")
    with pytest.raises(RefusedError, match=r"b.pth, which shares objects or tensors with 'a.pth'"):
        convert(tmp_path / "c.pt", tmp_path / "c.zip")
    convert(tmp_path / "c.pt", tmp_path / "c.zip", shared="duplicate")
    assert_same_tree(loaded(tmp_path / "c.zip", "b.pth"), {"x": both["weight"]})


def test_no_bundle_runs_what_safetensors_could_not(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return (open, (str(tmp_path / "canary"), "w"))

    write(path := tmp_path / "a.zip", more={"x.pth": saved({"t": torch.ones(1), "p": Payload()})})
    torch.save({"a.pth": policy(), "x.bin": saved([Payload()])}, tmp_path / "b.pt")
    for source in (path, tmp_path / "b.pt"):
        convert(source, tmp_path / "there.safetensors", force=True)
        with pytest.raises(RefusedError, match="known to be harmless"):
            convert(tmp_path / "there.safetensors", tmp_path / "back.zip", drop="vec.pkl")
        assert not (tmp_path / "back.zip").exists()
    assert not (tmp_path / "canary").exists()


@pytest.mark.sample(3)
@pytest.mark.parametrize("follows", [0, 100, 200_000])
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_no_record_of_bytes_runs_what_safetensors_could_not(
    protocol: int, follows: int, tmp_path: Path, run_cli: RunCli
) -> None:
    """A library unpickles a record of bytes, too, however short, and of whatever protocol."""
    start = pickle.PROTO + bytes([protocol]) if protocol else b""
    run = start + b"cos\ngetpid\n(tR."
    torch.save({"a.pth": policy(), "hyper": run + bytes(follows)}, source := tmp_path / "a.pt")
    convert(source, there := tmp_path / "there.safetensors")
    with pytest.raises(RefusedError, match=r"known to be harmless: os\.getpid at 'hyper'"):
        convert(there, tmp_path / "back.zip")
    assert not (tmp_path / "back.zip").exists()
    report = convert(there, tmp_path / "less.zip", drop="hyper")
    assert [loss.name for loss in report.dropped] == ["hyper"]
    assert inspect(tmp_path / "less.zip").unknown_callables == ()
    assert "os.getpid" in run_cli("convert", source, tmp_path / "told.zip", exit=0).stderr
    assert inspect(tmp_path / "told.zip").unknown_callables == ("os.getpid",)


def test_a_checkpoint_of_bytes_is_no_file(tmp_path: Path) -> None:
    """Else two bundles of which the library reads one would be called equal."""
    write(tmp_path / "a.zip", more={"x.pth": saved(b"payload")})
    write(tmp_path / "b.zip", more={"x.pth": b"payload"})
    assert not diff(tmp_path / "a.zip", tmp_path / "b.zip").equal


def test_what_is_packed_too_tightly_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    write(path, zipfile.ZIP_DEFLATED, {"zeros": bytes(9 << 20)})
    assert "zeros" in {each.name for each in inspect(path).records}
    with pytest.raises(RefusedError, match="<record zeros>, which cannot be stored"):
        convert(path, tmp_path / "a.pt")
    assert diff(path, path).equal


# -- the library ---------------------------------------------------------------------------------


def test_stable_baselines3_loads_what_came_back(tmp_path: Path) -> None:
    library = pytest.importorskip("stable_baselines3", reason="stable-baselines3 is not installed")
    path, back = tmp_path / "agent.zip", tmp_path / "back.zip"
    agent = library.PPO("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=4, n_epochs=1)
    agent.learn(8)
    agent.save(path)
    for via in ("there.safetensors", "there.pt"):
        convert(path, tmp_path / via)
        convert(tmp_path / via, back, force=True, trust_objects=True)
        again = library.PPO.load(back, device="cpu")
        assert_same_tree(again.policy.state_dict(), agent.policy.state_dict())
        assert again.num_timesteps == agent.num_timesteps
        again.set_env(agent.get_env())
        again.learn(8)
        assert diff(path, back).equal


@pytest.mark.parametrize("path", corpus_files("zip-container"))
def test_a_public_bundle_comes_back(path: Path, tmp_path: Path) -> None:
    convert(path, tmp_path / "there.safetensors")
    convert(tmp_path / "there.safetensors", tmp_path / "back.zip", trust_objects=True)
    assert diff(path, tmp_path / "back.zip").equal
    before, after = records_of(path), records_of(tmp_path / "back.zip")
    assert list(before) == list(after)
    for name, content in before.items():
        assert name.endswith(".pth") or after[name] == content


def test_a_record_of_more_pickles_than_are_read_stays_as_it_is(tmp_path: Path) -> None:
    """What the last of them would run is not known, so that it counts as unknown."""
    write(tmp_path / "x.zip", more={"replay.pkl": b"\x80\2(NNNNNNNNt." * 10_001})
    found = inspect(tmp_path / "x.zip")
    assert found.unknown_callables == ("(in the record 'replay.pkl')",)
    assert "the record 'replay.pkl' can't be read, and stays as it is" in found.warnings
