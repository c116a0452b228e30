"""Folders of training: every file in them counts, whichever library wrote it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptmove
from ckptmove import CheckFailed, CorruptError, InputError, UnsupportedError, formats, inspect, load
from ckptmove.formats.folders.training_folder import FolderCheckpoint
from tests.conftest import RunCli
from tests.making import libraries, model_folders, training_folders
from tests.making.frameworks import hf_trainer_folder
from tests.making.saving import tagging
from tests.making.trees import contents
from tests.oracles.sameness import assert_same_tree


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a Hugging Face Trainer saves, its optimizer on cuda:0."""
    return hf_trainer_folder(tmp_path_factory.mktemp("run"), "cuda:0")


def test_everything_in_a_trainers_folder_is_told(trainer: Path) -> None:
    manifest = inspect(trainer)
    assert manifest.format == "training-folder"
    assert set(manifest.sections) == {"model", "optimizer", "rng"}
    assert {e.device for e in manifest.tensors if e.name.endswith(".exp_avg")} == {"cuda:0"}
    with pytest.raises(CheckFailed, match=r"'optimizer\.state\.0\.exp_avg' is on cuda:0"):
        inspect(trainer, require="cpu")
    names = {entry.name for entry in inspect(trainer, select="optimizer").tensors}
    assert names == {e.name for e in manifest.tensors if e.name.startswith("optimizer.")}


def test_its_parts_are_what_torch_loads(trainer: Path) -> None:
    loaded = load(trainer, "cpu", select=["optimizer", "scheduler"])
    for name in ("optimizer", "scheduler"):
        whole = torch.load(trainer / f"{name}.pt", weights_only=True, map_location="cpu")
        assert_same_tree(loaded[name], whole)


def test_parts_of_the_same_names_stay_apart(tmp_path: Path) -> None:
    ones, twos = {"w": torch.ones(2)}, {"w": torch.full((2,), 2.0)}
    save_file(ones, tmp_path / "model.safetensors")
    save_file(twos, tmp_path / "model_1.safetensors")
    torch.save(ones, tmp_path / "pytorch_model.bin")
    for rank in range(2):
        with tagging(f"cuda:{rank}"):
            torch.save({"state": twos}, tmp_path / f"random_states_{rank}.pkl")
    manifest = inspect(tmp_path)
    assert [(entry.name, entry.device) for entry in manifest.tensors] == [
        *(("model_1.w", "cpu"), ("model.w", "cpu"), ("pytorch_model.w", "cpu")),
        *(("rng.0.state.w", "cuda:0"), ("rng.1.state.w", "cuda:1")),
    ]
    assert len(manifest.storages) == 5
    assert (
        "pytorch_model.bin should hold the same as model.safetensors, but they were not compared"
    ) in manifest.warnings
    found = load(tmp_path, "cpu")
    assert_same_tree(found["model_1"], twos)
    assert_same_tree(found["model"], ones)
    assert_same_tree(found["rng"][1], {"state": twos})


def test_damage_in_one_file_is_named(trainer: Path, tmp_path: Path) -> None:
    for path in trainer.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "optimizer.pt").write_bytes((trainer / "optimizer.pt").read_bytes()[:1000])
    with pytest.raises(CorruptError) as raised:
        inspect(tmp_path)
    assert raised.value.path == str(tmp_path / "optimizer.pt")
    assert not ckptmove.validate(tmp_path).ok


