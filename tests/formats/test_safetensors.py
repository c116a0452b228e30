"""safetensors files: inspect tells what the library loads; nothing in them can be relocated."""

from __future__ import annotations

import csv
import io
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ckptmove import (
    CorruptError,
    InputError,
    Manifest,
    Section,
    UnsupportedError,
    convert,
    inspect,
    relocate,
)
from ckptmove.manifest.dtypes import SAFETENSORS
from tests.conftest import RunCli, corpus_files, corpus_folder
from tests.making.tensors import of_dtype

NAMES = ("a", "model.layers.0.weight", "", "é\n", "rng_state", "param_groups", "w" * 5000)


def every_kind() -> dict[str, torch.Tensor]:
    """A tensor of each dtype; 0-d, empty and large ones; all kinds of names."""
    tensors = {name: of_dtype(getattr(torch, name)) for name in SAFETENSORS.values()}
    tensors |= {name: torch.full((n, 2), 0.5) for n, name in enumerate(NAMES)}
    return tensors | {"step": torch.tensor(3), "none": torch.empty(0, 3, 0), "nan": -torch.ones(9)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "model.safetensors"
    save_file(every_kind(), path, {"format": "pt"})
    return path


def assert_agrees(path: Path, manifest: Manifest) -> None:
    """The manifest lists what the library loads, with all its facts and bytes."""
    content = path.read_bytes()
    with safe_open(path, "pt") as file:
        assert sorted(entry.name for entry in manifest.tensors) == sorted(file.keys())
        for entry in manifest.tensors:
            assert entry.path == (entry.name,)
            tensor = file.get_tensor(entry.name)
            assert (entry.kind, entry.layout, entry.device) == ("tensor", "strided", "cpu")
            assert entry.dtype == str(tensor.dtype).removeprefix("torch.")
            assert (entry.shape, entry.stride) == (tuple(tensor.shape), tensor.stride())
            assert (entry.offset, entry.nbytes) == (0, tensor.nbytes)
            storage = manifest.storages[entry.storage or ""]
            assert storage.extent is not None
            assert storage.nbytes == storage.extent.nbytes == tensor.nbytes
            raw = bytes(tensor.reshape(-1).view(torch.uint8).numpy())
            assert content[storage.extent.start : storage.extent.end] == raw
    assert set(manifest.storages) == {entry.name for entry in manifest.tensors}
    assert manifest.format == "safetensors"
    assert manifest.nbytes == len(content)
    assert not manifest.globals
    assert not manifest.objects
    assert not manifest.warnings


def test_inspect_tells_what_the_library_loads(saved: Path) -> None:
    manifest = inspect(saved)
    assert_agrees(saved, manifest)
    assert manifest.verdict == "stores no devices"
    assert manifest.devices.keys() == {"not stored"}
    assert manifest.writer == "a library for PyTorch"
    assert {entry.section for entry in manifest.tensors} == {Section.MODEL}
    assert all(entry.state_key == entry.name for entry in manifest.tensors)


def test_tensors_are_in_the_order_of_the_header(saved: Path, tmp_path: Path) -> None:
    content = saved.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    path = tmp_path / "reordered"
    for order in (list(header), list(reversed(header)), sorted(header)):
        text = json.dumps({name: header[name] for name in order}, indent=1).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])
        manifest = inspect(path)
        order.remove("__metadata__")
        assert [entry.name for entry in manifest.tensors] == order
        assert_agrees(path, manifest)


def test_nothing_is_there(tmp_path: Path) -> None:
    path = tmp_path / "x"
    save_file({}, path)
    manifest = inspect(path)
    assert (manifest.format, manifest.tensors, manifest.writer) == ("safetensors", (), "")
    assert manifest.verdict == "no tensors"


@pytest.mark.slow
def test_many_tensors_are_no_bomb(tmp_path: Path) -> None:
    path = tmp_path / "x"
    save_file({f"{n}": torch.empty(0) for n in range(20_000)}, path)
    assert len(inspect(path).tensors) == 20_000


@pytest.mark.parametrize("length", [0x80, 0x180, 0x280, 0x380, 0x480, 0x580])
def test_a_length_that_starts_a_pickle_is_none(length: int, tmp_path: Path) -> None:
    path = tmp_path / "x"
    save_file({"w" * (length - 56): torch.ones(1)}, path)
    assert path.read_bytes()[:2] == length.to_bytes(2, "little")
    assert inspect(path).format == "safetensors"


