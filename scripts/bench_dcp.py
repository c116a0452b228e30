"""Measure `ckptmove convert` of distributed checkpoints against torch's: part of `bench.py`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from importlib.util import find_spec
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
COPY_ALL = ["sh", "-c", 'cp -r "$0" "$1" && find "$1" -type f -exec sync {} + && sync "$1"']
TO_TORCH = """
import os, sys, warnings
warnings.simplefilter("ignore")
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
dcp_to_torch_save(sys.argv[1], sys.argv[2])
fd = os.open(sys.argv[2], os.O_RDONLY); os.fsync(fd)
"""
#: Makes a checkpoint of DeepSpeed's ZeRO 2 of two ranks, in this process.
ZERO = """
import sys, torch
sys.path.insert(0, "..")
from pathlib import Path
from tests.making.zero import Run, save_zero
count = max(1, round(float(sys.argv[2]) * 1e9 / (3 * 4 * 4096 * 1024)))  # with two moments each
weights = {f"l{n}": torch.randn(1024, 4096) for n in range(count)}
save_zero(Path(sys.argv[1]), Run(stage=2, ranks=2, groups=[weights]))
"""
#: What zero_to_fp32.py does with ZeRO 2, where DeepSpeed is not installed: its weights alone.
BY_HAND = """
import glob, os, sys, types, torch
for name in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.fp16", "deepspeed.utils"):
    sys.modules.setdefault(name, types.ModuleType(name))
class Stub:
    def __init__(self, *args, **kwargs): pass
class Unpickler(__import__("pickle").Unpickler):
    def find_class(self, module, name):
        return Stub if module.startswith("deepspeed") else super().find_class(module, name)
reader = types.ModuleType("reader")
reader.Unpickler, reader.load = Unpickler, lambda file, **how: Unpickler(file, **how).load()
folder = os.path.join(sys.argv[1], open(os.path.join(sys.argv[1], "latest")).read().strip())
def load(path): return torch.load(path, "cpu", pickle_module=reader, weights_only=False)
model = load(os.path.join(folder, "mp_rank_00_model_states.pt"))
ranks = [load(path) for path in sorted(glob.glob(os.path.join(folder, "*optim_states.pt")))]
parts = [rank["optimizer_state_dict"]["single_partition_of_fp32_groups"] for rank in ranks]
state = {}
for n, shapes in enumerate(model["param_shapes"]):
    flat, at = torch.cat([part[n] for part in parts]), 0
    for name, shape in shapes.items():
        state[name] = flat.narrow(0, at, shape.numel()).view(shape)
        at += shape.numel()
torch.save({name: each.clone() for name, each in state.items()}, sys.argv[2])
fd = os.open(sys.argv[2], os.O_RDONLY); os.fsync(fd)
"""
#: The same by DeepSpeed itself, where it is installed.
BY_DEEPSPEED = """
import os, sys
from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as convert
os.makedirs(sys.argv[2], exist_ok=True)
convert(sys.argv[1], sys.argv[2], max_shard_size="100GB")
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
    zero(folder, size, rounds, before)
    source = make(TRAINING, folder / "in.pt", size)
    found = contenders(source, "--format", "dcp", "--ranks", "2")[:2]  # torch's can't change tags
    found[0] = Contender("cp, then sync", [*COPY, str(source), str(out)])
    compare(f"Divide a training checkpoint of {size} GB", found, rounds, before)
    source.unlink()
    before()
    source = make(ITEMS, folder / "many.pt", tensors)
    many = folder / "many"
    write = [*CKPTMOVE, "convert", "--quiet", "--force", str(source), str(many), "--format", "dcp"]
    read = [*CKPTMOVE, "convert", "--quiet", "--force", str(many), str(folder / "a.safetensors")]
    inspect = [*CKPTMOVE, "inspect", str(many)]
    found = [
        Contender("write", write),
        Contender("convert it to safetensors", read),
        Contender("inspect", inspect),
    ]
    compare(f"A distributed checkpoint of {tensors:,} items", found, rounds, lambda: None)
    shutil.rmtree(many)
    source.unlink()
    (folder / "a.safetensors").unlink()


def zero(folder: Path, size: float, rounds: int, before: Callable[[], None]) -> None:
    """Convert all of a checkpoint of ZeRO 2, and its weights alone, as DeepSpeed's script does."""
    source, out = make(ZERO, folder / "zero", size), folder / "out"
    script = BY_HAND if find_spec("deepspeed") is None else BY_DEEPSPEED
    name = "in torch, as zero_to_fp32.py does" if script == BY_HAND else "zero_to_fp32.py"
    ours = [*CKPTMOVE, "convert", "--quiet", str(source), str(out), "--format", "safetensors"]
    theirs = Contender(f"{name}: weights", [sys.executable, "-c", script, str(source), str(out)])
    found = [
        Contender("cp -r, then sync", [*COPY_ALL, str(source), str(out)]),
        Contender("ckptmove convert: all (verified, on disk)", ours),
        Contender("ckptmove convert --select module", [*ours, "--select", "module"]),
        theirs,
    ]
    compare(f"Convert a checkpoint of ZeRO 2, {size} GB", found, rounds, before)
    shutil.rmtree(source)
    before()
