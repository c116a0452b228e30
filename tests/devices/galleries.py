"""Run programs of the gallery as `ckptmove doctor --script` does, many in a short time.

`ckptmove doctor` runs a script in its own process, which imports torch first. Here one process
imports it and forks for each program.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.conftest import ROOT

GALLERY = Path(__file__).parents[1] / "gallery"


def ran(kind: str, programs: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """The diagnosis of each program as JSON.

    `kind` is `simulated`, `second` or `cuda`; a program is its name, or its path without `.py`, and
    its arguments after the device.
    """
    done = subprocess.run(
        [sys.executable, "-B", "-m", __name__, kind],
        input=json.dumps(programs),
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        check=True,
    )
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def _device(kind: str) -> str:
    if kind == "simulated":
        import torch

        from ckptmove.trial.simulation import device

        device.install(torch.device("cuda", 0))  # half a second for each
    if kind != "second":
        return "cuda:0"
    from tests.devices.second_device import DEVICE, install

    install()
    return DEVICE


def _one(kind: str, device: str, program: Sequence[str]) -> dict[str, Any]:
    """The diagnosis from a process that runs one program."""
    from ckptmove.trial.script import run_watched

    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        name, *args = program
        path = os.path.relpath(GALLERY / f"{name}.py")
        asked = {"script": path, "args": [device, *args], "steps": 2, "device": device}
        asked |= {"patience": 120, "onward": 20}
        try:
            told = run_watched({**asked, "simulate": kind == "simulated"})
            with os.fdopen(writing, "w") as out:
                json.dump(told, out)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as out:
        text = out.read()
    os.waitpid(child, 0)
    if not text:
        raise SystemExit(f"{program} gave nothing")
    found: dict[str, Any] = json.loads(text)
    return found


def _serve(kind: str) -> None:
    import torch._dynamo  # a second for each program that needs it

    import ckptmove.trial.script  # noqa: F401 - likewise

    torch.set_num_threads(1)  # before any is started, which no child would have
    device = _device(kind)
    gc.freeze()  # or a child copies the pages of all of torch when it looks for garbage
    json.dump([_one(kind, device, each) for each in json.load(sys.stdin)], sys.stdout)


if __name__ == "__main__":
    _serve(sys.argv[1])