def test_other_formats_are_not_taken_for_it(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for value in ({"a": 1}, '{"a":1}', b'{"a":1}', ['{"', "{}"], b"\0" * 4 + b"{" * 600):
        for protocol in range(6):
            path.write_bytes(pickle.dumps({"w": torch.ones(1), "x": value}, protocol))
            assert inspect(path).format == "pickle"
    for zipped in (True, False):
        buffer = io.BytesIO()
        torch.save({"w": torch.ones(1)}, buffer, _use_new_zipfile_serialization=zipped)
        path.write_bytes(buffer.getvalue())
        assert inspect(path).format == ("torch-zip" if zipped else "torch-legacy")


def test_every_option_of_inspect_works(saved: Path, run_cli: RunCli) -> None:
    assert "safetensors, " in run_cli("inspect", saved, exit=0).stdout
    assert "float8_e4m3fn" in run_cli("inspect", saved, "--tensors", exit=0).stdout
    assert "step: int64[]\n" in run_cli("inspect", saved, "--tree", exit=0).stdout
    told = json.loads(run_cli("inspect", saved, "--json", exit=0).stdout)
    assert told == inspect(saved).to_json()
    chosen = run_cli("inspect", saved, "--select", "model.*", "--json", exit=0).stdout
    assert [each["name"] for each in json.loads(chosen)["tensors"]] == ["model.layers.0.weight"]
    for device in ("cpu", "cuda:0"):  # it is loaded wherever one wants
        run_cli("inspect", saved, "--require", device, exit=0)


@pytest.mark.parametrize("to", ["cpu", "cuda:0"])
@pytest.mark.parametrize("options", [(), ("--dry-run",), ("--in-place",)])
def test_it_can_not_be_relocated(
    to: str, options: tuple[str, ...], saved: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(saved.read_bytes())
    done = run_cli("relocate", path, "--to", to, *options, exit=3)
    assert "safetensors files store no devices" in done.stderr
    assert "ckptmove convert" in done.stderr
    assert done.stderr.count("\n") == 1
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == saved.read_bytes()


def test_a_part_of_one_is_named(saved: Path, tmp_path: Path, run_cli: RunCli) -> None:
    content, path = saved.read_bytes(), tmp_path / "x"
    head = 8 + int.from_bytes(content[:8], "little")
    for nbytes in (10, 100, head - 1):
        path.write_bytes(content[:nbytes])
        with pytest.raises(
            UnsupportedError, match="looks like the beginning of a safetensors file"
        ) as raised:
            inspect(path)
        assert raised.value.hint is not None
        assert raised.value.hint.startswith("download it again, or ckptmove salvage ")
    for nbytes in (head, len(content) - 1):
        path.write_bytes(content[:nbytes])
        with pytest.raises(CorruptError, match="truncated"):
            inspect(path)
    path.write_bytes(content + b"\0")
    with pytest.raises(CorruptError, match="1 bytes follow the last tensor"):
        inspect(path)


def test_more_dimensions_than_tensors_have(tmp_path: Path) -> None:
    path = tmp_path / "x"
    save_file({"w": torch.ones([1] * 64)}, path)
    assert inspect(path).tensors[0].shape == (1,) * 64
    save_file({"w": torch.ones([1] * 65)}, path)
    with pytest.raises(UnsupportedError, match="the tensor 'w' has 65 dimensions"):
        inspect(path)


# -- files from public repositories ----------------------------------------------------------------


def count(path: Path) -> int:
    """How many tensors the manifest of the corpus says a file holds."""
    with (corpus_folder() / "MANIFEST.tsv").open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        name = path.relative_to(corpus_folder()).as_posix()
        return next(int(row["tensors"]) for row in rows if row["file"] == name)


@pytest.mark.parametrize("path", corpus_files("safetensors"))
def test_public_files_are_inspected(path: Path, tmp_path: Path) -> None:
    manifest = inspect(path)
    assert_agrees(path, manifest)
    assert len(manifest.tensors) == count(path)
    with pytest.raises(UnsupportedError, match="store no devices"):
        relocate(path, tmp_path / "out", to="cuda:0")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", corpus_files("malformed-safetensors"))
def test_broken_public_files_are_refused(path: Path, run_cli: RunCli) -> None:
    with pytest.raises(InputError) as raised:
        inspect(path)
    assert "\n" not in str(raised.value)
    done = run_cli("inspect", path, exit=3)
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)


def test_tensors_that_come_back_laid_out_otherwise_are_named(tmp_path: Path) -> None:
    complex64 = torch.randn(3, dtype=torch.complex64)
    state = {
        "plain": torch.ones(2, 3),
        "part": torch.arange(9.0)[3:6],
        "turned": torch.ones(2, 3).t(),
        "expanded": torch.arange(4.0).view(4, 1).expand(4, 3),
        "conj": complex64.conj(),
        "neg": torch.randn(3, dtype=torch.complex64).conj().imag,
        "array": np.asfortranarray(np.ones((2, 3))),
    }
    torch.save(state, tmp_path / "a.pt")
    report = convert(tmp_path / "a.pt", tmp_path / "b.safetensors")
    convert(tmp_path / "b.safetensors", tmp_path / "c.pt")
    back = torch.load(tmp_path / "c.pt", weights_only=False)
    differ = [
        name
        for name, each in state.items()
        if isinstance(each, torch.Tensor)
        and (each.stride(), each.is_conj(), each.is_neg())
        != (back[name].stride(), back[name].is_conj(), back[name].is_neg())
    ]
    assert back["array"].flags.f_contiguous
    (warning,) = report.warnings
    start, _, names = warning.rpartition(": ")
    assert start == "written contiguous, without strides, conj and neg bits of their own"
    assert differ == ["turned", "expanded", "conj", "neg"]
    assert names == "turned, expanded, conj and 1 more"
