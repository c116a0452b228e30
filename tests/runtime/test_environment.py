"""What is said of machines whose GPUs can't be used, and that asking this one works."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptmove.errors import DeviceError
from ckptmove.reports.doctor import WRONG, Verdict
from ckptmove.runtime.environment.facts import VISIBLE, Device, plain_message
from ckptmove.runtime.environment.machine import AMD, NVIDIA, Gpu, driver_version, gfx, parse_gpus
from ckptmove.runtime.environment.usable import Facts, best, facts, usable
from ckptmove.runtime.environment.wheels import (
    WHEELS,
    choose,
    driver_for,
    install,
    install_other,
    runs_on,
)
from tests.conftest import ROOT

GIB = 1 << 30
H100 = Gpu(NVIDIA, "NVIDIA H100 80GB HBM3", "GPU-aaaa1111", (9, 0), "", 80 * GIB, 79 * GIB)
A100 = Gpu(NVIDIA, "NVIDIA A100-SXM4-40GB", "GPU-bbbb2222", (8, 0), "", 40 * GIB, 39 * GIB)
RTX_5090 = Gpu(NVIDIA, "NVIDIA GeForce RTX 5090", "GPU-cccc3333", (12, 0), "", 32 * GIB, 31 * GIB)
GTX_1080 = Gpu(NVIDIA, "NVIDIA GeForce GTX 1080", "GPU-dddd4444", (6, 1), "", 8 * GIB, 7 * GIB)
K80 = Gpu(NVIDIA, "Tesla K80", "GPU-eeee5555", (3, 7), "", 12 * GIB, 11 * GIB)
MI300X = Gpu(AMD, "aqua_vanjaram", architecture="gfx942", kernel_driver="amdgpu")
RX_6600 = Gpu(AMD, "navi23", architecture="gfx1032", kernel_driver="amdgpu")
IN_A_RYZEN = Gpu(AMD, "raphael", architecture="gfx1036", kernel_driver="amdgpu")
ON_THE_BUS = Gpu(NVIDIA, kernel_driver="nouveau")

CU124 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
CU130 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")

#: As c10/cuda/CUDAFunctions.cpp and torch/cuda/__init__.py say it.
NO_GPUS = "No CUDA GPUs are available"
NO_DRIVER = (
    "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed "
    "a driver from http://www.nvidia.com/Download/index.aspx"
)
TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU "
    "driver by downloading and installing a new version from the URL: "
    "http://www.nvidia.com/Download/index.aspx Alternatively, go to: https://pytorch.org to "
    "install a PyTorch version that has been compiled with your version of the CUDA driver."
)
UNKNOWN = (
    "CUDA unknown error - this may be due to an incorrectly set up environment, e.g. changing env "
    "variable CUDA_VISIBLE_DEVICES after program start. Setting the available devices to be zero."
)
UNEXPECTED = (
    "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling "
    "NumCudaDevices() that might have already set an error? Error "
)


def seen(*gpus: Gpu) -> tuple[Device, ...]:
    """The GPUs as torch sees them."""
    return tuple(
        Device(f"cuda:{n}", gpu.name, gpu.capability, gpu.architecture, gpu.total)
        for n, gpu in enumerate(gpus)
    )


def working(*gpus: Gpu, **others: Any) -> Facts:
    """A machine with a driver for CUDA 12.4, and a torch for it, that sees the GPUs."""
    facts = Facts(
        torch="2.6.0+cu124",
        torch_at="/lib/torch",
        cuda="12.4",
        arch_list=CU124,
        driver="550.54.14",
        driver_cuda=(12, 4),
        libcuda=True,
        gpus=gpus,
        devices=seen(*gpus),
    )
    return replace(facts, **others)


def blind(*gpus: Gpu, said: str = NO_GPUS, **others: Any) -> Facts:
    """Such a one that sees none."""
    return replace(working(*gpus, devices=(), said=(said,)), **others)


def hidden_by(value: str, *gpus: Gpu) -> Facts:
    return blind(*gpus, visible={"CUDA_VISIBLE_DEVICES": value})


def with_cpu_build(facts: Facts, version: str = "2.6.0+cpu") -> Facts:
    return replace(facts, torch=version, cuda=None, arch_list=(), devices=(), said=())


def rocm(*gpus: Gpu, **others: Any) -> Facts:
    facts = Facts(
        torch="2.8.0+rocm6.4",
        hip="6.4.43482",
        arch_list=("gfx90a", "gfx942", "gfx1030", "gfx1100"),
        gpus=gpus,
        devices=seen(*gpus),
    )
    return replace(facts, **others)


MAC = Facts(torch="2.6.0", system="Darwin", processor="arm64", platform="macOS-15", mps=True)
HEALTHY_MAC = replace(MAC, mps_available=True, devices=(Device("mps"),))
ARC = Facts(torch="2.6.0+xpu", xpu=True, devices=(Device("xpu:0", "Intel Arc A770"),))


@dataclass(frozen=True)
class Case:
    """A situation.

    Attributes:
        facts: what the machine is like.
        causes: of the verdicts, the root cause first.
        title: what the title of the first says.
        fix: what its fix says.
        fixed: the facts once that is done, for which there are no verdicts; None where the fix
            is another device or machine.
        device: which is wanted.
    """

    facts: Facts
    causes: tuple[str, ...]
    title: str
    fix: str
    fixed: Facts | None
    device: str = "cuda:0"


INDEX = "https://download.pytorch.org/whl"
HIDDEN = "hidden-by-CUDA_VISIBLE_DEVICES"
GALLERY: dict[str, Case] = {
    "cpu-only-build": Case(
        with_cpu_build(working(H100)),
        ("cpu-only-build",),
        "torch 2.6.0+cpu is built for the CPU alone",
        f'pip install "torch==2.6.0+cu124" --index-url {INDEX}/cu124',
        working(H100),
    ),
    "cpu-only-build, from PyPI on Windows": Case(
        with_cpu_build(working(RTX_5090, driver_cuda=(12, 8), system="Windows"), "2.7.1"),
        ("cpu-only-build",),
        "torch 2.7.1 is built for the CPU alone",
        f'"torch==2.7.1+cu128" --index-url {INDEX}/cu128',
        working(RTX_5090, torch="2.7.1+cu128", cuda="12.8", arch_list=CU130, driver_cuda=(12, 8)),
    ),
    "cpu-only-build, hidden too": Case(
        with_cpu_build(hidden_by("", H100)),
        ("cpu-only-build", HIDDEN),
        "built for the CPU alone",
        "pip install",
        working(H100),
    ),
    "cpu-only-build, for an AMD GPU": Case(
        Facts(torch="2.8.0+cpu", gpus=(MI300X,)),
        ("cpu-only-build",),
        "without ROCm",
        f"{INDEX}/rocm6.4",
        rocm(MI300X),
    ),
    "cpu-only-build, without a driver": Case(
        Facts(torch="2.6.0+cpu", gpus=(ON_THE_BUS,)),
        ("cpu-only-build", "no-driver"),
        "built for the CPU alone",
        "pip install",
        working(H100),
    ),
    "hidden, empty": Case(
        hidden_by("", H100),
        (HIDDEN,),
        "CUDA_VISIBLE_DEVICES is set, but empty, which hides every GPU",
        "`unset CUDA_VISIBLE_DEVICES`",
        working(H100, visible={"CUDA_VISIBLE_DEVICES": None}),
    ),
    "hidden, -1": Case(
        hidden_by("-1", H100),
        (HIDDEN,),
        "is set to -1, which hides every GPU",
        "unset",
        working(H100),
    ),
    "hidden, by an index": Case(
        hidden_by("1", H100),
        (HIDDEN,),
        "CUDA_VISIBLE_DEVICES=1 names no GPU that is there",
        "unset",
        working(H100, visible={"CUDA_VISIBLE_DEVICES": "0"}),
    ),
    "hidden, and said so otherwise": Case(
        replace(hidden_by("7", H100), said=(UNEXPECTED + "101: invalid device ordinal",)),
        (HIDDEN,),
        "CUDA_VISIBLE_DEVICES=7 names no GPU that is there",
        "unset",
        working(H100),
    ),
    "hidden, by a UUID": Case(
        hidden_by("GPU-ffff", H100, A100),
        (HIDDEN,),
        "=GPU-ffff names no GPU",
        "unset",
        working(H100, A100, visible={"CUDA_VISIBLE_DEVICES": "GPU-aaaa"}),
    ),
    "hidden, twice the same": Case(
        hidden_by("0,0", H100, A100),
        (HIDDEN,),
        "CUDA_VISIBLE_DEVICES=0,0",
        "unset",
        working(H100, A100),
    ),
    "hidden, by SLURM": Case(
        hidden_by("NoDevFiles", H100),
        (HIDDEN,),
        "NoDevFiles",
        "--gres=gpu:1",
        working(H100),
    ),
    "hidden, the others aren't": Case(
        replace(working(A100, A100), devices=seen(A100), visible={"CUDA_VISIBLE_DEVICES": "1"}),
        (HIDDEN,),
        "CUDA_VISIBLE_DEVICES=1 hides cuda:1: it shows 1 of the 2 GPUs",
        "use what it shows, cuda:0",
        working(A100, A100),
        "cuda:1",
    ),
    "driver-too-old": Case(
        blind(H100, said=TOO_OLD, driver="470.82.01", driver_cuda=(11, 4)),
        ("driver-too-old",),
        "driver 470.82.01 supports CUDA 11.4, and torch 2.6.0+cu124 was built for 12.4",
        f'525 or newer, or install a torch that this one runs: `pip install "torch==2.6.0+cu118" '
        f"--index-url {INDEX}/cu118`",
        working(H100, torch="2.6.0+cu118", cuda="11.8", driver="470.82.01", driver_cuda=(11, 4)),
    ),
    "driver-too-old, the last for its GPU": Case(
        blind(K80, said=TOO_OLD, driver="470.82.01", driver_cuda=(11, 4)),
        ("driver-too-old",),
        "driver 470.82.01 supports CUDA 11.4",
        "not by a newer driver: 470 is the last for this GPU",
        None,
    ),
    "cpu-only-build, for ARM": Case(
        replace(
            working(A100, torch="2.3.0", cuda=None), devices=(), processor="aarch64", arch_list=()
        ),
        ("cpu-only-build",),
        "built for the CPU alone",
        "https://pytorch.org/get-started/locally/",
        None,
    ),
    "driver-too-old, for the torch of PyPI": Case(
        blind(A100, said=TOO_OLD.replace("11040", "12020"), torch="2.13.0+cu130", cuda="13.0"),
        ("driver-too-old",),
        "supports CUDA 12.2, and torch 2.13.0+cu130 was built for 13.0",
        f'580 or newer, or install a torch that this one runs: `pip install "torch==2.13.0+cu126" '
        f"--index-url {INDEX}/cu126`",
        working(A100, torch="2.13.0+cu126", cuda="12.6", driver_cuda=(12, 2)),
    ),
    "driver-too-old, and hidden": Case(
        replace(hidden_by("", A100), cuda="13.0", torch="2.13.0+cu130"),
        ("driver-too-old", HIDDEN),
        "12.4",
        "580",
        working(A100),
    ),
    "driver-too-old, for any build of this torch": Case(
        blind(A100, said=TOO_OLD, torch="2.13.0+cu130", cuda="13.0", driver_cuda=(11, 4)),
        ("driver-too-old",),
        "11.4",
        f'`pip install --force-reinstall "torch<2.8" --index-url {INDEX}/cu118`',
        working(A100, torch="2.7.1+cu118", cuda="11.8", driver_cuda=(11, 4)),
    ),
    "no-driver": Case(
        blind(ON_THE_BUS, said=NO_DRIVER, driver=None, driver_cuda=None, libcuda=False),
        ("no-driver",),
        "has an NVIDIA GPU, and no NVIDIA driver",
        "525 or newer",
        working(A100),
    ),
    "no-driver, not loaded": Case(
        blind(ON_THE_BUS, said=UNKNOWN, complaint="Driver Not Loaded", driver=None),
        ("no-driver",),
        "installed, and not loaded",
        "sudo modprobe nvidia",
        working(A100),
    ),
    "no-driver, its library is missing": Case(
        blind(A100, said=NO_DRIVER, libcuda=False),
        ("no-driver",),
        "libcuda can't be found",
        "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        working(A100),
    ),
    "no-gpu": Case(
        blind(said=NO_DRIVER, driver=None, driver_cuda=None, libcuda=False),
        ("no-gpu",),
        "no NVIDIA or AMD GPU",
        "docker run --gpus all",
        working(A100),
    ),
    "no-gpu, though an image has the driver's library": Case(
        blind(driver=None),
        ("no-gpu",),
        "no NVIDIA or AMD GPU",
        "docker run --gpus all",
        working(A100),
    ),
    "no-gpu, nor a build for one": Case(
        Facts(torch="2.6.0+cpu"),
        ("no-gpu", "cpu-only-build"),
        "no NVIDIA or AMD GPU",
        "docker run --gpus all",
        working(A100),
    ),
    "no-gpu, on a Mac": Case(HEALTHY_MAC, ("no-gpu",), "a Mac has no CUDA GPU", '"mps"', None),
    "no-such-index": Case(
        working(A100, A100),
        ("no-such-index",),
        "cuda:3 does not exist: devices go from cuda:0 to cuda:1",
        'model.to("cuda:1")',
        working(A100, A100, A100, A100),
        "cuda:3",
    ),
    "no-such-index, of one": Case(
        working(A100),
        ("no-such-index",),
        "cuda:1 does not exist: the only one is cuda:0",
        'model.to("cuda:0")',
        working(A100, A100),
        "cuda:1",
    ),
    "unsupported-architecture, a new GPU": Case(
        working(RTX_5090, driver_cuda=(12, 8)),
        ("unsupported-architecture",),
        "torch 2.6.0+cu124 has no kernels for NVIDIA GeForce RTX 5090, of compute capability 12.0",
        f'pip install --force-reinstall "torch<2.12" --index-url {INDEX}/cu128',
        working(RTX_5090, torch="2.7.0+cu128", cuda="12.8", arch_list=CU130, driver_cuda=(12, 8)),
    ),
    "unsupported-architecture, an old GPU": Case(
        working(GTX_1080, torch="2.13.0+cu130", cuda="13.0", arch_list=CU130, driver_cuda=(13, 0)),
        ("unsupported-architecture",),
        "no kernels for NVIDIA GeForce GTX 1080, of compute capability 6.1",
        f'pip install "torch==2.13.0+cu126" --index-url {INDEX}/cu126',
        working(GTX_1080, torch="2.13.0+cu126", cuda="12.6", driver_cuda=(13, 0)),
    ),
    "unsupported-architecture, the second GPU": Case(
        working(A100, RTX_5090, driver_cuda=(13, 0), torch="2.13.0+cu126", cuda="12.6"),
        ("unsupported-architecture",),
        "RTX 5090",
        f"{INDEX}/cu130",
        working(A100, RTX_5090, arch_list=CU130, driver_cuda=(13, 0), cuda="13.0"),
        "cuda:1",
    ),
    "driver-error, unknown": Case(
        blind(A100, said=UNKNOWN),
        ("driver-error",),
        "CUDA unknown error",
        "sudo modprobe nvidia_uvm",
        working(A100),
    ),
    "driver-error, 802": Case(
        blind(H100, said=UNEXPECTED + "802: system not yet initialized"),
        ("driver-error",),
        "Error 802",
        "nvidia-fabricmanager",
        working(H100),
    ),
    "driver-error, 804": Case(
        blind(
            A100, said=UNEXPECTED + "804: forward compatibility was attempted on non supported HW"
        ),
        ("driver-error",),
        "Error 804",
        "cuda/compat",
        working(A100),
    ),
    "driver-error, updated and not reloaded": Case(
        blind(A100, said=NO_GPUS, complaint="Driver/library version mismatch"),
        ("driver-error",),
        "Driver/library version mismatch",
        "reboot",
        working(A100),
    ),
    "driver-error, not allowed": Case(
        blind(A100, said=UNKNOWN, denied=("/dev/nvidia0",)),
        ("driver-error",),
        "this user may not open /dev/nvidia0",
        "ls -l /dev/nvidia*",
        working(A100),
    ),
    "driver-error, in a fork": Case(
        blind(A100, said="Cannot re-initialize CUDA in forked subprocess. To use CUDA with"),
        ("driver-error",),
        "forked subprocess",
        "spawn",
        working(A100),
    ),
    "driver-error, without a word": Case(
        blind(A100),
        ("driver-error",),
        "the driver doesn't say why",
        "nvidia-smi",
        working(A100),
    ),
    "other-build, Intel's": Case(
        replace(ARC, devices=(), gpus=(A100,), driver_cuda=(12, 4), libcuda=True),
        ("other-build",),
        "torch 2.6.0+xpu is built for Intel GPUs, and the GPU is one of NVIDIA's",
        f'"torch==2.6.0+cu124" --index-url {INDEX}/cu124',
        working(A100),
    ),
    "other-build, AMD's": Case(
        rocm(
            A100, devices=(), driver_cuda=(12, 8), libcuda=True, said=("No HIP GPUs are available",)
        ),
        ("other-build",),
        "built for AMD GPUs, and the GPU is one of NVIDIA's",
        f'"torch==2.8.0+cu128" --index-url {INDEX}/cu128',
        working(A100),
    ),
    "other-build, NVIDIA's": Case(
        blind(MI300X, torch="2.8.0+cu128", driver=None, driver_cuda=None, libcuda=False),
        ("other-build",),
        "built for NVIDIA GPUs, and the GPU is one of AMD's",
        f"{INDEX}/rocm6.4",
        rocm(MI300X),
    ),
    "AMD, no such index": Case(
        rocm(MI300X), ("no-such-index",), "cuda:1", "cuda:0", rocm(MI300X, MI300X), "cuda:1"
    ),
    "AMD, hidden": Case(
        rocm(MI300X, devices=(), visible={"HIP_VISIBLE_DEVICES": "4"}),
        ("hidden-by-HIP_VISIBLE_DEVICES",),
        "HIP_VISIBLE_DEVICES=4 names no GPU that is there",
        "unset HIP_VISIBLE_DEVICES",
        rocm(MI300X, visible={"HIP_VISIBLE_DEVICES": "0"}),
    ),
    "AMD, not allowed": Case(
        rocm(MI300X, devices=(), denied=("/dev/kfd",)),
        ("driver-error",),
        "may not open /dev/kfd",
        "usermod -aG render,video",
        rocm(MI300X),
    ),
    "AMD, unsupported": Case(
        rocm(RX_6600),
        ("unsupported-architecture",),
        "navi23, a gfx1032",
        "HSA_OVERRIDE_GFX_VERSION=10.3.0",
        rocm(replace(RX_6600, architecture="gfx1030")),
    ),
    "AMD, unseen": Case(
        rocm(MI300X, devices=(), said=("No HIP GPUs are available",)),
        ("driver-error",),
        "none of this machine's AMD GPUs",
        "--device=/dev/kfd",
        rocm(MI300X),
    ),
    "AMD, none": Case(rocm(), ("no-gpu",), "no NVIDIA or AMD GPU", "", rocm(MI300X)),
    "mps, on Linux": Case(
        working(A100), ("mps-not-built",), "only a Mac", 'model.to("cuda:0")', None, "mps"
    ),
    "mps-unavailable": Case(
        MAC, ("mps-unavailable",), "macOS too old", "update macOS", HEALTHY_MAC, "mps"
    ),
    "mps-not-built": Case(
        replace(MAC, mps=False, processor="x86_64"),
        ("mps-not-built",),
        "Python is one for Intel",
        "arm64",
        HEALTHY_MAC,
        "mps",
    ),
    "xpu, not built": Case(
        Facts(torch="2.6.0+cpu"), ("cpu-only-build",), "Intel", f"{INDEX}/xpu", ARC, "xpu"
    ),
    "xpu, of another build": Case(
        working(A100), ("other-build",), "Intel", f"{INDEX}/xpu", ARC, "xpu:0"
    ),
    "xpu, none": Case(replace(ARC, devices=()), ("no-gpu",), "Intel", "sycl-ls", ARC, "xpu:0"),
    "xpu, no such index": Case(ARC, ("no-such-index",), "xpu:1", "xpu:0", None, "xpu:1"),
    "npu": Case(working(A100), ("other-build",), "npu", "import it", None, "npu:0"),
}


@pytest.mark.parametrize("name", GALLERY)
def test_a_device_that_cannot_be_used_is_explained(name: str) -> None:
    case = GALLERY[name]
    found = usable(case.device, case.facts)
    assert tuple(each.cause for each in found) == case.causes
    assert case.title in found[0].title
    assert case.fix in found[0].fix
    for each in found:
        assert each.severity == WRONG
        assert "\n" not in each.title + each.fix
        json.dumps(each.to_json())


@pytest.mark.parametrize("name", [name for name, case in GALLERY.items() if case.fixed])
def test_once_mended_nothing_is_said(name: str) -> None:
    case = GALLERY[name]
    assert case.fixed is not None
    assert usable(case.device, case.fixed) == ()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_cpu_can_always_be_used(device: str) -> None:
    for case in GALLERY.values():
        assert usable(device, case.facts) == ()


def test_without_an_index_the_first_is_meant() -> None:
    assert usable("cuda", working(A100)) == ()
    assert usable("cuda", hidden_by("", A100)) == usable("cuda:0", hidden_by("", A100))


def test_what_is_no_device_is_refused() -> None:
    with pytest.raises(DeviceError):
        usable("gpu", working(A100))


def test_what_torch_said_is_evidence() -> None:
    (found,) = usable("cuda", GALLERY["driver-too-old"].facts)
    assert f"torch: {TOO_OLD}" in found.evidence
    assert any("NVIDIA H100" in line for line in found.evidence)


@pytest.mark.parametrize(
    ("facts", "device"),
    [
        (working(A100), "cuda:0"),
        (with_cpu_build(working(A100)), "cuda:0"),
        (hidden_by("", A100), "cuda:0"),
        (GALLERY["no-driver"].facts, "cuda:0"),
        (rocm(MI300X), "cuda:0"),
        (Facts(gpus=(IN_A_RYZEN,)), "cpu"),
        (Facts(devices=seen(A100)), "cuda:0"),  # where the machine tells nothing
        (ARC, "xpu:0"),
        (HEALTHY_MAC, "mps"),
        (MAC, "mps"),
        (Facts(), "cpu"),
    ],
)
def test_the_device_that_one_would_want(facts: Facts, device: str) -> None:
    assert best(facts) == device


# -- wheels and architectures ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch_list", "capability", "runs"),
    [
        (("sm_80",), (8, 0), True),
        (("sm_80",), (8, 6), True),
        (("sm_80",), (8, 9), True),
        (("sm_86",), (8, 0), False),
        (("sm_80",), (9, 0), False),
        (("sm_80",), (8, 7), False),  # Orin's code is its own
        (("sm_87",), (8, 9), False),
        (("sm_80", "compute_80"), (12, 0), True),
        (("compute_90",), (8, 0), False),
        (("sm_90a",), (9, 0), True),
        (("sm_100a", "compute_100a"), (12, 0), False),
        (("sm_100f",), (10, 3), True),
        (("sm_120",), (12, 1), True),
        (CU130, (6, 1), False),
        ((), (3, 5), True),
    ],
)
def test_code_runs_on_later_chips_of_its_kind(
    arch_list: tuple[str, ...], capability: tuple[int, int], runs: bool
) -> None:
    assert runs_on(arch_list, capability, driver=None, cuda=None) is runs


def test_ptx_needs_a_driver_as_new_as_its_compiler() -> None:
    arch_list = ("sm_80", "compute_80")
    assert runs_on(arch_list, (9, 0), driver=(12, 8), cuda=(12, 6))
    assert not runs_on(arch_list, (9, 0), driver=(12, 2), cuda=(12, 6))
    assert runs_on(arch_list, (8, 6), driver=(12, 2), cuda=(12, 6))


@pytest.mark.skipif(
    not hasattr(torch.cuda, "_code_compatible_with_device"), reason="this torch has no such table"
)
def test_architectures_are_judged_as_torch_does() -> None:
    for code in (50, 60, 61, 70, 75, 80, 86, 87, 89, 90, 100, 120):
        for found in (50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90, 100, 103, 120, 121):
            ours = runs_on((f"sm_{code}",), divmod(found, 10), driver=None, cuda=None)
            assert ours == torch.cuda._code_compatible_with_device(found, code), (code, found)


@pytest.mark.parametrize(
    ("version", "driver", "capability", "tag"),
    [
        ("2.4.1+cpu", (12, 8), (8, 0), "cu124"),
        ("2.5.1", (12, 1), (8, 0), "cu121"),
        ("2.5.1", (12, 0), (8, 0), "cu118"),
        ("2.7.1", (12, 2), (9, 0), "cu118"),
        ("2.8.0", (12, 2), (9, 0), "cu126"),
        ("2.5.1", (11, 4), None, "cu118"),
        ("2.9.0", (12, 9), (12, 0), "cu128"),
        ("2.9.0", (12, 9), (7, 0), "cu126"),
        ("2.13.0", (13, 0), (9, 0), "cu130"),
        ("2.13.0", (12, 8), (9, 0), "cu126"),
        ("2.13.0", (12, 8), (12, 0), None),
        ("2.13.0", (11, 8), (8, 0), None),
        ("2.6.0", None, None, "cu126"),
        ("2.6.0", (12, 8), (3, 7), None),
        ("unknown", None, None, None),
    ],
)
def test_a_build_is_chosen(
    version: str,
    driver: tuple[int, int] | None,
    capability: tuple[int, int] | None,
    tag: str | None,
) -> None:
    chosen = choose(version, driver, capability)
    assert (chosen and chosen.tag) == tag


def test_the_command_fits_what_is_installed() -> None:
    wheel = next(each for each in WHEELS if each.tag == "cu126")
    companions = {"torchvision": "0.21.0+cpu"}
    command = install("2.6.0+cpu", wheel, "uv", companions)
    assert command.startswith('uv pip install "torch==2.6.0+cu126" "torchvision==0.21.0+cu126" -')
    assert "conda-forge" in install("2.6.0", wheel, "conda")
    nightly = install("2.14.0.dev20260901+cpu", wheel)
    assert "--pre" in nightly
    assert nightly.endswith("/nightly/cu126")
    assert install_other((12, 8), (3, 7)) is None


def test_the_driver_that_a_build_needs() -> None:
    assert [driver_for(cuda) for cuda in ((11, 8), (12, 4), (13, 0))] == [450, 525, 580]


# -- what the machine says -------------------------------------------------------------------------


def test_the_answers_of_the_driver_are_read() -> None:
    text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 2023\n"
    assert driver_version(text) == "535.129.03"
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.14  Release Build\n"
    assert driver_version(text) == "550.54.14"
    assert driver_version("") is None
    text = "GPU 0: NVIDIA A100 (UUID: GPU-5f6e-7a)\n  MIG 1g.5gb Device 0: (UUID: MIG-77)\n"
    assert [(gpu.name, gpu.uuid) for gpu in parse_gpus(text)] == [("NVIDIA A100", "GPU-5f6e-7a")]
    assert parse_gpus("NVIDIA-SMI has failed because it couldn't communicate with the driver") == []


def test_architectures_of_amd_are_spelled() -> None:
    assert [gfx(n) for n in (90010, 90402, 100302, 110000, 0)] == [
        *("gfx90a", "gfx942", "gfx1032", "gfx1100"),
        "",
    ]


def test_what_torch_says_is_trimmed() -> None:
    warned = f"CUDA initialization: {UNKNOWN} (Triggered internally at /c10/CUDAFunctions.cpp:109.)"
    assert plain_message(warned) == UNKNOWN
    assert plain_message("failed\n\nCUDA call was originally invoked at:\n\n  File ...") == "failed"


SCRIPT = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch
warnings.simplefilter("always")
from ckptmove.runtime.environment.usable import best, facts, usable
started = []
sys.addaudithook(lambda event, given: event in {starting!r} and started.append(str(given[0])))
found = facts()
verdicts = [each.to_json() for each in usable({device!r}, found)]
sys.__stdout__.write(json.dumps([found.to_json(), verdicts, best(found), started]))
"""
#: What takes time: processes, and other machines.
STARTING = {"subprocess.Popen", "os.fork", "os.posix_spawn", "os.system", "socket.connect"}


