"""Whose weights a checkpoint holds: one model's and its averages, as libraries save them."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn, optim
from torch.optim.swa_utils import AveragedModel

import ckptmove
from ckptmove import RefusedError, UsageError, convert, inspect
from tests.conftest import RunCli

Saved = dict[str, Any]


def net(value: float) -> nn.Module:
    """A small model with parameters and buffers, all of one value."""
    made = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Linear(2, 3))
    with torch.no_grad():
        for each in made.state_dict().values():
            each.fill_(value)
    return made


def state(value: float, prefix: str = "") -> Saved:
    return {prefix + name: each for name, each in net(value).state_dict().items()}


def trained(value: float = 1) -> Saved:
    """What a model gives, and the optimizer that trained it."""
    return {"epoch": 3, "optimizer": optim.SGD(net(value).parameters(), 0.1).state_dict()}


def averaged() -> AveragedModel:
    """torch's own: an average of 2 within it, beside a count."""
    made = AveragedModel(net(1))
    made.update_parameters(net(2))
    return made


# -- in the shape that libraries give them: the model is of ones, its average of twos --------------


def timm() -> Saved:
    """timm/utils/checkpoint_saver.py, `_save`, of a model under DistributedDataParallel."""
    return {**trained(), "arch": "x", "state_dict": state(1), "state_dict_ema": state(2, "module.")}


def swa_utils() -> Saved:
    """torch/optim/swa_utils.py, `AveragedModel.state_dict`."""
    return {"model": state(1), "swa_model": averaged().state_dict(), **trained()}


def mobilenet() -> Saved:
    """pytorch/vision, references/classification/train.py: `model_ema` is an AveragedModel."""
    return {"model": state(1), "model_ema": averaged().state_dict(), "args": {"lr": 0.1}}


def lit_ema() -> Saved:
    """CompVis/latent-diffusion, ldm/modules/ema.py: names without dots, among the model's."""
    weights = state(1, "model.diffusion_model.")
    flat = {
        "model_ema." + f"diffusion_model.{name}".replace(".", ""): each
        for name, each in state(2).items()
        if "running" not in name and "num_" not in name
    }
    count = {"model_ema.decay": torch.tensor(0.9), "model_ema.num_updates": torch.tensor(1)}
    return {"state_dict": {**weights, "first_stage_model.w": torch.ones(2), **count, **flat}}


def diffusers() -> Saved:
    """diffusers/training_utils.py, `EMAModel.state_dict`: a list, in the order of parameters."""
    shadow = [each.detach() for each in net(2).parameters()]
    about = {"decay": 0.9999, "optimization_step": 7, "power": 0.6, "shadow_params": shadow}
    return {"model": state(1), "ema": about}


def torch_ema() -> Saved:
    """fadel/pytorch_ema, torch_ema/ema.py: `collected_params` are the model's own, put aside."""
    shadow, own = ([each.detach() for each in net(n).parameters()] for n in (2, 1))
    about = {"decay": 0.9, "num_updates": 3, "shadow_params": shadow, "collected_params": own}
    return {"net": state(1), "ema": about}


def ema_pytorch() -> Saved:
    """lucidrains/ema-pytorch: `online_model` is the model itself, beside its average."""
    count = {"initted": torch.tensor(True), "step": torch.tensor(1)}
    return {
        "model": state(1),
        "ema": {**state(1, "online_model."), **state(2, "ema_model."), **count},
    }


def k_diffusion() -> Saved:
    """crowsonkb/k-diffusion, train.py."""
    return {"model": state(1), "model_ema": state(2), "ema_sched": {"step": 1}, "step": 4}


def basicsr() -> Saved:
    """XPixelGroup/BasicSR, basicsr/models/base_model.py, `save_network`."""
    return {"params": state(1), "params_ema": state(2)}


def weight_averaging() -> Saved:
    """Lightning, callbacks/weight_averaging.py: the average is what `state_dict` holds."""
    count = {"n_averaged": torch.tensor(2)}
    return {"state_dict": state(2), "current_model_state": state(1), "averaging_state": count}


