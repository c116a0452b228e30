"""What accelerate and the Trainer save of FSDP: folders of DCP beside other files, as one state."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptmove
from ckptmove.errors import CkptmoveError, InputError
from tests.conftest import RunCli
from tests.making.distributed import save_dcp
from tests.making.frameworks import tiny_gpt2
from tests.making.trees import contents
from tests.oracles.sameness import assert_same_tree

ROWS = [((0, 0), (2, 4)), ((2, 0), (1, 4))]


def trained(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The states of a model and of its optimizer, by names."""
    torch.manual_seed(seed)
    weights: dict[str, Any] = {"w": torch.randn(3, 4), "b": torch.randn(3).bfloat16()}
    state = {name: {"step": torch.tensor(5.0), "exp_avg": w + 1} for name, w in weights.items()}
    return weights, {"state": state, "param_groups": [{"lr": 0.5, "params": ["w", "b"]}]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of two models, as accelerate saves them with SHARDED_STATE_DICT."""
    made = tmp_path / "tree" / "checkpoint-5"
    for n in range(2):
        model, optimizer = trained(n)
        save_dcp(made / f"pytorch_model_fsdp_{n}", {"model": model}, {"model.w": ROWS})
        boxes = {"optimizer.state.w.exp_avg": ROWS}
        save_dcp(made / f"optimizer_{n}", {"optimizer": optimizer}, boxes, files=2)
    torch.save({"last_epoch": 5}, made / "scheduler.bin")
    torch.save({"torch_manual_seed": torch.get_rng_state()}, made / "random_states_0.pkl")
    (made / "config.json").write_text("{}")
    return made


def whole() -> dict[str, Any]:
    """All that is in it."""
    (model, optimizer), (other, other_optimizer) = trained(0), trained(1)
    return {
        "model": model,
        "model_1": other,
        "optimizer": optimizer,
        "optimizer_1": other_optimizer,
        "scheduler": {"last_epoch": 5},
        "rng": {0: {"torch_manual_seed": torch.get_rng_state()}},
    }


def test_it_is_one_state(folder: Path, tmp_path: Path, run_cli: RunCli) -> None:
    found = ckptmove.inspect(folder)
    assert {str(each.section) for each in found.tensors} == {"model", "optimizer", "rng"}
    assert found.divisions["model.w"] == found.divisions["optimizer_1.state.w.exp_avg"] == "rows/2"
    assert "rows/2" in run_cli("inspect", folder, "--chunks", exit=0).stdout
    assert_same_tree(ckptmove.load(folder), whole())
    for name in ("all.pt", "all.safetensors"):
        report = ckptmove.convert(folder, tmp_path / name)
        assert report.left_out == ("config.json",)
        assert_same_tree(ckptmove.load(tmp_path / name), whole())
        assert ckptmove.diff(folder, tmp_path / name).equal
    assert_same_tree(torch.load(tmp_path / "all.pt", weights_only=True), whole())
    ckptmove.validate(folder).raise_if_failed()


def test_a_part_whose_save_did_not_finish_is_no_silence(folder: Path, tmp_path: Path) -> None:
    part = folder / "optimizer_1"
    changes: list[Callable[[], object]] = [
        lambda: (part / ".metadata").rename(part / ".metadata.tmp"),
        lambda: (part / ".metadata.tmp").unlink(),
    ]
    for change in changes:
        change()
        assert any("optimizer_1" in each for each in ckptmove.inspect(folder).warnings)
        assert not ckptmove.validate(folder).ok
        with pytest.raises(CkptmoveError, match="did not finish"):
            ckptmove.convert(folder, tmp_path / "all.pt")


@pytest.mark.sample(1)
@pytest.mark.parametrize("format", ["safetensors", "torch-zip"])
def test_a_folder_of_it_has_the_names_of_one_process(
    folder: Path, tmp_path: Path, format: str
) -> None:
    ckptmove.convert(folder, tmp_path / "one", format=format)
    end = ".safetensors" if format == "safetensors" else ""
    names = {f"{each}{end}" for each in ("optimizer.bin", "optimizer_1.bin", "scheduler.bin")}
    models = {f"model{n}.safetensors" if end else f"pytorch_model{n}.bin" for n in ("", "_1")}
    others = {"config.json", f"random_states_0.pkl{end}"}
    assert contents(tmp_path / "one").keys() == names | models | others
    loaded = ckptmove.load(tmp_path / "one")
    assert_same_tree({name: loaded[name] for name in whole()}, whole())
    (done,) = ckptmove.batch("convert", folder.parent, tmp_path / "out", format=format)
    assert done.outcome == "done"
    assert contents(tmp_path / "out" / "checkpoint-5") == contents(tmp_path / "one")


def test_a_damaged_part_is_told_by_every_verb(folder: Path, tmp_path: Path) -> None:
    (folder / "optimizer_1" / "__0_1.distcp").unlink()
    for dst in ("all.pt", "one"):
        with pytest.raises(InputError, match="missing"):
            ckptmove.convert(folder, tmp_path / dst)
        assert not (tmp_path / dst).exists()
    with pytest.raises(InputError, match="missing"):
        ckptmove.inspect(folder)


def test_the_whole_in_one_file_is_the_model_too(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    torch.save(model, tmp_path / "pytorch_model_fsdp.bin")
    torch.save(optimizer, tmp_path / "optimizer.bin")
    assert_same_tree(ckptmove.load(tmp_path), {"model": model, "optimizer": optimizer})


@pytest.mark.slow
def test_transformers_takes_what_accelerate_saved(tmp_path: Path) -> None:
    """Saved by accelerate's own functions, of one process; the optimizer goes on."""
    transformers = pytest.importorskip("transformers")
    accelerate = pytest.importorskip("accelerate")
    from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer

    class Process:
        """What the functions ask of an Accelerator."""

        process_index, num_processes, is_main_process = 0, 1, True
        is_fsdp2 = multi_device = True

        def wait_for_everyone(self) -> None:
            """It is alone."""

    accelerate.PartialState(cpu=True)
    model: Any = tiny_gpt2(transformers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    tokens = torch.arange(8).reshape(1, 8)
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT"
    )
    folder = tmp_path / "checkpoint-1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_fsdp_model(plugin, Process(), model, str(folder))
        save_fsdp_optimizer(plugin, Process(), optimizer, model, str(folder))
    model.config.save_pretrained(folder)
    torch.save({"last_epoch": 1}, folder / "scheduler.pt")
    ckptmove.convert(folder, tmp_path / "hf", preset="hf")
    again = type(model).from_pretrained(tmp_path / "hf")
    assert_same_tree(dict(again.state_dict()), dict(model.state_dict()))
    assert "optimizer" not in " ".join(load_file(tmp_path / "hf" / "model.safetensors"))
    ckptmove.convert(folder, tmp_path / "ids.pt", optimizer_ids="int")
    state = torch.load(tmp_path / "ids.pt", weights_only=True)["optimizer"]["state"]
    assert_same_tree(state, optimizer.state_dict()["state"])
