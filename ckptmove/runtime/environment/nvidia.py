"""Find out why torch cannot use an NVIDIA GPU: build, driver, environment variables, hardware."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ...reports.doctor import Verdict
from .evidence import (
    CUDA_VARIABLE,
    build_lines,
    built_for,
    cuda_command,
    driver_lines,
    gpu_lines,
    gpus_of,
    hidden_gpu,
    no_gpu,
    no_such,
)
from .facts import Facts
from .machine import AMD, NVIDIA, Gpu
from .wheels import CHOOSER, Pair, driver_for, install_rocm, last_driver, pair, runs_on, spell

_NOT_LOADED = r"(?i)driver not loaded|couldn't communicate with the NVIDIA driver"
_TOO_OLD = r"too old \(found version (\d+)\)"
_NO_GPUS = r"No CUDA GPUs are available"
_NOT_THERE = r"invalid device ordinal"

#: Messages of torch and NVIDIA's driver, each with its fix.
_REMEDIES = (
    (
        r"Error 802|system not yet initialized",
        "start NVIDIA's fabric manager, of the driver's version: "
        "`sudo systemctl enable --now nvidia-fabricmanager`",
    ),
    (
        r"Error 804|forward compatibility was attempted",
        "a newer libcuda is loaded than this GPU's driver allows: update the driver, or take the "
        "folder `cuda/compat` out of LD_LIBRARY_PATH",
    ),
    (
        r"Error 803|display driver / cuda driver combination|version mismatch",
        "the driver was updated while it was loaded, or a libcuda of another version is found "
        "first: reboot, and look through LD_LIBRARY_PATH",
    ),
    (r"Error 34\b|stub library", "take the folder `cuda/lib64/stubs` out of LD_LIBRARY_PATH"),
    (
        r"Cannot re-initialize CUDA in forked",
        'start workers with `torch.multiprocessing.set_start_method("spawn")`',
    ),
    (
        r"busy or unavailable|Error 46\b",
        "another process has the GPU for itself: end it, or `sudo nvidia-smi -c DEFAULT`",
    ),
    (
        r"CUDA unknown error|driver initialization failed",
        "if `nvidia-smi` works, reload the driver with `sudo rmmod nvidia_uvm; sudo modprobe "
        "nvidia_uvm` (after a suspend), or reboot; set CUDA_VISIBLE_DEVICES only before the "
        "program starts",
    ),
)


def unusable(index: int, facts: Facts) -> Iterator[Verdict]:
    """Why a torch build without ROCm can't use a `cuda` device; nothing if it can."""
    seen, gpus, amd = facts.of("cuda"), gpus_of(facts, NVIDIA), gpus_of(facts, AMD)
    if index < len(seen):
        yield from _architecture(index, facts)
    elif seen:
        is_there = len(gpus) > index and facts.visible.get(CUDA_VARIABLE) is not None
        yield hidden_gpu(index, facts) if is_there else no_such(f"cuda:{index}", len(seen), facts)
    elif facts.system == "Darwin":
        yield Verdict(
            "no-gpu",
            "a Mac has no CUDA GPU",
            'use its own GPU: `model.to("mps")`',
            (f"platform: {facts.platform}",),
        )
    elif gpus or any(re.search(_TOO_OLD, each) for each in facts.said):
        yield from _unseen(index, facts)
    else:
        if not amd:
            yield no_gpu(facts)
        if not facts.cuda:
            yield _build_without_cuda(index, facts)
        elif amd:
            yield built_for("NVIDIA", "AMD", install_rocm(facts.torch, facts.installer), facts)


def _unseen(index: int, facts: Facts) -> Iterator[Verdict]:
    """Why torch sees none of this machine's GPUs."""
    gpus = gpus_of(facts, NVIDIA)
    hides = _hides(facts)
    if not facts.cuda:
        yield _build_without_cuda(index, facts)
        if not facts.libcuda:
            yield _no_driver(facts)
    trouble = tuple(_driver(index, facts, explained=hides)) if facts.cuda else ()
    yield from trouble
    if hides:
        yield hidden_gpu(index, facts)
    if index >= len(gpus) > 0:
        yield no_such(f"cuda:{index}", len(gpus), facts)