def mmengine() -> Saved:
    """mmengine/hooks/ema_hook.py, `_swap_ema_state_dict`: they are exchanged when saved."""
    count = {"steps": torch.tensor(3)}
    model = {"state_dict": state(2), "ema_state_dict": {**state(1, "module."), **count}}
    return {"meta": {"epoch": 1}, "message_hub": {"log": {}}, **model}


def nemo() -> Saved:
    """NVIDIA/NeMo, nemo/collections/common/callbacks/ema.py: beside the optimizer's state."""
    shadow = tuple(each.detach() for each in net(2).parameters())
    inner = optim.SGD(net(1).parameters(), 0.1).state_dict()
    return {"state_dict": state(1), "optimizer_states": [{"opt": inner, "ema": shadow, "decay": 1}]}


def fairseq() -> Saved:
    """fairseq/models/ema/ema.py: in `extra_state`."""
    return {"model": state(1), "extra_state": {"ema": OrderedDict(state(2)), "epoch": 2}}


def within_lightning() -> Saved:
    """A LightningModule with `self.ema_model = AveragedModel(self.model)`."""
    average = {f"ema_model.{name}": each for name, each in averaged().state_dict().items()}
    return {"state_dict": {**state(1, "model."), **average}}


def stylegan() -> Saved:
    """rosinality/stylegan2-pytorch, train.py: but for its discriminator."""
    return {"g_ema": state(2), "module": state(1), "g_optim": trained()["optimizer"]}


def ultralytics() -> Saved:
    """ultralytics/engine/trainer.py, `save_model`, as of YOLOv5: whole modules, pickled."""
    return {"epoch": 1, "model": net(1), "ema": net(2), "updates": 7, "optimizer": None}


def whole_average() -> Saved:
    """An AveragedModel itself, pickled."""
    return {"net": net(1), "average": averaged()}


def with_more(value: float) -> nn.Module:
    """A whole module with tensors that its state dict does not hold."""
    model = net(value)
    model.register_buffer("mask", torch.full((2,), value), persistent=False)
    model.cache = torch.full((3,), value)
    return model


def ultralytics_with_more() -> Saved:
    """As above, with a buffer that is not persistent and a tensor that is an attribute."""
    return {"epoch": 1, "model": with_more(1), "ema": with_more(2), "optimizer": None}


def whole_average_with_more() -> Saved:
    """An AveragedModel of such a module."""
    return {"net": with_more(1), "average": AveragedModel(with_more(2))}


SHAPES: list[Callable[[], Saved]] = [
    *(timm, swa_utils, mobilenet, lit_ema, diffusers, torch_ema, ema_pytorch, k_diffusion),
    *(basicsr, weight_averaging, mmengine, nemo, fairseq, within_lightning, stylegan),
    *(ultralytics, whole_average, ultralytics_with_more, whole_average_with_more),
]


def saved(content: object, folder: Path) -> Path:
    torch.save(content, path := folder / "run.pt")
    return path


def bare(path: Path, **options: Any) -> dict[str, torch.Tensor]:
    """The tensors of a file for Hugging Face."""
    convert(path, out := path.with_name("out.safetensors"), preset="hf", force=True, **options)
    return load_file(out)


@pytest.mark.sample(8)
@pytest.mark.parametrize("make", SHAPES)
def test_a_model_and_its_average_are_told_apart(make: Callable[[], Saved], tmp_path: Path) -> None:
    path = saved(make(), tmp_path)
    manifest = inspect(path)
    for entry in manifest.tensors:
        if entry.beside:
            continue  # no state dict holds it
        if entry.section in ("model", "ema") and entry.nbytes > 8:  # none that counts
            convert(
                path,
                alone := tmp_path / "one.safetensors",
                select=entry.name,
                bare=True,
                force=True,
            )
            (value,) = load_file(alone).values()
            assert {"model": 1, "ema": 2}[entry.section] == value.unique()
    model, average = bare(path), bare(path, weights="ema")
    prefix = "model.diffusion_model." if make is lit_ema else ""
    prefix = "model." if make is within_lightning else prefix
    parameters = {prefix + name for name, _ in net(1).named_parameters()}
    buffers = {prefix + name for name, _ in net(1).named_buffers()}
    more = {"first_stage_model.w"} if make is lit_ema else set()
    assert model.keys() == parameters | buffers | more
    assert parameters <= average.keys() <= parameters | buffers
    assert {float(model[name].unique()) for name in parameters} == {1}
    assert {float(average[name].unique()) for name in parameters} == {2}
    for name in parameters:
        assert model[name].shape == average[name].shape
    reports = [
        convert(path, tmp_path / "o.pt", weights=each, dry_run=True) for each in ("model", "ema")
    ]
    one, two = (each.weights for each in reports)
    assert one is not None
    assert two is not None
    assert (one["section"], two["section"]) == ("model", "ema")
    assert (one["tensors"], two["tensors"]) == (len(model), len(average))
    assert two["name"] in {each["name"] for each in one["others"]}
    assert one["name"] in {each["name"] for each in two["others"]}


