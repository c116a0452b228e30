"""Prepare what a model made from a file needs, guard its process, and report what it tried.

The user's own code (a function that gives inputs, a class of optimizers, the modules of classes
that a trusted pickle names) is imported before the process is guarded: it may do what it likes.
"""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from ... import formats
from ...errors import CkptmoveError, StrPath
from ...formats.checkpoint import PickledCheckpoint
from ...reports.data.findings import CHECKS, FAILED, SKIPPED, Finding
from .. import model_factory, subprocess_call
from ..import_by_name import imported, is_named
from ..outcome import Performance
from . import exported_programs

_MOST_MODULES = 64
_TORCH = ("torch._dynamo", "torch.export.pt2_archive._package")
#: What there may be no classes of a user's in.
_STANDARD = frozenset((*sys.builtin_module_names, *sys.stdlib_module_names, "ckptmove", "torch"))


def begin(
    path: StrPath,
    inputs: Sequence[str],
    optimizer: str | None,
    device: str,
    *,
    trust_pickle: bool = False,
) -> None:
    """In a process that runs a model made of a file: import what is needed, and be guarded.

    Args:
        path: the file or folder.
        inputs, optimizer: as of a request.
        device: where it is run; `cpu` also for one that is simulated.
        trust_pickle: whether a pickled module may be unpickled.

    Raises:
        UsageError: a name in code names nothing.
    """
    folder = Path(path).parent if Path(path).name == "config.json" else Path(path)
    with contextlib.suppress(CkptmoveError):  # whoever reads it says so
        if folder.is_dir():
            model_factory.import_classes(folder)
        for module in _modules(path, trust_pickle):
            with contextlib.suppress(Exception):  # whoever needs it says so
                importlib.import_module(module)
    if inputs and is_named(inputs[0]):
        imported(inputs[0], "--input")
    if optimizer is not None:
        imported(optimizer, "--optimizer")
    _start(device)
    subprocess_call.enforce()


def _start(device: str) -> None:
    """Have libraries do once what a guarded process can't.

    OpenMP's may register itself in shared memory; a driver starts processes and connects to others.
    """
    torch.get_num_threads()
    with contextlib.suppress(Exception):  # whoever needs it says so
        torch.ones(1, device=device).add_(1).cpu()


def _modules(path: StrPath, trust_pickle: bool) -> list[str]:
    """The modules that code of a file takes for granted."""
    with formats.opened(path) as found:
        checkpoint = found.checkpoint
        if checkpoint.manifest.format == "torch-export":
            return [*_TORCH, *exported_programs.libraries(path)]
        if not trust_pickle or not isinstance(checkpoint, PickledCheckpoint):
            return []
        names = [
            each.module
            for container in checkpoint.container.everything()
            for stream in container.streams
            for each in stream.pickle.globals
        ]
    theirs = [name for name in names if name.partition(".")[0] not in _STANDARD]
    return list(dict.fromkeys(theirs))[:_MOST_MODULES]


def report(found: Performance) -> None:
    """In that process: tell what is found so far, in case that it is ended."""
    subprocess_call.tell_so_far({"findings": [each.to_json() for each in found.findings.values()]})


def ended(lost: subprocess_call.SubprocessLost) -> tuple[Finding, ...]:
    """What a process found that was ended: what it told, and by what it ended."""
    latest = lost.latest.get("findings", []) if lost.latest is not None else []
    with contextlib.suppress(TypeError):  # it may tell what it likes
        told = [Finding(**each) for each in latest]
        found = {each.check: each for each in told if each.check in CHECKS}
        last = next((check for check in CHECKS if check not in found), CHECKS[-1])
        if lost.attempt is not None:
            title = f"the program tried to {lost.attempt}, and was ended"
        elif lost.code is None:
            title = f"the program was ended: {lost}; see --timeout"
        else:
            title = f"the program ended early: {lost}"
        found[last] = Finding(last, FAILED, title, [*lost.lines, *_reason(lost.code)])
        return tuple(found.get(each, Finding(each, SKIPPED, "not reached")) for each in CHECKS)
    return tuple(Finding(each, FAILED, f"{lost}") for each in CHECKS)


def _reason(code: int | None) -> list[str]:
    """What ends a process so that can't say it itself."""
    if code is not None and code == -int(getattr(signal, "SIGKILL", 0)):
        return ["the system ends a process like this when memory runs short"]
    return []
