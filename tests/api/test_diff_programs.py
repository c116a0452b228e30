"""Programs with the same tensors and other code: different, and equal if code is ignored."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptmove import diff, validate
from tests.conftest import RunCli

pytestmark = pytest.mark.filterwarnings("ignore:Lite Interpreter:DeprecationWarning")


class Adds(nn.Module):
    """One program."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add."""
        return self.layer(x) + 1  # type: ignore[no-any-return]


class Layer(nn.Linear):
    """The same layer by another name."""


class Subtracts(nn.Module):
    """Another program, of classes with other names."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Subtract."""
        return self.layer(x) - 1  # type: ignore[no-any-return]


class Steps(nn.Module):
    """A program that keeps a number as an attribute."""

    def __init__(self, layer: nn.Linear, step: int) -> None:
        super().__init__()
        self.layer = layer
        self.step = step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        return self.layer(x) * self.step  # type: ignore[no-any-return]


def script(module: nn.Module, path: Path) -> None:
    torch.jit.script(module).save(path)


def phone(module: nn.Module, path: Path) -> None:
    torch.jit.script(module)._save_for_lite_interpreter(str(path))


def trace(module: nn.Module, path: Path) -> None:
    torch.jit.trace(module, torch.ones(1, 2)).save(path)


def export(module: nn.Module, path: Path) -> None:
    torch.export.save(torch.export.export(module, (torch.ones(1, 2),)), path)


Writer = Callable[[nn.Module, Path], None]
WRITERS: list[Writer] = [script, phone, trace, export]


@pytest.fixture
def same() -> tuple[Any, Any]:
    """Modules with the same tensors and other code."""
    one, two = Adds(), Subtracts()
    two.load_state_dict(one.state_dict())
    return one, two


@pytest.mark.sample(1)
@pytest.mark.parametrize("write", WRITERS)
def test_only_their_code_differs(
    write: Writer, same: tuple[Any, Any], tmp_path: Path, run_cli: RunCli
) -> None:
    one, two = tmp_path / "one.pt", tmp_path / "two.pt"
    write(same[0], one)
    write(same[1], two)
    assert not diff(one, two).equal
    ignoring = diff(one, two, ignore_code=True)
    assert ignoring.equal, ignoring.differences
    assert ignoring.ignored == diff(one, two).differences
    validate(two, against=one, ignore_code=True).raise_if_failed()
    run_cli("diff", "one.pt", "two.pt", exit=1)
    result = run_cli("diff", "one.pt", "two.pt", "--ignore-code", "-v", exit=0)
    assert f"({len(ignoring.ignored)} difference" in result.stdout
    assert all(
        each.name.replace("(root)", "(the whole object)") in result.stdout
        for each in ignoring.ignored
    )
    said = json.loads(run_cli("diff", "--json", "one.pt", "two.pt", "--ignore-code", exit=0).stdout)
    assert [each["name"] for each in said["ignored"]] == [e.name for e in ignoring.ignored]
    assert said["code_ignored"] == len(ignoring.ignored)


@pytest.mark.parametrize("write", WRITERS)
def test_tensors_count_all_the_same(write: Writer, same: tuple[Any, Any], tmp_path: Path) -> None:
    one, two = tmp_path / "one.pt", tmp_path / "two.pt"
    write(same[0], one)
    with torch.no_grad():
        same[1].layer.bias.add_(1)
    write(same[1], two)
    found = diff(one, two, ignore_code=True)
    assert [str(each.kind) for each in found.differences] == ["changed"]


def test_values_count_all_the_same(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)
    script(Steps(layer, 1), tmp_path / "one.pt")
    script(Steps(layer, 2), tmp_path / "two.pt")
    found = diff(tmp_path / "one.pt", tmp_path / "two.pt", ignore_code=True)
    assert [(str(each.kind), each.name) for each in found.differences] == [("value", "step")]


def test_a_phone_program_and_its_source_have_the_same_tensors(
    same: tuple[Any, Any], tmp_path: Path
) -> None:
    script(same[0], tmp_path / "one.pt")
    phone(same[0], tmp_path / "one.ptl")
    found = diff(tmp_path / "one.pt", tmp_path / "one.ptl")
    assert not found.equal
    assert diff(tmp_path / "one.pt", tmp_path / "one.ptl", ignore_code=True).equal


class Named(nn.Module):
    """Its layer has the name below which files for phones keep compiled code."""

    def __init__(self, class_: type[nn.Linear], number: int) -> None:
        super().__init__()
        self.bytecode = class_(2, 2)
        self.bytecode.number = number  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer."""
        return self.bytecode(x)  # type: ignore[no-any-return]


def test_what_is_only_called_like_compiled_code_counts(tmp_path: Path) -> None:
    one, two = Named(nn.Linear, 1), Named(nn.Linear, 2)
    two.load_state_dict(one.state_dict())
    script(one, tmp_path / "one.pt")
    script(two, tmp_path / "two.pt")
    found = diff(tmp_path / "one.pt", tmp_path / "two.pt", ignore_code=True)
    assert [each.name for each in found.differences] == ["bytecode.number"]


def test_classes_of_pickles_count(tmp_path: Path, run_cli: RunCli) -> None:
    torch.save(nn.Sequential(nn.Sigmoid()), tmp_path / "one.pt")
    torch.save(nn.ModuleList([nn.Tanh()]), tmp_path / "two.pt")
    done = run_cli("diff", "one.pt", "two.pt", "--ignore-code", exit=1)
    assert "type  (the whole object)" in done.stdout
    assert done.stderr.endswith("the whole object (type), and 1 more difference\n")