@pytest.mark.parametrize("make", SHAPES)
def test_they_load_into_the_model(make: Callable[[], Saved], tmp_path: Path) -> None:
    path = saved(make(), tmp_path)
    for which, value in (("model", 1.0), ("ema", 2.0)):
        loaded = ckptmove.load(path, weights=which)  # type: ignore[arg-type]
        wrapped = {"lit_ema": "model.diffusion_model.", "within_lightning": "model."}
        prefix = wrapped.get(make.__name__, "")
        model = net(0)
        loaded = {key.removeprefix(prefix): each for key, each in loaded.items()}
        found = model.load_state_dict(loaded, strict=False)
        assert all("running" in key or "num_" in key for key in found.missing_keys)
        assert set(found.unexpected_keys) <= {"first_stage_model.w"}
        assert {float(each.detach().unique()) for each in model.parameters()} == {value}


@pytest.mark.parametrize("which", ["model", "ema"])
@pytest.mark.parametrize("name", ["mask", "cache"])
def test_what_no_state_dict_holds_is_no_result(which: str, name: str, tmp_path: Path) -> None:
    path = saved(ultralytics_with_more(), tmp_path)
    with pytest.raises(RefusedError, match=f"does not hold '{which}.{name}' in its state dict"):
        convert(path, tmp_path / "out.safetensors", select=f"{which}.{name}", bare=True)
    assert not (tmp_path / "out.safetensors").exists()
    assert convert(path, tmp_path / "out.safetensors", select=f"{which}.{name}").tensors == 1


def test_bookkeeping_is_left_out_and_told(tmp_path: Path) -> None:
    path = saved(lit_ema(), tmp_path)
    report = convert(path, tmp_path / "out.pt", weights="ema")
    assert {"state_dict.model_ema.decay", "state_dict.model_ema.num_updates"} <= {*report.left_out}
    path = saved(averaged().state_dict(), tmp_path)
    report = convert(path, tmp_path / "out.pt", weights="ema", force=True)
    assert report.left_out == ("n_averaged",)
    again = torch.load(tmp_path / "out.pt")
    assert list(again) == list(net(1).state_dict())
    assert again._metadata.keys() == net(1).state_dict()._metadata.keys()  # type: ignore[attr-defined]


def test_an_average_whose_names_could_mean_several_keeps_its_own(tmp_path: Path) -> None:
    """Without its dots `a1.1` is `a.11`, and both are `a11`."""
    weights = {"model.a1.1": torch.ones(2), "model.a.11": torch.ones(2), "model.b.w": torch.ones(2)}
    average = {"model_ema.a11": torch.ones(2), "model_ema.bw": torch.ones(2)}
    count = {"model_ema.num_updates": torch.tensor(1)}
    path = saved({"state_dict": {**weights, **average, **count}}, tmp_path)
    assert bare(path, weights="ema").keys() == {"a11", "model.b.w"}


def test_a_list_that_follows_no_model_has_numbers_for_names(tmp_path: Path) -> None:
    shadow = [each.detach() for each in net(2).parameters()]
    path = saved({"shadow_params": shadow, "decay": 0.9}, tmp_path)
    report = convert(path, tmp_path / "out.safetensors", preset="hf", weights="ema")
    assert "nothing tells what the model calls the tensors of shadow_params" in report.warnings
    assert load_file(tmp_path / "out.safetensors").keys() == {*map(str, range(len(shadow)))}


# -- nothing there, or too much --------------------------------------------------------------------


