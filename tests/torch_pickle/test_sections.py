"""What each tensor serves: found by the shape of what holds it, never by a name alone."""

from __future__ import annotations

from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from ckptmove import Manifest, Role, Section, inspect
from tests.making.checkpoints import MAKERS, hf_trainer_folder, lightning_checkpoint, save
from tests.making.frameworks import library, lightning_trainer, regression
from tests.making.modules import TinyNet, trained_net
from tests.making.training import step, stepped

MODEL, OPTIMIZER, OTHER = Section.MODEL, Section.OPTIMIZER, Section.OTHER
RNG = Section.RNG


def of(saved: object, folder: Path, tag: str = "cuda:0") -> Manifest:
    """The manifest of a file with this object."""
    return inspect(save(folder / "made.pt", saved, tag))


def counted(manifest: Manifest) -> dict[str, int]:
    """How many tensors each section has."""
    return {str(name): total.tensors for name, total in manifest.sections.items()}


def by_name(manifest: Manifest) -> dict[str, Section]:
    """The section of each tensor."""
    return {entry.name: entry.section for entry in manifest.tensors}


def roles(manifest: Manifest) -> dict[str, Role]:
    """The tensors that have a role."""
    return {entry.name: entry.role for entry in manifest.tensors if entry.role is not None}


# -- sections ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "sections"),
    [
        ("linear_state_dict", {"model": 2}),
        ("data_parallel_state_dict", {"model": 9}),
        ("quantized_linear_state_dict", {"model": 4}),
        ("conv_batchnorm_state_dict", {"model": 9}),
        ("whole_module", {"model": 9}),
        ("whole_tied_module", {"model": 2}),
        ("parameter", {"model": 1}),
        ("bare_tensor", {"other": 1}),
        ("adamw_training", {"model": 9, "optimizer": 18, "rng": 2}),
        ("adam_never_stepped", {"model": 9}),
        ("adam_tensor_lr", {"model": 9, "optimizer": 19}),
        ("sgd", {"model": 9}),
        ("lbfgs", {"model": 9, "optimizer": 15}),
        ("gan", {"model": 18, "optimizer": 36}),
        ("ema", {"model": 9, "ema": 6, "other": 6}),
        ("rng_state_file", {"rng": 2}),
        ("generator", {"rng": 1, "other": 1}),
        ("cpu_string_first", {"other": 2}),
        ("no_tensors", {}),
    ],
)
def test_a_checkpoint_falls_into_sections(
    name: str, sections: dict[str, int], tmp_path: Path
) -> None:
    assert counted(of(MAKERS[name](), tmp_path)) == sections


def test_a_pickled_optimizer_is_one_with_the_parameters_it_trains(tmp_path: Path) -> None:
    manifest = of(MAKERS["whole_optimizer"](), tmp_path)
    assert {entry.section for entry in manifest.tensors if entry.path[0] == "model"} == {MODEL}
    assert {e.section for e in manifest.tensors if e.path[0] == "optimizer"} == {OPTIMIZER}
    steps = [entry for entry in manifest.tensors if entry.role is not None]
    assert [(entry.role, entry.path[-1]) for entry in steps] == [(Role.STEP, "step")] * 6


def test_optimizers_are_found_wherever_they_lie(tmp_path: Path) -> None:
    net, optimizer = stepped(optim.AdamW)
    state = optimizer.state_dict()
    nested = {"run": [{"a": {"state": {"deep": [state]}}}], "more": (1, state), "net": net}
    found = by_name(of({"everything": nested}, tmp_path))
    optimizers = {name for name, section in found.items() if section is OPTIMIZER}
    assert optimizers == {name for name in found if "everything.net" not in name}
    assert len(optimizers) == 18


