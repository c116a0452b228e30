"""The table of torch builds: which GPUs and drivers they support. Needs no torch.

From https://pytorch.org/get-started/previous-versions, the support matrix in PyTorch's RELEASE.md,
and https://docs.nvidia.com/deploy/cuda-compatibility: within a major version of CUDA, a newer
toolkit runs on an older driver.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_INDEX = "https://download.pytorch.org/whl"
CHOOSER = "https://pytorch.org/get-started/locally/"

Pair = tuple[int, int]


class Wheel(NamedTuple):
    """A kind of build on PyTorch's own index."""

    tag: str  #: the end of its index's address
    cuda: Pair  #: its version of CUDA
    first: Pair  #: the first release of torch that has this build
    last: Pair | None  #: the last such release; None if there is no last one yet
    least: Pair  #: the lowest compute capability for which it has kernels
    most: Pair  #: the highest compute capability for which it has kernels

    def has(self, torch: Pair) -> bool:
        """Whether a release of torch has this build."""
        return self.first <= torch and (self.last is None or torch <= self.last)

    def covers(self, capability: Pair | None) -> bool:
        """Whether it has kernels for a GPU; True if the capability is unknown."""
        return capability is None or self.least <= capability <= self.most

    def runs_on(self, driver: Pair | None) -> bool:
        """Whether it runs on a driver with this newest CUDA version; True if that is unknown."""
        return driver is None or self.cuda[0] <= driver[0]


#: Volta is left out of cu128, which has it only in some releases; cu126 has it in all.
WHEELS = (
    Wheel("cu118", (11, 8), (2, 0), (2, 7), (5, 0), (9, 9)),
    Wheel("cu121", (12, 1), (2, 1), (2, 5), (5, 0), (9, 9)),
    Wheel("cu124", (12, 4), (2, 4), (2, 6), (5, 0), (9, 9)),
    Wheel("cu126", (12, 6), (2, 6), None, (5, 0), (9, 9)),
    Wheel("cu128", (12, 8), (2, 7), (2, 11), (7, 5), (12, 9)),
    Wheel("cu129", (12, 9), (2, 8), (2, 8), (7, 5), (12, 9)),
    Wheel("cu130", (13, 0), (2, 9), None, (7, 5), (12, 9)),
    Wheel("cu132", (13, 2), (2, 12), None, (7, 5), (12, 9)),
)
#: Release of torch → the tag of its ROCm build.
_ROCM = {
    (2, 4): "rocm6.1",
    (2, 5): "rocm6.2",
    (2, 6): "rocm6.2.4",
    (2, 7): "rocm6.3",
    (2, 8): "rocm6.4",
    (2, 9): "rocm6.4",
}
#: The oldest driver (its major version, on Linux) for a major version of CUDA.
_DRIVERS = {11: 450, 12: 525, 13: 580}
#: The newest driver (its major version) for GPUs below a compute capability: Kepler, then Volta.
_LAST_DRIVERS = {(5, 0): 470, (7, 5): 580}
#: Capabilities of chips on boards such as Jetson: their code runs on no other chip, and no other
#: machine code of their major version runs on them.
_ALONE = frozenset(((5, 3), (6, 2), (7, 2), (8, 7), (10, 1)))


def pair(version: str | None) -> Pair | None:
    """`12.6.3` → (12, 6); None if the text does not start like this."""
    match = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(match[1]), int(match[2])) if match else None


def spell(version: Pair) -> str:
    """(12, 6) → `12.6`."""
    return f"{version[0]}.{version[1]}"


def driver_for(cuda: Pair) -> int:
    """The major version of the oldest NVIDIA driver that runs programs built with this CUDA."""
    known = [needed for major, needed in _DRIVERS.items() if major <= cuda[0]]
    return max(known, default=min(_DRIVERS.values()))


def last_driver(capability: Pair | None) -> int | None:
    """The major version of the last driver for a GPU; None if there is no last one."""
    known = (each for below, each in _LAST_DRIVERS.items() if capability and capability < below)
    return min(known, default=None)


