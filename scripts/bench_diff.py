"""Measure `ckptmove diff` against `cmp`: part of `bench.py`.

Only a copy can be compared by `cmp`; the same tensors in another format are measured besides. The
files are in the page cache, so that the disk does not count.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from measuring import CKPTMOVE, TRAINING, Contender, compare, make


def comparisons(folder: Path, size: float, rounds: int) -> None:
    """Compare a training checkpoint with a copy of it."""
    source, copy = make(TRAINING, folder / "a.pt", size), folder / "b.pt"
    shutil.copyfile(source, copy)
    diff = Contender("ckptmove diff", [*CKPTMOVE, "diff", str(source), str(copy)])
    plain = Contender("cmp", ["cmp", str(source), str(copy)])
    compare(f"Compare {source.stat().st_size / 1e9:.2f} GB", [plain, diff], rounds, lambda: None)
    for path in (source, copy):
        path.unlink()
