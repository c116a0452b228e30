"""Measure `ckptmove batch` against a bare copy of the tree: part of `bench.py`.

The copy is `cp -r` and one sync at the end; the batch verifies every file, and has each on disk
before it gets its name.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from bench_convert import removing
from measuring import CKPTMOVE, Contender, compare, make

#: Makes a tree of so many checkpoints of so many MB, a hundred in a folder.
TREE = """
import os, sys, torch
from demo_checkpoint import tagged
root, count, nbytes = sys.argv[1], int(sys.argv[2]), int(float(sys.argv[3]) * 1e6)
for n in range(count):
    folder = os.path.join(root, f"run-{n // 100}")
    os.makedirs(folder, exist_ok=True)
    state = {f"layers.{k}.weight": torch.randn(max(1, nbytes // 16)) for k in range(4)}
    with tagged(list(state.values()), "cuda:1"):
        torch.save(state, os.path.join(folder, f"step-{n}.pt"))
"""


def batches(folder: Path, rounds: int) -> None:
    """A few files that are big, and many that are tiny."""
    race(folder, "200 checkpoints of 20 MB", 200, 20.0, rounds, (1, 2))
    race(folder, "10,000 tiny checkpoints", 10_000, 0.0001, min(rounds, 3), (1, 2, 4))


def race(
    folder: Path, title: str, count: int, megabytes: float, rounds: int, jobs: tuple[int, ...]
) -> None:
    """Copy a tree, relocate it and convert it, by so many workers."""
    source, out = make(TREE, folder / "tree", count, megabytes), folder / "out"
    copy = ["sh", "-c", 'cp -r "$0" "$1" && sync', str(source), str(out)]
    contenders = [Contender("cp -r, then sync", copy)]
    for verb, *options in (["relocate", "--to", "cpu"], ["convert"]):
        for count_ in jobs:
            ours = [*CKPTMOVE, "batch", verb, str(source), str(out), *options, "--quiet"]
            name = " ".join(["ckptmove batch", verb, *options, "--jobs", str(count_)])
            contenders.append(Contender(name, [*ours, "--jobs", str(count_)]))
    compare(title, contenders, rounds, removing(out))
    removing(out)()
    shutil.rmtree(source)
