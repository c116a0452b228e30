"""What is slow is left out by default: never all that there is of something."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

import tests.conftest
from tests.conftest import ROOT, some, spread

FILES = sorted((ROOT / "tests").rglob("test_*.py"))


@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES}), ids=lambda at: at.name)
def test_every_file_has_a_test_that_is_not_slow(folder: Path) -> None:
    for path in sorted(folder.glob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        found = re.findall(r"^ *def test_", text, re.MULTILINE)
        slow = re.findall(r"^ *@pytest\.mark\.slow$", text, re.MULTILINE)
        assert len(found) > len(slow), path


@pytest.mark.parametrize("total", [1, 2, 7, 100])
@pytest.mark.parametrize("count", [1, 2, 6])
def test_a_sample_is_spread_over_all_cases(count: int, total: int) -> None:
    found = sorted(spread(total, count))
    assert len(found) == min(count, total)
    assert found[0] == 0
    assert found[-1] < total
    gaps = {later - earlier for earlier, later in pairwise(found)}
    assert len(gaps) < 3


def test_some_cases_are_all_of_them_with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tests.conftest, "ALL", False)
    assert some(range(100), 4) == [0, 25, 50, 75, 99]
    assert some(range(2), 4) == [0, 1]
    assert some([], 4) == []
    monkeypatch.setattr(tests.conftest, "ALL", True)
    assert some(range(100), 4) == list(range(100))


def test_ci_runs_all() -> None:
    ci = ROOT / ".ci" / "run"
    if not ci.exists():
        pytest.skip("not a checkout of git")
    assert "scripts/test --all" in ci.read_text(encoding="utf-8")
