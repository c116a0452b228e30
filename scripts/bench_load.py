"""Load checkpoints with ckptmove, torch and safetensors, in turn, to the CPU or to a GPU.

Each way runs in one process that has imported torch, because a program that loads has it anyway.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from measuring import environment

_LOADS = """
import gc, statistics, sys, time
import ckptmove, torch
from safetensors.torch import load_file, save_file

folder, device, gigabytes, rounds = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
on_gpu = device != "cpu"
wait = torch.cuda.synchronize if on_gpu else lambda: None
torch.zeros(1, device=device)  # the device starts

def ways(path, kind):
    yield "ckptmove.load", lambda: ckptmove.load(path, map_location=device)
    if kind == "safetensors":
        yield "safetensors load_file", lambda: load_file(path, device=device)
    else:
        yield "torch.load(mmap=True)", lambda: torch.load(path, map_location=device, mmap=True)
        yield "torch.load", lambda: torch.load(path, map_location=device)

for count, numbers in ((8000, 1024), (500, int(gigabytes * 1e9) // 2000)):
    tensors = {f"layers.{n}.weight": torch.rand(numbers) for n in range(count)}
    for kind in ("safetensors", "pt"):
        path = f"{folder}/{count}.{kind}"
        save_file(tensors, path) if kind == "safetensors" else torch.save(tensors, path)
        seconds = {}
        for turn in range(rounds + 1):
            for name, load in ways(path, kind):
                gc.collect()
                wait()
                start = time.perf_counter()
                found = load()
                wait()
                seconds.setdefault(name, []).append(time.perf_counter() - start)
                assert len(found) == count and str(found["layers.0.weight"].device) == device
                del found
        theirs = list(seconds)[1]
        print(f"\\n{count:,} tensors of {numbers * 4:,} bytes in a .{kind}, to {device}\\n")
        print("| | median | ratio |\\n|---|---|---|")
        for name, took in seconds.items():
            ratios = [mine / its for mine, its in zip(took[1:], seconds[theirs][1:])]
            print(f"| {name} | {1000 * statistics.median(took[1:]):.0f} ms "
                  f"| {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) |")
"""


def loads(folder: Path, device: str, size: float, rounds: int) -> None:
    """Print the median time of each way, and its ratio to the first way that is not ours."""
    command = [sys.executable, "-c", _LOADS, str(folder), device, str(size), str(rounds)]
    subprocess.run(command, check=True, env=environment())