#: What is in the folders that libraries write: layout, and file → part, sections, devices.
WRITTEN: dict[str, tuple[Callable[[Path], Path], dict[str, tuple[str, set[str], set[str]]]]] = {
    "accelerate": (
        lambda path: training_folders.accelerate_state(path, "cuda:0"),
        {
            "model.safetensors": ("model", {"model"}, set()),
            "optimizer.bin": ("optimizer", {"optimizer"}, {"cpu", "cuda:0"}),
            "scheduler.bin": ("scheduler", {"scheduler"}, set()),
            "random_states_0.pkl": ("rng.0", {"rng"}, {"cpu"}),
            "custom_checkpoint_0.pkl": ("custom_checkpoint.0", {"other"}, {"cuda:0"}),
        },
    ),
    "Lightning": (
        lambda path: training_folders.lightning_run(path, "cuda:0"),
        {
            "checkpoints/epoch=0-step=2.ckpt": (
                "epoch=0-step=2",
                {"model", "optimizer", "other"},
                {"cpu", "cuda:0"},
            )
        },
    ),
    "Meta": (
        lambda path: libraries.meta_consolidated(path, "cuda:0"),
        {
            "consolidated.00.pth": ("consolidated.0", {"model"}, {"cuda:0"}),
            "consolidated.01.pth": ("consolidated.1", {"model"}, {"cuda:0"}),
        },
    ),
    "sentence-transformers": (
        lambda path: model_folders.copy_of("sentence_transformers", path, "cuda:0"),
        {
            "model.safetensors": ("model", {"model"}, set()),
            "2_Dense/pytorch_model.bin": ("2_Dense", {"model"}, {"cuda:0"}),
        },
    ),
    "diffusers pipeline": (
        lambda path: model_folders.copy_of("diffusers", path, "cuda:0"),
        {
            "unet/diffusion_pytorch_model.bin": ("unet", {"model"}, {"cuda:0"}),
            "vqvae/diffusion_pytorch_model.bin": ("vqvae", {"model"}, {"cuda:0"}),
        },
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", WRITTEN)
def test_each_file_of_a_librarys_folder_is_told(layout: str, tmp_path: Path) -> None:
    make, files = WRITTEN[layout]
    folder = make(tmp_path / "made")
    with formats.open_checkpoint(folder) as found:
        assert isinstance(found, FolderCheckpoint)
        assert found.layout == layout
    told = {each.name: each for each in inspect(folder).files}
    for name, (part, sections, devices) in files.items():
        each = told.pop(name)
        assert (each.part, set(each.sections), set(each.devices)) == (part, sections, devices)
        assert each.nbytes == (folder / name).stat().st_size
    assert not any(each.format or each.not_read for each in told.values())
    everything = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert {*told, *files} >= everything


def test_deepspeed_without_zero_is_one_file(tmp_path: Path) -> None:
    folder = libraries.deepspeed_zero0(tmp_path, "cuda:0")
    assert set(inspect(folder).sections) == {"model", "optimizer"}


def test_a_run_names_its_checkpoints(tmp_path: Path) -> None:
    for n in (500, 1000):
        (tmp_path / f"checkpoint-{n}").mkdir()
    with pytest.raises(UnsupportedError, match="checkpoint-500, checkpoint-1000 in it are"):
        inspect(tmp_path)


def test_what_is_required_holds_for_every_file_of_a_model(tmp_path: Path, run_cli: RunCli) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    assert run_cli("inspect", ".", "--require", "cpu", exit=0, cwd=tmp_path)
    with tagging("cuda:0"):
        torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    done = run_cli("inspect", ".", "--require", "cpu", exit=1, cwd=tmp_path)
    assert "'pytorch_model.w' is on cuda:0" in done.stderr
    with pytest.raises(CheckFailed, match=r"'pytorch_model\.w' is on cuda:0"):
        inspect(tmp_path, require="cpu")
    (tmp_path / "pytorch_model.bin").write_bytes(b"no checkpoint")
    with pytest.raises(InputError):
        inspect(tmp_path, require="cpu")
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "extra.bin")
    with pytest.raises(CheckFailed, match=r"^not read: extra\.bin$"):
        inspect(tmp_path, require="cpu")
    torch.save({"cpu": torch.ones(2)}, tmp_path / "rng_state_1.pth")
    (tmp_path / "trainer_state.json").write_text("{}")
    with pytest.raises(CheckFailed, match=r"^missing: rng_state_0\.pth; not read: extra\.bin$"):
        inspect(tmp_path, require="cpu")


def test_long_names_are_cut_unless_all_is_shown(tmp_path: Path, run_cli: RunCli) -> None:
    folder = tmp_path / ("a" * 200) / ("b" * 200)
    deep = folder / ("c" * 200) / ("d" * 200)
    deep.mkdir(parents=True)
    save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    torch.save({"state": {}, "param_groups": []}, folder / "optimizer.pt")
    for name, content in (("e.bin", b"no checkpoint"), ("f.json", b"{}")):
        (deep / name).write_bytes(content)
    torch.save({"w": torch.ones(2)}, deep / "g.pt")
    done = run_cli("inspect", folder, exit=0)
    told = done.stdout + done.stderr
    for name in ("e.bin", "f.json", "g.pt"):
        assert f"d/{name}" in told
    assert max(map(len, told.splitlines())) < 500
    full = run_cli("inspect", folder, "-v", exit=0).stdout
    assert f"{'c' * 200}/{'d' * 200}/g.pt" in full


def test_weights_without_devices_are_where_they_are_loaded(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    with tagging("cuda:0"):
        torch.save({"param_groups": [], "state": {0: torch.ones(2)}}, tmp_path / "optimizer.pt")
    verdict = inspect(tmp_path, require="cuda:0").verdict
    assert verdict == "uniform cuda:0; 1 tensor stored without one"
    assert inspect(tmp_path).devices.keys() == {"cuda:0", "not stored"}
    with pytest.raises(CheckFailed, match=r"'optimizer\.state\.0' is on cuda:0"):
        inspect(tmp_path, require="cpu")


def test_a_damaged_or_foreign_file_is_found_by_validate(trainer: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(trainer, tmp_path / "copy")
    path = trainer / "optimizer.pt"
    report = ckptmove.validate(folder)
    assert report.ok
    assert report.of("reload").outcome == "skipped"  # torch refuses training_args.bin, and says so
    assert "training_args.bin" in "".join(report.of("reload").details)
    content = (folder / "optimizer.pt").read_bytes()
    (folder / "optimizer.pt").write_bytes(content[:1000])
    failed = ckptmove.validate(folder).of("container")
    assert failed.outcome == "failed"
    assert failed.title.startswith(f"{folder / 'optimizer.pt'}: ")
    at = content.index(torch.load(path, "cpu")["state"][0]["exp_avg"].numpy().tobytes())
    flipped = bytearray(content)
    flipped[at] ^= 1
    (folder / "optimizer.pt").write_bytes(flipped)
    assert ckptmove.validate(folder).of("container").details[0].startswith("optimizer.pt: ")
    (folder / "optimizer.pt").write_bytes(content)
    (folder / "rng_state.pth").rename(folder / "rng_state_1.pth")
    (folder / "extra.bin").write_bytes(b"no checkpoint")
    weights = load_file(folder / "model.safetensors")
    cut = {name: each[:1].clone() for name, each in weights.items()}
    save_file(cut, folder / "model.safetensors")
    faults = ckptmove.validate(folder).of("container").data["faults"]
    assert [fault.partition(":")[0] for fault in faults] == [
        "extra.bin was not checked",
        "rng_state_0.pth is missing",
        "optimizer.pt is not of this model",
    ]


def test_validate_looks_at_copies_of_the_weights(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    assert ckptmove.validate(tmp_path).ok
    content = (tmp_path / "pytorch_model.bin").read_bytes()
    (tmp_path / "pytorch_model.bin").write_bytes(content[:500])
    failed = ckptmove.validate(tmp_path).of("container")
    assert failed.outcome == "failed"
    assert "pytorch_model.bin" in failed.title + "".join(failed.details)
    at = content.index(torch.ones(2).numpy().tobytes())
    (tmp_path / "pytorch_model.bin").write_bytes(content[:at] + b"\1" + content[at + 1 :])
    assert ckptmove.validate(tmp_path).of("container").details[0].startswith("pytorch_model.bin: ")


@pytest.mark.slow
def test_the_optimizer_of_the_folder_takes_the_step(trainer: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(trainer, tmp_path / "copy")
    report = ckptmove.validate(
        folder, model=str(folder), step="train", device="cuda:0", simulate=True
    )
    step = report.of("step")
    assert report.ok, str(report)
    assert "AdamW" in "".join(step.details)
    assert "holds none" not in str(report)


def test_a_run_below_a_model_is_not_looked_at_and_that_is_no_success(
    trainer: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    shutil.copytree(trainer, tmp_path / "checkpoint-2")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(trainer / name, tmp_path / name)
    done = run_cli("inspect", ".", "--require", "cpu", "-q", exit=1, cwd=tmp_path)
    assert "not read: checkpoint-2" in done.stderr
    faults = ckptmove.validate(tmp_path).of("container").data["faults"]
    assert faults == ["checkpoint-2 was not checked: it is a checkpoint of its own"]


def test_what_has_no_checksums_is_told(trainer: Path) -> None:
    title = ckptmove.validate(trainer).of("container").title
    assert title.endswith(
        "every checksum of its files is right; 1 file of safetensors, which has none"
    )


@pytest.mark.parametrize(
    "put",
    [lambda path: path.symlink_to("nowhere"), os.mkfifo],
    ids=["a link to nothing", "a fifo"],
)
def test_what_is_named_like_a_checkpoint_and_is_no_file_is_not_passed_over(
    put: Callable[[Path], None], tmp_path: Path
) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    optimizer = tmp_path / "optimizer.pt"
    torch.save({"state": {}, "param_groups": []}, optimizer)
    assert inspect(tmp_path).format == "training-folder"
    optimizer.unlink()
    put(optimizer)
    with pytest.raises(InputError) as raised:
        inspect(tmp_path)
    assert raised.value.path == os.fspath(optimizer)


def test_checkpoints_that_are_not_called_so_are_parts(tmp_path: Path, run_cli: RunCli) -> None:
    """By their content: a folder says nothing of devices that it did not look at."""
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    state = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": [0]}]}
    torch.save(state, tmp_path / "of-optimizer")
    (tmp_path / "notes.doc").write_bytes(b"PK\x03\x04 and no zip")
    found = ckptmove.inspect(tmp_path)
    assert {each.name: each.format for each in found.files} == {
        "model.pt": "torch-zip",
        "of-optimizer": "torch-zip",
        "notes.doc": "",
    }
    sections = {each.name: each.section for each in found.tensors}
    assert sections == {"model.w": "model", "of-optimizer.state.0.exp_avg": "optimizer"}
    content = (tmp_path / "of-optimizer").read_bytes()
    (tmp_path / "of-optimizer").write_bytes(content[:-100])
    said = run_cli("inspect", tmp_path, exit=3).stderr
    assert "of-optimizer" in said
    assert ckptmove.validate(tmp_path).of("container").outcome == "failed"


def test_of_very_many_other_files_some_are_looked_into_and_that_is_said(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a-state")
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    for n in range(1200):
        (tmp_path / f"b{n}.raw").write_bytes(b"x")
    found = ckptmove.inspect(tmp_path)
    assert [each.name for each in found.files if each.format] == ["a-state", "model.pt"]
    assert [each for each in found.warnings if "201 files in it are not named like" in each]


@pytest.mark.parametrize("name", ["model_best.pth.tar", "agent.pkl"])
def test_a_folder_of_anything_that_torch_saved_is_a_checkpoint(name: str, tmp_path: Path) -> None:
    """As PyTorch's example of ImageNet and timm's training script call what they save."""
    with tagging("cuda:0"):
        torch.save({"state_dict": {"w": torch.ones(2)}}, tmp_path / name)
    (tmp_path / "args.yaml").write_text("lr: 1\n")
    assert set(inspect(tmp_path).devices) == {"cuda:0"}
    assert ckptmove.validate(tmp_path).ok


@pytest.mark.parametrize("in_shards", [False, True])
def test_the_epochs_of_torchtune_go_with_its_recipe(in_shards: bool, tmp_path: Path) -> None:
    """As its checkpointers write them; other folders of epochs are on their own."""
    path, file = tmp_path / "tuned", tmp_path / "one.pt"
    model_folders.torchtune_run(path, "cuda:0", in_shards=in_shards)
    found = inspect(path)
    assert {each.name: each.section for each in found.tensors} == {
        **{f"epoch_{n}.w{k}": "model" for n in range(2) for k in (1, 2)},
        "recipe_state.optimizer.state.0.exp_avg": "optimizer",
    }
    assert not found.warnings
    assert ckptmove.validate(path).of("container").outcome == "passed"
    before = contents(path)
    for device in ("cpu", "cuda:0"):
        ckptmove.relocate(path, to=device, in_place=True)
        assert set(inspect(path).devices) == {device}
    assert contents(path) == before
    ckptmove.convert(path, file)
    ckptmove.convert(file, f"{tmp_path}/back/")
    weights = [f"epoch_{n}/model-00001-of-00001.bin" for n in range(2)]
    assert contents(tmp_path / "back").keys() == {*weights, "recipe_state/recipe_state.pt"}
    for each in weights:
        assert torch.load(tmp_path / "back" / each, map_location="cpu").keys() == {"w1", "w2"}
    shutil.rmtree(path / "recipe_state")
    with pytest.raises(UnsupportedError, match="epoch_0, epoch_1 in it are checkpoints"):
        inspect(path)