def asked(device: str = "cuda:0", env: Mapping[str, str] | None = None) -> list[Any]:
    """Of a process that says nothing else: facts, verdicts, best device and what was started."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(device=device, starting=STARTING)],
        env={**os.environ, **(env or {})},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stderr == ""
    told: list[Any] = json.loads(done.stdout)
    return told


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "env",
    [
        {},
        {"CUDA_VISIBLE_DEVICES": ""},
        {"CUDA_VISIBLE_DEVICES": "GPU-nowhere"},
        {"CUDA_VISIBLE_DEVICES": "\udcff"},
        {"PATH": ""},
    ],
)
def test_facts_are_gathered_in_silence(env: dict[str, str]) -> None:
    found, verdicts, _, started = asked(env=env)
    assert found["torch"] == torch.__version__
    assert found["visible"]["CUDA_VISIBLE_DEVICES"] == env.get(
        "CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES")
    )
    assert set(found["visible"]) == set(VISIBLE)
    if not found["gpus"]:
        assert set(started) <= {"uname"}, "that is how Python tells the platform"
        assert verdicts[0]["cause"] == "no-gpu"
        assert not found["devices"]


#: NVIDIA's libraries on a machine with two GPUs, as far as they are asked.
DRIVER = """
#include <stdio.h>
int cuDriverGetVersion(int *v) { *v = 12040; return 0; }
int nvmlInit_v2(void) { return FAILS; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int n) { return "Driver/library version mismatch"; }
int nvmlSystemGetDriverVersion(char *s, unsigned n) { snprintf(s, n, "550.54.14"); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *v) { *v = 12040; return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned n, void **h) {
    *h = (void *)(0x700000000000 + n); return 0; }
