"""Import the code that a model from a file needs, guard its process, and report its findings.

The user's own code (a function that makes inputs, an optimizer class, the modules of classes that a
trusted pickle names) is imported before the process is guarded: it is not restricted.
"""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ... import formats
from ...errors import CkptmoveError, StrPath
from ...reports.validate import FAILED, PASSED, SKIPPED, TRIAL_CHECKS, Finding
from .. import subprocess_call
from ..findings import Performance
from ..model import factory
from ..model.import_by_name import import_named, is_named
from . import exported_programs

_MOST_MODULES = 64
_LACKING = {
    "Landlock": "this system does not keep code in C from writing elsewhere: it has no Landlock",
    "seccomp": "this system does not keep code in C from starting processes: it has no seccomp",
}
_TORCH = ("torch._dynamo", "torch.export.pt2_archive._package")
#: Packages that have no classes of the user.
_STANDARD = frozenset((*sys.builtin_module_names, *sys.stdlib_module_names, "ckptmove", "torch"))


def begin(
    path: StrPath,
    inputs: Sequence[str],
    optimizer: str | None,
    device: str,
    *,
    trust_pickle: bool = False,
) -> tuple[str, ...]:
    """Import the needed code, and guard the process that will run a model made from a file.

    Args:
        path: the file or folder.
        inputs, optimizer: see `Request`.
        device: the device that runs the model; `cpu` for a simulated device.
        trust_pickle: whether a pickled module may be unpickled.

    Returns:
        A sentence for each restriction that this system can't impose on C code.

    Raises:
        UsageError: a name in code does not exist.
    """
    folder = Path(path).parent if Path(path).name == "config.json" else Path(path)
    with contextlib.suppress(CkptmoveError):  # reported later, when the model is built
        if folder.is_dir():
            factory.import_classes(folder)
        for module in _modules(path, trust_pickle):
            with contextlib.suppress(Exception):  # reported later, when the module is needed
                importlib.import_module(module)
    if inputs and is_named(inputs[0]):
        import_named(inputs[0], "--input")
    if optimizer is not None:
        import_named(optimizer, "--optimizer")
    _start(device)
    return tuple(_LACKING[each] for each in subprocess_call.enforce())


def _start(device: str) -> None:
    """Initialize libraries in ways that a guarded process can't.

    OpenMP may register itself in shared memory; a driver starts processes and connects to others.
    """
    torch.get_num_threads()
    with contextlib.suppress(Exception):  # reported later, when the device is needed
        torch.ones(1, device=device).add_(1).cpu()


def _modules(path: StrPath, trust_pickle: bool) -> list[str]:
    """The modules that code from a file expects to be imported."""
    with formats.open_checkpoint(path) as found:
        if found.format == "torch-export":
            return [*_TORCH, *exported_programs.libraries(path)]
        if not trust_pickle:
            return []
        names = [
            each.module
            for container in found.container.everything()
            for stream in container.streams
            for each in stream.pickle.globals
        ]
    theirs = [name for name in names if name.partition(".")[0] not in _STANDARD]
    return list(dict.fromkeys(theirs))[:_MOST_MODULES]


def report(found: Performance) -> None:
    """In that process: report the findings so far, in case it is ended."""
    subprocess_call.tell_so_far({"findings": [each.to_json() for each in found.findings.values()]})


def result(found: Performance, lacking: Sequence[str]) -> Mapping[str, Any]:
    """In that process: the final result."""
    model = found.findings.get("model")
    if model is not None:
        found.findings["model"] = replace(model, details=[*lacking, *model.details])
    return {"findings": [each.to_json() for each in found.all_findings()]}


def findings(told: Mapping[str, Any]) -> tuple[Finding, ...]:
    """The findings of a process that ran code from a file.

    Raises:
        SubprocessLost: its result is not valid.
    """
    found = _findings(told)
    if [each.check for each in found] != list(TRIAL_CHECKS):
        raise subprocess_call.SubprocessLost("it told nothing that makes sense", code=0)
    return tuple(found)


def _findings(told: Mapping[str, Any]) -> list[Finding]:
    """The valid findings in a result: the process may report arbitrary data."""
    listed = told.get("findings")
    found = []
    for each in listed if isinstance(listed, list) else ():
        with contextlib.suppress(TypeError, ValueError):
            one = Finding.from_json(each)
            texts = (one.title, *one.details)
            known = one.check in TRIAL_CHECKS and one.outcome in (PASSED, FAILED, SKIPPED)
            if known and isinstance(one.data, dict) and all(isinstance(t, str) for t in texts):
                found.append(one)
    return found


def findings_of_ended(
    lost: subprocess_call.SubprocessLost, excuse: str = ""
) -> tuple[Finding, ...]:
    """The findings of a process that was ended: those it reported, and the reason for its end.

    `excuse`: why the simulation ended it, not the model; "" if the model did.
    """
    found = {each.check: each for each in _findings(lost.latest or {})}
    last = next((check for check in TRIAL_CHECKS if check not in found), TRIAL_CHECKS[-1])
    outcome = SKIPPED if excuse else FAILED
    if excuse:
        title = f"can't be simulated: {excuse}"
    elif lost.attempt is not None:
        title = f"the program tried to {lost.attempt}, and was ended"
    elif lost.code is None:
        title = f"the program was ended: {lost}; see --timeout"
    else:
        title = f"the program ended early: {lost}"
    found[last] = Finding(last, outcome, title, [*lost.lines, *_reason(lost.code)])
    return tuple(found.get(each, Finding(each, SKIPPED, "not reached")) for each in TRIAL_CHECKS)


def _reason(code: int | None) -> list[str]:
    """The likely reason for a signal that ended a process before it could report."""
    if code is not None and code == -int(getattr(signal, "SIGKILL", 0)):
        return ["the system ends a process like this when memory runs short"]
    return []
