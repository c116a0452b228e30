"""Memory is bounded by the metadata: files of any size take the same few megabytes."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data

import ckptmove
from tests.making.checkpoints import sparse_zip64

PROJECT = Path(__file__).parents[2]
MOST = 40_000_000  # bytes of anonymous memory, of the whole process
SPREAD = 20_000_000  # bytes by which that of two runs may differ, torch's threads included
told = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="RssAnon is told by Linux only"
)


def peak(*arguments: str | Path) -> int:
    """The most anonymous memory (RssAnon, bytes) that a command had whenever we looked."""
    command = [sys.executable, "-m", "ckptmove", *map(str, arguments)]
    process = subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.DEVNULL)
    status = Path(f"/proc/{process.pid}/status")
    most = 0
    while process.poll() is None:
        text = status.read_text()
        found = [line.split()[1] for line in text.splitlines() if line.startswith("RssAnon")]
        most = max(most, *(1024 * int(number) for number in found), 0)
        time.sleep(0.002)
    assert process.returncode == 0
    return most


def sparse(path: Path, mib: int) -> Path:
    """A tensor as it lies and a transposed one, half of so many MiB each, all of it holes."""
    with FakeTensorMode():
        flat, square = torch.empty(mib << 17), torch.empty(mib << 7, 1024)
        saved = {"flat": flat, "transposed": square.t()}
    with skip_data(materialize_fake_tensors=True):
        torch.save(saved, path)
    return path


@pytest.mark.slow
@told
def test_memory_does_not_grow_with_the_tensors(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    out = tmp_path / "out.pt"
    peaks = []
    for gib in (1, 5):
        source = sparse_zip64(tmp_path / f"{gib}.pt", gib)
        peaks.append(peak("relocate", source, "--to", "cpu", "-o", out, "--force"))
        peaks.append(peak("inspect", source))
    assert min(peaks) > 1_000_000, "it was looked at"
    assert max(peaks) < MOST, peaks
    record_property("peak RssAnon, MB", max(peaks) / 1e6)


@pytest.mark.slow
@told
@pytest.mark.parametrize(
    ("options", "most"),
    [(("--select", "flat"), MOST), (("--dtype", "*=bf16"), None)],
    ids=["copied", "gathered and cast"],
)
def test_converting_takes_no_more_for_larger_tensors(
    options: tuple[str, ...], most: int | None, tmp_path: Path
) -> None:
    safe, again = tmp_path / "out.safetensors", tmp_path / "out.pt"
    there, back = [], []
    for mib in (64, 512):
        source = sparse(tmp_path / f"{mib}.pt", mib)
        there.append(peak("convert", source, safe, "--force", *options))
        back.append(peak("convert", safe, again, "--force", *options))
        assert safe.stat().st_size > mib << 18
    for small, large in (there, back):
        assert small > 1_000_000, "it was looked at"
        assert large < small + SPREAD, (there, back)
        assert most is None or max(small, large) < most, (there, back)


VERBS: dict[str, Callable[[Path, Path], object]] = {
    "inspect": lambda path, folder: ckptmove.inspect(path),
    "relocate": lambda path, folder: ckptmove.relocate(path, folder / "moved.pt", to="cuda:0"),
    "convert": lambda path, folder: ckptmove.convert(path, folder / "run.safetensors"),
    "diff": lambda path, folder: ckptmove.diff(path, path),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("verb", VERBS)
def test_nobody_looks_for_garbage_while_a_graph_is_built(verb: str, tmp_path: Path) -> None:
    """It takes longer than all else where there are very many tensors."""
    torch.save({f"t{n}": torch.zeros(1) for n in range(2_000)}, tmp_path / "run.pt")
    VERBS[verb](tmp_path / "run.pt", tmp_path)  # imports what it needs
    generations: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        generations.append(info["generation"])

    for path in (tmp_path / "moved.pt", tmp_path / "run.safetensors"):
        path.unlink(missing_ok=True)
    gc.collect()
    gc.callbacks.append(note)
    try:
        VERBS[verb](tmp_path / "run.pt", tmp_path)
        found = [each for each in generations if each]
    finally:
        gc.callbacks.remove(note)
    assert not found
    assert gc.isenabled()