def test_weights_that_are_elsewhere_are_pointed_at(tmp_path: Path, run_cli: RunCli) -> None:
    saved({"model": None, "ema": state(2), "updates": 1}, tmp_path)
    for options in (["--preset", "hf"], ["--weights", "model"], ["--select", "model"]):
        done = run_cli("convert", "run.pt", "out.safetensors", *options, exit=4)
        assert "averages of weights (EMA) are under 'ema' (9 tensors)" in done.stderr
        assert "--weights ema takes these" in done.stderr
        assert not (tmp_path / "out.safetensors").exists()
    run_cli("convert", "run.pt", "out.safetensors", "--preset", "hf", "--weights", "ema", exit=0)
    with pytest.raises(RefusedError, match="under 'ema'"):
        ckptmove.load(tmp_path / "run.pt", weights="model")
    saved({"model": state(1)}, tmp_path)
    with pytest.raises(RefusedError, match=r"no averages .* under 'model' \(9 tensors\)"):
        ckptmove.load(tmp_path / "run.pt", weights="ema")
    saved({"epoch": 1}, tmp_path)
    for options in (["--preset", "hf"], ["--weights", "ema"]):
        run_cli("convert", "run.pt", "none.safetensors", *options, exit=4)
    with pytest.raises(UsageError, match="weights is one of model, ema, not 'best'"):
        convert(tmp_path / "run.pt", tmp_path / "out.pt", weights="best")  # type: ignore[arg-type]


def test_of_several_models_none_is_taken_unless_it_is_named(tmp_path: Path) -> None:
    path = saved({"netG": state(1), "netD": state(5), "netG_ema": state(2)}, tmp_path)
    asked: list[dict[str, Any]] = [{"preset": "hf"}, {"select": "model"}, {"weights": "model"}]
    for options in asked:
        with pytest.raises(RefusedError, match=r"several models: netG .*netD") as refused:
            convert(path, tmp_path / "out.safetensors", **options)
        assert "--root 'netG'" in str(refused.value.hint)
    assert {float(each.unique()) for each in bare(path, root="netD").values()} == {5}
    assert {float(each.unique()) for each in bare(path, weights="ema").values()} == {2}
    for weights in ("model", "ema"):  # who names the part means it
        assert bare(path, root="netG_ema", weights=weights).keys() == state(1).keys()
    several = ckptmove.load(path, select=["netG", "netD"])
    assert several.keys() == {"netG", "netD"}


def test_of_several_the_one_that_everybody_calls_so_is_meant(
    tmp_path: Path, run_cli: RunCli
) -> None:
    path = saved({"normalizer": {"mean": torch.zeros(1)}, "state_dict": state(1)}, tmp_path)
    assert bare(path).keys() == state(1).keys()
    done = run_cli("convert", "run.pt", "out.safetensors", "--preset", "hf", "--force", exit=0)
    told = "weights: state_dict (9 tensors); also in the file: normalizer (1 tensor)"
    assert told in done.stdout.splitlines()
    path = saved({"model": {"encoder": state(1), "decoder": state(2)}}, tmp_path)
    wanted = {f"{part}.{name}" for part in ("encoder", "decoder") for name in state(1)}
    assert bare(path).keys() == wanted
    one = net(1)
    path = saved({"best": one.state_dict(), "net": one.state_dict()}, tmp_path)
    assert bare(path).keys() == state(1).keys()


def test_it_says_which_and_what_else(tmp_path: Path, run_cli: RunCli) -> None:
    saved(timm(), tmp_path)
    done = run_cli("convert", "run.pt", "out.safetensors", "--preset", "hf", exit=0)
    assert (
        "weights: state_dict (9 tensors); also in the file: state_dict_ema (ema, 9 tensors); "
        "--weights ema selects them" in done.stdout.splitlines()
    )


def test_patterns_and_weights_go_together(tmp_path: Path) -> None:
    path = saved(timm(), tmp_path)
    found = bare(path, exclude_tensors="*.num_batches_tracked", select=["*.1.*"])
    assert found.keys() == {
        f"1.{name}" for name in ("weight", "bias", "running_mean", "running_var")
    }
    with pytest.raises(RefusedError, match="the options leave out all of its 18 tensors"):
        bare(path, select="state_dict_ema")
    averages = bare(path, weights="ema", select="*.weight")
    assert averages.keys() == {"0.weight", "1.weight", "2.weight"}