int nvmlDeviceGetName(void *h, char *s, unsigned n) { snprintf(s, n, "Tesla %p", h); return 0; }
int nvmlDeviceGetUUID(void *h, char *s, unsigned n) { snprintf(s, n, "GPU-%p", h); return 0; }
int nvmlDeviceGetCudaComputeCapability(void *h, int *a, int *b) { *a = 7; *b = 5; return 0; }
int nvmlDeviceGetMemoryInfo(void *h, unsigned long long *m) {
    m[0] = 16ull << 30; m[1] = 15ull << 30; m[2] = 1ull << 30; return 0; }
"""


@pytest.fixture(params=[0, 18], ids=["works", "fails"])
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[int, Path]:
    """What asking it comes to, and a folder with a driver's libraries."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs Linux and a C compiler")
    source, library = tmp_path / "driver.c", tmp_path / "libnvidia-ml.so.1"
    source.write_text(DRIVER.replace("FAILS", str(request.param)))
    command = [compiler, "-shared", "-fPIC", "-w", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    shutil.copy(library, tmp_path / "libcuda.so.1")
    return request.param, tmp_path


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="torch would load this driver")
def test_the_driver_is_asked(driver: tuple[int, Path]) -> None:
    failed, folder = driver
    found, verdicts, wanted, _ = asked(env={"LD_LIBRARY_PATH": str(folder)})
    assert (found["libcuda"], found["driver_cuda"]) == (True, [12, 4])
    assert verdicts[-1]["cause"] == "cpu-only-build"
    if failed:
        assert found["complaint"] == "Driver/library version mismatch"
        assert "NVIDIA driver: Driver/library version mismatch" in verdicts[0]["evidence"]
        return
    assert len(verdicts) == 1
    assert (found["driver"], found["complaint"], wanted) == ("550.54.14", "", "cuda:0")
    first, second = found["gpus"]
    assert (first["name"], second["name"]) == ("Tesla 0x700000000000", "Tesla 0x700000000001")
    assert first["uuid"] == "GPU-0x700000000000"
    assert (first["capability"], first["total"], first["free"]) == ([7, 5], 16 * GIB, 15 * GIB)


