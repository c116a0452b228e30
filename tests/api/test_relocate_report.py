"""What relocate writes where, and what it says of that."""

from __future__ import annotations

import json
import os
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptmove import InputError, RefusedError, RelocateReport, relocate
from tests.making.checkpoints import MAKERS, kept_on_cpu, save, save_tagged
from tests.oracles.readers import pid_locations, storage_records


def test_what_is_there_already_is_not_written(tmp_path: Path) -> None:
    source = save(tmp_path / "made.pt", MAKERS["gan"]())
    report = relocate(source, to="cuda:0")
    assert (report.destination, report.method, report.written) == (None, "none", False)
    assert (report.moved, report.bytes_written) == ({}, 0)
    assert [each.name for each in tmp_path.iterdir()] == ["made.pt"]
    report = relocate(source, tmp_path / "copy.pt", to="cuda:0")
    assert (report.method, report.written, report.moved) == ("clone", True, {})
    assert (tmp_path / "copy.pt").read_bytes() == source.read_bytes()


@pytest.mark.parametrize(
    ("name", "rules", "default"),
    [
        ("in.pt", {"to": "cuda:0"}, "in.cuda-0.pt"),
        ("in.pt", {"to": "cpu"}, "in.cpu.pt"),
        ("in.pt", {"to": "mps:0"}, "in.mps.pt"),
        ("epoch=3-step=4.5.ckpt", {"to": "cpu"}, "epoch=3-step=4.5.cpu.ckpt"),
        ("model", {"to": "cpu"}, "model.cpu"),
        (".hidden", {"to": "cpu"}, ".hidden.cpu"),
        ("in.pt", {"map": {"cuda:*": "cpu"}}, "in.relocated.pt"),
        ("in.pt", {"to": "cpu", "place": {"*": "mps"}}, "in.cpu.pt"),
        ("ключ.pt", {"to": "cpu"}, "ключ.cpu.pt"),
    ],
)
def test_the_default_name_is_beside_the_source(
    name: str, rules: dict[str, Any], default: str, tmp_path: Path
) -> None:
    source = tmp_path / name
    save(tmp_path / "plain.pt", {"weight": torch.ones(1)}, "cuda:1").rename(source)
    assert relocate(source, **rules).destination == str(tmp_path / default)
    assert {each.name for each in tmp_path.iterdir()} == {name, default}


def test_a_dry_run_decides_everything_and_writes_nothing(tmp_path: Path) -> None:
    source = save(tmp_path / "made.pt", MAKERS["adamw_training"]())
    dry = relocate(source, to="cpu", dry_run=True)
    assert [each.name for each in tmp_path.iterdir()] == ["made.pt"]
    wet = relocate(source, to="cpu")
    assert (dry.written, dry.copied, dry.bytes_written) == (False, None, 0)
    assert replace(dry, written=True, copied=wet.copied, bytes_written=wet.bytes_written) == wet
    with pytest.raises(RefusedError, match="the destination exists"):
        relocate(source, to="cpu", dry_run=True)


@pytest.mark.parametrize("link", [None, os.link, os.symlink])
def test_the_source_is_never_written(link: Any, tmp_path: Path) -> None:
    source = save(tmp_path / "made.pt", torch.ones(1))
    before = source.read_bytes(), source.stat().st_mtime_ns, source.stat().st_ino
    name = tmp_path / "other.pt" if link else source
    if link:
        link(source, name)
    for force in (False, True):
        with pytest.raises(RefusedError, match="is the source itself"):
            relocate(source, name, to="cpu", force=force)
    relocate(source, tmp_path / "out.pt", to="cpu")
    assert before == (source.read_bytes(), source.stat().st_mtime_ns, source.stat().st_ino)


def test_what_exists_is_replaced_by_force_alone(tmp_path: Path) -> None:
    source, out = save(tmp_path / "made.pt", torch.ones(1)), tmp_path / "out.pt"
    out.write_text("precious")
    with pytest.raises(RefusedError, match="the destination exists") as raised:
        relocate(source, out, to="cpu")
    assert (raised.value.hint, raised.value.path) == (
        "--force replaces it; or choose another name",
        str(out),
    )
    assert out.read_text() == "precious"
    relocate(source, out, to="cpu", force=True)
    assert pid_locations(out) == [("0", "cpu")]


def test_the_result_may_be_read_by_whom_the_source_may(tmp_path: Path) -> None:
    source = save(tmp_path / "made.pt", torch.ones(1))
    source.chmod(0o640)
    relocate(source, tmp_path / "out.pt", to="cpu")
    assert (tmp_path / "out.pt").stat().st_mode & 0o777 == 0o640


def test_strict_refuses_what_loading_would_run(tmp_path: Path) -> None:
    source = save(tmp_path / "made.pt", MAKERS["whole_module"]())
    report = relocate(source, tmp_path / "out.pt", to="cpu")
    assert "tests.making.modules.TinyNet" in report.unknown_callables
    with pytest.raises(InputError, match=r"tests\.making\.modules\.TinyNet") as raised:
        relocate(source, to="cpu", strict=True)
    assert (raised.value.exit_code, raised.value.path) == (3, str(source))
    relocate(save(tmp_path / "plain.pt", MAKERS["gan"]()), to="cpu", strict=True)


@pytest.mark.parametrize("name", ["adamw_training", "many_storages", "small_view_of_a_big_storage"])
def test_progress_adds_up_to_the_file(name: str, tmp_path: Path) -> None:
    source = save(tmp_path / "made.pt", MAKERS[name]())
    steps: list[int] = []
    relocate(source, to="cpu", progress=steps.append)
    assert sum(steps) == source.stat().st_size
    assert min(steps) >= 0


def test_the_report_says_what_was_done(tmp_path: Path) -> None:
    saved = MAKERS["adamw_training"]()
    source = tmp_path / "made.pt"
    tags = save_tagged(saved, source, "cuda:0", kept_on_cpu(saved))
    report: RelocateReport = relocate(source, to="cuda:1", values=True)
    said = report.to_json()
    assert json.loads(json.dumps(said, allow_nan=False)) == said
    out = tmp_path / "made.cuda-1.pt"
    sizes = [i.file_size for i in storage_records(out) if tags[i.filename.split("/")[2]] != "cpu"]
    moved = {"storages": len(sizes), "nbytes": sum(sizes), "tensors": 0}
    assert said["moved"] == {"cuda:0→cuda:1": moved}
    assert (said["schema"], said["source"], said["destination"]) == (1, str(source), str(out))
    assert (said["method"], said["written"]) == ("patch", True)
    assert said["copied"] in ("reflink", "kernel", "read")
    assert said["bytes_written"] == out.stat().st_size
    assert len(said["kept"]) == 8
    assert set(said["kept"][0]) == {"name", "device", "why"}
    assert [value["name"] for value in said["values_rewritten"]] == ["args.devices.0"]
    assert len(said["values_naming_devices"]) == 3
    assert said["unknown_callables"] == said["warnings"] == []
    assert said["seconds"] >= 0


def test_a_renamed_file_keeps_the_folder_inside_the_zip(tmp_path: Path) -> None:
    source = tmp_path / "renamed.pt"
    save(tmp_path / "made.pt", torch.ones(1)).rename(source)
    relocate(source, tmp_path / "out.pt", to="cpu")
    with zipfile.ZipFile(tmp_path / "out.pt") as archive:
        assert {name.split("/")[0] for name in archive.namelist()} == {"made"}
