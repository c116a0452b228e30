"""Files from public repositories: what holds tensors is read, all else refused in a line.

None of them is unpickled: rows whose kind starts with `malicious/` run code then.
"""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptmove import InputError, Manifest, inspect, relocate
from tests.conftest import RunCli, corpus_folder
from tests.making import trees
from tests.oracles.readers import assert_same_loads, assert_same_records, assert_sound_zip

Row = dict[str, str]

#: Files in which one tensor object has several names: how many more names than tensors.
MORE_NAMES = {"TestSerialization.test_lstm.state_dict.pt": 2, "simple_model_on_speaker": 2}


def rows() -> list[Row]:
    """The rows of the manifest, or none where there is no corpus."""
    table = corpus_folder() / "MANIFEST.tsv"
    if not table.is_file():
        return []
    with table.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


#: Kind of a file → its format.
READ = {
    "zip": "torch-zip",
    "legacy": "torch-legacy",
    "pickle": "pickle",
    "tar-legacy": "torch-tar",
    "torchscript": "torchscript",
    "torchscript-lite": "torchscript",
    "zip-container": "zip-bundle",
    "torchscript-v1(json)": "torchscript-v1",
}
OTHERS = [row for row in rows() if row["kind"] in READ and row["kind"] != "zip"]
#: Plain pickles that hold no tensors: they are read, and nothing in them is run.
BARE = ("malicious/pickle", "dcp-metadata")
#: See test_safetensors.py and test_sharded.py.
ELSEWHERE = ("safetensors", "hf-index-json")
STRANGERS = [row["file"] for row in rows() if row["kind"] not in (*READ, *BARE, *ELSEWHERE)]


@pytest.fixture
def row(corpus_zip: Path) -> Row:
    """What the manifest says of a zip."""
    return next(row for row in rows() if row["file"] == corpus_zip.name)


def test_a_zip_holds_what_its_row_says(corpus_zip: Path, row: Row) -> None:
    manifest = inspect(corpus_zip)
    said = ",".join(f"{device}x{n.storages}" for device, n in manifest.devices.items())
    assert said == row["storage_devices"]
    more = sum(n for part, n in MORE_NAMES.items() if part in corpus_zip.name)
    assert len(manifest.tensors) == int(row["tensors"]) + more
    assert manifest.nbytes == int(row["size"]) == corpus_zip.stat().st_size
    sharing = re.search(r"shared storages=(\d+) \((\d+) tensors\)", row["features"])
    shared = [entry for entry in manifest.tensors if entry.shared_with]
    assert len({entry.storage for entry in shared}) >= int(sharing[1] if sharing else 0)
    views = re.search(r"nonzero storage_offset=(\d+)", row["features"])
    assert sum(entry.offset > 0 for entry in manifest.tensors) == int(views[1] if views else 0)


def test_a_zip_names_the_callables_its_row_names(corpus_zip: Path, row: Row) -> None:
    manifest = inspect(corpus_zip)
    named = re.search(r"globals: (.*)", row["features"])
    for name in named[1].split(", ") if named else []:
        assert re.sub(r" \+\d+$", "", name) in manifest.globals


def told(manifest: Manifest) -> Any:
    """All that a manifest says, but for what is the file's own."""
    # JSON is written with other white space, so that its size is the file's own.
    records = tuple(record._replace(nbytes=0) for record in manifest.records)
    return replace(manifest, path="", nbytes=0, warnings=(), records=records).to_json()


@pytest.mark.sample(6)
@pytest.mark.parametrize("to", ["xpu:3", "privateuseone:15", "mps"])
def test_a_zip_goes_there_and_back(corpus_zip: Path, row: Row, to: str, tmp_path: Path) -> None:
    before = inspect(corpus_zip)
    (home,) = before.devices
    there, back = tmp_path / "there.pt", tmp_path / "back.pt"
    report = relocate(corpus_zip, there, map={home: to}, all=True, allow_unmatched=True)
    moved = {} if to == home else {f"{home}→{to}": before.devices[home]}
    assert {k: tuple(v)[:2] for k, v in report.moved.items()} == {
        k: v[1:] for k, v in moved.items()
    }
    assert set(inspect(there).devices) == {to}
    relocate(there, back, map={to: home}, all=True, allow_unmatched=True)
    assert told(inspect(back)) == told(before)
    for path in (there, back):
        assert_sound_zip(path, corpus_zip)
        assert_same_records(corpus_zip, path)
        if row["weights_only_load_cpu"].startswith("OK"):
            assert_same_loads(corpus_zip, path, weights_only=True)


@pytest.mark.sample(6)
@pytest.mark.parametrize("row", OTHERS, ids=lambda row: row["kind"] + " " + row["file"][-24:])
@pytest.mark.parametrize("to", ["cuda:5", "privateuseone:15"])
def test_other_formats_go_there_and_back(row: Row, to: str, corpus: Path, tmp_path: Path) -> None:
    source = corpus / row["file"]
    there, back = tmp_path / "there", tmp_path / "back"
    before = inspect(source)
    assert before.format == READ[row["kind"]]
    said = {f"{device}x{n.storages}" for device, n in before.devices.items() if n.storages}
    assert said == set(row["storage_devices"].split(",")) - {"-"}
    homes = {storage.id: storage.location for storage in before.storages.values()}
    relocate(source, there, to=to, all=True)
    assert {storage.location for storage in inspect(there).storages.values()} <= {to}
    assert contents(there, inspect(there)) == contents(source, before)
    if len(set(homes.values())) == 1:
        relocate(there, back, to=next(iter(homes.values())), all=True)
        assert told(inspect(back)) == told(before)
        assert contents(back, inspect(back)) == contents(source, before)


def contents(path: Path, manifest: Manifest) -> dict[str, bytes]:
    """The bytes of each storage, read from where it is said to be."""
    data = path.read_bytes()
    extents = {key: storage.extent for key, storage in manifest.storages.items()}
    return {key: data[each.start : each.end] for key, each in extents.items() if each}


@pytest.mark.parametrize(
    "row", [row for row in rows() if row["kind"] in BARE], ids=lambda row: row["file"][-24:]
)
def test_bare_pickles_are_read_or_refused(row: Row, corpus: Path) -> None:
    try:
        manifest = inspect(corpus / row["file"])
    except InputError:
        return
    assert manifest.tensors == ()


@pytest.mark.skipif(not STRANGERS, reason="no corpus")
def test_there_is_something_to_refuse() -> None:
    assert len(STRANGERS) > 20


@pytest.mark.sample(7)
@pytest.mark.parametrize("name", STRANGERS)
def test_what_torch_save_did_not_write_is_refused(
    name: str, corpus: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    for verb in (inspect, lambda path: relocate(path, tmp_path / "out.pt", to="cpu")):
        with pytest.raises(InputError) as raised:
            verb(corpus / name)
        assert "\n" not in str(raised.value)
    done = run_cli("inspect", corpus / name, "--json", exit=3)
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)
    assert done.stderr.startswith("ckptmove: ")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_whose_files_store_no_devices_is_copied(corpus: Path, tmp_path: Path) -> None:
    folder = corpus / "FluxML+SafeTensors.jl__test__sharded"
    assert relocate(folder, to="cuda:0").destination is None
    report = relocate(folder, tmp_path / "out", to="cuda:0")
    assert {each.method for each in report.files} == {"clone"}
    assert trees.contents(tmp_path / "out") == trees.contents(folder)
