"""What `validate` finds in a folder besides the bytes of its checkpoints."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckptmove import InputError, diff, inspect, load, validate
from ckptmove.formats.folders.missing_files import missing_files
from tests.conftest import TrainingFolder
from tests.making.building import at_most
from tests.making.distributed import save_dcp
from tests.making.saving import tagging
from tests.oracles.sameness import assert_same_tree

WEIGHTS = {"a.weight": torch.arange(12.0).reshape(3, 4), "b.bias": torch.ones(4)}


def faults(folder: Path) -> list[str]:
    """What `validate` has against a folder."""
    found = validate(folder).of("container")
    return list(found.data.get("faults", [found.title]))


def model(folder: Path, **files: object) -> Path:
    """A model with files of JSON beside it."""
    folder.mkdir(exist_ok=True)
    save_file(WEIGHTS, folder / "model.safetensors")
    for name, said in files.items():
        (folder / f"{name}.json").write_text(json.dumps(said))
    return folder


def optimizer(**state: object) -> dict[str, object]:
    """The state of an optimizer of those weights."""
    slots = {n: {"exp_avg": torch.zeros_like(each)} for n, each in enumerate(WEIGHTS.values())}
    return {"state": slots, "param_groups": [{"params": [0, 1]}], **state}


# What belongs here


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        ("rng_state_1.pth rng_state_3.pth", "rng_state_0.pth rng_state_2.pth"),
        ("random_states_1.pkl", "random_states_0.pkl"),
        ("rng_state.pth optimizer_0/__0_0.distcp optimizer_0/__1_0.distcp",) * 1
        + ("rng_state_0.pth rng_state_1.pth",),
        ("rng_state_0.pth optimizer_0/__2_1.distcp", "rng_state_1.pth rng_state_2.pth"),
        ("rng_state.pth optimizer_0/__0_0.distcp", ""),
        ("model_2.safetensors model.safetensors", "model_1.safetensors"),
        ("optimizer_1.bin", "optimizer.bin"),
        ("consolidated.00.pth consolidated.02.pth", "consolidated.01.pth"),
        (
            "actor/model_world_size_3_rank_0.pt actor/model_world_size_3_rank_1.pt",
            "actor/model_world_size_3_rank_2.pt",
        ),
        ("model-00002-of-00002.bin", "model.bin.index.json model-00001-of-00002.bin"),
        ("model-00001-of-00001.safetensors model.safetensors.index.json", ""),
        ("adapter_model.bin", "adapter_config.json"),
        ("a/adapter_model.bin a/adapter_config.json", ""),
        ("training_args.bin config.json", ""),
        ("training_args.bin optimizer.pt", "trainer_state.json"),
        ("trainer_state.json optimizer.pt", "scheduler.pt"),
        ("trainer_state.json optimizer.pt scheduler.pt", ""),
        (
            "s/zero_pp_rank_1_mp_rank_00_optim_states.pt s/mp_rank_00_model_states.pt",
            "s/zero_pp_rank_0_mp_rank_00_optim_states.pt",
        ),
        (
            "s/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt rng_state_0.pth rng_state_1.pth",
            "s/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt s/mp_rank_00_model_states.pt",
        ),
        (
            "zero_pp_rank_0_mp_rank_00_model_states.pt zero_pp_rank_0_mp_rank_01_optim_states.pt "
            "zero_pp_rank_0_mp_rank_00_optim_states.pt",
            "",
        ),
    ],
)
def test_names_say_what_is_missing(names: str, missing: str) -> None:
    found = missing_files(names.split())
    assert {each.name for each in found} == set(missing.split())
    assert all(each.because for each in found)


def test_a_number_without_end_is_no_work() -> None:
    names = ["rng_state_999999.pth", "x-00001-of-99999.bin", "zero_pp_rank_999999_mp_rank_999999_"]
    assert len(missing_files([*names, f"{names[2]}optim_states.pt"])) <= 1000


def test_the_rng_states_that_are_missing_are_named(tmp_path: Path) -> None:
    model(tmp_path)
    torch.save(optimizer(), tmp_path / "optimizer.pt")
    for rank in (0, 2):
        torch.save({"cpu": torch.get_rng_state()}, tmp_path / f"rng_state_{rank}.pth")
    told = "rng_state_2.pth is of process 2, so there were 3 of them or more"
    assert faults(tmp_path) == [f"rng_state_1.pth is missing: {told}"]
    found = inspect(tmp_path)
    assert f"incomplete, missing: rng_state_1.pth ({told})" in found.warnings
    assert {each.name: each.not_read for each in found.files}["rng_state_1.pth"] == "it is missing"


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        ("model.safetensors", "the weights are missing, such as model.safetensors"),
        ("optimizer.pt", "the optimizer is missing, such as optimizer.pt"),
        ("rng_state.pth", "the RNG states are missing, such as rng_state.pth"),
        ("scheduler.pt", "scheduler.pt is missing"),
    ],
)
def test_what_training_always_saves_has_to_be_there(gone: str, said: str, tmp_path: Path) -> None:
    model(tmp_path)
    torch.save(optimizer(), tmp_path / "optimizer.pt")
    torch.save({"last_epoch": 2, "_step_count": 3}, tmp_path / "scheduler.pt")
    torch.save({"cpu": torch.get_rng_state()}, tmp_path / "rng_state.pth")
    (tmp_path / "trainer_state.json").write_text('{"global_step": 2}')
    assert not faults(tmp_path)
    (tmp_path / gone).unlink()
    assert [fault.partition(":")[0] for fault in faults(tmp_path)] == [said]


def test_a_folder_that_no_trainer_wrote_needs_no_rng_states(tmp_path: Path) -> None:
    torch.save(WEIGHTS, tmp_path / "model.pt")
    torch.save(optimizer(), tmp_path / "optimizer.pt")
    assert not faults(tmp_path)


def test_a_folder_around_a_checkpoint_is_checked_as_the_checkpoint(tmp_path: Path) -> None:
    inner = model(tmp_path / "state")
    for name in ("optimizer.bin", "optimizer_1.bin"):
        torch.save(optimizer(), inner / name)
    torch.save({"last_epoch": 2, "_step_count": 3}, inner / "scheduler.bin")
    torch.save({"cpu": torch.get_rng_state()}, inner / "random_states_0.pkl")
    assert not faults(tmp_path)
    names = {each.name: each.section for each in inspect(inner).tensors}
    assert {each.name: each.section for each in inspect(tmp_path).tensors} == names
    assert "optimizer.state.0.exp_avg" in names
    (inner / "optimizer.bin").unlink()
    assert faults(tmp_path) == ["state/optimizer.bin is missing: optimizer_1.bin is there"]
    (inner / "optimizer_1.bin").unlink()
    assert [each.partition(":")[0] for each in faults(tmp_path)] == [
        "the optimizer is missing, such as optimizer.bin"
    ]


def test_files_that_torch_loads_are_named_as_in_the_folder(tmp_path: Path) -> None:
    for part in ("unet", "vae"):
        (tmp_path / part).mkdir()
        torch.save(WEIGHTS, tmp_path / part / "diffusion_pytorch_model.bin")
    (tmp_path / "model_index.json").write_text("{}")
    told = [each.partition(":")[0] for each in validate(tmp_path).of("reload").details]
    assert told == [f"{part}/diffusion_pytorch_model.bin" for part in ("unet", "vae")]


def test_a_device_that_is_not_stored_is_not_said_to_be_the_cpu(tmp_path: Path) -> None:
    folder = model(tmp_path / "folder")
    torch.save(optimizer(), folder / "optimizer.pt")
    for each in (folder, save_dcp(tmp_path / "dcp", {"weight": torch.ones(2)})):
        shown = str(inspect(each)).splitlines()
        rows = [line for line in shown if line.startswith(("model", "weight"))]
        assert len(rows) >= 2, shown
        assert all("not stored" in line for line in rows), shown
    shown = str(inspect(folder)).splitlines()
    assert any(line.startswith("optimizer ") and " cpu " in line for line in shown), shown


# Configurations


STATE = {"global_step": 2, "log_history": [{"loss": 1.5}]}


@pytest.mark.parametrize("name", ["config", "generation_config", "trainer_state", "vocab"])
@pytest.mark.parametrize("content", ["", '{"a": 1', '{"a": ' * 200 + "1" + "}" * 200, '{"\0": 1}'])
def test_json_that_is_none_is_named(name: str, content: str, tmp_path: Path) -> None:
    model(tmp_path)
    (tmp_path / f"{name}.json").write_text(content)
    fault = next(each for each in faults(tmp_path) if each.startswith(f"{name}.json: "))
    assert len(fault) < 300


def test_json_as_libraries_write_it_passes(tmp_path: Path) -> None:
    model(tmp_path, config={"a": [1, {}]}, vocab=["x"], trainer_state={**STATE, "loss": 1e999})
    (tmp_path / "log.json").write_text('{"loss": NaN}\n{"loss": 1}\n')
    assert "Infinity" in (tmp_path / "trainer_state.json").read_text()
    assert not faults(tmp_path)


@pytest.mark.parametrize(
    ("name", "said", "fault"),
    [
        ("config", [], "it is not an object of JSON"),
        ("trainer_state", {}, "its global_step is not a number"),
        ("trainer_state", {**STATE, "log_history": 1}, "its log_history is not a list"),
        ("adapter_config", {}, "its peft_type is not told"),
        ("adapter_config", {"peft_type": "LORA"}, "the weights of the adapter"),
        ("modules", {}, "it is not a list of modules"),
        ("modules", [{"idx": 0}], "it does not give the path and the type of each module"),
        ("modules", [{"path": "1_Pooling", "type": "st.Pooling"}], "its module 1_Pooling is"),
        ("model_index", {"unet": ["diffusers", "UNet2DModel"]}, "unet is missing, its component"),
        ("model_index", {"scheduler": ["diffusers", "X"]}, "scheduler is missing"),
        ("x.safetensors.index.fp16", {"weight_map": {"a": "../b"}}, "it names ../b, which is"),
    ],
)
def test_what_a_configuration_names_has_to_be_there(
    name: str, said: object, fault: str, tmp_path: Path
) -> None:
    model(tmp_path, **{name: said})
    found = faults(tmp_path)
    assert any(each.startswith(f"{name}.json: {fault}") for each in found), found


@pytest.mark.parametrize("gone", ["unet/config.json", "unet/diffusion_pytorch_model.safetensors"])
def test_each_component_has_weights_and_a_configuration(gone: str, tmp_path: Path) -> None:
    for name, file in (("scheduler", "scheduler_config"), ("unet", "config"), ("tok", "merges")):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{file}.json").write_text("{}")
    save_file(WEIGHTS, tmp_path / "unet" / "diffusion_pytorch_model.safetensors")
    save_file(WEIGHTS, tmp_path / "unet" / "diffusion_pytorch_model.fp16.safetensors")
    said = {
        "_class_name": "Pipeline",
        "scheduler": ["diffusers", "DDIMScheduler"],
        "unet": ["diffusers", "UNet2DModel"],
        "tok": ["transformers", "CLIPProcessor"],
        "safety_checker": [None, None],
    }
    (tmp_path / "model_index.json").write_text(json.dumps(said))
    assert not faults(tmp_path)
    (tmp_path / gone).unlink()
    (tmp_path / "unet" / "diffusion_pytorch_model.fp16.safetensors").unlink()
    if gone.endswith(".json"):
        save_file(WEIGHTS, tmp_path / "unet" / "diffusion_pytorch_model.safetensors")
    else:
        save_file(WEIGHTS, tmp_path / "model.safetensors")
    wanted = "unet/config.json" if gone.endswith(".json") else "the weights of its component unet"
    assert any(wanted in each for each in faults(tmp_path)), faults(tmp_path)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("", "it is empty"),
        ("lr: 0.1\nsiz", "its last line is cut short"),
        ("lr: 0.1\nsize\n", "its line 2 is not YAML"),
        ("lr: \x01\n", "it is not text"),
        pytest.param("x" * (1 << 20) + "\n", "its line 1 is not YAML", id="a long line"),
        ("{}\n", ""),
        ("# x\nlr: 0.1\na:\n- 1\n- b: 2\nkey: 'x\n\n  y'\n", ""),
    ],
)
def test_hyperparameters_are_whole_lines(content: str, fault: str, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    torch.save({"state_dict": WEIGHTS}, tmp_path / "checkpoints" / "last.ckpt")
    (tmp_path / "hparams.yaml").write_text(content)
    with at_most(20):
        assert faults(tmp_path) == [f"hparams.yaml: {fault}"] * bool(fault)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("lr: 0.1\nsize: 2", ""),
        ("lr: 0.1\nsizes:\n  - 2", ""),
        ("lr: 0.1\nsiz", "its last line is cut short"),
        ("lr\nsize: 2", "its line 1 is not YAML"),
    ],
)
def test_yaml_of_a_person_may_end_without_a_new_line(
    content: str, fault: str, tmp_path: Path
) -> None:
    model(tmp_path)
    (tmp_path / "train.yaml").write_text(content)
    found = validate(tmp_path).of("container")
    assert found.data.get("faults", []) == [f"train.yaml: {fault}"] * bool(fault)
    said = "no new line at the end, not known whether nothing is missing: train.yaml"
    assert (said in found.details) == (not fault)


def test_a_large_or_linked_configuration_is_not_read_and_that_is_said(tmp_path: Path) -> None:
    folder = model(tmp_path / "model")
    with (folder / "tokenizer.json").open("wb") as file:
        file.truncate(1 << 30)
    (tmp_path / "secret.json").write_text("{")
    (folder / "config.json").symlink_to(tmp_path / "secret.json")
    (folder / "gone.json").symlink_to("nowhere.json")
    found = {each.partition(": ")[0]: each for each in faults(folder)}
    assert found.keys() == {"tokenizer.json", "config.json", "gone.json"}
    assert "was not checked" in found["tokenizer.json"]
    assert "is a link that leads outside" in found["config.json"]


def test_state_of_a_parameter_that_no_group_lists_is_a_contradiction(tmp_path: Path) -> None:
    model(tmp_path)
    parameters = [torch.nn.Parameter(each.clone()) for each in WEIGHTS.values()]
    adam = torch.optim.AdamW([{"params": [each]} for each in parameters])
    sum(each.square().sum() for each in parameters).backward()  # type: ignore[union-attr]
    adam.step()
    state = adam.state_dict()
    torch.save({"cpu": torch.get_rng_state()}, tmp_path / "rng_state.pth")
    torch.save(state, tmp_path / "optimizer.pt")
    assert not faults(tmp_path)
    state["param_groups"].pop()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        adam.load_state_dict(state)
    torch.save(state, tmp_path / "optimizer.pt")
    assert faults(tmp_path) == [
        "optimizer.pt contradicts itself: it has state of 1 parameter "
        "that its param_groups do not list, for example of 1"
    ]


def test_an_optimizer_of_more_parameters_than_the_model_has_is_not_of_it(tmp_path: Path) -> None:
    model(tmp_path)
    torch.save({"cpu": torch.get_rng_state()}, tmp_path / "rng_state.pth")
    count = len(WEIGHTS)
    for extra in (0, 1):
        parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(count + extra)]
        torch.save(torch.optim.SGD(parameters).state_dict(), tmp_path / "optimizer.pt")
        assert faults(tmp_path) == [
            "optimizer.pt is not of this model: its param_groups list "
            f"{count + 1} parameters, and the model has {count} tensors"
        ] * bool(extra)


# Two forms of the same weights


def _torch(folder: Path, state: object) -> None:
    with tagging("cuda:0"):
        torch.save(state, folder / "pytorch_model.bin")


@pytest.mark.parametrize("training", [False, True])
def test_two_forms_are_the_same_only_if_they_were_compared(training: bool, tmp_path: Path) -> None:
    model(tmp_path)
    if training:
        torch.save(optimizer(), tmp_path / "optimizer.pt")
        torch.save({"cpu": torch.get_rng_state()}, tmp_path / "rng_state.pth")
    tied = {**WEIGHTS, "tied": WEIGHTS["b.bias"]}
    _torch(tmp_path, tied)
    assert any(each.endswith("but they were not compared") for each in inspect(tmp_path).warnings)
    report = validate(tmp_path)
    found = report.of("container")
    same = "pytorch_model.bin and model.safetensors hold the same tensors, 2, byte for byte"
    assert found.outcome == "passed", str(report)
    assert same in found.details
    assert not any("compared" in each for each in report.warnings)
    _torch(tmp_path, {**tied, "a.weight": WEIGHTS["a.weight"] + 1, "new": torch.ones(1)})
    [fault] = faults(tmp_path)
    assert fault == (
        "pytorch_model.bin and model.safetensors hold different tensors: a.weight (changed), "
        "new (added)"
    )


def test_an_adapter_is_no_copy_of_the_model(tmp_path: Path) -> None:
    model(tmp_path, adapter_config={"peft_type": "LORA"})
    save_file({"lora": torch.ones(2)}, tmp_path / "adapter_model.safetensors")
    assert not faults(tmp_path)
    assert not any("compared" in each for each in inspect(tmp_path).warnings)


# Limits


@pytest.mark.sample(1)
@pytest.mark.parametrize("sharded", [False, True])
def test_more_files_are_read_than_can_be_open(sharded: bool, tmp_path: Path) -> None:
    for n in range(1, 101):
        name = f"model-{n:05}-of-00100.safetensors" if sharded else f"x{n}.safetensors"
        save_file({f"w{n}": torch.ones(1)}, tmp_path / name)
    if sharded:
        where = {f"w{n}": f"model-{n:05}-of-00100.safetensors" for n in range(1, 101)}
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": where}))
    command = [sys.executable, "-m", "ckptmove", "inspect", str(tmp_path)]
    line = f"ulimit -n 64; exec {shlex.join(command)}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("w100 " if sharded else "x100.safetensors ") in done.stdout


def test_no_more_files_can_be_opened(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, path := tmp_path / "x.safetensors")
    inspect(path)  # which imports what it needs
    limits, held = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        with pytest.raises(InputError, match="Too many open files") as caught:
            inspect(path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for each in held:
            os.close(each)
    assert caught.value.hint == "raise ulimit -n"


# Devices


@pytest.fixture
def fsdp(tmp_path: Path) -> Callable[[], Path]:
    """What accelerate saves of FSDP: folders of torch.distributed.checkpoint."""

    def make() -> Path:
        folder = tmp_path / "state"
        folder.mkdir()
        save_dcp(folder / "pytorch_model_fsdp_0", {"model": WEIGHTS})
        save_dcp(folder / "optimizer_0", {"optimizer": optimizer()})
        torch.save({"last_epoch": 1}, folder / "scheduler.bin")
        torch.save({"torch_manual_seed": torch.get_rng_state()}, folder / "random_states_0.pkl")
        return folder

    return make


def test_parts_without_devices_are_not_on_the_cpu(fsdp: Callable[[], Path]) -> None:
    folder = fsdp()
    found = inspect(folder)
    told = {each.name: each for each in found.files}
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        assert told[name].devices == ()
        assert told[name].tensors
    assert told["random_states_0.pkl"].devices == ("cpu",)
    assert "stored without one" in found.verdict
    inspect(folder, require="cuda:0")  # what has no device is loaded to wherever one wants
    assert not faults(folder)


# Stores


def test_a_folder_in_a_store_is_checked_as_one_here(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    model(tmp_path, trainer_state=STATE)
    torch.save(optimizer(), tmp_path / "optimizer.pt")
    torch.save({"last_epoch": 2}, tmp_path / "scheduler.pt")
    torch.save({"cpu": torch.get_rng_state()}, tmp_path / "rng_state.pth")
    store = fsspec.filesystem("memory")
    store.put(str(tmp_path), "/checks/checkpoint-2", recursive=True)
    url = "memory://checks/checkpoint-2"
    try:
        assert not validate(url).of("container").data["faults"]
        assert len(inspect(url).files) == 5
        assert diff(url, tmp_path).equal
        assert_same_tree(load(url, "cpu")["model"], WEIGHTS)
        store.pipe("/checks/checkpoint-2/trainer_state.json", b'{"global_step"')
        store.mv("/checks/checkpoint-2/rng_state.pth", "/checks/checkpoint-2/rng_state_1.pth")
        named = [fault.partition(":")[0] for fault in validate(url).of("container").data["faults"]]
        assert named == ["rng_state_0.pth is missing", "trainer_state.json"]
    finally:
        store.rm("/checks", recursive=True)


@pytest.mark.slow
def test_what_names_very_many_files_is_checked_in_time(tmp_path: Path) -> None:
    folder = model(tmp_path / "model")
    for n in range(1_000):
        (folder / f"{n}.txt").touch()
    named = {str(n): f"file {n}" for n in range(300_000)}
    (folder / "other.json").write_text(json.dumps({"weight_map": named}))
    with at_most(10):
        assert len(faults(folder)) == len(named)


def test_a_component_of_an_endless_class_is_checked_in_time(tmp_path: Path) -> None:
    folder = model(tmp_path / "model")
    (folder / "unet").mkdir()
    (folder / "unet" / "notes.txt").touch()
    said = {"unet": ["diffusers", "Scheduler" * 60_000 + "-"]}
    (folder / "model_index.json").write_text(json.dumps(said))
    with at_most(10):
        assert faults(folder) == ["model_index.json: the weights of its component unet are missing"]


def test_the_arguments_of_a_trainer_tell_how_many_processes_there_were(
    training_folder: TrainingFolder,
) -> None:
    folder = training_folder("trainer")
    args: Any = torch.load(folder / "training_args.bin", weights_only=False)
    assert args.distributed_state.num_processes == 1
    assert not faults(folder)
    args.distributed_state.__dict__["num_processes"] = 3
    torch.save(args, folder / "training_args.bin")
    for n in (0, 1):
        shutil.copy(folder / "rng_state.pth", folder / f"rng_state_{n}.pth")
    (folder / "rng_state.pth").unlink()
    said = "training_args.bin says that there were 3 processes"
    assert faults(folder) == [f"rng_state_2.pth is missing: {said}"]
    (folder / "training_args.bin").unlink()
    found = validate(folder).of("container")
    assert "RNG states of 2 processes; not checked whether there were more, which no file says" in (
        found.details
    )