def choose(torch: str, driver: Pair | None, capability: Pair | None) -> Wheel | None:
    """The build of a torch release for a driver and a GPU; either may be None, if unknown.

    Returns the newest build that the driver supports fully, else the oldest build that it runs,
    else None.
    """
    release = pair(torch)
    fitting = [
        each
        for each in WHEELS
        if release and each.has(release) and each.covers(capability) and each.runs_on(driver)
    ]
    outright = [each for each in fitting if driver is None or each.cuda <= driver]
    return outright[-1] if outright else (fitting[0] if fitting else None)


def install(
    torch: str, wheel: Wheel, installer: str = "", companions: Mapping[str, str] | None = None
) -> str:
    """The command that replaces torch with the same release in another build.

    `companions` are versions of packages whose build must match.
    """
    if installer == "conda":
        return "conda install -c conda-forge pytorch-gpu"
    return _install(torch, wheel.tag, installer, companions)


def install_rocm(torch: str, installer: str = "") -> str:
    """The command that replaces torch with the same release for AMD GPUs."""
    tag = _ROCM.get(pair(torch) or (0, 0))
    if tag is None or "dev" in torch:
        return f"install torch for ROCm with the command that {CHOOSER} gives"
    return _install(torch, tag, installer, None)


def install_xpu(torch: str, installer: str = "") -> str:
    """The command that replaces torch with the same release for Intel GPUs."""
    return _install(torch, "xpu", installer, None)


def _install(torch: str, tag: str, installer: str, companions: Mapping[str, str] | None) -> str:
    pip = "uv pip" if installer == "uv" else "pip"
    public = torch.partition("+")[0]
    if "dev" in public or re.search(r"\d[a-z]", public):
        return f"{pip} install --pre --force-reinstall torch --index-url {_INDEX}/nightly/{tag}"
    wanted = {"torch": torch, **(companions or {})}
    # Include the local part, because +cpu satisfies a version without one.
    names = " ".join(f'"{name}=={v.partition("+")[0]}+{tag}"' for name, v in wanted.items())
    return f"{pip} install {names} --index-url {_INDEX}/{tag}"


def install_other(driver: Pair | None, capability: Pair | None, installer: str = "") -> str | None:
    """The command that installs another release of torch, the newest that fits; None if none."""
    fitting = [each for each in WHEELS if each.covers(capability) and each.runs_on(driver)]
    if not fitting:
        return None
    wheel = max(fitting, key=lambda each: (each.last or (99, 0), each.cuda))
    bound = f"torch<{wheel.last[0]}.{wheel.last[1] + 1}" if wheel.last else "torch"
    pip = "uv pip" if installer == "uv" else "pip"
    return f'{pip} install --force-reinstall "{bound}" --index-url {_INDEX}/{wheel.tag}'


def runs_on(
    arch_list: Sequence[str], capability: Pair, *, driver: Pair | None, cuda: Pair | None
) -> bool:
    """Whether code for a list of architectures runs on a GPU; True if the list is empty.

    Machine code (`sm_80`) runs on later chips of its major version. PTX (`compute_80`) is compiled
    for any later chip, unless the driver supports only a CUDA older than the one that wrote it.
    """
    known = [each for each in map(_architecture, arch_list) if each is not None]
    if not known:
        return True
    compiles = driver is None or cuda is None or driver >= cuda
    for kind, code, suffix in known:
        if kind == "compute" and not compiles:
            continue
        if code == capability:
            return True
        if suffix == "a" or code in _ALONE or capability < code:
            continue
        same = code[0] == capability[0]
        if kind == "compute" and (same or suffix != "f"):
            return True
        if kind == "sm" and same and capability not in _ALONE:
            return True
    return False


def _architecture(name: str) -> tuple[str, Pair, str] | None:
    """`sm_90a` → ("sm", (9, 0), "a")."""
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name)
    return (match[1], (int(match[2]), int(match[3])), match[4]) if match else None
