"""Folders whose files are parts of one checkpoint that is not read: named, never in silence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptmove
from ckptmove.errors import UnsupportedError
from tests.conftest import RunCli
from tests.making.distributed import save_dcp, save_hf_rank
from tests.making.trees import contents

STATE = {"w": torch.arange(6.0).reshape(2, 3), "n": 7}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with a plain checkpoint, a folder of DCP, one of ZeRO, and one in safetensors."""
    top = tmp_path / "tree"
    save_dcp(top / "run" / "step-10", dict(STATE))
    save_hf_rank(top / "hf", {"w": torch.ones(2)})
    zero = top / "ds" / "global_step2"
    zero.mkdir(parents=True)
    torch.save(STATE, top / "plain.pt")
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        torch.save(STATE, zero / name)
    (top / "ds" / "latest").write_text("global_step2")
    return top


@pytest.mark.slow
def test_a_batch_names_each_and_converts_none_of_its_files(tree: Path, tmp_path: Path) -> None:
    found = {each.name: each for each in ckptmove.batch("convert", tree, tmp_path / "out")}
    refused = {name: each.reason for name, each in found.items() if each.outcome != "done"}
    assert set(refused) == {"ds/global_step2"}
    assert "is not what DeepSpeed saves" in refused["ds/global_step2"]
    written = {name for name in contents(tmp_path / "out") if not name.startswith(".")}
    folders = {f"{name}/model.safetensors" for name in ("run/step-10", "hf")}
    assert written == {"plain.safetensors"} | folders


def test_a_batch_moves_no_file_of_them_alone(tree: Path, tmp_path: Path, run_cli: RunCli) -> None:
    done = run_cli("batch", "relocate", tree, tmp_path / "out", "--to", "cuda:0", exit=1)
    assert "failed  ds/global_step2: " in done.stdout
    assert "is not what DeepSpeed saves" in done.stdout
    written = contents(tmp_path / "out")
    assert not [name for name in written if name.startswith("ds/global_step2")]
    hf = {f"hf/{name}": held for name, held in contents(tree / "hf").items()}
    assert {name: held for name, held in written.items() if name.startswith("hf/")} == hf


@pytest.mark.parametrize("name", ["run/step-10", "hf", "ds/global_step2"])
def test_it_is_no_tree(name: str, tree: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="one checkpoint, not a tree"):
        list(ckptmove.batch("convert", tree / name, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_save_that_did_not_finish_is_told(tree: Path) -> None:
    (tree / "run" / "step-10" / ".metadata").unlink()
    with pytest.raises(UnsupportedError, match="its save did not finish") as raised:
        ckptmove.inspect(tree / "run" / "step-10")
    assert "dcp_to_torch" not in str(raised.value.hint)


def test_a_file_of_one_rank_is_not_taken_for_the_whole(tree: Path) -> None:
    (file,) = (tree / "hf").iterdir()
    with pytest.raises(UnsupportedError, match="parts of tensors"):
        ckptmove.inspect(file)


@pytest.mark.slow
def test_parts_in_folders_of_their_own_are_named_and_not_converted(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    names = ("iter/mp_rank_00/model.pt", "iter/mp_rank_01/model.pt", "one/mp_rank_00/model.pt")
    universal = ("run/global_step2/mp_rank_00_model_states.pt", "run/global_step2/zero/w/fp32.pt")
    for name in (*names, *universal):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save(STATE, tree / name)
    found = {each.name: each for each in ckptmove.batch("convert", tree, tmp_path / "out")}
    assert {name: each.outcome for name, each in found.items()} == {
        "iter": "refused",
        "run/global_step2": "failed",
        "one/mp_rank_00/model.pt": "done",  # nothing says that there is more of it
    }
    assert "Megatron-LM" in (found["iter"].reason or "")
    assert "'zero/optimizer_state.pt' is missing" in (found["run/global_step2"].reason or "")
    moved = ckptmove.batch("relocate", tree, tmp_path / "moved", to="cuda:0")
    assert {each.name: each.outcome for each in moved} == dict.fromkeys(found, "done")
    assert contents(tmp_path / "moved").keys() == contents(tree).keys()


def test_what_lies_beside_items_is_told(tree: Path) -> None:
    torch.save({"iteration": 5}, tree / "run" / "step-10" / "other.pt")
    found = ckptmove.inspect(tree / "run" / "step-10")
    assert "other.pt beside the items was not looked at" in found.warnings
