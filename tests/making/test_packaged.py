"""Packages, read by torch."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
from torch.package.package_importer import PackageImporter

from tests.making.expected import having_every_device, storage_bytes
from tests.making.packaged import PACKAGED_MAKERS, PICKLES


@pytest.mark.parametrize("tag", ["cpu", "cuda:1"])
@pytest.mark.parametrize("name", PACKAGED_MAKERS)
def test_torch_reads_what_is_expected(name: str, tag: str, tmp_path: Path) -> None:
    expected = PACKAGED_MAKERS[name](path := tmp_path / "made.pt", tag)
    with having_every_device() as restored:
        importer: Any = PackageImporter(path)
        where = "cpu" if name == "script" else None
        loaded: Any = {
            at: importer.load_pickle(*place, map_location=where)
            for at, place in PICKLES[name].items()
        }
    if name == "script":
        script = loaded["both"].pop("script")
        loaded |= {f"both.script.{at}": part for at, part in script.named_parameters()}
    else:
        assert restored.devices(loaded) == expected.devices
    assert storage_bytes(loaded) == expected.storages


@pytest.mark.parametrize("name", PACKAGED_MAKERS)
def test_records(name: str, tmp_path: Path) -> None:
    PACKAGED_MAKERS[name](path := tmp_path / "made.pt", "cpu")
    with zipfile.ZipFile(path) as archive:
        names = {each.partition("/")[2] for each in archive.namelist()}
    assert {".data/extern_modules", ".data/version", ".data/python_version", "byteorder"} <= names
    assert {"/".join([at.replace(".", "/"), file]) for at, file in PICKLES[name].values()} <= names
