#!/usr/bin/env python3
"""Measure ckptmove against the ways people have today, interleaved, as whole processes.

Usage: .venv/bin/python scripts/bench.py [--size GB] [--tensors N] [--rounds N] [--folder DIR]
                                  [--in-place]

Prints for each contender the median time, its ratio to the first of its group (the median of the
ratios round by round, since machines are noisy) and the peak of anonymous memory (RssAnon; the
maximum resident set would count mapped files). What a relocation wrote is on disk
(fsync) before its clock stops. The order changes from round to round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).parent
CKPTMOVE = [sys.executable, "-m", "ckptmove"]

SYNC = "fd = os.open(sys.argv[2], os.O_RDWR); os.fsync(fd)"
COPY = ["sh", "-c", 'cp "$0" "$1" && sync "$1"']
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


@dataclass
class Contender:
    """A command, and what was measured of it."""

    name: str
    command: list[str]
    seconds: list[float] = field(default_factory=list)
    anonymous: int = 0  # bytes, at the peak

    def run(self) -> None:
        """Run it once; it must succeed."""
        started = time.perf_counter()
        process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, env=environment())
        while process.poll() is None:
            self.anonymous = max(self.anonymous, anonymous_nbytes(process.pid))
            time.sleep(0.001)
        self.seconds.append(time.perf_counter() - started)
        if process.returncode:
            raise SystemExit(f"{self.name} failed with {process.returncode}")


def environment() -> dict[str, str]:
    """Compiled modules are kept, as they are wherever a package is installed."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPATH": str(FOLDER.parent)}


def anonymous_nbytes(pid: int) -> int:
    """RssAnon of a process, 0 where it is not told."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return sum(
        1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")
    )


def compare(
    title: str, contenders: list[Contender], rounds: int, before: Callable[[], None] = os.sync
) -> None:
    """Run all of them in turn, `rounds` times, and print what came out."""
    for contender in contenders:  # warm the page cache, and compile modules
        before()
        contender.run()
        contender.seconds.clear()
    for n in range(rounds):
        turn = n % len(contenders)
        for contender in contenders[turn:] + contenders[:turn]:
            before()
            contender.run()
    base = contenders[0].seconds
    print(f"\n{title}\n")
    print("| | median | ratio | anonymous memory |\n|---|---|---|---|")
    for each in contenders:
        ratios = [mine / its for mine, its in zip(each.seconds, base, strict=True)]
        print(
            f"| {each.name} | {statistics.median(each.seconds):.2f} s "
            f"| {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) "
            f"| {each.anonymous / 1e6:.0f} MB |",
            flush=True,
        )


def make(script: str, path: Path, *arguments: object) -> Path:
    """Make a checkpoint in a process of its own, whose memory goes with it."""
    command = [sys.executable, "-c", script, str(path), *map(str, arguments)]
    subprocess.run(command, check=True, cwd=FOLDER, env=environment())
    return path


TRAINING = """
import sys, torch
from demo_checkpoint import tagged
width, rows = 4096, 1024
layers = max(1, round(float(sys.argv[2]) * 1e9 / (3 * 4 * width * rows)))
model = torch.nn.ModuleDict({f"l{n}": torch.nn.Linear(width, rows) for n in range(layers)})
optimizer = torch.optim.AdamW(model.parameters())
for parameter in model.parameters():
    parameter.grad = torch.randn_like(parameter)
optimizer.step()
state = optimizer.state_dict()
moments = [s[k] for s in state["state"].values() for k in ("exp_avg", "exp_avg_sq")]
with tagged([*model.parameters(), *moments], "cuda:1"):
    rng = torch.get_rng_state()
    torch.save({"model": model.state_dict(), "optimizer": state, "rng": rng}, sys.argv[1])
"""
SPARSE = """
import sys, torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data
width, count = 4096, 160
rows = max(1, round(float(sys.argv[2]) * 1e9 / (3 * 4 * width * count)))
with FakeTensorMode():
    model = {f"l{n}.weight": torch.empty(rows, width, device="cuda:1") for n in range(count)}
    moment = lambda: torch.empty(rows, width, device="cuda:1")
    moments = {n: {"exp_avg": moment(), "exp_avg_sq": moment()} for n in range(count)}
with skip_data(materialize_fake_tensors=True):
    torch.save({"model": model, "optimizer": {"state": moments, "param_groups": []}}, sys.argv[1])
"""
MANY = """
import sys, torch
from demo_checkpoint import tagged
state = {f"layers.{n // 10}.t{n % 10}.weight": torch.ones(3, 2) for n in range(int(sys.argv[2]))}
with tagged(list(state.values()), "cuda:1"):
    torch.save(state, sys.argv[1])
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
            again = [*CKPTMOVE, "relocate", str(source), "--to", "cuda:1", "--in-place", "--quiet"]
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
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="ckptmove-bench-") as folder:
        start = Contender("ckptmove --help", [*CKPTMOVE, "--help"])
        python = Contender("python -c pass", [sys.executable, "-c", "pass"])
        compare("Start", [python, start], options.rounds, lambda: None)
        in_place(Path(folder), options.size, options.rounds)
        if not options.in_place:
            relocations(Path(folder), options.size, options.rounds)
            growth(Path(folder), options.size, options.tensors, options.rounds)


if __name__ == "__main__":
    main()