def test_a_list_of_models_is_no_model(tmp_path: Path) -> None:
    models: list[object] = [[state(1), state(2)], (net(1), net(2)), [{"a": state(1)}, state(2)]]
    for content in (*models, *({"model": each, "epoch": 1} for each in models)):
        path = saved(content, tmp_path)
        asked: list[Saved] = [{"preset": "hf"}, {"select": "model"}, {"weights": "model"}]
        for options in asked:
            with pytest.raises(RefusedError, match="several models") as refused:
                convert(path, tmp_path / "out.safetensors", force=True, **options)
        first = str(refused.value.hint).split("'")[1]
        assert {float(each.unique()) for each in bare(path, root=first).values()} == {1}
        assert load_file(tmp_path / "out.safetensors").keys() == state(1).keys()
    path = saved([state(1)], tmp_path)
    assert bare(path).keys() == state(1).keys()
    report = convert(path, tmp_path / "out.pt", select="model", dry_run=True)
    assert report.weights == {"name": "0", "section": "model", "tensors": 9, "others": []}


def test_a_part_that_is_asked_for_by_name_is_told_too(tmp_path: Path, run_cli: RunCli) -> None:
    path = saved(weight_averaging(), tmp_path)
    report = convert(path, tmp_path / "out.pt", preset="lightning")
    other = {"name": "current_model_state", "section": "model", "tensors": 9}
    assert report.weights == {
        **{"name": "state_dict", "section": "ema", "tensors": 9},
        "others": [other],
    }
    done = run_cli("convert", "run.pt", "out.pt", "--preset", "lightning", "--force", exit=0)
    assert (
        "weights: state_dict (ema, 9 tensors); also in the file: current_model_state (9 tensors); "
        "--weights model selects them" in done.stdout.splitlines()
    )
    for which, value in (("model", 1), ("ema", 2)):
        options: Any = {"preset": "lightning", "weights": which}
        convert(path, tmp_path / "out.pt", **options, force=True)
        loaded = torch.load(tmp_path / "out.pt")
        assert {float(each.unique()) for each in loaded.values()} == {value}
    path = saved({"model": {"a": state(1), "b": state(2)}}, tmp_path)
    report = convert(path, tmp_path / "o.pt", select="model", dry_run=True)
    assert report.weights == {"name": "model", "section": "model", "tensors": 18, "others": []}


def test_counts_beside_averages_are_no_weights_of_the_model(tmp_path: Path) -> None:
    content = ema_pytorch()
    for saved_too in (content, {"ema": content["ema"]}):
        path = saved(saved_too, tmp_path)
        sections = {entry.name: entry.section for entry in inspect(path).tensors}
        assert sections["ema.initted"] == sections["ema.step"] == "ema"
    report = convert(path, tmp_path / "out.pt", select="model")
    assert report.weights is not None
    assert report.weights["name"] == "ema.online_model"
    assert {float(t.unique()) for t in torch.load(tmp_path / "out.pt")["ema"].values()} == {1}


def test_all_of_a_file_has_no_name(tmp_path: Path, run_cli: RunCli) -> None:
    saved(averaged().state_dict(), tmp_path)
    done = run_cli("convert", "run.pt", "out.pt", "--preset", "hf", exit=4)
    assert "its 9 tensors are averages of weights (EMA) (--weights ema takes these)" in done.stderr
    done = run_cli("convert", "run.pt", "out.pt", "--weights", "ema", exit=0)
    assert "weights: all of it (ema, 9 tensors)" in done.stdout
    done = run_cli("convert", "run.pt", "out.pt", "--preset", "lightning", exit=4)
    assert "_metadata" not in done.stderr
    torch.save(net(1), tmp_path / "run.pt")
    done = run_cli("convert", "run.pt", "out.pt", "--preset", "lightning", exit=4)
    assert "nothing under the name 'state_dict' (at the top it has 0, 1, 2)" in done.stderr


# -- in bytes --------------------------------------------------------------------------------------


