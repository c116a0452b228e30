"""Repositories in the cache of the Hub: links into `blobs/` are files of the snapshot."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import ckptmove
from ckptmove import InputError, inspect
from tests.conftest import RunCli
from tests.making.model_folders import SNAPSHOT, cached_on_hub, copy_of

NAMES = ("transformers", "diffusers", "sentence_transformers")


@pytest.fixture(params=NAMES)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A folder as its library saves it, and a snapshot of the same in the cache."""
    plain = copy_of(request.param, tmp_path / "plain")
    return plain, cached_on_hub(plain, tmp_path / "models--a--b") / SNAPSHOT


@pytest.mark.sample(1)
def test_a_snapshot_is_what_was_saved(made: tuple[Path, Path], run_cli: RunCli) -> None:
    plain, snapshot = made
    names = {each.name for each in inspect(plain).tensors}
    assert names
    assert {each.name for each in inspect(snapshot).tensors} == names
    assert ckptmove.diff(plain, snapshot).equal
    run_cli("validate", snapshot, exit=0)
    out = snapshot.parents[2] / "out"
    run_cli("convert", snapshot, out, exit=0)
    assert ckptmove.diff(plain, out).equal
    files = [each for each in out.rglob("*") if each.is_file()]
    assert not any(each.is_symlink() for each in files)


def test_a_link_out_of_the_cache_is_refused(tmp_path: Path) -> None:
    plain = copy_of("transformers", tmp_path / "plain")
    snapshot = cached_on_hub(plain, tmp_path / "models--a--b") / SNAPSHOT
    secret = shutil.copy(plain / "model.safetensors", tmp_path / "elsewhere")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(secret)
    with pytest.raises(InputError, match="link"):
        inspect(snapshot)
    assert inspect(snapshot, follow_links=True).tensors
