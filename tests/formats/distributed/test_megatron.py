"""Runs of Megatron, of which a file names the latest iteration; and what Megatron-FSDP saves.

That (`fsdp_dtensor`) is DCP, with parts of a parameter that are not even.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ckptmove
from ckptmove.errors import CorruptError, UnsupportedError
from tests.conftest import RunCli
from tests.making.distributed import save_dcp
from tests.making.ranks import over_gloo
from tests.oracles.sameness import assert_same_tree

#: The rows of each rank: it cuts a buffer of all parameters, and a cut may leave a rank nothing.
ROWS = {"a.weight": (5, 2), "b.bias": (0, 4), "c.weight": (1, 5)}


def whole(name: str) -> torch.Tensor:
    torch.manual_seed(len(name))
    rows = sum(ROWS[name])
    return torch.randn(rows) if name.endswith("bias") else torch.randn(rows, 3)


def trained(part: Any = lambda name, tensor: tensor) -> dict[str, Any]:
    """A model and its optimizer, of what `part` makes of each tensor."""
    weights = {name: whole(name) for name in ROWS}
    state = {
        name: {"exp_avg": part(name, weight + 1), "step": torch.tensor(4.0)}
        for name, weight in weights.items()
    }
    model = {name: part(name, weight) for name, weight in weights.items()}
    return {"model": model, "optimizer": {"state": state}, "iteration": 5}


@pytest.mark.parametrize("size", [list, tuple])
def test_offsets_and_sizes_of_other_types(size: Any, tmp_path: Path) -> None:
    boxes = {
        f"model.{name}": [((0, 0), (rows[0], 3)), ((rows[0], 0), (rows[1], 3))]
        for name, rows in ROWS.items()
        if name.endswith("weight")
    }
    folder = save_dcp(tmp_path / "dcp", trained(), boxes, size=size)
    assert ckptmove.inspect(folder).divisions["model.a.weight"] == "rows/2"
    assert_same_tree(ckptmove.load(folder), trained())


@pytest.mark.slow
def test_it_is_what_was_trained(tmp_path: Path) -> None:
    """Two ranks describe their parts with Megatron's own code."""
    uneven = pytest.importorskip(
        "megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor", exc_type=ImportError
    )
    folder = tmp_path / "iter_0000005"

    def save_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))

        def part(name: str, tensor: torch.Tensor) -> DTensor:
            local = tensor.split(ROWS[name])[rank].clone()
            by, shape = [Shard(0)], tensor.shape
            return DTensor.from_local(local, mesh, by, shape=shape, stride=tensor.stride())

        state = uneven.preprocess_state_dict_for_uneven_dtensor(trained(part))
        save(state, checkpoint_id=folder)

    over_gloo(folder, 2, save_rank)
    assert ckptmove.inspect(folder).divisions["model.a.weight"] == "rows/2"
    assert_same_tree(ckptmove.load(folder), trained())


# -- runs ------------------------------------------------------------------------------------------


def save_run(folder: Path, *iterations: int) -> Path:
    """A run of so many iterations, each of which is its number; the last is the latest."""
    for n in iterations:
        saved = save_dcp(folder / f"iter_{n:07}", {"w": torch.full((4,), float(n))})
        torch.save({"iteration": n}, saved / "common.pt")
        (saved / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (folder / "latest_checkpointed_iteration.txt").write_text(f"{iterations[-1]}")
    return folder


def test_a_run_is_its_latest_iteration(tmp_path: Path, run_cli: RunCli) -> None:
    run = save_run(tmp_path / "run", 50, 150, 100)
    expected = {"w": torch.full((4,), 100.0), "iteration": 100}
    note = "only iter_0000100 was looked at, the latest in it"
    assert any(note in each for each in ckptmove.inspect(run).warnings)
    assert_same_tree(ckptmove.load(run), expected)
    ckptmove.convert(run, tmp_path / "all.pt")
    assert_same_tree(ckptmove.load(tmp_path / "all.pt"), expected)
    assert ckptmove.diff(run, run / "iter_0000100").equal
    assert ckptmove.validate(run).ok
    assert note in run_cli("convert", run, tmp_path / "w.safetensors", exit=0).stderr
    run_cli("batch", "convert", run, tmp_path / "each", "--format", "safetensors", exit=0)
    assert len([*(tmp_path / "each").rglob("*.safetensors")]) == 3


def test_an_only_iteration_needs_no_name(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", 7)
    (run / "latest_checkpointed_iteration.txt").unlink()
    assert_same_tree(ckptmove.load(run)["w"], torch.full((4,), 7.0))


def test_a_release_is_followed(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", 7, 9)
    (run / "iter_0000009").rename(run / "release")
    (run / "latest_checkpointed_iteration.txt").write_text("release\n")
    assert_same_tree(ckptmove.load(run)["w"], torch.full((4,), 9.0))


def test_iterations_without_a_latest_are_listed(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", 50, 100)
    (run / "latest_checkpointed_iteration.txt").unlink()
    for verb in (
        ckptmove.inspect,
        ckptmove.load,
        lambda at: ckptmove.convert(at, tmp_path / "o.pt"),
    ):
        with pytest.raises(UnsupportedError, match="iter_0000050, iter_0000100 in it"):
            verb(run)
    assert not (tmp_path / "o.pt").exists()


@pytest.mark.parametrize(
    "told", ["300", "", "../run/iter_0000050", "1" * 30, "-50", "\0", "release"]
)
def test_a_latest_that_is_not_there(told: str, tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", 50, 100)
    (run / "latest_checkpointed_iteration.txt").write_text(told)
    for verb in (
        ckptmove.inspect,
        ckptmove.load,
        lambda at: ckptmove.convert(at, tmp_path / "o.pt"),
    ):
        with pytest.raises(CorruptError, match=r"iteration\.txt. names") as raised:
            verb(run)
        assert "\n" not in str(raised.value)
    assert not (tmp_path / "o.pt").exists()