def in_bytes(content: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def test_weights_in_bytes_are_taken_and_pointed_at(tmp_path: Path, run_cli: RunCli) -> None:
    """As skorch keeps them: `__cuda_dependent_attributes__`."""
    optimizer = trained()["optimizer"]
    inner = in_bytes({"module_": net(1), "optimizer_": optimizer, "old": in_bytes(state(3))})
    path = saved({"lr": 0.1, "kept": inner, "other": in_bytes([1])}, tmp_path)
    assert bare(path).keys() == state(1).keys()
    assert {float(each.unique()) for each in bare(path).values()} == {1}
    assert ckptmove.load(path, weights="model").keys() == state(1).keys()
    done = run_cli("convert", "run.pt", "out.pt", "--preset", "hf", exit=0)
    assert "weights: kept.module_ (9 tensors)" in done.stdout
    done = run_cli("convert", "run.pt", "o.pt", "--select", "model", exit=4)
    assert "its weights are in a checkpoint inside the bytes at 'kept'" in done.stderr
    assert "--root 'kept' takes all of that checkpoint" in done.stderr
    convert(path, tmp_path / "whole.pt", root="kept")
    loaded = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert loaded["module_"].state_dict().keys() == state(1).keys()
    assert isinstance(loaded["old"], bytes)
    assert {float(each.unique()) for each in bare(path, root="kept.old").values()} == {3}
    assert bare(path, root="kept.module_").keys() == state(1).keys()


def test_the_model_of_skorch_is_not_its_criterion(tmp_path: Path) -> None:
    """A loss has weights too; skorch/net.py, `__getstate__`."""
    criterion = nn.CrossEntropyLoss(weight=torch.ones(3))
    inner = in_bytes({"module_": net(1), "criterion_": criterion})
    path = saved({"lr": 0.1, "__cuda_dependent_attributes__": inner}, tmp_path)
    report = convert(path, tmp_path / "out.safetensors", preset="hf")
    assert report.weights is not None
    assert report.weights["name"] == "__cuda_dependent_attributes__.module_"
    assert [e["name"] for e in report.weights["others"]] == [
        "__cuda_dependent_attributes__.criterion_"
    ]


def test_bytes_that_nobody_asks_for_stay_bytes(tmp_path: Path) -> None:
    inner = in_bytes({"w": torch.arange(1000.0)})
    content = {"net": state(1), "part": {"kept": inner, "t": torch.ones(1)}}
    path = saved(content, tmp_path)
    asked: list[Saved] = [{"select": "part"}, {"root": "part"}, {"exclude_tensors": "net"}]
    for options in asked:
        convert(path, out := tmp_path / "out.pt", force=True, **options)
        loaded = torch.load(out)
        assert loaded.get("part", loaded)["kept"] == inner
        assert out.stat().st_size < len(inner) + 3000
    assert bare(path).keys() == state(1).keys()
    loaded = ckptmove.load(path, select="part")
    assert loaded["part"]["kept"] == inner


# -- evidence, not names ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        {"model": {"ema.weight": torch.ones(1), "head.bias": torch.ones(1)}},
        {"model": nn.Sequential(OrderedDict(ema=nn.Linear(1, 1), b=nn.Linear(2, 2))).state_dict()},
        {"layers.0.ema_gate.w": torch.ones(2), "layers.0.w": torch.ones(2)},
        {"schema": {"w": torch.ones(2)}, "semantic": {"w": torch.ones(2)}},
        {"average": {"loss": torch.ones(2)}},
        state(1, "module."),
    ],
)
def test_names_alone_make_no_average(content: object, tmp_path: Path) -> None:
    assert {entry.section for entry in inspect(saved(content, tmp_path)).tensors} == {"model"}


def test_an_average_of_scalars_and_an_optimizer_below_its_name(tmp_path: Path) -> None:
    content = {"ema": {"loss": 0.1, "norm": torch.tensor(2.0), "steps": 3}, **trained()}
    assert [entry.section for entry in inspect(saved(content, tmp_path)).tensors] == ["other"]
    optimizer = optim.Adam(model := nn.Linear(1, 1).parameters())
    next(iter(optimizer.param_groups))["params"][0].grad = torch.ones(1, 1)
    optimizer.step()
    del model
    path = saved({"ema": {"optimizer": optimizer.state_dict(), "net": state(1)}}, tmp_path)
    sections = {entry.section for entry in inspect(path).tensors}
    assert sections == {"optimizer", "ema"}


