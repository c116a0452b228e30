"""Measure `ckptmove convert` against the scripts that people write today: part of `bench.py`.

A checkpoint of nested dicts has no form in safetensors, so the peers get a file that holds the same
tensors under flat names: what they do is only what they can.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from measuring import CKPTMOVE, COPY, MANY, TRAINING, Contender, compare, make

FLATTEN = """
import sys, torch
def flat(value, name=""):
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, f"{name}.{key}" if name else str(key))
saved = torch.load(sys.argv[2], map_location="cpu", mmap=True)
torch.save(dict(flat(saved)), sys.argv[1])
"""
SYNC = """
def sync(path):
    fd = os.open(path, os.O_RDONLY); os.fsync(fd); os.close(fd)
    if os.path.isdir(path):
        [sync(os.path.join(path, name)) for name in os.listdir(path)]
sync(sys.argv[2])
"""
IMPORTS = "import os, sys, torch; from safetensors.torch import load_file, save_file\n"
LOADS = {
    "torch.load(mmap=True)": 'state = torch.load(sys.argv[1], map_location="cpu", mmap=True)\n',
    "torch.load": 'state = torch.load(sys.argv[1], map_location="cpu")\n',
    "load_file": "state = load_file(sys.argv[1])\n",
}
BF16 = """
state = {k: t.bfloat16() if t.is_floating_point() else t for k, t in state.items()}
"""
SAVES = {
    "save_file": "save_file(state, sys.argv[2])",
    "torch.save": "torch.save(state, sys.argv[2])",
    ".to(bfloat16), save_file": f"{BF16}save_file(state, sys.argv[2])",
    "save_torch_state_dict": """
from huggingface_hub import save_torch_state_dict
os.mkdir(sys.argv[2])
save_torch_state_dict(state, sys.argv[2], max_shard_size="500MB")
""",
}


def conversions(folder: Path, size: float, tensors: int, rounds: int) -> None:
    """Convert a training checkpoint to safetensors, back, into shards, and to another dtype."""
    source = make(TRAINING, folder / "training.pt", size)
    flat = make(FLATTEN, folder / "flat.pt", source)
    safe = folder / "training.safetensors"
    gigabytes = f"{source.stat().st_size / 1e9:.2f} GB"

    def race(title: str, source: Path, out: Path, loads: str, save: str, *options: str) -> None:
        """Ours, a bare copy, and each way to load with one to save."""
        ours = [*CKPTMOVE, "convert", str(source), str(out), "--quiet", *options]
        theirs = flat if source.suffix == ".pt" else source
        contenders = [
            Contender("cp, then fsync", [*COPY, str(source), str(out)]),
            Contender(" ".join(["ckptmove convert", *options]), ours),
        ]
        for load in loads.split(", "):
            script = IMPORTS + LOADS[load] + SAVES[save] + SYNC
            command = [sys.executable, "-c", script, str(theirs), str(out)]
            contenders.append(Contender(f"{load}, {save}, fsync", command))
        compare(title, contenders, rounds, removing(out))

    both = "torch.load(mmap=True), torch.load"
    race(f"Training checkpoint of {gigabytes} → safetensors", source, safe, both, "save_file")
    removing(safe)()
    race("→ shards of 500 MB", source, folder / "shards", both, "save_torch_state_dict",
         "--max-shard-size", "500MB")  # fmt: skip
    removing(folder / "shards")()
    race("→ safetensors in bfloat16", source, safe, both, ".to(bfloat16), save_file",
         "--dtype", "*=bf16")  # fmt: skip
    removing(safe)()
    make_safe = [*CKPTMOVE, "convert", str(source), str(safe), "--quiet"]
    Contender("the source of what follows", make_safe).run()
    source.unlink()
    flat.unlink()
    race(f"safetensors of {gigabytes} → torch-zip", safe, folder / "out.pt", "load_file",
         "torch.save")  # fmt: skip
    removing(folder / "out.pt")()
    safe.unlink()
    counts(folder, tensors, rounds)


def counts(folder: Path, tensors: int, rounds: int) -> None:
    """How time and memory grow with the number of tensors."""
    contenders = []
    for count in (tensors // 4, tensors):
        source = make(MANY, folder / f"many-{count}.pt", count)
        command = [*CKPTMOVE, "convert", str(source), str(folder / "many.safetensors"), "--force"]
        contenders.append(Contender(f"{count:,} tensors", command))
    compare("ckptmove convert, by tensors", contenders, min(rounds, 3))


def removing(path: Path) -> Callable[[], None]:
    """Before each run: nothing is there, and the disk is idle."""

    def before() -> None:
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        os.sync()

    return before
