"""Copies between the host and a device: which ones the host must wait for, and which repeat."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.devices.galleries import ran
from tests.trial.test_doctor_runs import TRAINS, without_gpu

pytestmark = without_gpu

#: A line of a loop, and what doctor says of it.
COPIES = {
    "changed": ("stage.add_(1)", ["copy-not-waited-for"]),
    "changed by out=": ("torch.add(stage, 1, out=stage)", ["copy-not-waited-for"]),
    "read, not changed": ("stage.sum()", []),
    "changed after a wait": ("torch.cuda.synchronize(); stage.add_(1)", []),
    "changed after an event": ("made.synchronize(); stage.add_(1)", []),
    "changed after a value was read": ("model.weight.norm().item(); stage.add_(1)", []),
    "back": ("weight.to('cpu', non_blocking=True).sum()", ["copy-not-waited-for"]),
    "back, as a list": (
        "weight.to('cpu', non_blocking=True).tolist()",
        ["copy-not-waited-for"],
    ),
    "back, to an array": (
        "weight.to('cpu', non_blocking=True).numpy().mean()",
        ["copy-not-waited-for"],
    ),
    "back, after a wait": (
        "y = weight.to('cpu', non_blocking=True); torch.cuda.synchronize(); y.sum()",
        [],
    ),
    "back, to memory that is not pinned": (
        "y = torch.ones(2, 4); y.copy_(weight, non_blocking=True); y.sum()",
        [],
    ),
    "an array that is kept": ("arrays.append(weight.to('cpu', non_blocking=True).numpy())", []),
    "there and back": ("kept[n] = weight; kept.to(device)", ["kept-elsewhere"]),
    "only copied there": ("kept.to(device)", []),
    "only filled": ("kept[n] = weight", []),
    "filled once": ("kept[n] = weight if not n else 0; kept.to(device)", []),
}
LOOP = """
    kept, arrays = torch.zeros(4, 2, 4), []
    stage = torch.ones(3, 4).pin_memory()
    for n in range(4):
        made = torch.cuda.Event()
        with torch.no_grad():
            x, weight = stage.to(device, non_blocking=True), model.weight.detach()
            made.record()
            {}
        step(x)
"""


@pytest.fixture(scope="module")
def told(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """What doctor says of each program that a test asks about."""
    folder = tmp_path_factory.mktemp("copies")
    asked = {item.name.partition("[")[2][:-1] for item in request.session.items}
    kinds = [kind for kind in COPIES if kind in asked]
    paths = [folder / f"{n}.py" for n in range(len(kinds))]
    for path, kind in zip(paths, kinds, strict=True):
        text = "".join(map(textwrap.dedent, (TRAINS, LOOP)))
        path.write_text(text.replace("{}", COPIES[kind][0]))
    programs = [(str(Path(path).with_suffix("")),) for path in paths]
    return dict(zip(kinds, ran("simulated", programs), strict=True))


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", COPIES)
def test_what_is_said_of_a_copy(told: dict[str, dict[str, Any]], kind: str) -> None:
    found = told[kind]
    causes = [each["cause"] for each in found["verdicts"] if each["cause"] != "host-waits"]
    assert (causes, found["complete"]) == (COPIES[kind][1], True)
    noted = [each for each in found["notes"] if each.startswith("not checked")]
    assert len(noted) == (kind == "an array that is kept")
