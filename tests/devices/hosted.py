"""Runs small programs on a played GPU beside a real CPU, each in a process that it forks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.conftest import ROOT

_BEGIN = """\
import copy
import torch
from torch import nn
from torch.nn import functional as F

def step(model, optimizer, loss=None):
    optimizer.zero_grad()
    (model(torch.ones(2, 4, device="cuda")).sum() if loss is None else loss).backward()
    optimizer.step()

"""


def hosted(programs: Mapping[str, str], folder: Path) -> dict[str, dict[str, Any]]:
    """The result of each: its `error`, and the `excuse` for that."""
    for name, program in programs.items():
        (folder / f"{name}.py").write_text(_BEGIN + program)
    done = subprocess.run(
        [sys.executable, "-B", "-m", __name__],
        input=json.dumps([str(folder / f"{name}.py") for name in programs]),
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        check=True,
    )
    return dict(zip(programs, json.loads(done.stdout), strict=True))


def _run(path: str) -> dict[str, Any]:
    import torch

    from ckptmove.trial.simulation.script_host import call, hosting
    from ckptmove.trial.stage_fake import limit_of_simulation

    os.chdir(Path(path).parent)
    names: dict[str, Any] = {"__name__": "hosted"}
    error = excuse = None
    with hosting(torch.device("cuda", 0)):
        try:
            exec(compile(Path(path).read_text(), path, "exec"), names)
        except Exception as raised:
            excuse = limit_of_simulation(raised, call)
            error = call(f"{type(raised).__name__}: {raised}")
    return {"error": error, "excuse": excuse}


def _one(path: str) -> dict[str, Any]:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        try:
            with os.fdopen(writing, "w") as out:
                json.dump(_run(path), out)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as out:
        text = out.read()
    os.waitpid(child, 0)
    found: dict[str, Any] = json.loads(text) if text else {"error": "lost", "excuse": None}
    return found


def _serve() -> None:
    import torch._dynamo  # a second for each program that needs it

    import ckptmove.trial.stage_fake  # noqa: F401 - likewise
    from ckptmove.trial.simulation.device import install

    install(torch.device("cuda", 0))  # likewise
    torch.set_num_threads(1)  # before any is started, which no child would have
    json.dump([_one(each) for each in json.load(sys.stdin)], sys.stdout)


if __name__ == "__main__":
    _serve()
