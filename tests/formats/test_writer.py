"""Which torch wrote a file: what the files that torch writes say, and those of known eras."""

from __future__ import annotations

import pickle
import re
import zipfile
from pathlib import Path

import pytest
import torch

from ckptmove import inspect, relocate
from tests.conftest import RunCli
from tests.making.saving import rezip, save, save_by_cpp
from tests.whole.test_corpus import Row, rows

RECENT = "a recent torch (about 2.7 or newer)"
SAVED = {"a": torch.ones(2), "b": torch.zeros(3)}

#: How the manifest of the public files words an era, by the records it found → what we say.
ERAS = {
    r"recent, about 2\.7\+": RECENT,
    r">=2\.1": "torch 2.1 or newer",
    r"1\.6-2\.0; storage keys are addresses": "torch 1.4 to 1.6",
    r"1\.6-2\.0; committed": "torch 1.6 to 2.0",
    r"torch 0\.1\.x \(tar\)": "torch 0.1",
}
DATED = [row for row in rows() if row["kind"] in ("zip", "tar-legacy")]


@pytest.mark.parametrize("row", DATED, ids=lambda row: row["file"][-30:])
def test_public_files_are_of_the_era_their_row_says(row: Row, corpus: Path) -> None:
    (said,) = {says for era, says in ERAS.items() if re.match(era, row["torch_era"])}
    assert inspect(corpus / row["file"]).writer == said


def test_the_torch_of_today_is_recent(tmp_path: Path) -> None:
    path = save(tmp_path / "made.pt", SAVED)
    assert inspect(path).writer == RECENT
    relocate(path, moved := tmp_path / "moved.pt", to="cpu")
    assert inspect(moved).writer == RECENT


def test_libtorch_is_known_by_the_storages_that_come_first(tmp_path: Path) -> None:
    path = save_by_cpp(SAVED, tmp_path / "made.pt")
    assert inspect(path).writer == "libtorch (C++)"
    relocate(path, moved := tmp_path / "moved.pt", to="privateuseone:15")
    assert inspect(moved).writer == "libtorch (C++)"


def older(path: Path, *dropped: str) -> Path:
    """The same file without the records that older releases did not write."""
    whole = path.with_suffix(".whole")
    rezip(path, whole, lambda _: False)
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(path, "w") as target:
        for info in source.infolist():
            if info.filename.partition("/")[2] not in dropped:
                target.writestr(zipfile.ZipInfo(info.filename), source.read(info))
    return path


def test_older_releases_wrote_fewer_records(tmp_path: Path) -> None:
    path = save(tmp_path / "made.pt", SAVED)
    assert inspect(older(path, ".format_version", ".storage_alignment")).writer == (
        "torch 2.1 or newer"
    )
    assert inspect(older(path, "byteorder")).writer == "torch 2.0 or newer"
    assert inspect(older(path, ".data/serialization_id")).writer == "torch 1.6 to 2.0"
    assert torch.equal(torch.load(path, map_location="cpu")["a"], SAVED["a"])


def test_a_file_without_storages_says_less(tmp_path: Path) -> None:
    path = save(tmp_path / "made.pt", {"epoch": 1})
    old = (".format_version", ".storage_alignment", "byteorder", ".data/serialization_id")
    assert inspect(older(path, *old)).writer == "torch 1.4 to 2.0"


def test_it_is_shown(tmp_path: Path, run_cli: RunCli) -> None:
    save(tmp_path / "run.pt", SAVED)
    shown = run_cli("inspect", "run.pt", exit=0).stdout.splitlines()[1]
    assert shown.endswith(f", written by {RECENT}")
    assert f'"writer": "{RECENT}"' in run_cli("inspect", "run.pt", "--json", exit=0).stdout
    (tmp_path / "run.pkl").write_bytes(pickle.dumps({"a": 1}, 2))
    shown = run_cli("inspect", "run.pkl", exit=0).stdout.splitlines()[1]
    assert shown.endswith(", written by Python, pickle protocol 2")
