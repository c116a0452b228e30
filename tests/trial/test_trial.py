"""A rehearsal on this machine's CPU: sound models pass, and each planted fault is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmove
from ckptmove.errors import DeviceError, UnsupportedError, UsageError
from ckptmove.trial.trial import TrialResult, run_trial
from tests.making import trial_models as rehearsing
from tests.making.trial_models import (
    IMAGES,
    SEQUENCES,
    Convolutions,
    Recurrent,
    Tied,
    images,
    sequences,
    trained,
)

pytestmark = pytest.mark.usefixtures("warm")

SAVED = "run.pt"


def outcomes(found: TrialResult) -> dict[str, str]:
    return {each.check: each.outcome for each in found.findings}


def all_passed(found: TrialResult) -> None:
    assert outcomes(found) == {"model": "passed", "step": "passed", "trace": "passed"}, found
    json.dumps(found.to_json())


def train(path: Path, model: Any = Convolutions, spec: str = IMAGES, **options: Any) -> TrialResult:
    return run_trial(path, model=model, inputs=[spec], step="train", **options)


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    path = tmp_path / SAVED
    torch.save(rehearsing.of_convolutions(), path)
    return path


def spoilt(path: Path, spoil: Callable[[dict[str, Any]], object]) -> Path:
    saved = torch.load(path)
    spoil(saved)
    torch.save(saved, path)
    return path


# -- what passes -----------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "Adam": torch.optim.Adam,
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "SGD without momentum": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adafactor": torch.optim.Adafactor,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    "LBFGS": torch.optim.LBFGS,
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_model_mid_training_passes_with_any_optimizer(tmp_path: Path, name: str) -> None:
    model = Recurrent()
    path = tmp_path / SAVED
    optimizer = OPTIMIZERS[name](model.parameters())
    torch.save(trained(model, optimizer, sequences), path)
    found = train(path, Recurrent, SEQUENCES)
    all_passed(found)
    said = found.of("step").data["optimizer"]
    assert said.startswith(name.split()[0] + " ")


def test_a_step_is_the_same_as_torch_takes_it(sound: Path) -> None:
    found = train(sound, against=sound)
    all_passed(found)
    saved = torch.load(sound)
    model = Convolutions().train()
    model.load_state_dict(saved["model"])
    torch.manual_seed(20240229)
    loss = model(torch.randn(4, 3, 8, 8)).square().mean()
    assert found.of("step").data["value"] == float(loss.detach())
    assert found.of("step").data["against"]["equal"]


def test_relocated_and_converted_checkpoints_give_the_same(sound: Path, tmp_path: Path) -> None:
    moved, converted = tmp_path / "moved.pt", tmp_path / "run.safetensors"
    ckptmove.relocate(sound, moved, to="cuda:0")
    ckptmove.convert(moved, converted)
    for other in (moved, converted):
        found = train(other, against=sound, device="cpu")
        all_passed(found)
        assert found.of("step").data["against"]["equal"]


def test_groups_of_parameters_are_found_by_shape(tmp_path: Path) -> None:
    model = Convolutions()
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]
    path = tmp_path / SAVED
    torch.save(trained(model, torch.optim.AdamW(groups), images), path)
    all_passed(train(path))


def test_parameters_may_go_by_their_names(sound: Path) -> None:
    def rename(saved: dict[str, Any]) -> None:
        names = [name for name, _ in Convolutions().named_parameters()]
        optimizer = saved["optimizer"]
        optimizer["state"] = {names[key]: slots for key, slots in optimizer["state"].items()}
        optimizer["param_groups"][0]["params"] = names

    all_passed(train(spoilt(sound, rename)))


def test_hyper_parameters_may_be_tensors(tmp_path: Path) -> None:
    model = Convolutions()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3))
    path = tmp_path / SAVED
    torch.save(trained(model, optimizer, images), path)
    all_passed(train(path, against=path))


def test_of_several_optimizers_the_model_has_one(sound: Path) -> None:
    model = Recurrent()
    other = trained(model, torch.optim.Adam(model.parameters()), sequences)["optimizer"]
    spoilt(sound, lambda saved: saved.update(optimizer=[other, saved["optimizer"]]))
    found = train(sound)
    all_passed(found)
    assert "optimizer.1, one of 2" in str(found.of("step").details)
    spoilt(sound, lambda saved: saved.update(optimizer=[other, deepcopy(other)]))
    assert train(sound).of("step").outcome == "skipped"


def test_of_several_state_dicts_the_likeliest_is_taken(sound: Path) -> None:
    spoilt(sound, lambda saved: saved.update(teacher=Recurrent().state_dict()))
    assert run_trial(sound, model=Convolutions).of("model").data["state_dict"] == "model"
    spoilt(sound, lambda saved: saved.update(ema=Convolutions().state_dict()))
    assert run_trial(sound, model=Convolutions).of("model").data["state_dict"] == "model"
    spoilt(sound, lambda saved: saved.update(other=Convolutions().state_dict()))
    with pytest.raises(UsageError, match="match the model equally well: model, other") as error:
        run_trial(sound, model=Convolutions)
    assert "--root" in str(error.value.hint)


@pytest.mark.slow
def test_a_model_saved_whole_is_never_unpickled_but_if_trusted(tmp_path: Path) -> None:
    path = tmp_path / SAVED
    torch.save(Convolutions(), path)
    found = run_trial(path, model=Convolutions, inputs=[IMAGES], step="forward")
    all_passed(found)  # its state is found without
    with pytest.raises(UnsupportedError, match="unpickling it runs"):
        run_trial(path, inputs=[IMAGES], step="forward")
    found = run_trial(path, inputs=[IMAGES], step="forward", trust_pickle=True)
    all_passed(found)
    assert "trusted" in found.of("model").details[0]


@pytest.mark.slow
def test_programs_are_their_own_models(tmp_path: Path) -> None:
    script, program = tmp_path / "model.pt", tmp_path / "model.pt2"
    torch.jit.script(Convolutions().eval()).save(str(script))
    all_passed(run_trial(script, inputs=[IMAGES], step="forward"))
    torch.export.save(torch.export.export(Convolutions().eval(), (images(),)), program)
    all_passed(run_trial(program, step="forward"))


def test_inputs_may_be_made_by_a_function(sound: Path) -> None:
    spec = f"{rehearsing.HERE}:inputs"
    all_passed(run_trial(sound, model=Convolutions, inputs=[spec], step="forward"))
    named = f"images={IMAGES}"
    all_passed(run_trial(sound, model=Convolutions, inputs=[named], step="forward"))


def test_without_an_optimizer_a_new_one_is_taken(sound: Path) -> None:
    spoilt(sound, lambda saved: saved.pop("optimizer"))
    found = train(sound)
    all_passed(found)
    assert "a new one" in str(found.of("step").details)
    all_passed(train(sound, optimizer="torch.optim:SGD"))


def test_the_generator_of_the_process_is_left_alone(sound: Path) -> None:
    before = torch.random.get_rng_state()
    train(sound)
    assert torch.equal(before, torch.random.get_rng_state())


# -- what fails ------------------------------------------------------------------------------------


def swap(state: dict[str, Any], one: str, other: str) -> None:
    state[one], state[other] = state[other], state[one]


def prefixed(state: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {f"{prefix}{key}": value for key, value in state.items()}


FAULTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "swapped shapes": (
        lambda s: swap(s["model"], "conv.weight", "head.weight"),
        "wrong shape: conv.weight is 5×8, the model's is 8×3×3×3",
    ),
    "transposed": (
        lambda s: s["model"].update({"head.weight": s["model"]["head.weight"].T.clone()}),
        "transposed: head.weight",
    ),
    "other classes": (
        lambda s: s["model"].update(
            {"head.weight": torch.randn(7, 8), "head.bias": torch.randn(7)}
        ),
        "different number of rows: head.weight, head.bias",
    ),
    "a renamed key": (
        lambda s: s["model"].update(tail=s["model"].pop("head.bias")),
        "missing: head.bias",
    ),
    "wrong dtype": (
        lambda s: s["model"].update({"bn.weight": s["model"]["bn.weight"].half()}),
        "dtype: bn.weight is float16, the model's is float32",
    ),
    "DataParallel": (
        lambda s: s.update(model=prefixed(s["model"], "module.")),
        "ckptmove convert --strip-prefix module",
    ),
    "compiled": (
        lambda s: s.update(model=prefixed(s["model"], "_orig_mod.")),
        "ckptmove convert --strip-prefix _orig_mod",
    ),
    "PEFT": (
        lambda s: s.update(model=prefixed(s["model"], "base_model.model.")),
        "ckptmove convert --strip-prefix base_model.model",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_state_that_does_not_fit_is_told_why(sound: Path, name: str) -> None:
    spoil, said = FAULTS[name]
    found = run_trial(spoilt(sound, spoil), model=Convolutions).of("model")
    assert found.outcome == "failed"
    assert any(said in line for line in found.details), found


def test_a_prefix_that_the_model_has(sound: Path) -> None:
    wrapped = lambda: torch.nn.Sequential(Convolutions())  # noqa: E731 # as a user might
    found = run_trial(sound, model=wrapped).of("model")
    assert any("--add-prefix 0" in line for line in found.details)


def test_tied_weights_may_be_stored_once_but_not_apart(tmp_path: Path) -> None:
    path = tmp_path / SAVED
    state = Tied().state_dict()
    torch.save(state, path)
    words = "int64[2,4]<20"
    all_passed(train(path, Tied, words))
    torch.save({"embed.weight": state["embed.weight"]}, path)
    found = train(path, Tied, words)
    all_passed(found)
    assert any(line.startswith("tied: head.weight") for line in found.of("model").details)
    torch.save({**state, "head.weight": state["head.weight"] + 1}, path)
    untied = train(path, Tied, words).of("model")
    assert untied.outcome == "failed"
    assert any(line.startswith("untied: embed.weight and head.weight") for line in untied.details)


def test_all_of_another_dtype_is_cast_as_torch_does(sound: Path, tmp_path: Path) -> None:
    half = tmp_path / "half.pt"
    ckptmove.convert(sound, half, dtype="bfloat16", select=["model"])
    found = run_trial(half, model=Convolutions, inputs=[IMAGES], step="forward", against=sound)
    all_passed(found)
    assert any(line.startswith("cast: all bfloat16") for line in found.of("model").details)
    assert not found.of("step").data["against"]["equal"]
    assert found.of("step").data["against"]["tolerance"] == 5e-2


STATES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a dropped moment": (
        lambda s: s["state"][2].pop("exp_avg_sq"),
        "the state of bn.weight (parameter 2) lacks exp_avg_sq",
    ),
    "a dropped parameter": (
        lambda s: s["state"].pop(4),
        "no state is saved for head.weight (parameter 4)",
    ),
    "a moment of another": (
        lambda s: s["state"][0].update(exp_avg_sq=s["state"][1]["exp_avg_sq"]),
        "exp_avg_sq of conv.weight (parameter 0) is [8], the parameter [8, 3, 3, 3]",
    ),
    "swapped states": (
        lambda s: swap(s["state"], 0, 5),  # type: ignore[arg-type]
        "the shapes of its state do not match",
    ),
    "too few": (
        lambda s: (s["param_groups"][0]["params"].pop(), s["state"].pop(5)),
        "it holds 5 parameters; the model has 6",
    ),
    "capturable on a CPU": (
        lambda s: s["param_groups"][0].update(capturable=True),
        "capturable=True",
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_an_optimizer_that_is_not_whole_is_told(sound: Path, name: str) -> None:
    spoil, said = STATES[name]
    found = train(spoilt(sound, lambda saved: spoil(saved["optimizer"])))
    step = found.of("step")
    assert outcomes(found)["model"] == "passed"
    assert step.outcome == "failed"
    assert said in " ".join([step.title, *step.details]), step


def test_what_is_wrong_is_told_before_what_comes_of_it(sound: Path) -> None:
    found = train(spoilt(sound, lambda saved: saved["optimizer"]["state"][2].pop("exp_avg")))
    step = found.of("step")
    assert step.title == "the state of bn.weight (parameter 2) lacks exp_avg"
    assert "KeyError: 'exp_avg'" in step.details


def test_a_script_that_exits_is_a_finding(sound: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import argparse\nraise SystemExit(2)\n")
    model = run_trial(sound, model=f"{script}:Net").of("model")
    assert (model.outcome, model.details[0]) == ("failed", "SystemExit: 2")
    assert model.details[1].endswith("script.py:2")


def test_an_unknown_optimizer_is_skipped_with_a_hint(sound: Path) -> None:
    def spoil(saved: dict[str, Any]) -> None:
        saved["optimizer"]["param_groups"][0] = {"params": [0, 1], "twist": 1, "turn": 2}
        saved["optimizer"]["state"] = {0: {"twirl": torch.ones(1)}}

    step = train(spoilt(sound, spoil)).of("step")
    assert step.outcome == "skipped"
    assert "--optimizer" in step.details[-1]


def test_a_changed_value_shows_against_the_source(sound: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.pt"
    saved = torch.load(sound)
    swap(saved["model"], "bn.weight", "bn.bias")
    torch.save(saved, other)
    step = train(other, against=sound).of("step")
    assert step.outcome == "failed"
    assert "gives a different result on cpu, compared bit for bit" in step.title
    assert any("bn.weight after the step differs in 8 values" in line for line in step.details)


def test_what_is_not_finite_is_told(sound: Path) -> None:
    found = train(sound, rehearsing.Infinite)
    assert found.of("step").outcome == "failed"
    assert found.of("step").title.startswith("the output is not finite in 20 of 20 values")
    spoilt(sound, lambda saved: saved["model"]["bn.running_var"].fill_(float("nan")))
    assert run_trial(sound, model=Convolutions, inputs=[IMAGES], step="forward").of(
        "step"
    ).outcome == ("failed")


def test_a_model_that_fails_is_a_finding(sound: Path) -> None:
    found = train(sound, rehearsing.Failing)
    step = found.of("step")
    assert step.outcome == "failed"
    assert step.data["module"] == "head"
    assert "trial_models.py:" in step.data["source"]
    assert outcomes(found)["trace"] == "skipped"
    broken = run_trial(sound, model=rehearsing.named(rehearsing.unbuildable))
    assert outcomes(broken) == {"model": "failed", "step": "skipped", "trace": "skipped"}
    assert "ValueError: no such luck" in broken.of("model").details


# -- what makes no sense ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "nowhere:Net"}, "there is no module 'nowhere'"),
        ({"model": "json:Net"}, "json has no 'Net'"),
        ({"model": "missing.py:Net"}, "there is no file"),
        ({"model": rehearsing.HERE}, "the name of the model in it is missing"),
        ({"model": "what is this"}, "neither a file or folder nor a name"),
        ({"model": rehearsing.named(rehearsing.no_model)}, "returned a str"),
        ({"model": "torch.nn:Linear"}, "it needs in_features, out_features"),
        ({"inputs": ["float32[3"]}, "is not valid"),
        ({"inputs": ["float33[3]"]}, "no dtype 'float33'"),
        ({"inputs": ["float32[3]<4"]}, "a limit must be above 0"),
        ({"inputs": ["a=bool[3]", "a=bool[4]"]}, "'--input a is given twice|a is given twice"),
        ({"step": "fly"}, "must be forward or train"),
        ({"step": "forward"}, "is not known"),
        ({"optimizer": "Adam W"}, "is not a name in Python code"),
    ],
)
def test_nonsense_is_refused(sound: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run_trial(sound, **{"model": Convolutions, **options})


def test_a_device_that_is_not_there(sound: Path) -> None:
    for device in ("cuda:0", "mps", "meta", "gpu"):
        if device == "cuda:0" and torch.cuda.is_available():
            continue
        with pytest.raises(DeviceError):
            run_trial(sound, model=Convolutions, device=device)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_real_gpu(sound: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved.pt"
    ckptmove.relocate(sound, moved, to="cuda:0")
    all_passed(train(moved, against=sound, device="cuda:0"))
    all_passed(train(moved, against=sound))  # each where it says it is
    strays = train(moved, rehearsing.OnTheHost, device="cuda:0")
    assert outcomes(strays)["trace"] == "failed"
    assert train(moved, rehearsing.Unregistered, device="cuda:0").of("step").outcome == "failed"
