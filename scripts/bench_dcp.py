"""Measure `ckptmove convert` of distributed checkpoints against torch's: part of `bench.py`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from measuring import CKPTMOVE, COPY, TRAINING, Contender, compare, make

#: Makes a checkpoint of two ranks, divided by rows or columns, in this process.
DIVIDED = """
import sys, torch, warnings
sys.path.insert(0, "..")
from pathlib import Path
from tests.making.distributed import save_dcp
warnings.simplefilter("ignore")
width, rows = 4096, 4096
count = max(1, round(float(sys.argv[2]) * 1e9 / (4 * width * rows)))
boxes = {
    "rows": [((0, 0), (rows // 2, width)), ((rows // 2, 0), (rows // 2, width))],
    "columns": [((0, 0), (rows, width // 2)), ((0, width // 2), (rows, width // 2))],
}[sys.argv[3]]
state = {f"l{n}": torch.randn(rows, width) for n in range(count)}
save_dcp(Path(sys.argv[1]), state, dict.fromkeys(state, boxes), files=2)
"""
COPY_ALL = ["sh", "-c", 'cp -r "$0" "$1" && sync "$1"/* "$1"']
TO_TORCH = """
import os, sys, warnings
warnings.simplefilter("ignore")
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
dcp_to_torch_save(sys.argv[1], sys.argv[2])
fd = os.open(sys.argv[2], os.O_RDONLY); os.fsync(fd)
"""
#: Makes a checkpoint of so many items of four bytes.
ITEMS = """
import sys, torch
torch.save({f"n{n}": torch.tensor(float(n)) for n in range(int(sys.argv[2]))}, sys.argv[1])
"""


def divided(folder: Path, size: float, tensors: int, rounds: int) -> None:
    """Convert checkpoints of rows and columns, one of torch, and one of many items."""
    out = folder / "out"

    def before() -> None:
        shutil.rmtree(out, ignore_errors=True)
        out.unlink(missing_ok=True)

    def contenders(source: Path, *how: str) -> list[Contender]:
        ours = [*CKPTMOVE, "convert", "--quiet", str(source), str(out), *how]
        theirs = [sys.executable, "-c", TO_TORCH, str(source), str(out)]
        return [
            Contender("cp -r, then sync", [*COPY_ALL, str(source), str(out)]),
            Contender(f"ckptmove convert {' '.join(how)} (verified, on disk)", ours),
            Contender("torch's converter, sync", theirs),
        ]

    for kind in ("rows", "columns"):
        source = make(DIVIDED, folder / kind, size, kind)
        title = f"Convert a distributed checkpoint of {kind}, {size} GB"
        compare(title, contenders(source, "--format", "safetensors"), rounds, before)
        if kind == "rows":
            found = contenders(source, "--format", "dcp", "--ranks", "4")[:2]
            compare(f"Divide it anew, {size} GB", found, rounds, before)
        shutil.rmtree(source)
    source = make(TRAINING, folder / "in.pt", size)
    found = contenders(source, "--format", "dcp", "--ranks", "2")[:2]  # torch's can't change tags
    found[0] = Contender("cp, then sync", [*COPY, str(source), str(out)])
    compare(f"Divide a training checkpoint of {size} GB", found, rounds, before)
    source.unlink()
    before()
    source = make(ITEMS, folder / "many.pt", tensors)
    many = folder / "many"
    write = [*CKPTMOVE, "convert", "--quiet", "--force", str(source), str(many), "--format", "dcp"]
    inspect = [*CKPTMOVE, "inspect", str(many)]
    found = [Contender("write", write), Contender("inspect", inspect)]
    compare(f"A distributed checkpoint of {tensors:,} items", found, rounds, lambda: None)
    shutil.rmtree(many)
    source.unlink()
