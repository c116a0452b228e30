"""A rehearsal on a device that isn't there: sound models pass, and each fault is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmove
from ckptmove.errors import UsageError
from ckptmove.trial.run import Request
from ckptmove.trial.stage_fake import limit_of_simulation, simulate
from ckptmove.trial.trial import run_trial
from tests.making import trial_models as rehearsing
from tests.making.trial_models import (
    SEQUENCES,
    Convolutions,
    Recurrent,
    named,
    sequences,
    trained,
)

pytestmark = [
    pytest.mark.usefixtures("warm"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there"),
]

Findings = dict[str, dict[str, Any]]


def _moved(saved: dict[str, Any], path: Path, spoil: Callable[[Path], object] | None = None) -> str:
    """A checkpoint as one saved on a GPU."""
    before = path.with_suffix(".cpu.pt")
    torch.save(saved, before)
    ckptmove.relocate(before, path, to="cuda:0")
    return str(path)


def _requests(folder: Path) -> dict[str, dict[str, Any]]:
    sound = rehearsing.of_convolutions()
    on_cuda = _moved(sound, folder / "cuda.pt")
    on_cpu = folder / "cpu.pt"
    torch.save(sound, on_cpu)
    step, buffer = folder / "step.pt", folder / "buffer.pt"
    ckptmove.relocate(on_cuda, step, to="cuda:0", all=True)
    ckptmove.relocate(on_cuda, buffer, place={"model.bn.running_mean": "cpu"})
    fused = _moved(rehearsing.of_convolutions(fused=True), folder / "fused.pt")
    recurrent = Recurrent()
    sgd = torch.optim.SGD(recurrent.parameters(), lr=0.1, momentum=0.9)
    lstm = _moved(trained(recurrent, sgd, sequences), folder / "lstm.pt")
    model = Convolutions()
    factors = trained(model, torch.optim.Adafactor(model.parameters()), rehearsing.images)
    adafactor = _moved(factors, folder / "adafactor.pt")
    plain = {"path": on_cuda, "model": named(Convolutions)}
    faulty = {
        each.__name__: {**plain, "model": named(each)}
        for each in (
            rehearsing.Unregistered,
            rehearsing.OnTheHost,
            rehearsing.MadeOnTheHost,
            rehearsing.AsksForValues,
            rehearsing.Knowing,
            rehearsing.Speaking,
            rehearsing.OnAnother,
            rehearsing.Failing,
        )
    }
    tied, untied = rehearsing.Tied().state_dict(), folder / "untied.pt"
    tied["head.weight"] = tied["head.weight"] * 2
    torch.save(tied, untied)
    twice = folder / "twice.pt"
    torch.save({key: value.clone() for key, value in rehearsing.Tied().state_dict().items()}, twice)
    words = {"model": named(rehearsing.Tied), "inputs": ["int64[2,4]<20"]}
    return {
        "untied": {**words, "path": str(untied)},
        "tied twice": {**words, "path": str(twice)},
        "sound": plain,
        "forward": {**plain, "step": "forward"},
        "without devices": {**plain, "path": str(on_cpu)},
        "fused": {**plain, "path": fused},
        "lstm": {"path": lstm, "model": named(Recurrent), "inputs": [SEQUENCES]},
        "adafactor": {**plain, "path": adafactor},
        "step": {**plain, "path": str(step)},
        "buffer": {**plain, "path": str(buffer)},
        **faulty,
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Findings]:
    return rehearsing.simulated(_requests(tmp_path_factory.mktemp("simulated")))


def outcomes(findings: Findings) -> list[str]:
    return [each["outcome"] for each in findings.values()]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "name", ["sound", "forward", "without devices", "fused", "lstm", "Knowing", "Speaking"]
)
def test_sound_models_pass(found: dict[str, Findings], name: str) -> None:
    assert outcomes(found[name]) == ["passed"] * 3, found[name]
    devices = found[name]["trace"]["data"]["operations"]
    assert devices["cuda:0"] > 5
    assert "lazy" not in str(found[name])


def test_an_untied_weight_is_named(found: dict[str, Findings]) -> None:
    model = found["untied"]["model"]
    assert model["outcome"] == "failed"
    assert model["data"]["untied"] == [["embed.weight", "head.weight"]]
    assert outcomes(found["tied twice"]) == ["passed"] * 3


def test_a_step_left_on_the_device_is_named(found: dict[str, Findings]) -> None:
    assert outcomes(found["step"]) == ["passed", "failed", "passed"]
    title = found["step"]["step"]["title"]
    assert title.startswith("stored on cuda:0; torch keeps it on cpu")
    assert "step of conv.weight" in title


def test_a_buffer_left_on_the_cpu_is_named(found: dict[str, Findings]) -> None:
    model, step = found["buffer"]["model"], found["buffer"]["step"]
    assert model["title"] == "1 tensor stored on cpu, not on cuda:0"
    assert "stored on cpu: bn.running_mean" in model["details"]
    assert step["outcome"] == "failed"
    assert step["data"]["module"] == "bn"
    assert "batch_norm" in step["data"]["operator"]


def line_of(text: str) -> str:
    lines = Path(rehearsing.__file__).read_text().splitlines()
    return f":{1 + next(n for n, line in enumerate(lines) if text in line)}"


def test_an_unregistered_tensor_is_named(found: dict[str, Findings]) -> None:
    step = found["Unregistered"]["step"]
    assert outcomes(found["Unregistered"]) == ["passed", "failed", "failed"]
    assert "wrong device: aten.mul.Tensor" in step["title"]
    assert step["data"]["source"].endswith(line_of("# unregistered"))


def test_an_operation_on_the_host_is_named(found: dict[str, Findings]) -> None:
    step, trace = found["OnTheHost"]["step"], found["OnTheHost"]["trace"]
    assert step["outcome"] == "passed"  # it works, if slowly
    assert trace["outcome"] == "failed"
    assert "aten.tanh.default" in trace["title"]
    assert line_of("# on the host") in trace["title"]
    copies = [each["devices"] for each in trace["data"]["happenings"] if each["kind"] == "transfer"]
    assert {"cuda:0→cpu", "cpu→cuda:0"} <= set(copies)


def test_a_tensor_made_on_the_host_is_named(found: dict[str, Findings]) -> None:
    step, trace = found["MadeOnTheHost"]["step"], found["MadeOnTheHost"]["trace"]
    assert step["outcome"] == "failed"
    assert step["data"]["source"].endswith(line_of("# made here"))
    made = [each for each in trace["data"]["happenings"] if each["kind"] == "created"]
    assert [each["devices"] for each in made] == ["cpu"]


def test_a_device_beside_is_another(found: dict[str, Findings]) -> None:
    step = found["OnAnother"]["step"]
    assert outcomes(found["OnAnother"]) == ["passed", "failed", "failed"]
    assert "cuda:1" in step["details"][0]
    assert "lazy" not in str(found["OnAnother"])


@pytest.mark.parametrize("name", ["AsksForValues", "adafactor"])
def test_what_needs_values_is_skipped_by_name(found: dict[str, Findings], name: str) -> None:
    step = found[name]["step"]
    assert outcomes(found[name]) == ["passed", "skipped", "skipped"]
    assert step["title"] == "can't be simulated: aten._local_scalar_dense.default needs values"
    if name == "AsksForValues":
        assert step["data"]["source"].endswith(line_of("# asked"))


def test_a_model_that_fails_anywhere_fails(found: dict[str, Findings]) -> None:
    assert outcomes(found["Failing"]) == ["passed", "failed", "skipped"]
    assert found["Failing"]["step"]["data"]["module"] == "head"


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: CUDA driver version is insufficient for CUDA runtime version",
        "CUDA driver initialization failed, you might not have a CUDA gpu.",
        "Could not run 'aten::digamma_' with arguments from the 'Lazy' backend. This could be",
        "Torch not compiled with CUDA enabled",
    ],
)
def test_no_program_is_blamed_for_what_the_simulation_lacks(text: str) -> None:
    operator = text.partition("Could not run '")[2].partition("'")[0]
    said = f"{operator} is not simulated" if operator else f"RuntimeError: {text}"
    assert limit_of_simulation(RuntimeError(text), str) == said


def test_a_program_is_blamed_for_its_own_error() -> None:
    assert (
        limit_of_simulation(RuntimeError("mat1 and mat2 shapes cannot be multiplied"), str) is None
    )


def test_what_takes_too_long_fails(tmp_path: Path) -> None:
    request = Request(str(tmp_path), rehearsing.HERE, "cuda:0")
    found = simulate(request, patience=0.05)
    assert found[0].outcome == "failed"
    told = "the program was ended: it did not finish within 0.05 s; see --timeout"
    assert found[0].title == told


def test_errors_come_out_of_the_process(tmp_path: Path) -> None:
    path = tmp_path / "cpu.pt"
    torch.save(rehearsing.of_convolutions(), path)
    with pytest.raises(UsageError, match="returned a str"):
        run_trial(path, model=rehearsing.no_model, device="cuda:0", simulate=True)
    with pytest.raises(UsageError, match="can't import this model"):
        run_trial(path, model=lambda: Convolutions(), device="cuda:0", simulate=True)
