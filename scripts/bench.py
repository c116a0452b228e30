#!/usr/bin/env python3
"""Measure ckptmove against the ways people have today, interleaved, as whole processes.

Usage: .venv/bin/python scripts/bench.py [--size GB] [--tensors N] [--rounds N] [--folder DIR]
                                  [--in-place] [--convert] [--diff] [--batch] [--store]
                                  [--dcp] [--load [DEVICE]] [--trace]

Prints for each contender the median time, its ratio to the first of its group (the median of the
ratios round by round, since machines are noisy) and the peak of anonymous memory (RssAnon; the
maximum resident set would count mapped files). What is written is on disk (fsync)
before the clock stops. The order changes from round to round.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench_batch import batches
from bench_convert import conversions
from bench_dcp import divided
from bench_diff import comparisons
from bench_load import loads
from bench_store import readings, small_items
from bench_trace import traces
from measuring import CKPTMOVE, COPY, MANY, TRAINING, Contender, compare, environment, make

SYNC = "fd = os.open(sys.argv[2], os.O_RDWR); os.fsync(fd)"
LOAD_SAVE = f"""
import os, sys, torch
state = torch.load(sys.argv[1], map_location="cpu")
torch.save(state, sys.argv[2]); {SYNC}
"""
MMAP_SAVE = f"""
import os, sys, torch
state = torch.load(sys.argv[1], map_location="cpu", mmap=True)
torch.save(state, sys.argv[2]); {SYNC}
"""
LIST = """
def listed(value):
    if isinstance(value, torch.Tensor):
        yield value.dtype, value.shape, value.device
    elif isinstance(value, dict):
        for inner in value.values():
            yield from listed(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from listed(inner)
print(len(list(listed(state))))
"""
MMAP_LIST = f"""
import sys, torch
state = torch.load(sys.argv[1], map_location="cpu", mmap=True)
{LIST}"""
FAKE_LIST = f"""
import sys, torch
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    state = torch.load(sys.argv[1])
{LIST}"""


SPARSE = """
import sys, torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data
width, count = 4096, 160
rows = max(1, round(float(sys.argv[2]) * 1e9 / (3 * 4 * width * count)))
with FakeTensorMode():
    model = {f"l{n}.weight": torch.empty(rows, width, device="cuda:0") for n in range(count)}
    moment = lambda: torch.empty(rows, width, device="cuda:0")
    moments = {n: {"exp_avg": moment(), "exp_avg_sq": moment()} for n in range(count)}
with skip_data(materialize_fake_tensors=True):
    torch.save({"model": model, "optimizer": {"state": moments, "param_groups": []}}, sys.argv[1])
"""


def relocations(folder: Path, size: float, rounds: int) -> None:
    """Relocate a training checkpoint, against a bare copy and against torch."""
    source, out = make(TRAINING, folder / "training.pt", size), folder / "out.pt"

    def before() -> None:
        out.unlink(missing_ok=True)
        os.sync()

    def python(name: str, script: str) -> Contender:
        return Contender(name, [sys.executable, "-c", script, str(source), str(out)])

    relocate = [*CKPTMOVE, "relocate", str(source), "--to", "cpu", "-o", str(out), "--quiet"]
    compare(
        f"Relocate a training checkpoint of {source.stat().st_size / 1e9:.2f} GB to the CPU",
        [
            Contender("cp, then fsync", [*COPY, str(source), str(out)]),
            Contender("ckptmove relocate (verified, on disk)", relocate),
            python("torch.load(mmap=True), torch.save, fsync", MMAP_SAVE),
            python("torch.load, torch.save, fsync", LOAD_SAVE),
        ],
        rounds,
        before,
    )
    before()
    inspections(source, f"Inspect it: {source.stat().st_size / 1e9:.2f} GB", rounds)


def inspections(source: Path, title: str, rounds: int, *, fake: bool = True) -> None:
    """Inspect a checkpoint, against torch; `fake` takes minutes where there are many tensors."""

    def torch_way(name: str, script: str) -> Contender:
        return Contender(name, [sys.executable, "-c", script, str(source)])

    contenders = [
        Contender("ckptmove inspect", [*CKPTMOVE, "inspect", str(source)]),
        torch_way("torch.load(mmap=True)", MMAP_LIST),
        torch_way("import torch, nothing else", "import torch"),
    ]
    if fake:
        contenders.append(torch_way("torch.load under FakeTensorMode", FAKE_LIST))
    compare(title, contenders, rounds)
    source.unlink()


def in_place(folder: Path, size: float, rounds: int) -> None:
    """Change tags in place, in files of the same tensors: holes take no room on disk."""
    sources = [make(SPARSE, folder / f"sparse-{n}.pt", n) for n in (size, 25 * size)]

    def before() -> None:
        for source in sources:
            again = [*CKPTMOVE, "relocate", str(source), "--to", "cuda:0", "--in-place", "--quiet"]
            subprocess.run(again, check=True, env=environment(), stderr=subprocess.DEVNULL)
        os.sync()

    contenders = [
        Contender(
            f"{source.stat().st_size / 1e9:.0f} GB",
            [*CKPTMOVE, "relocate", str(source), "--to", "cpu", "--in-place", "--quiet"],
        )
        for source in sources
    ]
    compare("ckptmove relocate --in-place, 480 tensors", contenders, rounds, before)
    for source in sources:
        source.unlink()


def growth(folder: Path, size: float, tensors: int, rounds: int) -> None:
    """How time and memory grow with the file, and with the number of tensors."""
    out = folder / "out.pt"
    contenders = []
    for share in (4, 2, 1):
        source = make(TRAINING, folder / f"size-{share}.pt", size / share)
        command = [*CKPTMOVE, "relocate", str(source), "--to", "cpu", "-o", str(out), "--force"]
        contenders.append(Contender(f"{source.stat().st_size / 1e9:.2f} GB", command))
    compare("ckptmove relocate, by size", contenders, rounds)
    for count in (tensors // 4, tensors // 2, tensors):
        source = make(MANY, folder / f"many-{count}.pt", count)
        inspections(source, f"Inspect {count:,} tensors", min(rounds, 3), fake=False)


def main() -> None:
    """Make the files, run everything, remove the files."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=float, default=2.0, help="GB of the training checkpoint")
    parser.add_argument("--tensors", type=int, default=100_000, help="the most tensors of a file")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", help="where the files are made; needs three times the size")
    parser.add_argument("--in-place", action="store_true", help="measure only that")
    parser.add_argument("--convert", action="store_true", help="measure only that")
    parser.add_argument("--diff", action="store_true", help="measure only that")
    parser.add_argument("--batch", action="store_true", help="measure only that")
    parser.add_argument("--store", action="store_true", help="measure only that")
    parser.add_argument("--dcp", action="store_true", help="measure only that")
    parser.add_argument("--load", nargs="?", const="cpu", help="measure only that, to a device")
    parser.add_argument("--trace", action="store_true", help="measure only that")
    options = parser.parse_args()
    if options.trace:
        traces(options.rounds)
        return
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="ckptmove-bench-") as folder:
        if options.convert:
            conversions(Path(folder), options.size, options.tensors, options.rounds)
            return
        if options.diff:
            comparisons(Path(folder), options.size, options.rounds)
            return
        if options.batch:
            batches(Path(folder), options.rounds)
            return
        if options.load:
            loads(Path(folder), options.load, options.size, options.rounds)
            return
        if options.dcp:
            divided(Path(folder), options.size, options.tensors, options.rounds)
            return
        if options.store:
            readings(Path(folder), options.size, options.rounds)
            small_items(Path(folder), options.rounds)
            return
        start = Contender("ckptmove --help", [*CKPTMOVE, "--help"])
        python = Contender("python -c pass", [sys.executable, "-c", "pass"])
        compare("Start", [python, start], options.rounds, lambda: None)
        in_place(Path(folder), options.size, options.rounds)
        if not options.in_place:
            relocations(Path(folder), options.size, options.rounds)
            growth(Path(folder), options.size, options.tensors, options.rounds)
            conversions(Path(folder), options.size, options.tensors, options.rounds)
            comparisons(Path(folder), options.size, options.rounds)
            batches(Path(folder), options.rounds)
            readings(Path(folder), options.size, options.rounds)
            small_items(Path(folder), options.rounds)
            divided(Path(folder), options.size, options.tensors, options.rounds)


if __name__ == "__main__":
    main()
