"""What is said of values that name a device: only what is true, and what it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckptmove import inspect, relocate
from tests.conftest import RunCli
from tests.making.checkpoints import save
from tests.making.families import FAMILIES

OPTION = "--values"


def lines(path: Path, *, full: bool = False, **rules: Any) -> list[str]:
    """What is said of a relocation."""
    return list(relocate(path, path.with_name("out"), force=True, **rules).lines(full=full))


@pytest.fixture
def named(tmp_path: Path) -> Path:
    """A file that names devices: one that moves, and two that do not."""
    saved = {"w": torch.ones(2), "a": "cuda:0", "b": "cuda:3", "c": "mps"}
    return save(tmp_path / "made.pt", saved)


def test_what_is_rewritable_is_told(named: Path) -> None:
    said = lines(named, to="cpu")
    assert "unchanged values that --values would rewrite: a (cuda:0)" in said
    assert not any("cuda:3" in line or "mps" in line for line in said)


def test_the_option_is_not_advised_to_who_gave_it(named: Path) -> None:
    said = lines(named, to="cpu", values=True)
    assert "rewrote values that name a device: a (cuda:0→cpu)" in said
    assert OPTION not in "\n".join(said)


def test_nothing_is_said_of_devices_that_stay(named: Path) -> None:
    assert not any(
        "values" in line for line in lines(named, map={"mps": "cpu"}, allow_unmatched=True)
    )


def test_what_can_not_be_rewritten_is_told_apart(tmp_path: Path) -> None:
    path = save(tmp_path / "made.pt", {"w": torch.ones(2), "a": {"cuda:0"}})
    for values in (False, True):
        said = [line for line in lines(path, to="cpu", values=values) if "values" in line]
        assert said == ["unchanged values that can't be rewritten: a.<args>.0.0 (cuda:0)"]


def test_a_report_tells_programs_what_is_rewritable(named: Path) -> None:
    said = relocate(named, to="cpu", dry_run=True).to_json()
    assert [value["name"] for value in said["values_rewritable"]] == ["a"]
    done = relocate(named, to="cpu", values=True).to_json()
    assert [(v["name"], v["to"]) for v in done["values_rewritten"]] == [("a", "cpu")]
    assert done["values_rewritable"] == []
    assert done["values_could_follow"] == []  # the former name


def test_many_rewritten_values_are_counted(tmp_path: Path) -> None:
    saved = {"w": torch.ones(2), "names": ["cuda:0" for _ in range(9)]}
    path = save(tmp_path / "made.pt", saved)
    (line,) = (line for line in lines(path, to="cpu", values=True) if "rewrote" in line)
    assert line.endswith("names.4 (cuda:0→cpu) and 4 more")
    (line,) = (x for x in lines(path, to="cpu", values=True, full=True) if "rewrote" in x)
    assert line.endswith("names.8 (cuda:0→cpu)")


def test_the_places_of_a_program_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "made.pt2"
    FAMILIES["exported"]["model"](path, "cuda:0")
    graph = [value for value in inspect(path).values_naming_devices if value.follows]
    moving = sum(value.value == "cuda:0" for value in graph)
    assert moving > 9
    said = lines(path, to="cuda:1")
    assert f"graph of the program: {moving:,} places cuda:0→cuda:1" in said
    assert OPTION not in "\n".join(said)
    assert not any(line.startswith(("rewrote", "left")) for line in said)
    assert graph[-1].name in "\n".join(lines(path, to="cuda:1", full=True))
    shown = list(inspect(path).lines())
    (line,) = (line for line in shown if line.startswith("graph: "))
    assert line.startswith(f"graph: cuda:0 ×{moving}")
    assert not any("loading never changes" in line for line in shown)
    assert graph[-1].name in "\n".join(inspect(path).lines(full=True))


def test_code_is_warned_of_once_and_truly(tmp_path: Path) -> None:
    path = tmp_path / "made.pt"
    FAMILIES["script"]["lite"](path, "cuda:0")
    code = {v.name: v for v in inspect(path).values_naming_devices if v.kind.startswith("code")}
    moved = [name for name, value in code.items() if value.value == "cuda:0"]
    report = relocate(path, tmp_path / "out.pt", to="cuda:1")
    (warning,) = (text for text in report.warnings if "the code itself names" in text)
    assert [name for name in code if repr(name) in warning] == moved
    assert OPTION in warning
    assert "code/" not in "\n".join(report.lines())
    report = relocate(path, tmp_path / "out.pt", to="cuda:1", values=True, force=True)
    assert not any("the code itself names" in text for text in report.warnings)


def test_code_strings_can_not_be_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "made.pt"
    FAMILIES["script"]["lite"](path, "cuda:1")
    for values in (False, True):
        report = relocate(path, tmp_path / "out.pt", to="mps", values=values, force=True)
        (warning,) = (text for text in report.warnings if "the code itself names" in text)
        assert "scripts.py:18" in warning
        assert OPTION not in warning


def test_in_place_there_may_be_nothing_to_change(named: Path, run_cli: RunCli) -> None:
    done = run_cli("relocate", named, "--to", "cuda:0", "--in-place", exit=0)
    assert done.stdout.splitlines()[-1] == "nothing to move, so nothing was changed"
    done = run_cli("relocate", named, "--to", "cuda:0", exit=0)
    assert done.stdout.splitlines()[-1].endswith("(give DST to get a copy)")
