"""Trees of checkpoints, and what a batch makes of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptmove
from ckptmove.batches.trees import LEDGER
from ckptmove.writing.in_place.journal_name import SUFFIX
from tests.conftest import ROOT
from tests.making.checkpoints import MAKERS, save
from tests.making.families import FAMILIES
from tests.servers.fronts import HANG
from tests.servers.warm_python import WarmCommand

CLI = [sys.executable, "-m", "ckptmove", "batch"]


def model_folder(folder: Path) -> Path:
    """A folder as libraries save a model in: weights in two files, their index, a configuration."""
    folder.mkdir(parents=True)
    files = {
        "model-00001-of-00002.safetensors": {"a.weight": torch.arange(6.0)},
        "model-00002-of-00002.safetensors": {"b.weight": torch.ones(3, 2)},
    }
    for name, state in files.items():
        save_file(state, folder / name, {"format": "pt"})
    where = {key: name for name, state in files.items() for key in state}
    index = {"metadata": {"total_size": 48}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    return folder


def small_tree(folder: Path) -> Path:
    """A few checkpoints of several formats, two that are damaged, and other files."""
    (folder / "a" / "deep").mkdir(parents=True)
    save(folder / "a" / "run.pt", MAKERS["adamw_training"](), "cuda:1")
    whole = save(folder / "a" / "last.ckpt", {"w": torch.arange(50_000.0)}, "cuda:1")
    save(folder / "a" / "deep" / "old.pth", torch.ones(3), "cuda:1",
         _use_new_zipfile_serialization=False)  # fmt: skip
    (folder / "a" / "cut.pt").write_bytes(whole.read_bytes()[:-100])
    (folder / "empty.pt").touch()
    (folder / "a" / "notes.txt").write_text("precious")
    save(folder / "a" / "nameless", {"w": torch.zeros(7)}, "cuda:1")
    model_folder(folder / "model")
    return folder


def many(folder: Path, count: int, elements: int = 20_000) -> Path:
    """Checkpoints of one size in a few folders, their tensors on alternating devices."""
    for n in range(count):
        inside = folder / f"run-{n % 3}"
        inside.mkdir(parents=True, exist_ok=True)
        generator = torch.Generator().manual_seed(n)
        state = {f"w{k}": torch.rand(elements, generator=generator) for k in range(2)}
        save(inside / f"step-{n:03}.pt", {"model": state, "step": n}, f"cuda:{n % 2}")
    return folder


def every_kind(folder: Path) -> int:
    """Checkpoints of all kinds, some of them damaged; gives how many."""
    folder.mkdir()
    for name, make in MAKERS.items():
        save(folder / f"{name}.pt", make(), "cuda:1")
    for family, makers in FAMILIES.items():
        (folder / family).mkdir()
        for name in sorted(makers)[:: 2 if len(makers) > 100 else 1]:  # each takes its time
            makers[name](folder / family / name, "cuda:1")
    (folder / "cut").mkdir()
    for path in sorted(folder.glob("*.pt"))[::9]:
        (folder / "cut" / path.name).write_bytes(path.read_bytes()[:-90])
    return sum(_is_checkpoint(path) for path in folder.rglob("*") if path.is_file())


def _is_checkpoint(path: Path) -> bool:
    """Whether a batch must take it as an item: any file may be a pickle."""
    try:
        found = ckptmove.inspect(path)
    except ckptmove.InputError:
        return path.suffix == ".pt"
    return found.format != "pickle" or bool(found.tensors)


def contents(folder: Path) -> Mapping[str, bytes]:
    """Every file in a folder and below, except the ledger."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != LEDGER
    }


def stamps(folder: Path) -> Mapping[str, tuple[int, int]]:
    """Inode and time of change of every file with its final name."""
    return {
        str(path.relative_to(folder)): (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".") and "ckptmove-tmp" not in str(path)
    }


def left_over(folder: Path) -> list[Path]:
    """Temporary files and journals that should not remain."""
    return [*folder.rglob("*.ckptmove-tmp"), *folder.rglob(f".*{SUFFIX}*")]


def outcomes(batch: ckptmove.Batch) -> Mapping[str, str]:
    return {result.name: result.outcome for result in batch}


def entered(folder: Path) -> list[str]:
    with suppress(FileNotFoundError):
        lines = (folder / LEDGER).read_text().splitlines()
        said = [json.loads(line) for line in lines if line.endswith("}")]
        return [each["name"] for each in said if each["outcome"] == "done"]
    return []


def start(*arguments: str | Path, cold: bool = False) -> subprocess.Popen[str]:
    """Start `ckptmove batch ARGUMENTS` in the background: a fork, or a new Python if `cold`."""
    return (subprocess.Popen if cold else WarmCommand)(
        [*CLI, *[os.fspath(each) for each in arguments]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
    )


def unprivileged(cwd: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """`ckptmove ARGUMENTS`, without root's power over files of any mode."""
    command = [sys.executable, "-m", "ckptmove", *[os.fspath(each) for each in arguments]]
    if not os.geteuid():
        if shutil.which("setpriv") is None:
            pytest.skip("needs setpriv")
        given_up = "-dac_override,-dac_read_search"
        command[:0] = ["setpriv", f"--bounding-set={given_up}", f"--inh-caps={given_up}"]
    env = {**os.environ, "PYTHONPATH": os.fspath(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, check=False)


def children(pid: int) -> list[int]:
    found = list[int]()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, task.read_text().split())
    return found


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def until(true: Callable[[], object]) -> None:
    """Return when something is true; fail the test if it never is."""
    end = time.monotonic() + HANG
    while not true():
        assert time.monotonic() < end, "it hangs"
        time.sleep(0.0005)