def _driver(index: int, facts: Facts, *, explained: bool) -> Iterator[Verdict]:
    """The verdict about the driver, if it is the cause; `explained`: another cause is known."""
    built, said = pair(facts.cuda), " ".join(facts.said)
    told = re.search(_TOO_OLD, said)
    version = int(told[1]) if told else 0
    supported = (version // 1000, version % 1000 // 10) if told else facts.driver_cuda
    expected = f"{_NO_GPUS}|{_NOT_THERE}" if explained else _NO_GPUS
    heard = [each for each in facts.said if not re.search(expected, each)]
    message = facts.complaint or (heard[0] if heard else "")
    if built and supported and (told or supported[0] < built[0]):
        yield _too_old(index, built, supported, facts)
    elif not facts.libcuda or re.search(_NOT_LOADED, facts.complaint):
        yield _no_driver(facts)
    elif facts.denied:
        yield Verdict(
            "driver-error",
            f"this user may not open {', '.join(facts.denied)}",
            "see `ls -l /dev/nvidia*`, and ask who administers the machine, for they are open to "
            "all as a rule; start a container with `docker run --gpus all`",
            driver_lines(facts),
        )
    elif message:
        title = f"the NVIDIA driver fails: {message}"
        yield Verdict("driver-error", title, _remedy(message, facts), driver_lines(facts))
    elif not explained:
        title = "torch sees none of this machine's NVIDIA GPUs, and the driver doesn't say why"
        yield Verdict("driver-error", title, _remedy("", facts), driver_lines(facts))


def _remedy(message: str, facts: Facts) -> str:
    for pattern, remedy in _REMEDIES:
        if re.search(pattern, message):
            return remedy
    return (
        "see whether `nvidia-smi` works here, and reboot if it doesn't; start a container with "
        "`docker run --gpus all`; a GPU in MIG mode needs an instance"
    )


def _too_old(index: int, built: Pair, supported: Pair, facts: Facts) -> Verdict:
    needed, gpus = driver_for(built), gpus_of(facts, NVIDIA)
    capability = gpus[min(index, len(gpus) - 1)].capability if gpus else None
    last = last_driver(capability)
    command = cuda_command(index, facts, supported)
    fix = f"update the NVIDIA driver to {needed} or newer"
    if last is not None and last < needed:
        fix = f"not by a newer driver: {last} is the last for this GPU"
    if command:
        fix = f"{fix}, or install a torch that this one runs: `{command}`"
    running = f" {facts.driver}" if facts.driver else ""
    return Verdict(
        "driver-too-old",
        f"the NVIDIA driver{running} supports CUDA {spell(supported)}, and torch "
        f"{facts.torch} was built for {spell(built)}",
        fix,
        driver_lines(facts),
    )


def _no_driver(facts: Facts) -> Verdict:
    needed = driver_for(pair(facts.cuda) or (12, 0))
    drivers = {each.kernel_driver for each in gpus_of(facts, NVIDIA)} - {"", "nvidia"}
    lines = tuple(f"the kernel drives the GPU with {name}" for name in sorted(drivers))
    if re.search(_NOT_LOADED, facts.complaint):
        return Verdict(
            "no-driver",
            "the NVIDIA driver is installed, and not loaded",
            "`sudo modprobe nvidia`; if that fails, install the driver anew for this kernel",
            lines + driver_lines(facts),
        )
    if facts.driver:
        return Verdict(
            "no-driver",
            "the NVIDIA driver is loaded, and its library libcuda can't be found",
            "in a container, set NVIDIA_DRIVER_CAPABILITIES=compute,utility; elsewhere install "
            "the whole driver, or put the folder of libcuda.so.1 into LD_LIBRARY_PATH",
            driver_lines(facts),
        )
    return Verdict(
        "no-driver",
        "this machine has an NVIDIA GPU, and no NVIDIA driver that programs here can use",
        f"install the NVIDIA driver, {needed} or newer, on the machine; start a container with "
        "`docker run --gpus all`",
        lines + driver_lines(facts),
    )


def _build_without_cuda(index: int, facts: Facts) -> Verdict:
    amd_only = gpus_of(facts, AMD) and not gpus_of(facts, NVIDIA)
    if amd_only:
        command = install_rocm(facts.torch, facts.installer)
    else:
        command = cuda_command(index, facts, facts.driver_cuda) or f"see {CHOOSER}"
    if facts.xpu or facts.mps:
        whose = "AMD" if amd_only else "NVIDIA"
        return built_for("Intel" if facts.xpu else "Apple", whose, command, facts)
    where = "" if facts.gpus else "where there is a GPU: "
    return Verdict(
        "cpu-only-build",
        f"torch {facts.torch} is built for the CPU alone, without {'ROCm' if amd_only else 'CUDA'}",
        f"{where}{command}",
        (*build_lines(facts), *gpu_lines(facts)),
    )


def _architecture(index: int, facts: Facts) -> Iterator[Verdict]:
    device, built = facts.of("cuda")[index], pair(facts.cuda)
    found = device.capability
    if not found or runs_on(facts.arch_list, found, driver=facts.driver_cuda, cuda=built):
        return
    command = cuda_command(index, facts, facts.driver_cuda)
    newer = f"update the NVIDIA driver, then take the build that {CHOOSER} gives for this GPU"
    yield Verdict(
        "unsupported-architecture",
        f"torch {facts.torch} has no kernels for {device.name or device.tag}, of compute "
        f"capability {spell(found)}",
        command or newer,
        (
            f"it has them for {' '.join(facts.arch_list)}",
            "what runs ends in `CUDA error: no kernel image is available for execution on the "
            "device`",
        ),
    )


def _hides(facts: Facts) -> bool:
    """Whether CUDA_VISIBLE_DEVICES hides every GPU."""
    value = facts.visible.get(CUDA_VARIABLE)
    return value is not None and not _visible(value, gpus_of(facts, NVIDIA))


def _visible(value: str, gpus: Sequence[Gpu]) -> list[int]:
    """The indices of the GPUs that CUDA_VISIBLE_DEVICES shows.

    By CUDA's rules, the first missing GPU ends the list, and a repeated one empties it. MIG
    instances count as missing: their GPU is unknown, and torch would see them.
    """
    left: list[int] = []
    for part in value.split(","):
        if part.startswith(("GPU-", "MIG-")):
            found = [n for n, gpu in enumerate(gpus) if gpu.uuid.startswith(part)]
            index = found[0] if len(found) == 1 else -1
        else:
            digits = re.match(r"\s*\+?(\d+)", part)
            index = int(digits[1]) if digits else -1
        if index in left:
            return []
        if not 0 <= index < max(len(gpus), 1):
            break
        left.append(index)
    return left
