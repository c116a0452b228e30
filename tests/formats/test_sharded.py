"""A checkpoint in several files with an index: read as one, merged, and divided again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckptmove
from ckptmove import CorruptError, InputError, UnsupportedError, UsageError, convert, inspect
from tests.conftest import ROOT, RunCli
from tests.making.checkpoints import MAKERS, save
from tests.making.tensors import of_dtype
from tests.oracles.sameness import assert_same_tree

hub: Any = pytest.importorskip("huggingface_hub")
DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "int64", "bool", "uint8")
INDEX = "model.safetensors.index.json"
TORCH_INDEX = "pytorch_model.bin.index.json"


def weights() -> dict[str, torch.Tensor]:
    """Tensors of many dtypes; 0-d, empty and large ones; NaN and -0.0."""
    named = {
        f"layers.{n}.{dtype}": of_dtype(getattr(torch, dtype)) for n in (0, 1) for dtype in DTYPES
    }
    named |= {
        "step": torch.tensor(3),
        "none": torch.empty(0, 3),
        "nan": -torch.full((9,), torch.nan),
    }
    return named | {"big": torch.arange(700.0), "zero": torch.tensor([-0.0, 0.0])}


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def assert_same_tensors(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    def told(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {name: (t.dtype, tuple(t.shape), raw(t)) for name, t in tensors.items()}

    assert told(ours) == told(theirs)


def by_hub(folder: Path, tensors: dict[str, torch.Tensor], limit: int, *, safe: bool) -> Path:
    """A folder that huggingface_hub wrote."""
    folder.mkdir()
    hub.save_torch_state_dict(tensors, folder, max_shard_size=limit, safe_serialization=safe)
    return folder


@pytest.fixture
def safe(tmp_path: Path) -> Path:
    return by_hub(tmp_path / "safe", weights(), 1000, safe=True)


@pytest.fixture
def pickled(tmp_path: Path) -> Path:
    return by_hub(tmp_path / "pickled", weights(), 1000, safe=False)


# -- reading ---------------------------------------------------------------------------------------


def test_it_is_inspected_as_one(safe: Path) -> None:
    for path in (safe, safe / INDEX):
        manifest = inspect(path)
        assert manifest.format == "safetensors-sharded"
        assert manifest.nbytes == sum(file.stat().st_size for file in safe.iterdir())
        assert not manifest.warnings
        assert manifest.verdict == "stores no devices"
        files = sorted(safe.glob("*.safetensors"))
        listed = {entry.name: entry for entry in manifest.tensors}
        assert listed.keys() == weights().keys()
        for name, tensor in weights().items():
            storage = manifest.storages[listed[name].storage or ""]
            assert storage.extent is not None
            content = files[storage.extent.source].read_bytes()
            assert content[storage.extent.start : storage.extent.end] == raw(tensor)


def test_what_torch_saved_is_inspected_as_one(pickled: Path) -> None:
    manifest = inspect(pickled)
    assert (manifest.format, manifest.path) == ("torch-sharded", str(pickled / TORCH_INDEX))
    assert {entry.name for entry in manifest.tensors} == weights().keys()
    assert {str(entry.section) for entry in manifest.tensors} == {"model"}
    files = sorted(pickled.glob("*.bin"))
    for entry in manifest.tensors:
        storage = manifest.storages[entry.storage or ""]
        assert storage.extent is not None
        content = files[storage.extent.source].read_bytes()
        assert content[storage.extent.start : storage.extent.end] == raw(weights()[entry.name])


def test_it_is_loaded_as_one(safe: Path, pickled: Path) -> None:
    for folder in (safe, pickled):
        for path in (folder, next(folder.glob("*.index.json"))):
            assert_same_tensors(ckptmove.load(path), weights())
        part = ckptmove.load(folder, select="layers.1.*")
        assert part.keys() == {name for name in weights() if name.startswith("layers.1.")}


# -- merging and dividing --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["safe", "pickled"])
def test_it_is_merged(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    folder = request.getfixturevalue(kind)
    report = convert(folder, tmp_path / "out.safetensors")
    assert report.source_format == ("safetensors-sharded" if kind == "safe" else "torch-sharded")
    assert report.nbytes == sum(file.stat().st_size for file in folder.iterdir())
    assert_same_tensors(load_file(tmp_path / "out.safetensors"), weights())
    convert(folder, tmp_path / "out.pt")
    assert_same_tensors(torch.load(tmp_path / "out.pt", weights_only=True), weights())


@pytest.mark.parametrize("kind", ["safe", "pickled"])
def test_it_is_divided_again(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    index = next(request.getfixturevalue(kind).glob("*.index.json"))
    report = convert(index, tmp_path / "out", max_shard_size="3KB")
    names = {Path(name).name for name in report.files}
    assert names == {path.name for path in (tmp_path / "out").iterdir()}
    assert INDEX in names
    where = json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"]
    found: dict[str, torch.Tensor] = {}
    for name in names - {INDEX}:
        with safe_open(tmp_path / "out" / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            assert {key for key, own in where.items() if own == name} == set(file.keys())
            found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no dict)
    assert_same_tensors(found, weights())
    convert(tmp_path / "out", tmp_path / "merged.safetensors")
    assert_same_tensors(load_file(tmp_path / "merged.safetensors"), weights())


def test_it_is_divided_as_by_the_hub(tmp_path: Path) -> None:
    for limit in (100, 1000, 3000, 10**6):
        theirs = by_hub(tmp_path / f"theirs{limit}", weights(), limit, safe=True)
        torch.save(weights(), tmp_path / "in.pt")
        convert(tmp_path / "in.pt", tmp_path / f"ours{limit}", max_shard_size=limit, bare=True)
        ours = tmp_path / f"ours{limit}"
        assert {path.name for path in ours.iterdir()} == {path.name for path in theirs.iterdir()}
        for path in theirs.iterdir():
            if path.suffix == ".json":
                assert json.loads(path.read_text()) == json.loads((ours / path.name).read_text())
            else:
                assert path.read_bytes() == (ours / path.name).read_bytes()


def test_the_hub_loads_it(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    torch.save(model.state_dict(), tmp_path / "in.pt")
    convert(tmp_path / "in.pt", tmp_path / "out", max_shard_size="100")
    fresh = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    assert hub.load_torch_model(fresh, tmp_path / "out", strict=True) == ([], [])
    assert_same_tensors(fresh.state_dict(), model.state_dict())


@pytest.mark.parametrize(
    "name", ["adamw_training", "tied_weights", "whole_tied_module", "ema", "recursive"]
)
def test_everything_comes_back(name: str, tmp_path: Path) -> None:
    source = save(tmp_path / "in.pt", MAKERS[name](), tag="cpu")
    convert(source, tmp_path / "shards", max_shard_size=300)
    convert(tmp_path / "shards", tmp_path / "merged.safetensors")
    convert(tmp_path / "shards", tmp_path / "other", max_shard_size=2000)
    convert(source, tmp_path / "once.safetensors")
    convert(tmp_path / "once.safetensors", tmp_path / "again.pt", trust_objects=True)
    expected = (tmp_path / "again.pt").read_bytes()
    for way in ("merged.safetensors", "shards", "other"):
        (tmp_path / "again.pt").unlink()
        convert(tmp_path / way, tmp_path / "again.pt", trust_objects=True)
        assert (tmp_path / "again.pt").read_bytes() == expected
    loaded = torch.load(tmp_path / "again.pt", weights_only=False)
    assert_same_tree(torch.load(source, weights_only=False), loaded)


def test_long_bytes_in_a_tree_are_in_a_shard(tmp_path: Path) -> None:
    saved = {"a": torch.arange(900.0), "text": os.urandom(90_000), "b": torch.ones(3)}
    torch.save(saved, tmp_path / "in.pt", pickle_protocol=4)
    convert(tmp_path / "in.pt", tmp_path / "shards", max_shard_size="2KB")
    assert len(list((tmp_path / "shards").iterdir())) == 4
    for target in ("out.pt", "again"):
        limit = "80KB" if target == "again" else None
        convert(tmp_path / "shards", tmp_path / target, max_shard_size=limit)
        assert ckptmove.load(tmp_path / target)["text"] == saved["text"]


# -- what torch saved ------------------------------------------------------------------------------


def shards_of_torch(folder: Path, *parts: Any, **options: Any) -> Path:
    """A folder as transformers wrote it: files of torch.save, and their index."""
    folder.mkdir()
    where: dict[str, str] = {}
    for n, part in enumerate(parts, 1):
        name = f"pytorch_model-{n:05}-of-{len(parts):05}.bin"
        torch.save(part, folder / name, **options)
        where |= dict.fromkeys(part, name)
    (folder / TORCH_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


@pytest.mark.parametrize("zipped", [True, False])
def test_tied_tensors_stay_tied(zipped: bool, tmp_path: Path) -> None:
    tied = torch.arange(6.0)
    first = {"a": tied, "b": tied, "half": tied[3:], "t": torch.ones(2, 3).t()}
    folder = shards_of_torch(
        tmp_path / "in", first, {"c": tied.clone()}, _use_new_zipfile_serialization=zipped
    )
    convert(folder, tmp_path / "out.pt")
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert_same_tree(loaded, {**first, "c": tied.clone()})
    assert loaded["half"].data_ptr() == loaded["a"].data_ptr() + 12
    assert type(loaded) is dict
    report = convert(folder, tmp_path / "out.safetensors")
    assert report.shared == {"b": "a", "half": "a"}


def test_ordered_dicts_are_one(tmp_path: Path) -> None:
    parts = [OrderedDict({"a": torch.ones(1)}), OrderedDict({"b": torch.ones(2)})]
    convert(shards_of_torch(tmp_path / "in", *parts), tmp_path / "out.pt")
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert_same_tree(loaded, OrderedDict(a=torch.ones(1), b=torch.ones(2)))


def test_attributes_of_the_dicts_are_a_loss(tmp_path: Path) -> None:
    part = torch.nn.Linear(2, 2).state_dict()
    folder = shards_of_torch(tmp_path / "in", part)
    with pytest.raises(ckptmove.RefusedError, match="would lose <attributes of its dicts>"):
        convert(folder, tmp_path / "out.safetensors")
    convert(folder, tmp_path / "out.safetensors", drop="<attributes*")
    assert_same_tensors(load_file(tmp_path / "out.safetensors"), dict(part))


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"a": {}, 1: torch.ones(1)}, "holds a dict with a key that is not a string"),
        ([], "does not hold a dict of tensors"),
        (torch.ones(1), "does not hold a dict of tensors"),
    ],
)
def test_other_than_dicts_are_refused(part: Any, message: str, tmp_path: Path) -> None:
    folder = shards_of_torch(tmp_path / "in", {"b": torch.ones(1)})
    torch.save(part, folder / "pytorch_model-00001-of-00001.bin")
    with pytest.raises(UnsupportedError, match=message):
        inspect(folder)


def test_shards_are_not_written_by_torch(pickled: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="torch-zip is always one file"):
        convert(pickled, tmp_path / "out", format="torch-zip", max_shard_size="1KB")
    assert not (tmp_path / "out").exists()


# -- hostile and damaged ---------------------------------------------------------------------------


def remap(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


NAMES = (
    *("../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "", "a\\b", "C:\\x", "x\0y"),
    *("w" * 256, "\ud800"),
)


@pytest.mark.parametrize("name", NAMES)
def test_no_name_leads_elsewhere(name: str, safe: Path) -> None:
    shutil.copy(next(safe.glob("*.safetensors")), safe.parent / "x.safetensors")
    remap(safe, lambda where: where.update(step=name))
    with pytest.raises(CorruptError) as raised:
        inspect(safe)
    assert "\n" not in str(raised.value)
    assert raised.value.path == str(safe / INDEX)


def test_files_may_be_links(safe: Path, tmp_path: Path) -> None:
    """So lies everything in the cache of the Hub."""
    snapshot = tmp_path / "models--hub" / "snapshots" / "abc"
    blobs = tmp_path / "models--hub" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for n, path in enumerate(sorted(safe.iterdir())):
        path.rename(blobs / f"{n}")
        (snapshot / path.name).symlink_to(f"../../blobs/{n}")
    assert_same_tensors(ckptmove.load(snapshot), weights())
    (tmp_path / "link").symlink_to(snapshot)
    assert_same_tensors(ckptmove.load(tmp_path / "link"), weights())
    with pytest.raises(UnsupportedError, match="the cache of the Hub"):
        inspect(tmp_path / "models--hub")


def first(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def last(folder: Path) -> Path:
    return max(folder.glob("*.safetensors"))


def dangle(folder: Path) -> None:
    path = first(folder)
    path.unlink()
    path.symlink_to("none")


def replace_by_folder(folder: Path) -> None:
    path = first(folder)
    path.unlink()
    path.mkdir()


def twice(folder: Path) -> None:
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(text.replace('"step":', '"zero": "x.safetensors", "step":'))


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda f: first(f).unlink(), "its file 'model-00001-of-0.* is missing"),
    "dangling": (dangle, "is missing"),
    "a directory": (replace_by_folder, "is a directory"),
    "truncated": (lambda f: os.truncate(first(f), first(f).stat().st_size - 1), "truncated"),
    "empty": (lambda f: os.truncate(first(f), 0), "is empty"),
    "a pickle": (lambda f: torch.save({"a": torch.ones(1)}, first(f)), "different formats"),
    "no checkpoint": (lambda f: first(f).write_text("hello"), "is not a checkpoint"),
    "a pointer": (lambda f: first(f).write_text("version https://git-lfs"), "Git LFS pointer"),
    "not held": (lambda f: remap(f, lambda w: w.update(more=first(f).name)), "'more' should be in"),
    "elsewhere": (
        lambda f: remap(f, lambda w: w.update(dict.fromkeys(w, first(f).name))),
        "should be in model-00001",
    ),
    "in two": (
        lambda f: save_file(load_file(first(f)) | load_file(last(f)), first(f)),
        "both",
    ),
    "twice": (twice, "it says 'zero' twice"),
    "nothing": (lambda f: remap(f, lambda w: w.clear()), "it lists no files"),
    "no map": (lambda f: (f / INDEX).write_text("{}"), "not the index of a checkpoint"),
    "a list": (lambda f: (f / INDEX).write_text('{"weight_map": []}'), "weight_map does not give"),
    "numbers": (lambda f: (f / INDEX).write_text('{"weight_map": {"a": 1}}'), "weight_map does"),
    "no JSON": (lambda f: (f / INDEX).write_text('{"weight_map'), "is not JSON"),
    "deep": (lambda f: (f / INDEX).write_text('{"a":' * 10**5), "nested more than"),
    "long": (lambda f: os.truncate(f / INDEX, 100_000_001), "not a checkpoint|is not"),
    "no tree": (
        lambda f: (f / INDEX).write_text(
            json.dumps({**json.loads((f / INDEX).read_text()), "metadata": {"ckptmove": 1}})
        ),
        "its tree is malformed",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_line(fault: str, safe: Path, tmp_path: Path) -> None:
    change, message = FAULTS[fault]
    change(safe)
    with pytest.raises(InputError, match=message) as raised:
        convert(safe, tmp_path / "out.safetensors")
    assert "\n" not in str(raised.value)
    assert str(raised.value.path).startswith(str(safe))
    assert [path.name for path in tmp_path.iterdir()] == ["safe"]


def test_a_pipe_is_no_shard(safe: Path) -> None:
    path = first(safe)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(InputError, match="not a regular file"):
        inspect(safe)


def test_tensors_that_the_index_does_not_list_count(safe: Path, tmp_path: Path) -> None:
    remap(safe, lambda where: (where.pop("step"), where.pop("zero")))
    report = convert(safe, tmp_path / "out.safetensors")
    assert report.warnings == (
        "its files hold 2 tensors that the index does not list, for example 'step': "
        "they count as well",
    )
    assert_same_tensors(load_file(tmp_path / "out.safetensors"), weights())


def test_a_tree_that_does_not_fit_is_ignored(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(100), "b": {"c": torch.ones(99)}}, tmp_path / "in.pt")
    convert(tmp_path / "in.pt", tmp_path / "out", max_shard_size=100)
    assert not inspect(tmp_path / "out").warnings
    path = first(tmp_path / "out")
    save_file({**load_file(path), "more": torch.ones(1)}, path)
    remap(tmp_path / "out", lambda where: where.update(more=path.name))
    manifest = inspect(tmp_path / "out")
    assert manifest.warnings[0].endswith("its tree is ignored")
    assert {entry.name for entry in manifest.tensors} == {"a", "b.c", "more"}


def test_a_tree_of_one_file_is_not_that_of_all(safe: Path, tmp_path: Path) -> None:
    path = first(safe)
    save_file(load_file(path), path)
    convert(path, tmp_path / "x.safetensors")
    shutil.move(tmp_path / "x.safetensors", path)
    manifest = inspect(safe)
    assert manifest.warnings == (
        f"the tree in {path.name} describes that one file only; it is ignored",
    )
    assert_same_tensors(ckptmove.load(safe), weights())


def test_more_files_are_read_than_can_be_open(tmp_path: Path) -> None:
    tensors = {f"t{n}": torch.ones(30) for n in range(60)}
    folder = by_hub(tmp_path / "in", tensors, 120, safe=True)
    command = f"ulimit -n 40; exec {sys.executable} -m ckptmove inspect {folder} -q"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_an_index_is_not_replaced_by_what_it_stands_for(safe: Path) -> None:
    before = (safe / INDEX).read_bytes()
    with pytest.raises(ckptmove.RefusedError, match="the source itself"):
        convert(safe / INDEX, safe / INDEX, format="safetensors", force=True)
    with pytest.raises(ckptmove.RefusedError, match="the source itself"):
        convert(safe, first(safe), force=True)
    assert (safe / INDEX).read_bytes() == before


def test_only_its_folder_is_relocated(safe: Path, pickled: Path, run_cli: RunCli) -> None:
    done = run_cli("relocate", pickled / TORCH_INDEX, "--to", "cuda:0", exit=3)
    assert "give one of those files instead" in done.stderr
    one = min(pickled.glob("*.bin"))
    ckptmove.relocate(one, to="cuda:0", in_place=True)
    assert inspect(pickled).verdict.startswith("mixed: cuda:0")
    ckptmove.relocate(pickled, to="cuda:0", in_place=True)
    assert inspect(pickled).verdict.startswith("uniform cuda:0")
    assert ckptmove.relocate(safe, to="cuda:0").method == "none"


# -- public files ----------------------------------------------------------------------------------


def test_a_public_folder(corpus: Path, tmp_path: Path) -> None:
    folder = corpus / "FluxML+SafeTensors.jl__test__sharded"
    expected: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        expected |= load_file(path)
    assert len(inspect(folder).tensors) == len(expected) == 36
    convert(folder, tmp_path / "one.safetensors")
    assert_same_tensors(load_file(tmp_path / "one.safetensors"), expected)
    convert(folder, tmp_path / "again", max_shard_size=500)
    convert(tmp_path / "again", tmp_path / "out.pt")
    assert_same_tensors(torch.load(tmp_path / "out.pt", weights_only=True), expected)
