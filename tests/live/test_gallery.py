"""The gallery: a program for each reason why a model isn't where it should be, and each mended.

Each says what is asked on forums, in its first line. It must get exactly the verdicts that it
deserves, with the user's own names and lines in them; mended, it must get none.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmove
from tests.conftest import RunCli, some
from tests.devices.galleries import GALLERY, ran
from tests.devices.second_device import needs_second_device

NEVER = "model-never-moved"
BATCH = "batch-never-moved"
HIDDEN = "unregistered-tensor"
MADE = "made-elsewhere"
OLD = "optimizer-of-old-parameters"
STATE = "state-elsewhere"
WAITS = "host-waits"

#: By program, with its arguments: a cause of each verdict, and what its title must say. `L:text`
#: stands for the line of the program that ends in that text.
EXPECTED: dict[tuple[str, ...], list[tuple[str, tuple[str, ...]]]] = {
    ("arange_in_forward",): [
        (MADE, ("torch.arange", "L:positions = torch.arange(ids.shape[1])", "positions"))
    ],
    ("attribute",): [(HIDDEN, ("decoder.pos_embed",))],
    ("causal_mask",): [
        (MADE, ("torch.ones", "L:mask = torch.triu(torch.ones(length, length), 1)", "mask"))
    ],
    ("copied_every_time",): [(HIDDEN, ("0.angles",))],
    ("cpu_in_loop",): [(WAITS, ("once a step", "L:predicted if fixed else predicted.cpu())"))],
    ("criterion_weights",): [
        ("criterion-never-moved", ("criterion was never moved: its weight is on cpu",))
    ],
    ("custom_layer",): [(HIDDEN, ("norm.mean",))],
    ("data_loader",): [(BATCH, (": image",))],
    ("discriminator",): [(NEVER, ("the model D (Discriminator) is on cpu",))],
    ("dict_batch",): [(BATCH, ("batch['input_ids'], batch['attention_mask']",))],
    ("hidden_state",): [
        (MADE, ("torch.zeros", "h0", "L:h0 = torch.zeros(1, x.size(0), 16, **there)")),
        (MADE, ("torch.zeros", "c0", "L:c0 = torch.zeros(1, x.size(0), 16, **there)")),
    ],
    ("hook_closure",): [(HIDDEN, ("0.hook hook.weights",))],
    ("if_loss",): [(WAITS, ("once a step", "L:elif loss > 10:"))],
    ("item_in_loop",): [(WAITS, ("once a step", "L:total += loss.item()"))],
    ("labels_forgotten",): [(BATCH, (": labels",))],
    ("made_in_loop",): [
        (MADE, ("torch.linspace", "weight", "L:device=device if fixed else None)"))
    ],
    ("model_never_moved",): [(NEVER, ("the model is on cpu",))],
    ("modules_in_list",): [(HIDDEN, ("layers.0.bias, layers.0.weight",))],
    ("momentum",): [(STATE, ("weight.momentum_buffer", "bias.momentum_buffer"))],
    ("momentum", "plain"): [],
    ("nothing_moved",): [(NEVER, ("the model is on cpu",))],
    ("old_parameters_assign",): [(OLD, ("weight, bias will never change",))],
    ("old_parameters_deepcopy",): [(OLD, ("0.weight, 0.bias, 2.weight, 2.bias",))],
    ("other_parameters",): [
        ("optimizer-of-other-parameters", ("0.weight, 0.bias, 2.weight, 2.bias",))
    ],
    ("partly_placed",): [("partly-moved", ("3.weight, 3.bias",))],
    ("state_elsewhere",): [(STATE, ("optimizer.state.0.weight.exp_avg,",))],
    ("step_on_device",): [
        ("step-on-device", ("optimizer.state.weight.step, optimizer.state.bias.step",))
    ],
    ("table_on_cpu",): [(BATCH, ("the batch is on cpu: rows",))],
    ("target_in_loop",): [(BATCH, ("the batch is on cpu: y",))],
    ("tensors_in_list",): [(HIDDEN, ("scales.0",))],
    ("three_loops", "wrong"): [(NEVER, ("the model is on cpu",))],
    ("three_loops", "intermediate"): [
        ("computed-elsewhere", ("backward", "L:out = model(x.to(device)).cpu()"))
    ],
    ("to_result_dropped",): [("to-result-dropped", ("x stays on cpu", "L:    x.to(device)"))],
}
MENDED = sorted({(name, "fixed") for name, *_ in EXPECTED})


def line_in(program: str, text: str) -> str:
    """Where a text ends a line of a program: `program.py:12`."""
    lines = (GALLERY / f"{program}.py").read_text().splitlines()
    (number,) = [n for n, line in enumerate(lines, 1) if line.endswith(text)]
    return f"{program}.py:{number}"


def wrongs(program: tuple[str, ...], found: dict[str, Any]) -> Iterator[str]:
    """In what a diagnosis isn't what it must be."""
    wanted = EXPECTED.get(program, [])
    titles = {each["title"]: each["cause"] for each in found["verdicts"]}
    if sorted(titles.values()) != sorted(cause for cause, _ in wanted):
        yield f"{program}: {titles}"
        return
    for cause, phrases in wanted:
        said = [
            line_in(program[0], each[2:]) if each.startswith("L:") else each for each in phrases
        ]
        if not any(
            titles[title] == cause and all(phrase in title for phrase in said) for title in titles
        ):
            yield f"{program}: no {cause} says {said}: {list(titles)}"
    if not all(each["fix"] for each in found["verdicts"]):
        yield f"{program}: no fix"
    if any("the simulation can't continue" in note for note in found["notes"]):
        yield f"{program}: {found['notes']}"