def test_the_model_inside_an_optimizer_like_dict_is_no_model(tmp_path: Path) -> None:
    """FSDP's form: states by name, each a dict of tensors alone, as a state dict is."""
    moments = {"exp_avg": torch.ones(2), "step": torch.tensor(1.0)}
    saved = {"state": {"head.weight": moments}, "param_groups": [{"params": ["head.weight"]}]}
    manifest = of(saved, tmp_path, "cpu")
    assert set(by_name(manifest).values()) == {OPTIMIZER}
    assert roles(manifest) == {"state.head.weight.step": Role.STEP}


def test_tensors_of_a_scheduler(tmp_path: Path) -> None:
    optimizer = optim.Adam(TinyNet().parameters(), lr=torch.tensor(0.1))
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1)
    found = by_name(of({"scheduler": scheduler.state_dict()}, tmp_path))
    assert found
    assert set(found.values()) == {Section.SCHEDULER}


@pytest.mark.parametrize(
    ("saved", "section"),
    [
        ({"a.weight": torch.ones(1), "a.bias": None}, MODEL),
        (OrderedDict({"a.weight": torch.ones(1), "a._extra_state": {"x": 1}}), MODEL),
        ({"weight": torch.ones(1), "epoch": 1}, OTHER),
        ({0: torch.ones(1)}, OTHER),
        ([torch.ones(1)], OTHER),
        ({"ema": {"decay": 0.9, "shadow": {"weight": torch.ones(1)}}}, Section.EMA),
    ],
)
def test_names_of_tensors_alone_make_a_state_dict(
    saved: object, section: Section, tmp_path: Path
) -> None:
    assert set(by_name(of(saved, tmp_path)).values()) == {section}


# -- roles -------------------------------------------------------------------------------------


def optimizer_roles(make: Any, tmp_path: Path, **flags: bool) -> Counter[str]:
    """How often each slot of a stepped optimizer has a role."""
    _, optimizer = stepped(make)
    state = optimizer.state_dict()
    state["param_groups"][0].update(flags)
    found = roles(of(state, tmp_path, "cpu"))
    assert set(found.values()) <= {Role.STEP}
    return Counter(name.rpartition(".")[2] for name in found)


@pytest.mark.parametrize(
    ("kind", "options", "flags", "slots"),
    [
        (optim.Adam, {}, {}, {"step": 6}),
        (optim.AdamW, {"amsgrad": True}, {}, {"step": 6}),
        (optim.Adam, {}, {"capturable": True}, {}),
        (optim.Adam, {"fused": True}, {}, {}),
        (optim.Adam, {}, {"fused": None}, {"step": 6}),
        (optim.Adam, {}, {"capturable": False, "fused": False}, {"step": 6}),
        (optim.NAdam, {}, {}, {"step": 6, "mu_product": 6}),
        (optim.NAdam, {}, {"capturable": True}, {}),
        (optim.ASGD, {}, {}, {}),
        (optim.Adagrad, {}, {}, {"step": 6}),
        (optim.Adafactor, {}, {}, {"step": 6}),
        (optim.Rprop, {}, {}, {"step": 6}),
        (optim.SGD, {"momentum": 0.9}, {}, {}),
    ],
)
def test_steps_that_stay_on_the_cpu(
    kind: Any, options: dict[str, Any], flags: dict[str, Any], slots: dict[str, int], tmp_path: Path
) -> None:
    make = lambda params: kind(params, **options)  # noqa: E731
    assert optimizer_roles(make, tmp_path, **flags) == slots


def test_flags_count_for_their_own_group(tmp_path: Path) -> None:
    manifest = of(MAKERS["adam_mixed_capturable"](), tmp_path, "cpu")
    assert roles(manifest) == {"optimizer.state.1.step": Role.STEP}
    assert manifest.capturable == ("optimizer",)
    assert of(MAKERS["adam_fused"](), tmp_path).capturable == ()


def test_a_pickled_capturable_optimizer_has_its_steps_on_the_device(tmp_path: Path) -> None:
    net, optimizer = stepped(optim.AdamW)
    optimizer.param_groups[0]["capturable"] = True
    manifest = of([net, optimizer], tmp_path, "cpu")
    assert manifest.capturable == ("1",)
    assert roles(manifest) == {}


