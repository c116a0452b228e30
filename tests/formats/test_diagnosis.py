"""What errors say of broken files, and the command that keeps what is left of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import ckptmove
from ckptmove.formats.diagnosis import damage_of
from ckptmove.sources import open_source
from tests.conftest import RunCli
from tests.making.distributed import save_dcp
from tests.whole.test_salvage import FORMATS, saved, torch_zip

STRICT = ("torch-zip", "torch-legacy", "safetensors", "pickle")


def error_of(content: bytes, path: Path) -> ckptmove.InputError:
    path.write_bytes(content)
    with pytest.raises(ckptmove.InputError) as caught:
        ckptmove.inspect(path)
    assert caught.value.hint is not None
    assert f"ckptmove salvage {path} DST" in caught.value.hint
    return caught.value


@pytest.mark.parametrize("format", STRICT)
def test_an_interrupted_upload_is_named(format: str, tmp_path: Path) -> None:
    content = FORMATS[format](saved(5000))
    nbytes = len(content) * 2 // 3
    said = str(error_of(content[:nbytes], tmp_path / "run.pt"))
    found = re.search(
        r"interrupted upload: .* cut short after ([\d,]+)(?: of .*?([\d,]+))? byt", said
    )
    assert found is not None, said
    assert found[1] == f"{nbytes:,}"
    if format in ("torch-legacy", "safetensors"):
        assert found[2] == f"{len(content):,}"
    elif format == "torch-zip":
        assert nbytes < int(found[2].replace(",", "")) <= len(content)


@pytest.mark.parametrize("format", ["torch-zip", "torch-legacy"])
def test_a_full_disk_is_named(format: str, tmp_path: Path) -> None:
    content = FORMATS[format](saved(5000))
    zeros = len(content) // 3
    said = str(error_of(content[:-zeros] + bytes(zeros), tmp_path / "run.pt"))
    assert "it looks like a full disk while saving: it ends in" in said


@pytest.mark.parametrize("format", ["torch-zip", "safetensors"])
def test_two_writers_are_named(format: str, tmp_path: Path) -> None:
    content, longer = (FORMATS[format](saved(n)) for n in (5000, 6000))
    said = str(error_of(content + longer[len(content) :], tmp_path / "run.pt"))
    assert "it looks like two ranks wrote one file" in said


def test_two_writers_of_a_zip_are_named_wherever_each_was_last(tmp_path: Path) -> None:
    """Its directory is in its place, so that only the records tell."""
    other = {name: each + 1 for name, each in saved(5000).items()}
    whole = {n: torch_zip(saved(n)) for n in (5000, 5001, 9000)} | {0: torch_zip(other)}
    for one, two in ((5000, 9000), (9000, 5000), (5000, 5001), (5000, 0)):
        first, second = whole[one], whole[two]
        half = len(first) // 2
        mixed = [first[:half] + second[half:], second[:half] + first[half:]]
        mixed += [first + second[len(first) :]] if len(first) < len(second) else []
        for content in mixed:
            said = str(error_of(content, tmp_path / "run.pt"))
            assert "it looks like two ranks wrote one file" in said, (one, two)


def test_damage_at_one_place_is_not_said_to_be_of_two_writers(tmp_path: Path) -> None:
    content = torch_zip(saved(5000))
    for start in (b"PK\3\4", b"PK\7\10"):
        for found in re.finditer(re.escape(start), content):
            for at, nbytes in ((1, 1), (5, 1), (0, 700)):
                damaged = bytearray(content)
                damaged[found.start() + at : found.start() + at + nbytes] = bytes([99]) * nbytes
                (tmp_path / "run.pt").write_bytes(damaged[: len(content)])
                with open_source(tmp_path / "run.pt") as source:
                    assert "two ranks" not in (damage_of(source) or "")


@pytest.mark.parametrize("format", ["torch-legacy", "pickle", "pickle 2"])
def test_a_longer_file_behind_is_named_where_the_first_is_read(format: str, tmp_path: Path) -> None:
    content, longer = (FORMATS[format](saved(n)) for n in (5000, 6000))
    (tmp_path / "run.pt").write_bytes(content + longer[len(content) :])
    (said,) = ckptmove.inspect(tmp_path / "run.pt").warnings
    assert said.startswith(f"{len(longer) - len(content):,} bytes follow the ")
    assert said.endswith(", as where two ranks wrote one file")


@pytest.mark.sample(3)
@pytest.mark.parametrize("format", ["torch-zip", "torch-legacy", "pickle"])
@pytest.mark.parametrize("behind", [bytes(37), bytes(9000), b"signed"])
def test_validate_and_salvage_say_the_same_of_bytes_behind_the_end(
    format: str, behind: bytes, tmp_path: Path, run_cli: RunCli
) -> None:
    """torch and pickle read such a file, so nothing of it is damaged; both verbs tell of them."""
    path = tmp_path / "run.pt"
    path.write_bytes(FORMATS[format](saved(50)) + behind)
    told = f"{len(behind):,} bytes follow the "
    checked = run_cli("validate", path, exit=0)
    assert told in checked.stderr
    assert checked.stdout.endswith("; 1 warning\n")
    kept = run_cli("salvage", path, "out.safetensors", exit=0 if format == "torch-zip" else 1)
    assert told in kept.stderr
    assert "ranks" not in kept.stdout
    report = json.loads(Path(f"{tmp_path}/out.safetensors.salvage.json").read_text())
    assert not report["damage"] or (len(behind) == 9000 and format != "torch-zip")


def test_several_saves_into_one_file_are_salvaged_by_number(
    tmp_path: Path, run_cli: RunCli
) -> None:
    with (tmp_path / "run.pt").open("wb") as file:
        for n in range(3):
            torch.save({"w": torch.full((2,), n)}, file)
    said = run_cli("inspect", "run.pt", exit=3).stderr
    assert "it looks like several saves went into one open file" in said
    kept = run_cli("salvage", "run.pt", "out.pt", exit=0)
    assert "3 zips follow each other" in kept.stderr
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert {name: each.tolist() for name, each in loaded.items()} == {
        f"{n}.w": [n, n] for n in range(3)
    }
    content = bytearray((tmp_path / "run.pt").read_bytes())
    content[content.rindex(torch.full((2,), 2).numpy().tobytes())] ^= 1  # in the last zip
    (tmp_path / "run.pt").write_bytes(content)
    run_cli("salvage", "run.pt", "two.pt", exit=1)
    assert set(torch.load(tmp_path / "two.pt", weights_only=True)) == {"0.w", "1.w"}


def test_every_verb_names_salvage(tmp_path: Path, run_cli: RunCli) -> None:
    (tmp_path / "run.pt").write_bytes(torch_zip(saved(5000))[:40_000])
    (tmp_path / "ok.pt").write_bytes(torch_zip(saved(50)))
    for verb, code in {
        "inspect run.pt": 3,
        "relocate run.pt --to cpu": 3,
        "relocate run.pt --to cpu --in-place": 3,
        "convert run.pt": 3,
        "diff run.pt ok.pt": 3,
        "diff ok.pt run.pt": 3,
        "validate run.pt": 1,
        "validate ok.pt --against run.pt": 1,
    }.items():
        said = run_cli(*verb.split(), exit=code)
        told = said.stdout + said.stderr
        assert "looks like an interrupted upload" in told, verb
        assert "ckptmove salvage run.pt DST keeps what is left" in told, verb


def test_files_that_are_not_broken_are_not_said_to_be(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    for content in (b"precious", b"GGUF" + bytes(100), b'{"a": 1}'):
        path.write_bytes(content)
        with pytest.raises(ckptmove.InputError) as caught:
            ckptmove.inspect(path)
        assert "salvage" not in f"{caught.value} {caught.value.hint}"


def test_the_command_exits_with_1_unless_all_is_proven(tmp_path: Path, run_cli: RunCli) -> None:
    content, path, out = torch_zip(saved()), tmp_path / "run.pt", tmp_path / "out.safetensors"
    path.write_bytes(content)
    done = run_cli("salvage", path, out, "--json", exit=0)
    assert json.loads(done.stdout)["complete"]
    run_cli("salvage", path, out, exit=4)
    path.write_bytes(content[: content.index(b"data/2")])
    done = run_cli("salvage", path, out, "--force", exit=1)
    assert "interrupted upload" in done.stdout
    assert re.fullmatch(r"ckptmove: [^\n]+\n", done.stderr)
    beside = json.loads((tmp_path / "out.safetensors.salvage.json").read_text())
    assert not beside["complete"]
    assert beside["counts"]["lost"]
    assert "salvaged" in ckptmove.inspect(out).metadata
    before = sorted(tmp_path.iterdir())
    run_cli("salvage", path, tmp_path / "dry.pt", "--dry-run", exit=1)
    path.write_bytes(content[:20])
    run_cli("salvage", path, tmp_path / "dry.pt", exit=3)
    run_cli("salvage", path, f"{tmp_path}/", exit=2)
    assert sorted(tmp_path.iterdir()) == before


def test_a_file_of_torch_can_be_written(tmp_path: Path, run_cli: RunCli) -> None:
    state = saved()
    (tmp_path / "run.pt").write_bytes(torch_zip(state)[:-400])
    run_cli("salvage", tmp_path / "run.pt", tmp_path / "out.pt", exit=0)
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    assert loaded["tied"].data_ptr() == loaded["layer0"].data_ptr()


def test_a_shard_of_a_distributed_checkpoint_is_not_two_writers(tmp_path: Path) -> None:
    """Zips in a row are what it is; what is left of the folder is named, not of its first zip."""
    state = {"w": torch.arange(3000.0), "b": torch.ones(7), "step": 3}
    folder = save_dcp(tmp_path / "run", state)
    (shard,) = folder.glob("*.distcp")
    whole = shard.read_bytes()
    cases = [(shard, whole), (folder, whole[: len(whole) // 2]), (folder, whole[:-1])]
    for path, data in cases:
        shard.write_bytes(data)
        with pytest.raises(ckptmove.InputError) as caught:
            ckptmove.load(path)
        assert "two ranks" not in str(caught.value)
        assert f"salvage {shard} " not in (caught.value.hint or "")
    shard.write_bytes(whole[: len(whole) // 2] + bytes(len(whole)))
    with pytest.raises(ckptmove.InputError, match="a full disk while saving: it ends in"):
        ckptmove.load(folder)


def test_what_is_left_of_a_folder_is_named_by_its_files(tmp_path: Path, run_cli: RunCli) -> None:
    """Each file is read by itself: one that is intact is proven, what is lost is named."""
    folder = tmp_path / "run"
    folder.mkdir()
    torch.save({"state": {"m": torch.arange(500.0)}, "step": 3}, folder / "optimizer.pt")
    torch.save({"pool": torch.ones(3)}, folder / "scheduler.pt")
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(
        {"w": torch.ones(500, 3), "b": torch.arange(4.0)}, folder / "model.safetensors"
    )
    (folder / "trainer_state.json").write_text('{"global_step": 3}')
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:3000])
    said = run_cli("salvage", "run", "out.safetensors", "--partial", "zeros", exit=1)
    report = json.loads((tmp_path / "out.safetensors.salvage.json").read_text())
    fates = {each["name"]: each["fate"] for each in report["tensors"]}
    assert fates["optimizer.state.m"] == fates["scheduler.pool"] == "whole"
    assert fates["model.w"] == "in part"
    assert "unproven" not in (fates["optimizer.state.m"], fates["scheduler.pool"])
    kept = safetensors.load_file(tmp_path / "out.safetensors")
    assert torch.equal(kept["optimizer.state.m"], torch.arange(500.0))
    assert "interrupted upload" in said.stdout

    (folder / "epochs").symlink_to(tmp_path)
    (folder / "model.safetensors").write_bytes(b"nonsense")
    said = run_cli("salvage", "run", "again.safetensors", exit=1)
    assert "not looked at: epochs" in said.stdout + said.stderr
    assert "model.safetensors" in said.stdout + said.stderr
    kept = safetensors.load_file(tmp_path / "again.safetensors")
    assert torch.equal(kept["scheduler.pool"], torch.ones(3))


def test_of_two_that_are_compared_the_broken_one_is_named(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_dcp(tmp_path / name, {"w": torch.arange(32.0)})
        (tmp_path / f"{name}.pt").write_bytes(torch_zip(saved(20)))
    (item,) = (tmp_path / "a").glob("*.distcp")
    item.write_bytes(item.read_bytes().replace(b"FloatStorage", b"LongStorage\n"))
    with pytest.raises(ckptmove.InputError) as caught:
        ckptmove.diff(tmp_path / "a", tmp_path / "b")
    assert f"ckptmove salvage {tmp_path / 'a'} DST" in str(caught.value.hint)
