"""Run commands in turn, as whole processes, and tell what each took."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).parent
CKPTMOVE = [sys.executable, "-m", "ckptmove"]
COPY = ["sh", "-c", 'cp "$0" "$1" && sync "$1"']


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


#: Makes a checkpoint of a model and its optimizer, of so many GB, tagged to be on a GPU.
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
#: Makes a checkpoint of so many small tensors.
MANY = """
import sys, torch
from demo_checkpoint import tagged
state = {f"layers.{n // 10}.t{n % 10}.weight": torch.ones(3, 2) for n in range(int(sys.argv[2]))}
with tagged(list(state.values()), "cuda:1"):
    torch.save(state, sys.argv[1])
"""
