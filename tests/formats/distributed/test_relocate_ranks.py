"""Folders with files of ranks are relocated as a whole: DeepSpeed, trainers with ZeRO, FSDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmove
from ckptmove.errors import InputError
from tests.conftest import RunCli
from tests.making.trees import contents, outcomes
from tests.making.zero import classes_of_deepspeed, run, save_zero
from tests.oracles.readers import labels


@pytest.fixture
def trainer(tmp_path: Path) -> Path:
    """A checkpoint of a Trainer with ZeRO, of two processes, in the folder of its run."""
    folder = tmp_path / "tree" / "checkpoint-2"
    save_zero(folder, run())
    for rank in range(2):
        torch.save({"cpu": torch.get_rng_state()}, folder / f"rng_state_{rank}.pth")
    torch.save({"last_epoch": 5}, folder / "scheduler.pt")
    (folder / "trainer_state.json").write_text("{}")
    return folder


def devices_by_file(folder: Path) -> dict[str, set[str]]:
    """The devices of each file of a rank, as torch reads the tags, without steps."""
    found = dict[str, set[str]]()
    with classes_of_deepspeed():
        for file in folder.rglob("*_states.pt"):
            tags = labels(file).items()
            name = str(file.relative_to(folder))
            found[name] = {tag for key, tag in tags if not key.endswith("step")}
    return found


def relocated_whole(source: Path, tmp_path: Path, others: set[str]) -> None:
    """Check that a folder goes elsewhere and back as a whole, in a new folder and in place."""
    before = contents(source)
    ranks = {name for name in before if name.endswith("_states.pt")}
    there, back = tmp_path / "there", tmp_path / "back"
    report = ckptmove.relocate(source, there, to="cuda:0")
    assert {each.name for each in report.files} == before.keys() == contents(there).keys()
    assert {each.name for each in report.files if each.method == "patch"} == ranks
    assert {each.name for each in report.files if not each.stores_devices} == others
    assert set(map(frozenset, devices_by_file(there).values())) == {frozenset({"cuda:0"})}
    ckptmove.relocate(there, tmp_path / "other", map={"cuda:0": "cuda:1"})
    ckptmove.relocate(tmp_path / "other", back, map={"cuda:1": "cuda:0"})
    assert contents(back) == contents(there)
    assert contents(source) == before
    assert ckptmove.diff(source, there, ignore_devices=True).equal
    changed = ckptmove.relocate(source, to="cuda:0", in_place=True)
    assert changed.in_place
    assert devices_by_file(source) == devices_by_file(there)


def test_relocate_takes_a_run_as_a_whole(tmp_path: Path) -> None:
    save_zero(tmp_path / "run", run())
    save_zero(tmp_path / "run", run(stage=3, tag="global_step4"))
    relocated_whole(tmp_path / "run", tmp_path, {"latest", "zero_to_fp32.py"})


def test_relocate_takes_the_folder_of_a_trainer_as_a_whole(trainer: Path, tmp_path: Path) -> None:
    relocated_whole(trainer, tmp_path, {"latest", "zero_to_fp32.py", "trainer_state.json"})


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "elsewhere"])
def test_what_lacks_a_rank_is_not_relocated(trainer: Path, tmp_path: Path, in_place: bool) -> None:
    wanted: dict[str, Any] = {"in_place": True} if in_place else {"dst": tmp_path / "out"}
    (trainer / "rng_state_0.pth").unlink()  # it resumes without, if not just the same
    told = ckptmove.relocate(trainer, **wanted, to="cuda:0", dry_run=True)
    assert any("missing: rng_state_0.pth" in each for each in told.warnings)
    for name, message in (
        ("global_step2/zero_pp_rank_1_mp_rank_00_optim_states.pt", "rank 1"),
        ("global_step2/mp_rank_00_model_states.pt", "mp_rank_00_model_states.pt"),
    ):
        held = (trainer / name).read_bytes()
        (trainer / name).unlink()
        before = contents(trainer)
        with pytest.raises(InputError, match=f"missing.*{message}|{message}.*missing"):
            ckptmove.relocate(trainer, **wanted, to="cuda:0")
        (trainer / name).write_bytes(b"\0" * len(held))
        with pytest.raises(InputError) as raised:
            ckptmove.relocate(trainer, **wanted, to="cuda:0")
        assert raised.value.path == str(trainer / name)
        (trainer / name).unlink()
        assert contents(trainer) == before
        (trainer / name).write_bytes(held)
    assert not (tmp_path / "out").exists()


def test_files_of_fsdp_lack_a_rank(tmp_path: Path, run_cli: RunCli) -> None:
    folder = tmp_path / "tree" / "actor"
    folder.mkdir(parents=True)
    for rank in (0, 2):
        torch.save({"w": torch.ones(3)}, folder / f"model_world_size_3_rank_{rank}.pt")
    told = "missing: model_world_size_3_rank_1.pt"
    assert told in run_cli("relocate", folder, tmp_path / "x", "--to", "cuda:0", exit=3).stderr
    done = run_cli("batch", "relocate", folder.parent, tmp_path / "y", "--to", "cuda:0", exit=1)
    assert told in done.stdout + done.stderr
    assert not [*tmp_path.glob("[xy]/**/*.pt")]
    torch.save({"w": torch.ones(3)}, folder / "model_world_size_3_rank_1.pt")
    run_cli("batch", "relocate", folder.parent, tmp_path / "y", "--to", "cuda:0", exit=0)
    assert len([*tmp_path.glob("y/actor/*.pt")]) == 3


@pytest.mark.slow
def test_a_batch_relocates_ranks_as_one_item(trainer: Path, tmp_path: Path) -> None:
    tree = trainer.parent
    save_zero(tree / "run", run())
    save_zero(tree / "broken", run())
    save_zero(tree / "broken", run(tag="global_step4"))
    (tree / "broken" / "global_step2" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    before = contents(tree)
    with ckptmove.batch("relocate", tree, tmp_path / "out", to="cuda:0", jobs=1) as batch:
        found = outcomes(batch)
    beside = (
        f"{run}/{name}" for run in ("run", "broken") for name in ("latest", "zero_to_fp32.py")
    )
    assert found == {
        **dict.fromkeys(beside, "done"),
        **dict.fromkeys(("checkpoint-2", "run/global_step2", "broken/global_step4"), "done"),
        "broken/global_step2": "failed",
    }
    made = contents(tmp_path / "out").keys()
    assert made == {each for each in before if not each.startswith("broken/global_step2/")}
    moved = devices_by_file(tmp_path / "out").values()
    assert set(map(frozenset, moved)) == {frozenset({"cuda:0"})}
