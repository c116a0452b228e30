"""What trainers save beside a folder of torch.distributed.checkpoint is a part of the state."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmove
from ckptmove.errors import InputError
from tests.making.distributed import save_dcp
from tests.oracles.sameness import assert_same_tree

ROWS = [((0, 0), (2, 4)), ((2, 0), (1, 4))]
WEIGHT = torch.arange(12.0).reshape(3, 4)
LIGHTNING: dict[str, Any] = {
    "epoch": 1,
    "global_step": 2,
    "loops": {"fit_loop": {"state_dict": {}}},
    "callbacks": {"best": torch.tensor(0.5)},
    "hyper_parameters": {"lr": 0.1},
}


def lightning(folder: Path) -> dict[str, Any]:
    """As FSDPStrategy.save_checkpoint does; gives all of it."""
    optimizer = {"state": {"w": {"exp_avg": WEIGHT + 1}}, "param_groups": [{"params": ["w"]}]}
    divided = {"model": {"w": WEIGHT}, "optimizer_0": optimizer}
    save_dcp(folder, divided, {"model.w": ROWS})
    torch.save(LIGHTNING, folder / "meta.pt")
    return {**divided, **LIGHTNING}


def megatron(folder: Path) -> dict[str, Any]:
    """As megatron-core's dist_checkpointing does, of which keys are not paths."""
    arguments = argparse.Namespace(tensor_model_parallel_size=2)
    common = {"iteration": 5, "args": arguments, "rng": {"t": torch.arange(3)}}
    save_dcp(folder, {"decoder.weight": WEIGHT}, {"decoder.weight": ROWS})
    torch.save(common, folder / "common.pt")
    backends = {"sharded_backend": "torch_dist", "common_backend": "torch"}
    (folder / "metadata.json").write_text(json.dumps(backends))
    return {"decoder.weight": WEIGHT, **common}


@pytest.mark.parametrize("maker", [lightning, megatron])
def test_it_is_one_state(maker: Any, tmp_path: Path) -> None:
    folder = tmp_path / "step=5"
    whole = maker(folder)
    assert_same_tree(ckptmove.load(folder), whole)
    found = ckptmove.inspect(folder)
    assert not found.warnings
    assert not found.unknown_callables
    for name in ("all.pt", "all.safetensors"):
        ckptmove.convert(folder, tmp_path / name)
        assert_same_tree(ckptmove.load(tmp_path / name), whole)
        assert ckptmove.diff(folder, tmp_path / name).equal
    assert_same_tree(torch.load(tmp_path / "all.pt", weights_only=False), whole)
    ckptmove.validate(folder).raise_if_failed()


def test_what_megatron_saves_beside_must_be_there(tmp_path: Path) -> None:
    megatron(tmp_path / "a")
    (tmp_path / "a" / "common.pt").unlink()
    for verb in (ckptmove.inspect, lambda path: ckptmove.convert(path, tmp_path / "all.pt")):
        with pytest.raises(InputError, match=r"its file 'common\.pt' is missing"):
            verb(tmp_path / "a")


@pytest.mark.parametrize("text", ["run 17\n", '{"loss": NaN}', f'["{"x" * 70_000}"]', "[1]", "{}"])
def test_a_file_called_like_one_of_megatron_is_none(text: str, tmp_path: Path) -> None:
    folder = save_dcp(tmp_path / "a", {"w": WEIGHT}, {"w": ROWS})
    (folder / "metadata.json").write_text(text)
    assert_same_tree(ckptmove.load(folder), {"w": WEIGHT})


@pytest.mark.parametrize("maker", [lightning, megatron])
def test_a_broken_file_beside_is_told(maker: Any, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    maker(folder)
    (path,) = folder.glob("*.pt")
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(InputError) as raised:
        ckptmove.convert(folder, tmp_path / "all.pt")
    assert raised.value.path == str(path)
    assert not (tmp_path / "all.pt").exists()


def test_a_key_that_both_have_is_below_the_name_of_the_file(tmp_path: Path) -> None:
    save_dcp(tmp_path / "a", {"model": {"w": WEIGHT}, "epoch": 3})
    torch.save({"epoch": 4, "n": 5}, tmp_path / "a" / "meta.pt")
    wanted = {"model": {"w": WEIGHT}, "epoch": 3, "meta": {"epoch": 4, "n": 5}}
    assert_same_tree(ckptmove.load(tmp_path / "a"), wanted)


def test_a_file_beside_with_storages_of_the_same_names(tmp_path: Path) -> None:
    """Two such folders in one do not mix up what lies beside each."""
    for n in range(2):
        folder = tmp_path / "state" / f"pytorch_model_fsdp_{n}"
        save_dcp(folder, {"model": {"w": WEIGHT + n}})
        torch.save({"best": torch.full((2,), n)}, folder / "meta.pt")
    torch.save({"last_epoch": 5}, tmp_path / "state" / "scheduler.bin")
    loaded = ckptmove.load(tmp_path / "state")
    for n, name in enumerate(("model", "model_1")):
        assert_same_tree(loaded[name], {"model": {"w": WEIGHT + n}, "best": torch.full((2,), n)})


def test_another_checkpoint_in_the_folder_is_named_by_every_verb(tmp_path: Path) -> None:
    folder, out = tmp_path / "step", tmp_path / "out.safetensors"
    save_dcp(folder, {"w": WEIGHT}, {"w": ROWS})
    torch.save({"w": WEIGHT + 1}, folder / "other.pt")
    with pytest.raises(ckptmove.RefusedError, match=r"would lose other\.pt"):
        ckptmove.convert(folder, out)
    ckptmove.convert(folder, out, drop="other.pt")
    found = ckptmove.diff(folder, out)
    assert [(each.kind, each.name) for each in found.differences] == [("not compared", "other.pt")]
    checked = ckptmove.validate(folder).of("container")
    assert checked.details == ["other.pt was not checked: it is no part of the checkpoint"]
