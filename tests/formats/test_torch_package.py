"""Packages: several pickles on the same storages, read and moved as torch reads them."""

from __future__ import annotations

import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.package.package_exporter import PackageExporter
from torch.package.package_importer import PackageImporter

from ckptmove import CorruptError, InputError, UnsupportedError, inspect, relocate
from tests.conftest import RunCli
from tests.making.expected import having_every_device, storage_bytes
from tests.making.packaged import PACKAGED_MAKERS, PICKLES
from tests.making.relaying import relay
from tests.making.walking import named_tensors
from tests.oracles.readers import assert_sound_zip
from tests.oracles.sameness import assert_same_tree

WHOLE = [name for name in PICKLES if name != "script"]


def load(path: Path, name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """What torch makes of the pickles, and where it would have put the tensors."""
    with having_every_device() as restored, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importer: Any = PackageImporter(path)
        loaded = {at: importer.load_pickle(*place) for at, place in PICKLES[name].items()}
        return loaded, restored.devices(loaded)


def shown(name: str, key: str) -> str:
    """The name that we give to a tensor that torch's loader gives us as `key`."""
    at, _, rest = key.partition(".")
    package, resource = PICKLES[name][at]
    return f"{package.replace('.', '/')}/{resource}.{rest}"


def fill(path: Path, **saved: object) -> Path:
    """A package with these pickles."""
    with PackageExporter(path) as exporter:
        exporter.extern("**")
        for name, each in saved.items():
            exporter.save_pickle("p", name, each)
    return path


def files(path: Path) -> dict[str, bytes]:
    """The records, without the prefix."""
    with zipfile.ZipFile(path) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


@pytest.mark.parametrize("tag", ["cpu", "cuda:1"])
@pytest.mark.parametrize("name", WHOLE)
def test_it_is_read_as_torch_reads_it(name: str, tag: str, tmp_path: Path) -> None:
    expected = PACKAGED_MAKERS[name](path := tmp_path / "made.pt", tag)
    manifest, data = inspect(path), path.read_bytes()
    assert manifest.format == "torch-package"
    assert manifest.writer.startswith("torch.package, Python 3.")
    entries = {spelled(entry.path): entry for entry in manifest.tensors}
    wanted = {shown(name, key): device for key, device in expected.devices.items()}
    assert {key: entry.device for key, entry in entries.items()} == wanted
    for key, whole in expected.storages.items():
        storage = manifest.storages[entries[shown(name, key)].storage or ""]
        assert storage.extent is not None
        assert data[storage.extent.start : storage.extent.end] == whole


def spelled(path: tuple[object, ...]) -> str:
    """A path with plain dots."""
    return ".".join(map(str, path))


def test_pickles_share_storages(tmp_path: Path) -> None:
    PACKAGED_MAKERS["state_dicts"](path := tmp_path / "made.pt", "cuda:0")
    manifest = inspect(path)
    entries = {spelled(entry.path): entry for entry in manifest.tensors}
    view = entries["other/views.pkl.view"]
    assert view.storage == entries["models/state.pkl.shared"].storage
    assert view.offset == 2
    named = [(value.path[0], value.value) for value in manifest.values_naming_devices]
    assert named == [
        ("models/state.pkl", "cuda:1"),
        ("other/views.pkl", "cpu"),
        ("other/deep/empty", "cuda:0"),
    ]


def test_classes_that_the_package_brings_are_unknown(tmp_path: Path) -> None:
    PACKAGED_MAKERS["module"](path := tmp_path / "made.pt", "cpu")
    assert any(name.startswith("tests.") for name in inspect(path).unknown_callables)


@pytest.mark.sample(10)
@pytest.mark.parametrize("to", ["cpu", "cuda:0", "cuda:1", "privateuseone:15"])
@pytest.mark.parametrize("tag", ["cpu", "cuda:1"])
@pytest.mark.parametrize("name", WHOLE)
def test_it_goes_anywhere(name: str, tag: str, to: str, tmp_path: Path) -> None:
    PACKAGED_MAKERS[name](path := tmp_path / "made.pt", tag)
    relocate(path, moved := tmp_path / "moved.pt", to=to, all=True)
    ours, before = load(path, name)
    theirs, after = load(moved, name)
    assert after == dict.fromkeys(before, to)
    assert storage_bytes(ours) == storage_bytes(theirs)
    if name != "module":  # whose class is another one in each package
        assert_same_tree(ours, theirs)
    assert_sound_zip(moved, path)
    old, new = files(path), files(moved)
    assert list(old) == list(new)
    pickles = {"/".join([at.replace(".", "/"), file]) for at, file in PICKLES[name].values()}
    assert all(old[each] == new[each] for each in old if each not in pickles)


def test_a_storage_may_be_looked_at_as_several_dtypes(tmp_path: Path) -> None:
    x = torch.arange(4.0)
    path = fill(tmp_path / "made.pt", a={"f": x, "i": x.view(torch.int32)}, b=x.view(torch.uint8))
    entries = {spelled(entry.path): entry for entry in inspect(path).tensors}
    assert {key: entry.dtype for key, entry in entries.items()} == {
        "p/a.f": "float32",
        "p/a.i": "int32",
        "p/b": "uint8",
    }
    assert len({entry.storage for entry in entries.values()}) == 1
    relocate(path, moved := tmp_path / "moved.pt", to="cuda:1")
    with having_every_device() as restored:
        loaded = PackageImporter(moved).load_pickle("p", "a")
        assert set(restored.devices(loaded).values()) == {"cuda:1"}
    assert torch.equal(loaded["i"], x.view(torch.int32))


def test_bytes_that_are_no_pickle_are_left_alone(tmp_path: Path) -> None:
    with PackageExporter(path := tmp_path / "made.pt") as exporter:
        exporter.save_binary("p", "short", b"\x80")
        exporter.save_binary("p", "empty", b"")
        exporter.save_binary("p", "no_stack", b"\x80\x03.")
        exporter.save_binary("p", "more_than_one", b"\x80\x03N.N.")
        exporter.save_binary("p", "newer", b"\x80\x09N.")
        exporter.save_text("p", "text", "cuda:0.")
        exporter.save_pickle("p", "one", torch.ones(2))
    assert [spelled(entry.path) for entry in inspect(path).tensors] == ["p/one"]
    relocate(path, moved := tmp_path / "moved.pt", to="privateuseone:15")
    old, new = files(path), files(moved)
    assert {name for name in old if old[name] != new[name]} == {"p/one"}


def test_a_script_is_told_and_not_moved(tmp_path: Path, run_cli: RunCli) -> None:
    PACKAGED_MAKERS["script"](path := tmp_path / "made.pt", "cuda:1")
    manifest = inspect(path)
    assert [spelled(entry.path) for entry in manifest.tensors] == ["models/both.weight"]
    (told,) = manifest.warnings
    assert told.endswith("not shown; they are made by torch.jit._script.unpackage_script_module")
    assert "torch.jit._script.unpackage_script_module" in manifest.unknown_callables
    with pytest.raises(UnsupportedError, match="unpackage_script_module, whose devices"):
        relocate(path, tmp_path / "moved.pt", to="cpu")
    done = run_cli("relocate", path, "moved.pt", "--to", "cpu", exit=3)
    assert done.stderr.count("\n") <= 2
    assert not (tmp_path / "moved.pt").exists()


@pytest.mark.parametrize(
    ("said", "old", "new"),
    [
        ("the storage '7' is missing", b"K\0X\3\0\0\0cpu", b"K\7X\3\0\0\0cpu"),
        ("should have 16 bytes and has 12", b"cpuq\x03K\3", b"cpuq\x03K\4"),
        ("reaches outside its storage", b"K\3\x85", b"K\4\x85"),
        ("truncated", b"Rq\n.", b"Rq\n}"),
        ("not a storage", b"storage", b"shelves"),
        ("in a malformed way", b"X\7\0\0\0storage", b"X\x0e\0\0\0reduce_package"),
    ],
)
def test_bad_packages_are_refused_in_a_line(
    said: str, old: bytes, new: bytes, tmp_path: Path
) -> None:
    path = fill(tmp_path / "bad.pt", **{"a.pkl": torch.ones(3), "b": torch.zeros(2)})
    assert old in files(path)["p/a.pkl"]
    relay(path, lambda each, data: data.replace(old, new) if each == "p/a.pkl" else data)
    with pytest.raises(InputError, match=said) as raised:
        inspect(path)
    assert "\n" not in str(raised.value)


def test_pickles_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    x = torch.ones(3)
    path = fill(tmp_path / "bad.pt", a=x, b=[x])
    relay(path, lambda name, data: data.replace(b"cpu", b"mps") if name == "p/b" else data)
    with pytest.raises(CorruptError, match="is listed on 'cpu' and on 'mps'"):
        inspect(path)


def test_names_of_tensors_are_those_of_torch(tmp_path: Path) -> None:
    PACKAGED_MAKERS["optimizer"](path := tmp_path / "made.pt", "cuda:1")
    loaded, _ = load(path, "optimizer")
    named = {shown("optimizer", key) for key, _ in named_tensors(loaded)}
    assert {spelled(entry.path) for entry in inspect(path).tensors} == named
    sections = {entry.section for entry in inspect(path).tensors}
    assert sections == {"model", "optimizer"}


@pytest.mark.parametrize("nbytes", [100, 100_000])
def test_a_pickle_without_a_suffix_may_hold_long_bytes(nbytes: int, tmp_path: Path) -> None:
    held = torch.ones(3)
    path = fill(tmp_path / "in.pt", model={"w": held, "raw": bytes(nbytes)}, **{"o.pkl": [held]})
    assert [each.name for each in inspect(path).tensors] == ["p/model.w", "p/o.pkl.0"]
    relocate(path, out := tmp_path / "out.pt", to="cuda:3")
    assert b"cuda:3" in files(out)["p/model"]
    assert set(inspect(out).devices) == {"cuda:3"}
