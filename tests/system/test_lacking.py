"""Systems that lack calls and modules of Linux give the same bytes, or a refusal by name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from tests.making.saving import save
from tests.system.lacking import LACKS

_ROOT = Path(__file__).parents[2]
_IN_PLACE = "can't be changed in place on this system, which has no locks on files"


def outcomes(folder: Path, systems: Iterable[str]) -> dict[str, dict[str, str]]:
    """What comes out on each system."""
    model = {"w": torch.arange(120.0).reshape(10, 12), "b": torch.ones(3, dtype=torch.int64)}
    state = {"model": model, "step": 3, "rng": torch.get_rng_state()}
    save(folder / "run.pt", state, "cuda:1")
    for name in ("a", "b/c"):
        path = folder / "tree" / f"{name}.pt"
        path.parent.mkdir(parents=True)
        save(path, {"w": torch.arange(40.0), "name": name}, "cuda:1")
    said = subprocess.run(
        [sys.executable, "-m", "tests.system.lacking", folder, *systems],
        capture_output=True,
        text=True,
        cwd=_ROOT,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    found: dict[str, dict[str, str]] = json.loads(said.stdout)
    return found


def check_same(found: dict[str, dict[str, str]]) -> None:
    """All of them are as on this system, but for what is refused by name."""
    there = dict(found["nothing"])
    assert there["validate"] == "True"
    assert there["batch"] == "[('a.pt', 'done', ''), ('b/c.pt', 'done', '')]"
    assert there["again"] == "[('a.pt', 'skipped'), ('b/c.pt', 'skipped')]"
    assert there["left"] == "[]"
    assert there.pop("in place") == "changed"
    for system, outcome in found.items():
        assert "error" not in outcome, system + outcome["error"]
        in_place = outcome.pop("in place")
        assert outcome == there, system
        assert in_place == (_IN_PLACE if "fcntl" in LACKS[system] else "changed")


def test_windows_and_macos(tmp_path: Path) -> None:
    check_same(outcomes(tmp_path, ("nothing", "darwin", "win32")))


@pytest.mark.slow
def test_each_lack_and_all_of_them(tmp_path: Path) -> None:
    check_same(outcomes(tmp_path, (each for each in LACKS if each not in ("darwin", "win32"))))