def test_facts_of_this_process() -> None:
    with torch.device("meta"):
        found = facts()
    assert found.default_device == "meta"
    assert found.default_dtype == "float32"
    assert usable("cpu", found) == ()
    assert found.gpus or found.system == "Darwin" or best(found) == "cpu" or found.devices
    json.dumps(found.to_json())


def test_another_torch_on_the_path_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert str((tmp_path / "torch").resolve()) in facts().other_torches


def test_a_failing_torch_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("cuDNN version\nincompatibility")

    monkeypatch.setattr(torch.backends.cudnn, "version", fail)
    assert "cuDNN version incompatibility" in facts().said


def test_verdicts_need_no_torch() -> None:
    script = "import sys; import ckptmove.reports.doctor; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def test_a_verdict_is_plain_data() -> None:
    assert Verdict("a", "b", "c", ("d",), "slow").to_json() == {
        **{"cause": "a", "title": "b", "fix": "c", "evidence": ["d"]},
        "severity": "slow",
    }


# -- on a real GPU ---------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.cuda
@needs_gpu
def test_a_gpu_is_seen() -> None:
    found, verdicts, wanted, _ = asked()
    assert verdicts == []
    assert wanted == "cuda:0"
    (device,) = [each for each in found["devices"] if each["tag"] == "cuda:0"]
    assert tuple(device["capability"]) == torch.cuda.get_device_capability(0)
    assert device["name"] == torch.cuda.get_device_name(0)
    assert found["gpus"]
    assert found["libcuda"]
    assert found["driver_cuda"]
    assert found["arch_list"]


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("value", ["", "-1", "99", "GPU-nowhere"])
def test_a_hidden_gpu_is_told(value: str) -> None:
    found, verdicts, wanted, _ = asked(env={"CUDA_VISIBLE_DEVICES": value})
    assert [each["cause"] for each in verdicts] == [HIDDEN]
    assert not found["devices"]
    assert wanted == "cuda:0"


@pytest.mark.cuda
@needs_gpu
def test_a_gpu_that_is_not_there_is_told() -> None:
    _, verdicts, _, _ = asked("cuda:99")
    assert [each["cause"] for each in verdicts] == ["no-such-index"]


@pytest.mark.cuda
@needs_gpu
def test_asking_makes_no_context() -> None:
    script = (
        "import torch; from ckptmove.runtime.environment.usable import facts; facts(); "
        "raise SystemExit(torch._C._cuda_hasPrimaryContext(0))"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)
