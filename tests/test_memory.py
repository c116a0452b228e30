"""Memory is bounded by the metadata: files of any size take the same few megabytes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.checkpoints import sparse_zip64

PROJECT = Path(__file__).parent.parent
MOST = 40_000_000  # bytes of anonymous memory, of the whole process


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


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="RssAnon is told by Linux only")
def test_memory_does_not_grow_with_the_tensors(tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    peaks = []
    for gib in (1, 5):
        source = sparse_zip64(tmp_path / f"{gib}.pt", gib)
        peaks.append(peak("relocate", source, "--to", "cpu", "-o", out, "--force"))
        peaks.append(peak("inspect", source))
    assert min(peaks) > 1_000_000, "it was looked at"
    assert max(peaks) < MOST, peaks