def test_a_tensor_among_the_hyper_parameters(tmp_path: Path) -> None:
    net = TinyNet()
    betas: Any = (torch.tensor(0.9), torch.tensor(0.99))
    optimizer = optim.Adam(net.parameters(), lr=torch.tensor(0.1), betas=betas, foreach=False)
    found = roles(of(optimizer.state_dict(), tmp_path))
    group = "param_groups.0"
    assert found == dict.fromkeys(
        [f"{group}.lr", f"{group}.betas.0", f"{group}.betas.1"], Role.HYPERPARAMETER
    )


@pytest.mark.parametrize(
    "saved",
    [
        {"rng": torch.get_rng_state()},
        {"anything": torch.get_rng_state()},
        [torch.get_rng_state()],
        torch.get_rng_state(),
        {"random": {"torch": torch.get_rng_state(), "cuda": [torch.zeros(16).byte()]}},
        {"cuda_rng_state": torch.zeros(16).byte()},
        {"rng_states": {"xpu": [torch.zeros(16).byte()]}},
        {"cpu": torch.get_rng_state(), "cuda": [torch.zeros(16).byte(), torch.zeros(16).byte()]},
        {"generator": torch.Generator()},
        {"model": {"weight": 1}, "rng_state": torch.get_rng_state()},
    ],
)
def test_states_of_random_number_generators(saved: object, tmp_path: Path) -> None:
    manifest = of(saved, tmp_path, "cpu")
    assert set(by_name(manifest).values()) == {RNG}
    assert set(roles(manifest).values()) == {Role.RNG_STATE}


# -- lookalikes --------------------------------------------------------------------------------


class Packed(nn.Module):
    """Has bytes among its buffers, as 4-bit linear layers have."""

    def __init__(self, nbytes: int = 16) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("quant_state", torch.zeros(nbytes, dtype=torch.uint8))


LOOKALIKES: dict[str, object] = {
    "bytes": Packed().state_dict(),
    "bytes beside an RNG state": {"model": Packed().state_dict(), "rng": torch.get_rng_state()},
    "bytes of a module beside an RNG state": {"model": Packed(), "rng": torch.get_rng_state()},
    "bytes of a plain dict beside an RNG state": {
        "model": {"w": torch.ones(1), "quant_state": torch.zeros(16).byte()},
        "rng": torch.get_rng_state(),
    },
    "bytes of a GAN's generator": {"generator": Packed().state_dict()},
    "as many bytes as an RNG state": Packed(5056).state_dict(),
    "a parameter named step": {"model": nn.ParameterDict({"step": torch.ones(1)}).state_dict()},
    "a module named random": {"random": nn.Linear(1, 1).state_dict()},
    "a module named rng_state": nn.ModuleDict({"rng_state": Packed()}).state_dict(),
    "only state": {"state": {"0": nn.Linear(1, 1).state_dict()}},
    "param_groups that are none": {"param_groups": 3, "state": {"weight": torch.ones(1)}},
}


@pytest.mark.parametrize("what", LOOKALIKES)
def test_a_model_is_no_other_thing(what: str, tmp_path: Path) -> None:
    manifest = of(LOOKALIKES[what], tmp_path)
    manifest = manifest.select(["*[!g]"]) if "RNG" in what else manifest
    assert set(by_name(manifest).values()) == {MODEL}
    assert roles(manifest) == {}


def test_moments_are_no_steps_and_steps_elsewhere_are_tensors(tmp_path: Path) -> None:
    saved = {"step": torch.tensor(7), "state": {0: {"step": torch.tensor(1.0)}}, "groups": []}
    assert roles(of(saved, tmp_path)) == {}


# -- files of frameworks -----------------------------------------------------------------------