def test_relocating_treats_averages_as_what_they_are(tmp_path: Path) -> None:
    path = saved(timm(), tmp_path)
    ckptmove.relocate(path, out := tmp_path / "out.pt", device_map={"0": "cuda:1", "": "cuda:0"})
    found = {entry.name: entry.device for entry in inspect(out).tensors}
    assert found["state_dict.0.weight"] == "cuda:1"
    assert found["state_dict_ema.module.2.weight"] == "cuda:0"


def test_casting_casts_averages_too(tmp_path: Path) -> None:
    path = saved(copy.deepcopy(timm()), tmp_path)
    convert(path, out := tmp_path / "out.pt", dtype="bf16")
    floating = {e.dtype for e in inspect(out).tensors if e.nbytes > 1 and e.dtype != "int64"}
    assert floating == {"bfloat16"}


def _normalized() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    return {"model": model.state_dict(), "epoch": 3}


@pytest.mark.parametrize("options", [{"weights": "model"}, {"root": "model"}, {"preset": "hf"}])
def test_a_part_below_a_root_is_a_part_with_its_values(
    options: dict[str, Any], tmp_path: Path
) -> None:
    torch.save(_normalized(), tmp_path / "whole.pt")
    convert(tmp_path / "whole.pt", tmp_path / "part.safetensors", **options)
    found = ckptmove.validate(
        tmp_path / "part.safetensors", against=tmp_path / "whole.pt", subset=True
    )
    found.raise_if_failed()


@pytest.mark.parametrize("value", [2, True, "1", 1.0])
def test_another_value_below_a_root_is_no_part(value: object, tmp_path: Path) -> None:
    whole = _normalized()
    whole["model"] = {**whole["model"], "version": 1}
    torch.save(whole, tmp_path / "whole.pt")
    torch.save({**whole["model"], "version": value}, tmp_path / "part.pt")
    found = ckptmove.validate(tmp_path / "part.pt", against=tmp_path / "whole.pt", subset=True)
    assert not found.ok


def _ema_pytorch_child() -> dict[str, Any]:
    own = {
        f"ema.{which}.{name}": each
        for which in ("online_model", "ema_model")
        for name, each in state(2 if which == "ema_model" else 3).items()
    }
    return {**own, "ema.initted": torch.tensor(True), "ema.step": torch.tensor(1)}


#: The averages of a LightningModule whose child keeps them, and the name of the averages.
CHILDREN: dict[str, Callable[[], dict[str, Any]]] = {
    "model_ema": lambda: {k: v for k, v in lit_ema()["state_dict"].items() if "_ema" in k},
    "ema_model": lambda: state(2, "ema_model."),
    "ema": lambda: state(2, "ema.module."),
    "swa_model": lambda: {
        **state(2, "swa_model.module."),
        "swa_model.n_averaged": torch.tensor(1),
    },
    "ema.ema_model": _ema_pytorch_child,
}


@pytest.mark.parametrize("name", CHILDREN)
def test_averages_among_the_names_of_a_lightning_module(name: str, tmp_path: Path) -> None:
    prefix = "model.diffusion_model." if name == "model_ema" else "model."
    model, averages = state(1, prefix), CHILDREN[name]()
    path = saved({"state_dict": {**model, **averages}, "pytorch-lightning_version": "2"}, tmp_path)
    report = convert(path, tmp_path / "out.pt", preset="lightning")
    assert report.weights is not None
    assert (report.weights["name"], report.weights["section"]) == ("state_dict", "model")
    assert [each["name"] for each in report.weights["others"]] == [f"state_dict.{name}"]
    own = {each.removeprefix("model.") for each in model}
    assert torch.load(tmp_path / "out.pt").keys() == own
    convert(path, tmp_path / "out.pt", preset="lightning", weights="ema", force=True)
    loaded = torch.load(tmp_path / "out.pt")
    assert loaded.keys() <= own
    assert {float(each.unique()) for each in loaded.values()} == {2}
