"""What safetensors say of the whole goes on with the tensors, and so do names of tied tensors."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_model, save_file, save_model

import ckptmove
from ckptmove import CorruptError, UnsupportedError, convert, diff, inspect, relocate, validate
from ckptmove.formats.safetensors.metadata import RECORD
from tests.conftest import RunCli
from tests.making.saving import save
from tests.oracles.readers import assert_sound_zip, loads_with_computed_offsets

LORA = {"modelspec.title": "a ünicode\ttitle", "ss_network_dim": "8", "empty": "", "": "no key"}
TENSORS = {"up": torch.arange(6.0).view(2, 3), "down": torch.ones(3, dtype=torch.bfloat16)}


class Tied(torch.nn.Module):
    """Two layers of the same parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        self.b.weight, self.b.bias = self.a.weight, self.a.bias


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "lora.safetensors", LORA | {"format": "pt"})
    return tmp_path / "lora.safetensors"


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    save_model(Tied(), str(tmp_path / "tied.safetensors"), {"made": "here"})
    return tmp_path / "tied.safetensors"


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return dict(file.metadata() or {})


def record_of(path: Path) -> bytes | None:
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith(RECORD)]
        return archive.read(names[0]) if names else None


def test_it_goes_there_and_back(lora: Path, tmp_path: Path) -> None:
    there, back = tmp_path / "there.pt", tmp_path / "back.safetensors"
    report = convert(lora, there)
    assert (report.dropped, report.warnings) == ((), ())
    assert_sound_zip(there)
    convert(there, back, bare=True)
    assert metadata_of(back) == metadata_of(lora)
    convert(back, tmp_path / "again.pt")
    convert(tmp_path / "again.pt", tmp_path / "again.safetensors", bare=True)
    assert (tmp_path / "again.safetensors").read_bytes() == back.read_bytes()
    convert(there, tmp_path / "tree.safetensors")
    assert metadata_of(tmp_path / "tree.safetensors").items() >= metadata_of(lora).items()


def test_torch_passes_over_it(lora: Path, tmp_path: Path) -> None:
    path = tmp_path / "there.pt"
    convert(lora, path)
    ways: tuple[dict[str, Any], ...] = ({}, {"mmap": True}, {"weights_only": False})
    for options in (*ways, {"map_location": "meta"}):
        loaded = torch.load(path, **options)
        assert set(loaded) == set(TENSORS)
        if not loaded["up"].is_meta:
            assert all(torch.equal(loaded[name], TENSORS[name]) for name in TENSORS)
    computed: Any = loads_with_computed_offsets(path, weights_only=True)
    assert set(computed) == set(TENSORS)


def test_relocating_keeps_it(lora: Path, tmp_path: Path) -> None:
    path = tmp_path / "there.pt"
    convert(lora, path)
    said = record_of(path)
    assert said is not None
    assert json.loads(said) == {"version": 1, "metadata": LORA}
    relocate(path, tmp_path / "moved.pt", to="privateuseone:15")
    assert record_of(tmp_path / "moved.pt") == said
    relocate(tmp_path / "moved.pt", to="privateuseone:14", in_place=True)
    assert record_of(tmp_path / "moved.pt") == said
    convert(tmp_path / "moved.pt", tmp_path / "last.pt")
    assert record_of(tmp_path / "last.pt") == said
    assert validate(path, against=lora).ok
    assert diff(lora, path).equal


def test_without_metadata_there_is_no_record(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "plain.safetensors", {"format": "pt"})
    convert(tmp_path / "plain.safetensors", tmp_path / "plain.pt")
    assert record_of(tmp_path / "plain.pt") is None


def test_a_folder_keeps_it(lora: Path, tmp_path: Path) -> None:
    convert(lora, tmp_path / "folder", max_shard_size=10)
    convert(tmp_path / "folder", tmp_path / "one.pt")
    convert(tmp_path / "one.pt", tmp_path / "one.safetensors", bare=True)
    assert metadata_of(tmp_path / "one.safetensors") == metadata_of(lora)


WRONG = {
    b"": CorruptError,
    b"{": CorruptError,
    b"[]": CorruptError,
    b"null": CorruptError,
    b'{"version":1}': CorruptError,
    b'{"version":1,"metadata":[]}': CorruptError,
    b'{"version":1,"metadata":{"a":1}}': CorruptError,
    b'{"version":1,"metadata":{"a":"1","a":"2"}}': CorruptError,
    b'{"version":1,"metadata":{},"more":0}': CorruptError,
    b'{"version":2,"metadata":{}}': UnsupportedError,
    b"[" * 100_000: CorruptError,
    b'{"version":1,"metadata":{"a":"\xff"}}': CorruptError,
}


