"""The folders of verl: an actor and a critic, of ranks, with what its tools expect beside them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckptmove
from ckptmove.errors import CkptmoveError, InputError, RefusedError
from tests.conftest import RunCli
from tests.making.frameworks import tiny_gpt2
from tests.making.ranks import save_ranks
from tests.making.trees import contents
from tests.oracles.sameness import assert_same_tree

from .test_fsdp_ranks import extra, save_verl, trained

MODELS = ("actor", "critic")
CONFIGURATION = {"config.json": {"dtype": "float32"}, "tokenizer.json": {}}


def save_step(folder: Path, sizes: tuple[int, ...] = (2,)) -> Path:
    """The folder of a step; an actor and a critic of the same values."""
    for name in MODELS:
        made = save_verl(folder / name, sizes)
        (made / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 2}')
        (made / "huggingface").mkdir()
        for file, content in CONFIGURATION.items():
            (made / "huggingface" / file).write_text(json.dumps(content))
    torch.save({"snapshot": 3}, folder / "data.pt")
    return folder


def whole(name: str = "model") -> Any:
    """What an actor or a critic holds."""
    model, optimizer = trained((1,))
    held = {
        "extra_state": {rank: extra(rank) for rank in range(2)},
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    return held if name == "all" else held[name]


def assert_weights(file: Path, expected: Mapping[str, Any]) -> None:
    """A file that libraries load has these weights, in whatever order."""
    found = load_file(file / "model.safetensors" if file.is_dir() else file)
    assert_same_tree(dict(sorted(found.items())), dict(sorted(expected.items())))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_step(tmp_path_factory.mktemp("verl") / "global_step_10")


@pytest.fixture
def step(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run" / "global_step_10"))


def test_the_folder_of_a_step_has_both_models(step: Path, tmp_path: Path, run_cli: RunCli) -> None:
    (step.parent / "latest_checkpointed_iteration.txt").write_text("10")
    found = ckptmove.inspect(step.parent)
    assert "global_step_10 is the only checkpoint in it" in found.warnings
    parts = {each.name: each.sections for each in found.files if each.format == "fsdp-ranks"}
    assert parts.keys() == {*MODELS}
    assert {"model", "optimizer", "rng"} == {*parts["actor"]}
    assert found.divisions["critic.optimizer.state.0.exp_avg"] == "rows/2"
    assert not [each for each in found.warnings if "not looked at" in each]
    both = {name: whole("all") for name in MODELS} | {"data": {"snapshot": 3}}
    assert_same_tree(ckptmove.load(step), both)
    for name in ("all.pt", "all.safetensors"):
        ckptmove.convert(step, tmp_path / name)
        assert_same_tree(ckptmove.load(tmp_path / name), both)
        assert ckptmove.diff(step, tmp_path / name).equal
    checked = run_cli("validate", step, exit=0).stdout
    assert "container training-folder" in checked
    assert "actor: not tried: the library that wrote fsdp-ranks loads it on its ranks" in checked
    shutil.copytree(step, step.with_name("global_step_20"))
    assert "only global_step_10 was looked at" in run_cli("inspect", step.parent, exit=0).stderr
    (step.parent / "latest_checkpointed_iteration.txt").unlink()
    asked = run_cli("convert", step.parent, tmp_path / "one.pt", exit=3).stderr
    assert "give one of them, such as" in asked


@pytest.mark.parametrize("format", ["safetensors", "torch-zip"])
def test_a_folder_of_it_keeps_all_else(step: Path, tmp_path: Path, format: str) -> None:
    ckptmove.convert(step, tmp_path / "out", format=format)
    end = {"safetensors": ".safetensors", "torch-zip": ".pt"}[format]
    made = contents(tmp_path / "out")
    data = "data.pt" + (end if format == "safetensors" else "")
    models = {f"{name}{end}" for name in MODELS}
    beside = {
        f"{name}/{each}"
        for name in MODELS
        for each in ("fsdp_config.json", *(f"huggingface/{file}" for file in CONFIGURATION))
    }
    assert made.keys() == models | beside | {data}
    assert_same_tree(ckptmove.load(tmp_path / "out" / f"actor{end}"), whole("all"))


def test_models_as_libraries_load_them(step: Path, tmp_path: Path) -> None:
    report = ckptmove.convert(step, tmp_path / "hf", preset="hf", dtype="bf16")
    assert {"data.pt", "actor: optimizer", "critic: extra_state"} <= {*report.left_out}
    half = {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor
        for name, tensor in whole().items()
    }
    for name in MODELS:
        folder = tmp_path / "hf" / name
        assert {*CONFIGURATION, "model.safetensors", "fsdp_config.json"} == {*contents(folder)}
        assert json.loads((folder / "config.json").read_text()) == {"dtype": "bfloat16"}
        assert_weights(folder, half)
    ckptmove.convert(step / "critic", tmp_path / "critic", preset="hf")
    assert_weights(tmp_path / "critic", whole())
    assert {*CONFIGURATION} <= {*contents(tmp_path / "critic")}
    ckptmove.convert(step / "critic", tmp_path / "critic.safetensors", preset="hf")
    assert_weights(tmp_path / "critic.safetensors", whole())
    with pytest.raises(RefusedError):
        ckptmove.convert(step, tmp_path / "one.safetensors", preset="hf")


def test_a_file_that_is_beside_the_ranks_stays_there(step: Path, tmp_path: Path) -> None:
    (step / "actor" / "config.json").write_text('{"own": 1}')
    ckptmove.convert(step / "actor", tmp_path / "hf", preset="hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == {"own": 1}
    assert {"tokenizer.json", "huggingface/config.json"} <= {*contents(tmp_path / "hf")}


@pytest.mark.slow
def test_a_batch_has_both_models_of_each_step(step: Path, tmp_path: Path) -> None:
    shutil.copytree(step, step.with_name("global_step_20"))
    done = {
        each.name: each.outcome
        for each in ckptmove.batch("convert", step.parent, tmp_path / "out", preset="hf")
    }
    names = {f"global_step_{n}/{name}" for n in (10, 20) for name in MODELS}
    assert {name for name, outcome in done.items() if outcome == "done"} == names
    for name in names:
        assert_weights(tmp_path / "out" / name, whole())
        assert (tmp_path / "out" / name / "config.json").exists()


def test_damage_of_one_model_is_told_with_its_name(step: Path, tmp_path: Path) -> None:
    gone = step / "critic" / "model_world_size_2_rank_1.pt"
    held = gone.read_bytes()
    for content in (None, held[:700]):
        gone.unlink() if content is None else gone.write_bytes(content)
        for to in ("one.pt", "folder", "hf"):
            options: Any = {"preset": "hf"} if to == "hf" else {}
            with pytest.raises(InputError) as raised:
                ckptmove.convert(step, tmp_path / to, **options)
            assert "critic" in str(raised.value.path)
            assert not (tmp_path / to).exists()
        with pytest.raises(CkptmoveError) as told:
            ckptmove.inspect(step)
        assert "critic" in str(told.value.path)
        ckptmove.convert(step / "actor", tmp_path / f"actor{content is None}.safetensors")


def test_weights_that_were_saved_whole_too(step: Path, tmp_path: Path) -> None:
    """`save_contents` with `hf_model`: these are what libraries load."""
    from safetensors.torch import save_file

    inside = step / "actor" / "huggingface"
    save_file(whole(), inside / "model.safetensors", {"format": "pt"})
    assert any("huggingface" in each for each in ckptmove.inspect(step / "actor").warnings)
    ckptmove.convert(step / "actor", tmp_path / "hf", preset="hf")
    assert_weights(tmp_path / "hf" / "huggingface", whole())


@pytest.mark.slow
def test_transformers_takes_what_verl_saved(tmp_path: Path) -> None:
    """Each rank is a process; the model is divided by FSDP2, as in `FSDPCheckpointManager`."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model: Any = tiny_gpt2(transformers)
    folder = tmp_path / "global_step_1" / "actor"
    for part in ("config", "generation_config"):
        getattr(model, part).save_pretrained(folder / "huggingface")

    def sharded(_: int) -> Any:
        divided: Any = tiny_gpt2(transformers)
        divided.load_state_dict(model.state_dict())
        fully_shard(divided, mesh=init_device_mesh("cpu", (2,)))
        return divided.state_dict()

    save_ranks(folder, 2, sharded, apart=True)
    ckptmove.convert(folder.parent, tmp_path / "hf", preset="hf")
    again = type(model).from_pretrained(os.fspath(tmp_path / "hf" / "actor"))
    assert_same_tree(dict(again.state_dict()), dict(model.state_dict()))
