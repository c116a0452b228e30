"""Folders in object stores are relocated and converted as those on disk are, or refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

import fsspec
import pytest

import ckptmove
from ckptmove import CorruptError, RefusedError
from tests.conftest import TrainingFolder
from tests.making.model_folders import copy_of
from tests.making.trees import contents
from tests.oracles.sameness import assert_same_tree
from tests.servers.object_store import Store

_NUMBERS = itertools.count()

#: What makes a folder of another, by the places of the two.
VERBS: Mapping[str, Callable[[str, str], object]] = {
    "relocate": lambda source, out: ckptmove.relocate(source, out, to="cpu"),
    "convert": lambda source, out: ckptmove.convert(source, f"{out}/"),
}


def objects(url: str) -> Mapping[str, bytes]:
    """Every object below a prefix."""
    fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    return {path[len(root) :].lstrip("/"): fs.cat_file(path) for path in fs.find(root)}


def put(folder: Path, url: str) -> str:
    """Put all files of a folder below a prefix; gives its URL."""
    fs, root = fsspec.core.url_to_fs(url)
    for name, data in contents(folder).items():
        fs.pipe_file(f"{root}/{name}", data)
    return url


@pytest.fixture
def memory() -> str:
    """A prefix of its own in the store that fsspec has in memory."""
    return f"memory://folders-{next(_NUMBERS)}"


def check_everywhere(tmp_path: Path, store: str) -> None:
    """From and to the store, and within it, a folder and a file come out as they do on disk."""
    here = copy_of("accelerate", tmp_path / "in", "cuda:1")
    there = put(here, f"{store}/in")
    for verb, make in VERBS.items():
        make(str(here), str(tmp_path / verb))
        right = contents(tmp_path / verb)
        make(there, str(tmp_path / f"{verb}-down"))
        assert contents(tmp_path / f"{verb}-down") == right
        for name, source in (("up", str(here)), ("within", there)):
            make(source, f"{store}/{verb}-{name}")
            assert objects(f"{store}/{verb}-{name}") == right
    ckptmove.convert(there, f"{store}/one.safetensors")
    ckptmove.convert(here, tmp_path / "one.safetensors")
    assert objects(f"{store}/one.safetensors")[""] == (tmp_path / "one.safetensors").read_bytes()
    ckptmove.convert(f"{store}/one.safetensors", f"{store}/back/")
    assert objects(f"{store}/back").keys() == contents(here).keys()


def check_that_it_is_read_alike(source: Path, store: str) -> None:
    """Every verb that reads says of a folder in the store what it says of one on disk."""
    there = put(source, f"{store}/in")
    here, found = ckptmove.inspect(source), ckptmove.inspect(there)
    assert (found.verdict, found.files) == (here.verdict, here.files)
    assert ckptmove.validate(there).ok
    assert ckptmove.diff(source, there).equal
    loaded = ckptmove.load(there, map_location="cpu")
    assert_same_tree(loaded, ckptmove.load(source, map_location="cpu"))
    assert list(ckptmove.load(there, map_location="cpu", select="optimizer")) == ["optimizer"]
    planned = ckptmove.relocate(there, to="cpu", dry_run=True)
    assert planned.files == ckptmove.relocate(source, to="cpu", dry_run=True).files
    fs, path = fsspec.core.url_to_fs(f"{there}/optimizer.pt")
    fs.pipe_file(path, fs.cat_file(path)[:1000])
    report = ckptmove.validate(there)
    assert not report.ok
    assert "optimizer.pt" in str(report)


@pytest.mark.slow
def test_a_trainer_in_memory(training_folder: TrainingFolder, memory: str) -> None:
    check_that_it_is_read_alike(training_folder("trainer"), memory)


@pytest.mark.slow
def test_a_trainer_in_s3(training_folder: TrainingFolder, store: Store) -> None:
    check_that_it_is_read_alike(training_folder("trainer"), store.url("trainer"))


def test_a_folder_in_memory(tmp_path: Path, memory: str) -> None:
    check_everywhere(tmp_path, memory)


@pytest.mark.slow
def test_a_folder_in_s3(tmp_path: Path, store: Store) -> None:
    check_everywhere(tmp_path, store.url("folders"))


def test_what_is_there_is_replaced_only_if_asked(tmp_path: Path, memory: str) -> None:
    source = copy_of("accelerate", tmp_path / "in", "cuda:1")
    for verb, make in VERBS.items():
        make(str(source), f"{memory}/{verb}")
        before = objects(f"{memory}/{verb}")
        with pytest.raises(RefusedError, match="the destination exists"):
            make(str(source), f"{memory}/{verb}")
        assert objects(f"{memory}/{verb}") == before


def test_in_place_and_damage_leave_everything_as_it_was(tmp_path: Path, memory: str) -> None:
    source = put(copy_of("accelerate", tmp_path / "in", "cuda:1"), f"{memory}/in")
    before = objects(memory)
    with pytest.raises(RefusedError, match="in an object store, where files cannot be changed"):
        ckptmove.relocate(source, to="cpu", in_place=True)
    assert objects(memory) == before
    fs, root = fsspec.core.url_to_fs(source)
    fs.pipe_file(f"{root}/optimizer.bin", before["in/optimizer.bin"][:-90])
    before = objects(memory)
    for make in VERBS.values():
        with pytest.raises(CorruptError) as raised:
            make(source, f"{memory}/out")
        assert raised.value.path == f"{source}/optimizer.bin"
        assert objects(memory) == before
