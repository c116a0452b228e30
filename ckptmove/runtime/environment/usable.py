"""Decide whether this build of torch can use a device on this machine, and why not.

`facts` asks the machine and torch; `usable` and `best` only judge these facts.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...manifest.device import parse
from ...reports.doctor import Verdict
from . import nvidia
from .evidence import (
    CUDA_VARIABLE,
    build_lines,
    built_for,
    cuda_command,
    gpu_lines,
    gpus_of,
    hidden_gpu,
    no_gpu,
    no_such,
)
from .facts import Facts, facts
from .machine import AMD, NVIDIA
from .wheels import CHOOSER, install_xpu

__all__ = ["Facts", "best", "facts", "usable"]

#: GPUs for which PyTorch's ROCm wheels have kernels; small GPUs inside processors are not included.
_ROCM_GPUS = frozenset(
    (
        *("gfx900", "gfx906", "gfx908", "gfx90a", "gfx942", "gfx950", "gfx1030"),
        *("gfx1100", "gfx1101", "gfx1102", "gfx1150", "gfx1151", "gfx1200", "gfx1201"),
    )
)


def best(facts: Facts) -> str:
    """The best device of this machine, even if torch can't use it."""
    amd = (each for each in gpus_of(facts, AMD) if each.architecture in _ROCM_GPUS | {""})
    if gpus_of(facts, NVIDIA) or any(amd) or facts.of("cuda"):
        return "cuda:0"
    if facts.of("xpu"):
        return "xpu:0"
    if facts.mps_available or (facts.system == "Darwin" and facts.processor == "arm64"):
        return "mps"
    return "cpu"


def usable(device: str, facts: Facts) -> tuple[Verdict, ...]:
    """Why a device can't be used, root cause first; empty if it can.

    Raises DeviceError for an unknown device type.
    """
    tag = parse(device)
    kind, _, number = tag.partition(":")
    if kind in ("cpu", "meta"):
        return ()
    if kind == "mps":
        return tuple(_mps(facts))
    index = int(number or 0)
    if kind == "cuda":
        return tuple(_amd(index, facts) if facts.hip else nvidia.unusable(index, facts))
    if index < len(facts.of(kind)):
        return ()
    if kind == "xpu":
        return tuple(_xpu(index, facts))
    return (
        Verdict(
            "other-build",
            f"this torch knows no {kind} devices",
            f"install the package that brings {kind} to torch, and import it first",
            build_lines(facts),
        ),
    )


# -- AMD, Intel, Apple -----------------------------------------------------------------------------


def _amd(index: int, facts: Facts) -> Iterator[Verdict]:
    seen, gpus = facts.of("cuda"), gpus_of(facts, AMD)
    setting = [
        (name, facts.visible[name])
        for name in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", CUDA_VARIABLE)
        if facts.visible.get(name) is not None
    ]
    if index < len(seen):
        name = seen[index].architecture
        if facts.arch_list and name and name not in facts.arch_list:
            yield Verdict(
                "unsupported-architecture",
                f"torch {facts.torch} has no kernels for {seen[index].name or name}, a {name}",
                _override(name) or f"install the build that {CHOOSER} gives for this GPU",
                (f"it has them for {' '.join(facts.arch_list)}",),
            )
    elif seen:
        if setting and len(gpus) > index:
            yield hidden_gpu(index, facts, setting[0][0])
        else:
            yield no_such(f"cuda:{index}", len(seen), facts)
    elif not gpus and gpus_of(facts, NVIDIA):
        command = cuda_command(index, facts, facts.driver_cuda) or f"see {CHOOSER}"
        yield built_for("AMD", "NVIDIA", command, facts)
    elif facts.denied:
        yield Verdict(
            "driver-error",
            f"this user may not open {', '.join(facts.denied)}",
            "`sudo usermod -aG render,video $USER`, and log in again",
            facts.said,
        )
    elif not gpus:
        yield no_gpu(facts)
    elif setting:
        yield hidden_gpu(index, facts, setting[0][0])
    else:
        yield Verdict(
            "driver-error",
            "torch sees none of this machine's AMD GPUs",
            "see whether `rocminfo` lists them; start a container with "
            "`docker run --device=/dev/kfd --device=/dev/dri`",
            (*facts.said, *gpu_lines(facts)),
        )


def _override(architecture: str) -> str:
    """How to make a GPU use the kernels of its generation's largest chip; "" if not known."""
    for family, version in (("gfx103", "10.3.0"), ("gfx110", "11.0.0")):
        if architecture.startswith(family):
            return f"`export HSA_OVERRIDE_GFX_VERSION={version}`, which often works"
    return ""


def _xpu(index: int, facts: Facts) -> Iterator[Verdict]:
    count = len(facts.of("xpu"))
    if count:
        yield no_such(f"xpu:{index}", count, facts)
    elif facts.xpu:
        yield Verdict(
            "no-gpu",
            "torch sees no Intel GPU",
            "install Intel's GPU driver and level-zero, and see whether `sycl-ls` lists one",
            facts.said,
        )
    else:
        is_other = facts.cuda or facts.hip or facts.mps
        yield Verdict(
            "other-build" if is_other else "cpu-only-build",
            f"torch {facts.torch} is built without Intel GPUs",
            install_xpu(facts.torch, facts.installer),
            build_lines(facts),
        )


def _mps(facts: Facts) -> Iterator[Verdict]:
    if facts.mps_available:
        return
    evidence = (f"platform: {facts.platform}", *build_lines(facts), *facts.said)
    if facts.system != "Darwin":
        title, wanted = "only a Mac has mps", best(facts)
        yield Verdict("mps-not-built", title, f'`model.to("{wanted}")`', evidence)
    elif facts.mps:
        title = "this Mac has no GPU that torch can use, or a macOS too old for it"
        fix = "update macOS; a virtual machine has no such GPU"
        yield Verdict("mps-unavailable", title, fix, evidence)
    else:
        title = "this torch is built without mps"
        fix = "pip install --force-reinstall torch"
        if facts.processor == "x86_64":
            title += ", for this Python is one for Intel processors"
            fix = f"on a Mac with an M processor, install a Python for arm64, then `{fix}`"
        yield Verdict("mps-not-built", title, fix, evidence)