def check(kind: str) -> None:
    programs = some([*EXPECTED, *MENDED], 12)
    found = ran(kind, programs)
    assert [
        wrong
        for program, each in zip(programs, found, strict=True)
        for wrong in wrongs(program, each)
    ] == []


def test_every_program_is_expected_and_asks_a_question() -> None:
    names = {path.stem for path in GALLERY.glob("*.py")}
    assert names == {name for name, *_ in EXPECTED}
    for path in GALLERY.glob("*.py"):
        first, *rest = path.read_text().splitlines()
        assert first.startswith('# "'), path
        assert "?" in first, path
        assert 12 <= len(rest) <= 42, path


@pytest.mark.usefixtures("warm")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_every_program_on_a_played_gpu() -> None:
    check("simulated")


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
@needs_second_device
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_every_program_on_a_second_device() -> None:
    check("second")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_program_on_a_gpu() -> None:
    check("cuda")


@pytest.mark.slow
@pytest.mark.parametrize("mended", [False, True])
def test_doctor_says_it(mended: bool) -> None:
    """The way that users go, in whose process there may be nothing of all this."""
    args = ["cuda:0", "fixed"] if mended else ["cuda:0"]
    found = ckptmove.doctor(
        script=GALLERY / "attribute.py", args=args, device="cuda:0", simulate=True
    )
    assert [each.cause for each in found.verdicts] == ([] if mended else [HIDDEN])
    assert found.ok is mended


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_the_machine_comes_first(run_cli: RunCli) -> None:
    """A device that torch can't use is the root of all else, and nothing is run."""
    program = GALLERY / "nothing_moved.py"
    arguments = ("doctor", "--script", program, "--device", "cuda:0")
    done = run_cli(*arguments, "--", "cuda:0", exit=1)
    assert "it was not run; --simulate simulates the device" in done.stdout
    told = ckptmove.doctor(script=program, device="cuda:0")
    if torch.version.cuda is None and torch.version.hip is None:
        assert "cpu-only-build" in [each.cause for each in told.verdicts]
    assert told.verdicts[0].title in done.stdout
    assert told.verdicts[0].fix in done.stdout
    assert told.trace is None


@pytest.mark.usefixtures("warm")
def test_programs_run_by_themselves(tmp_path: Path) -> None:
    """On the CPU all of them are right, or as good as."""
    for name in ("data_loader", "state_elsewhere", "step_on_device"):
        subprocess.run(
            [sys.executable, "-B", GALLERY / f"{name}.py", "cpu"], check=True, cwd=tmp_path
        )