@pytest.mark.slow
def test_the_files_of_a_hugging_face_trainer(tmp_path: Path) -> None:
    folder = hf_trainer_folder(tmp_path, "cuda:0")
    optimizer = inspect(folder / "optimizer.pt")
    assert set(counted(optimizer)) == {"optimizer"}
    assert any(name.endswith(".step") for name in by_name(optimizer))
    assert roles(optimizer) == {}  # the trainer's AdamW is fused
    rng = inspect(folder / "rng_state.pth")
    assert set(counted(rng)) == {"rng"}
    assert rng.verdict == "uniform cpu"
    assert inspect(folder / "scheduler.pt").verdict == "no tensors"
    arguments = inspect(folder / "training_args.bin")
    assert "transformers.training_args.TrainingArguments" in arguments.objects
    assert arguments.unknown_callables == ()


@pytest.mark.slow
def test_a_pytorch_model_bin_is_a_model(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    manifest = of(model.state_dict(), tmp_path)
    assert set(counted(manifest)) == {"model"}
    tied = {entry.name: entry.shared_with for entry in manifest.tensors}
    assert tied["lm_head.weight"] == ("transformer.wte.weight",)


def test_a_lightning_checkpoint(tmp_path: Path) -> None:
    manifest = inspect(lightning_checkpoint(tmp_path / "last.ckpt", "cuda:0"))
    found = by_name(manifest)
    assert {name.partition(".")[0] for name, s in found.items() if s is MODEL} == {"state_dict"}
    optimizers = {name.partition(".")[0] for name, s in found.items() if s is OPTIMIZER}
    assert optimizers == {"optimizer_states"}
    assert Counter(roles(manifest).values()) == {Role.STEP: 2}
    values = {value.name: value.value for value in manifest.values_naming_devices}
    assert values["hyper_parameters.device_name"] == "cuda:0"


def test_scores_of_files_are_no_model(tmp_path: Path) -> None:
    """As Lightning's ModelCheckpoint keeps them: `best_k_models`."""
    scores = {"/runs/epoch=1.ckpt": torch.tensor(0.5), "/runs/epoch=2.ckpt": torch.tensor(0.4)}
    saved = {"callbacks": {"best_k_models": scores}, "state_dict": {"w": torch.ones(1)}}
    torch.save(saved, tmp_path / "run.ckpt")
    sections = [str(entry.section) for entry in inspect(tmp_path / "run.ckpt").tensors]
    assert sections == ["other", "other", "model"]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("keeps", "role"), [(1, None), (2, Role.SCORE)])
def test_the_score_to_beat_is_on_the_cpu_until_there_is_one(
    keeps: int, role: Role | None, tmp_path: Path
) -> None:
    """As Lightning's ModelCheckpoint saves it after one file."""
    lightning = library("lightning")

    class Logging(lightning.Callback):  # type: ignore[name-defined]
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: object) -> None:
            module.log("loss", outputs["loss"])

    saver = lightning.pytorch.callbacks.ModelCheckpoint(
        tmp_path, "first", monitor="loss", save_top_k=keeps, every_n_train_steps=1
    )
    trainer = lightning_trainer(
        lightning, max_steps=1, enable_checkpointing=True, callbacks=[Logging(), saver]
    )
    inputs = torch.utils.data.TensorDataset(torch.randn(8, 3))
    trainer.fit(regression(lightning), torch.utils.data.DataLoader(inputs))
    entries = {entry.path[-1]: entry for entry in inspect(tmp_path / "first.ckpt").tensors}
    assert entries["kth_value"].role == role
    assert (entries["kth_value"].storage == entries["current_score"].storage) == (role is None)
    assert entries["current_score"].role is None


def test_steps_of_two_optimizers(tmp_path: Path) -> None:
    first, second = trained_net(), trained_net()
    optimizers = [optim.Adam(first.parameters()), optim.SGD(second.parameters(), momentum=0.9)]
    for net, optimizer in zip((first, second), optimizers, strict=True):
        step(net, optimizer)
    manifest = of({"optimizers": [each.state_dict() for each in optimizers]}, tmp_path)
    assert {name.split(".")[1] for name in roles(manifest)} == {"0"}
    assert set(counted(manifest)) == {"optimizer"}
