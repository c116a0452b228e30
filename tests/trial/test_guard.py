"""A process that runs code of a file ends when that reaches out of it."""

from __future__ import annotations

import ctypes
import platform
import re
import signal
import sys
from pathlib import Path

import pytest

from ckptmove.trial.sandbox.guard import CODE
from ckptmove.trial.subprocess_call import SubprocessLost, call_in_subprocess
from tests.trial import acts


def landlock() -> int:
    """The version of Landlock that the kernel has; 0: none."""
    if sys.platform != "linux":
        return 0
    found: int = ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1)
    return max(0, found)


filtered = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"),
    reason="no filter of system calls for this machine",
)
fenced = pytest.mark.skipif(landlock() < 3, reason="the kernel has no Landlock, or an early one")


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
    with pytest.raises(SubprocessLost, match="it tried to ") as lost:
        call_in_subprocess(
            acts.act,
            {"kind": "ending", "act": name, "path": str(beside)},
            patience=60,
            guarded=True,
        )
    assert lost.value.code == CODE
    assert lost.value.attempt is not None
    assert tree(beside.parent) == before


@pytest.mark.parametrize("name", acts.HARMLESS)
def test_what_stays_inside_is_let_be(name: str, beside: Path) -> None:
    before = tree(beside.parent)
    asked = {"kind": "harmless", "act": name, "path": str(beside)}
    assert call_in_subprocess(acts.act, asked, patience=60, guarded=True) == {"did": name}
    assert tree(beside.parent) == before


@fenced
@filtered
@pytest.mark.parametrize("name", acts.FAILING)
def test_an_act_in_c_fails(name: str, beside: Path) -> None:
    before = tree(beside.parent)
    asked = {"kind": "failing", "act": name, "path": str(beside)}
    with pytest.raises(SubprocessLost, match=r"its process ended \(exit 1\)") as lost:
        call_in_subprocess(acts.act, asked, patience=60, guarded=True)
    assert len(lost.value.lines) == 1
    # Not permitted, permission denied, or a link across what counts as another device.
    assert re.match(r"\w+Error: \[Errno (1|13|18)\] ", lost.value.lines[0])
    assert tree(beside.parent) == before


@filtered
@pytest.mark.parametrize("name", acts.ENDED)
def test_an_act_in_c_ends_the_process(name: str, beside: Path) -> None:
    before = tree(beside.parent)
    asked = {"kind": "ended", "act": name, "path": str(beside)}
    with pytest.raises(
        SubprocessLost, match="it tried to start a process or open a socket"
    ) as lost:
        call_in_subprocess(acts.act, asked, patience=60, guarded=True)
    assert lost.value.code == -signal.SIGSYS
    assert tree(beside.parent) == before
