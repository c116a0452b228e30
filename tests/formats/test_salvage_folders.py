"""Salvage of folders: a file of them missing, cut short or damaged, and what errors say of them.

The oracle is what was saved: no byte that is called right differs from it.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckptmove
from ckptmove import Fate, SalvageReport
from tests.conftest import RunCli, examples
from tests.making.distributed import save_dcp, save_hf_rank
from tests.whole.test_salvage import (
    Tensors,
    check,
    everywhere,
    nemo,
    points,
    salvaged,
    saved,
    torch_zip,
)


def distributed(folder: Path, numel: int = 24) -> dict[str, torch.Tensor]:
    """A checkpoint of DCP in two files, of which one tensor lies in three chunks; its tensors."""
    table = torch.arange(numel * 6.0).reshape(6, numel)
    boxes = [((0, 0), (3, numel)), ((3, 0), (3, 20)), ((3, 20), (3, numel - 20))]
    state = {"model": {"table": table, "bias": torch.ones(7)}, "m": torch.zeros(90), "step": 3}
    save_dcp(folder, state, {"model.table": boxes}, files=2)
    return {"model.table": table, "model.bias": torch.ones(7), "m": torch.zeros(90)}


def fates(report: SalvageReport | None) -> dict[str, Fate]:
    return {each.name: each.fate for each in report.tensors} if report is not None else {}


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, Tensors]:
    return tmp_path / "run", distributed(tmp_path / "run")


def test_an_intact_distributed_checkpoint(run: tuple[Path, Tensors]) -> None:
    report = salvaged(run[0])
    check(report, run[1])
    assert fates(report) == dict.fromkeys(run[1], Fate.UNPROVEN)
    assert {each.name for each in ckptmove.inspect(run[0]).tensors} == set(run[1])


def test_a_file_of_a_distributed_checkpoint_is_missing(run: tuple[Path, Tensors]) -> None:
    folder, state = run
    for path in sorted(folder.glob("*.distcp")):
        content = path.read_bytes()
        path.unlink()
        with pytest.raises(ckptmove.CorruptError, match="interrupted upload") as caught:
            ckptmove.inspect(folder)
        assert f"ckptmove salvage {folder} DST" in (caught.value.hint or "")
        report = salvaged(folder)
        check(report, state)
        found = fates(report)
        assert found["model.table"] is Fate.PART
        assert set(found) == set(state)
        zeros = salvaged(folder, partial="zeros")
        assert zeros is not None
        table = ckptmove.load(zeros.destination)["model.table"]
        there = table == state["model.table"]
        assert (there | (table == 0)).all()
        assert 0 < int(there.sum()) < there.numel()
        path.write_bytes(content)


def cut_distributed(folder: Path, state: Tensors, lengths: Callable[[bytes], list[int]]) -> None:
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        for nbytes in lengths(content):
            path.write_bytes(content[:nbytes])
            if path.suffix == ".distcp":
                with pytest.raises(ckptmove.InputError) as caught:
                    ckptmove.inspect(folder)
                assert "interrupted upload" in str(caught.value)
                assert f"ckptmove salvage {folder} DST" in (caught.value.hint or "")
            report = salvaged(folder)
            check(report, state)
            assert report is None or set(fates(report)) == set(state)
        path.write_bytes(content)


def test_a_distributed_checkpoint_that_was_cut_short(run: tuple[Path, Tensors]) -> None:
    cut_distributed(*run, lambda content: points(len(content), 10))


@pytest.mark.slow
def test_a_distributed_checkpoint_that_was_cut_short_anywhere(run: tuple[Path, Tensors]) -> None:
    cut_distributed(*run, lambda content: everywhere(content, 3)[1:])


@pytest.mark.slow
def test_a_large_distributed_checkpoint_that_was_cut_short(tmp_path: Path) -> None:
    state = distributed(tmp_path / "run", 50_000)
    cut_distributed(tmp_path / "run", state, lambda content: points(len(content), examples(150)))


def test_bits_of_a_distributed_checkpoint_that_were_flipped(run: tuple[Path, Tensors]) -> None:
    """Nothing is whole here, since nothing proves a name; what is unproven has right checksums."""
    folder, state = run
    chance = random.Random(0)
    for path in sorted(folder.glob("*.distcp")):
        content = path.read_bytes()
        for _ in range(examples(100)):
            damaged = bytearray(content)
            damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
            path.write_bytes(damaged)
            check(salvaged(folder), state)
        path.write_bytes(content)


@pytest.mark.parametrize("how", ["zeros", "no pickle", "cut"])
def test_values_of_a_distributed_checkpoint_that_cannot_be_read_are_told(
    how: str, tmp_path: Path
) -> None:
    """There may be tensors in them."""
    state = {"t": (torch.ones(3), "text"), "w": torch.arange(32.0)}
    folder = save_dcp(tmp_path / "in", state, files=2)
    assert not ckptmove.salvage(folder, tmp_path / "whole.pt").warnings
    (file,) = (each for each in folder.glob("*.distcp") if b"text" in each.read_bytes())
    content = file.read_bytes()
    at = content.index(b"\x80\x02")
    damaged = {
        "zeros": bytes(len(content)),
        "no pickle": content[:at] + b"\0" + content[at + 1 :],
        "cut": content[: content.index(b"text")],
    }
    file.write_bytes(damaged[how])
    report = ckptmove.salvage(folder, tmp_path / "out.pt")
    (said,) = (each for each in report.warnings if "nor tensors in them: t: " in each)
    assert said.startswith("1 value can't be read")
    assert not report.complete


def test_a_save_into_a_distributed_checkpoint_that_was_interrupted(
    run: tuple[Path, Tensors],
) -> None:
    """Nobody knows of which save its bytes are."""
    (run[0] / ".metadata.tmp").write_bytes(b"")
    assert salvaged(run[0]) is None


def test_a_distributed_checkpoint_without_metadata(run: tuple[Path, Tensors]) -> None:
    (run[0] / ".metadata").unlink()
    assert salvaged(run[0]) is None


def test_a_rank_of_the_writer_for_hugging_face_is_missing(tmp_path: Path, run_cli: RunCli) -> None:
    """Nothing tells the whole shapes: each file is read by itself, under its own name."""
    state = {"w": torch.arange(300.0), "b": torch.ones(7)}
    folder = save_hf_rank(tmp_path / "run", state)
    (path,) = folder.glob("*.safetensors")
    shutil.copy(path, folder / path.name.replace("shard-00001", "shard-00003"))
    said = run_cli("inspect", "run", exit=3).stderr
    assert "interrupted upload" in said
    assert "ckptmove salvage run DST" in said
    report = salvaged(folder)
    assert report is not None
    assert not report.complete
    assert {each.name.rpartition(".")[2] for each in report.tensors} == {"w", "b"}


def test_folders_in_a_folder_are_read(tmp_path: Path, run_cli: RunCli) -> None:
    folder = tmp_path / "run"
    state = distributed(folder / "pytorch_model_fsdp_0")
    (folder / "unet").mkdir()
    torch.save({"m": torch.arange(500.0)}, folder / "optimizer.bin")
    (folder / "unet" / "model.pt").write_bytes(torch_zip(saved())[:-900])
    next((folder / "pytorch_model_fsdp_0").glob("*.distcp")).unlink()
    said = run_cli("salvage", "run", "out.safetensors", exit=1)
    assert "not looked at" not in said.stdout + said.stderr
    report = salvaged(folder)
    found = fates(report)
    assert found["optimizer.m"] is Fate.WHOLE
    assert found["unet.layer0"] is Fate.WHOLE
    assert {f"pytorch_model_fsdp_0.{name}" for name in state} <= set(found)
    assert "an interrupted upload" in said.stdout


@pytest.mark.parametrize("make", [nemo])
def test_what_a_tar_looks_like(make: Callable[[Tensors], bytes], tmp_path: Path) -> None:
    content, longer = make(saved(5000)), make(saved(9000))
    path = tmp_path / "run.nemo"
    for damaged, what in (
        (content[: len(content) // 2], "an interrupted upload: the file is cut short after"),
        (content[: len(content) // 2] + bytes(len(content) // 2), "a full disk while saving"),
        (content[:-9000] + longer[len(content) - 9000 :], "two ranks wrote one file"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ckptmove.InputError) as caught:
            ckptmove.inspect(path)
        assert what in str(caught.value)
        assert f"ckptmove salvage {path} DST" in (caught.value.hint or "")


def test_of_a_run_the_only_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoint-5").mkdir(parents=True)
    torch.save({"w": torch.ones(2)}, tmp_path / "run" / "checkpoint-5" / "model.pt")
    report = ckptmove.salvage(tmp_path / "run", tmp_path / "out.pt")
    assert "checkpoint-5 is the only checkpoint in it" in report.warnings
