"""A process that runs code of a file ends when that reaches out of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptmove.rehearsal.apart import Lost, apart
from ckptmove.rehearsal.guard import CODE

from . import acts


def tree(folder: Path) -> dict[str, object]:
    """What lies in a folder, as far as an act could change it."""
    return {
        each.name: (each.read_bytes(), each.stat().st_mode, each.stat().st_mtime_ns)
        for each in folder.iterdir()
    }


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """Where an act would leave something, beside a file that it could change."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "kept").write_text("kept")
    return folder / "canary"


@pytest.mark.parametrize("name", acts.ENDING)
def test_an_act_ends_the_process(name: str, beside: Path) -> None:
    before = tree(beside.parent)
    with pytest.raises(Lost, match="it tried to ") as lost:
        apart(acts.act, {"act": name, "path": str(beside)}, patience=60, guarded=True)
    assert lost.value.code == CODE
    assert lost.value.attempt is not None
    assert tree(beside.parent) == before


@pytest.mark.parametrize("name", acts.HARMLESS)
def test_what_stays_inside_is_let_be(name: str, beside: Path) -> None:
    before = tree(beside.parent)
    asked = {"act": name, "path": str(beside)}
    assert apart(acts.act, asked, patience=60, guarded=True) == {"did": name}
    assert tree(beside.parent) == before
