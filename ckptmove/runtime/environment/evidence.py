"""Verdicts about GPUs of any vendor, and the evidence for them."""

from __future__ import annotations

from ...reports.doctor import Verdict
from .facts import Facts
from .machine import AMD, NVIDIA, Gpu
from .wheels import Pair, choose, install, install_other, spell

CUDA_VARIABLE = "CUDA_VISIBLE_DEVICES"
_MAKERS = {NVIDIA: "NVIDIA", AMD: "AMD"}


def gpus_of(facts: Facts, vendor: str) -> list[Gpu]:
    """The machine's GPUs of a vendor."""
    return [each for each in facts.gpus if each.vendor == vendor]


def build_lines(facts: Facts) -> tuple[str, ...]:
    """Lines about the devices for which torch was built, and about its folder."""
    kinds = {"CUDA": facts.cuda, "ROCm": facts.hip, "xpu": facts.xpu, "mps": facts.mps}
    built = ", ".join(
        name if value is True else f"{name} {value}" for name, value in kinds.items() if value
    )
    lines = [f"torch {facts.torch} in {facts.torch_at}: {built or 'no GPU of any kind'}"]
    lines += [f"another torch lies in {path}" for path in facts.other_torches]
    return tuple(lines)


def gpu_lines(facts: Facts) -> tuple[str, ...]:
    """Lines about the GPUs of the machine."""
    return tuple(
        f"this machine has: {each.name or 'a GPU of ' + _MAKERS[each.vendor]}"
        for each in facts.gpus
    )


def driver_lines(facts: Facts) -> tuple[str, ...]:
    """Lines with the messages of torch and the NVIDIA driver, and the GPUs."""
    lines = [f"torch: {each}" for each in facts.said]
    if facts.driver or facts.driver_cuda:
        supported = f", for CUDA {spell(facts.driver_cuda)}" if facts.driver_cuda else ""
        lines.append(f"NVIDIA driver: {facts.driver or 'of unknown version'}{supported}")
    if facts.complaint:
        lines.append(f"NVIDIA driver: {facts.complaint}")
    lines += [f"this user may not open {path}" for path in facts.denied]
    return (*lines, *gpu_lines(facts))


def no_gpu(facts: Facts) -> Verdict:
    """The verdict that no GPU is visible, with a note on containers."""
    given = facts.visible.get("NVIDIA_VISIBLE_DEVICES")
    evidence = ["no GPU in /dev, /proc/driver/nvidia or on the PCI bus, nor by nvidia-smi"]
    if given is not None:
        evidence.append(f"NVIDIA_VISIBLE_DEVICES={given}, which says what a container gets")
    return Verdict(
        "no-gpu",
        "this machine has no NVIDIA or AMD GPU that programs here can see",
        "run on a machine that has one; start a container with `docker run --gpus all`, ask a "
        "cluster for a GPU, e.g. `sbatch --gres=gpu:1`",
        (*evidence, *driver_lines(facts)),
    )


def built_for(whose: str, wanted: str, command: str, facts: Facts) -> Verdict:
    """The verdict that torch is built for GPUs of another maker; `command` installs the right one.

    `whose` is the maker of the build, `wanted` that of the GPU.
    """
    return Verdict(
        "other-build",
        f"torch {facts.torch} is built for {whose} GPUs, and the GPU is one of {wanted}'s",
        command,
        (*build_lines(facts), *gpu_lines(facts)),
    )


def hidden_gpu(index: int, facts: Facts, variable: str = CUDA_VARIABLE) -> Verdict:
    """The verdict that an environment variable hides the GPU."""
    value = facts.visible.get(variable) or ""
    gpus = gpus_of(facts, AMD if facts.hip else NVIDIA)
    seen = len(facts.of("cuda"))
    have = f" of the {len(gpus)} GPUs of this machine" if len(gpus) > 1 else ""
    if seen:
        title = f"{variable}={value} hides cuda:{index}: it shows {seen}{have}"
    elif value in ("", "-1", "NoDevFiles"):
        how = f"set to {value}" if value else "set, but empty"
        title = f"{variable} is {how}, which hides every GPU"
    else:
        title = f"{variable}={value} names no GPU that is there, which hides every one"
    fix = f"`unset {variable}`, or take the line that sets it out of the program"
    if seen:  # the variable may reserve the other GPUs for other users
        shown = "cuda:0" if seen == 1 else f"cuda:0 to cuda:{seen - 1}"
        fix = (
            f"use what it shows, {shown}; or have it show more, if the other GPUs are yours to use"
        )
    if value == "NoDevFiles":
        fix = "ask SLURM for a GPU: `sbatch --gres=gpu:1`"
    return Verdict(
        f"hidden-by-{variable}",
        title,
        fix,
        (
            f"{variable}={value!r}; torch reads it once, when it first uses a GPU",
            *gpu_lines(facts),
        ),
    )


def no_such(tag: str, count: int, facts: Facts) -> Verdict:
    """The verdict that the device's index is too high for this machine."""
    kind, _, _ = tag.partition(":")
    last = f" to {kind}:{count - 1}" if count > 1 else ""
    return Verdict(
        "no-such-index",
        f"{tag} does not exist: {'devices go' if count > 1 else 'the only one is'} "
        f"{'from ' if count > 1 else ''}{kind}:0{last}",
        f'use one that is there: `model.to("{kind}:{count - 1}")`',
        gpu_lines(facts),
    )


def cuda_command(index: int, facts: Facts, driver: Pair | None) -> str | None:
    """The command that installs a torch that supports this GPU, or None."""
    gpus = [each.capability for each in gpus_of(facts, NVIDIA)]
    seen = [each.capability for each in facts.of("cuda")]
    known = seen or gpus
    capability = known[index if index < len(known) else 0] if known else None
    if facts.processor in ("aarch64", "arm64"):
        return None  # few releases have CUDA builds for these, and their libraries differ
    wheel = choose(facts.torch, driver, capability)
    if wheel:
        return install(facts.torch, wheel, facts.installer, facts.companions)
    return install_other(driver, capability, facts.installer)
