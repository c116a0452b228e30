"""A process that runs code of a file ends when that reaches out of it."""

from __future__ import annotations

import ctypes
import json
import platform
import re
import signal
import subprocess
import sys
import tempfile
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


@pytest.mark.sample(3)
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


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", acts.HARMLESS)
def test_what_stays_inside_is_let_be(name: str, beside: Path) -> None:
    before = tree(beside.parent)
    asked = {"kind": "harmless", "act": name, "path": str(beside)}
    assert call_in_subprocess(acts.act, asked, patience=60, guarded=True) == {"did": name}
    assert tree(beside.parent) == before


#: Not permitted, permission denied, or a link across what counts as another device.
_PLACES = (1, 13, 18)


@pytest.mark.sample(3)
@fenced
@filtered
@pytest.mark.parametrize(
    ("kind", "name", "numbers"),
    [
        *(("failing", name, _PLACES) for name in acts.FAILING),
        *(("calls", name, (1,)) for name in acts.CALLS),
        *(("newer", name, (38,)) for name in acts.NEWER),
    ],
)
def test_an_act_in_c_fails(kind: str, name: str, numbers: tuple[int, ...], beside: Path) -> None:
    before = tree(beside.parent)
    asked = {"kind": kind, "act": name, "path": str(beside)}
    with pytest.raises(SubprocessLost, match=r"its process ended \(exit 1\)") as lost:
        call_in_subprocess(acts.act, asked, patience=60, guarded=True)
    assert len(lost.value.lines) == 1
    found = re.match(r"\w+Error: \[Errno (\d+)\] ", lost.value.lines[0])
    assert found is not None
    assert int(found[1]) in numbers
    assert tree(beside.parent) == before


@pytest.mark.sample(3)
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


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", acts.TELLING)
def test_it_can_not_deceive_who_waits(
    name: str, beside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(beside.parent))
    before = tree(beside.parent)
    asked = {"kind": "telling", "act": name, "path": str(beside)}
    if name == "folders in folders":
        assert call_in_subprocess(acts.act, asked, patience=60, guarded=True) == {"did": name}
    else:
        with pytest.raises(SubprocessLost, match="its process ended"):
            call_in_subprocess(acts.act, asked, patience=60, guarded=True)
    assert tree(beside.parent) == before


@fenced
def test_no_thread_was_started_before(tmp_path: Path) -> None:
    """Landlock would not apply to it."""
    assert call_in_subprocess(acts.threads, {}, patience=60, guarded=True) == {"threads": 1}


@pytest.mark.usefixtures("warm")
@pytest.mark.slow
@fenced
@filtered
@pytest.mark.parametrize("lacking", [["Landlock"], ["seccomp"], ["Landlock", "seccomp"]])
def test_what_the_kernel_lacks_is_said(lacking: list[str], tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    file = tmp_path / "it.pt"
    torch.jit.script(torch.nn.Linear(2, 2)).save(file)
    at = 0 if platform.machine() == "x86_64" else 1
    numbers = [{"Landlock": (444, 444), "seccomp": (317, 277)}[each][at] for each in lacking]
    command = [sys.executable, "-c", acts.WITHOUT, json.dumps(numbers), "validate", str(file)]
    done = subprocess.run(
        [*command, "--step", "forward", "--input", "float32[1,2]"],
        capture_output=True,
        text=True,
        check=True,
    )
    for each in ("Landlock", "seccomp"):
        assert (f"it has no {each}" in done.stdout) == (each in lacking)
    assert "ok      step" in done.stdout