@pytest.mark.parametrize("content", WRONG, ids=range(len(WRONG)))
def test_a_malformed_record_is_refused(content: bytes, tmp_path: Path, lora: Path) -> None:
    made = save(tmp_path / "made.pt", TENSORS)
    with zipfile.ZipFile(made, "a") as archive:
        archive.writestr(f"made/{RECORD}", content)
    torch.load(made, map_location="cpu")
    with pytest.raises(WRONG[content], match="ckptmove_metadata") as caught:
        inspect(made)
    assert len(str(caught.value)) < 200


# -- names that save_model left out ----------------------------------------------------------------


def test_tied_tensors_have_all_their_names(tied: Path, tmp_path: Path, run_cli: RunCli) -> None:
    names = ["a.bias", "a.weight", "b.bias", "b.weight"]
    manifest = inspect(tied)
    assert {each.name: each.shared_with for each in manifest.tensors} == {
        "a.bias": ("b.bias",),
        "a.weight": ("b.weight",),
        "b.bias": ("a.bias",),
        "b.weight": ("a.weight",),
    }
    assert "b.weight" in run_cli("inspect", tied, "--tensors", exit=0).stdout
    path = tmp_path / "tied.pt"
    convert(tied, path)
    for state in (torch.load(path), torch.load(path, mmap=True), ckptmove.load(tied)):
        assert sorted(state) == names
        assert state["a.weight"].data_ptr() == state["b.weight"].data_ptr()
        Tied().load_state_dict(state)
    assert diff(tied, path).equal


def test_save_model_and_load_model_know_it_after(tied: Path, tmp_path: Path) -> None:
    convert(tied, tmp_path / "tied.pt")
    convert(tmp_path / "tied.pt", back := tmp_path / "back.safetensors", bare=True)
    assert metadata_of(back) == metadata_of(tied) | {"format": "pt"}
    assert not any(load_model(Tied(), str(back)))  # neither missing nor unexpected
    assert [each.name for each in inspect(back).tensors] == [
        each.name for each in inspect(tied).tensors
    ]


def test_a_name_that_was_left_out_stays_out(tied: Path, tmp_path: Path) -> None:
    for suffix in ("pt", "safetensors"):
        convert(tied, one := tmp_path / f"one.{suffix}", exclude_tensors="b.*", bare=True)
        convert(one, last := tmp_path / f"last.{suffix}.safetensors", bare=True)
        assert sorted(each.name for each in inspect(last).tensors) == ["a.bias", "a.weight"]
        assert metadata_of(last) == {"format": "pt", "made": "here"}


@pytest.mark.parametrize(
    "metadata",
    [
        {"format": "pt"},
        {"up": "down"},  # both are tensors
        {"author": "somebody"},
        {"abc": "down"},  # save_model keeps the first by the alphabet
        {"x": "nothing"},
    ],
)
def test_other_metadata_name_nothing(metadata: dict[str, str], tmp_path: Path) -> None:
    save_file(TENSORS, path := tmp_path / "made.safetensors", metadata)
    assert {each.name for each in inspect(path).tensors} == set(TENSORS)


def test_files_that_differ_in_it_are_not_equal(lora: Path, tmp_path: Path, run_cli: RunCli) -> None:
    other = tmp_path / "other.safetensors"
    save_file(TENSORS, other, LORA | {"format": "pt", "ss_network_dim": "16", "more": "yes"})
    found = diff(lora, other)
    assert [(str(each.kind), each.name, each.old, each.new) for each in found.differences] == [
        ("value", "__metadata__.ss_network_dim", "8", "16"),
        ("value added", "__metadata__.more", None, "yes"),
    ]
    assert "__metadata__.ss_network_dim" in run_cli("diff", lora, other, exit=1).stdout
    convert(lora, tmp_path / "there.pt")
    assert diff(lora, tmp_path / "there.pt").equal  # where it lies does not count
    assert not diff(tmp_path / "there.pt", other).equal


def test_names_that_save_model_left_out_are_tensors(tied: Path, tmp_path: Path) -> None:
    torch.save(Tied().state_dict(), tmp_path / "in.pt")
    names = {each.name for each in diff(tmp_path / "in.pt", tied).differences}
    assert [name for name in names if name.startswith("__metadata__")] == ["__metadata__.made"]


def test_inspect_lists_it(lora: Path, run_cli: RunCli) -> None:
    assert inspect(lora).metadata == LORA
    assert "ss_network_dim=8" in run_cli("inspect", lora, exit=0).stdout
    assert json.loads(run_cli("inspect", lora, "--json", exit=0).stdout)["metadata"] == LORA
