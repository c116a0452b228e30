"""Find the GPUs of this machine and their drivers, without torch.

For NVIDIA, this module asks the management library (NVML), which creates no CUDA context and
ignores CUDA_VISIBLE_DEVICES; if that fails, nvidia-smi, /proc, /dev and the PCI bus. For AMD, it
reads the topology of the kernel driver. Each of these may be missing.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .wheels import Pair

NVIDIA, AMD = "nvidia", "amd"

_SECONDS = 5.0  # the time limit of nvidia-smi
_WSL = "/usr/lib/wsl/lib"
_NVML = ("libnvidia-ml.so.1", f"{_WSL}/libnvidia-ml.so.1")
_LIBCUDA = ("libcuda.so.1", f"{_WSL}/libcuda.so.1")
_PCI_NVIDIA, _PCI_DISPLAY = "0x10de", "0x03"


@dataclass(frozen=True)
class Gpu:
    """A GPU of the machine."""

    vendor: str  #: `nvidia` or `amd`
    name: str = ""  #: its maker's name; "" if unknown
    uuid: str = ""  #: NVIDIA's id, `GPU-...`; "" if unknown
    capability: Pair | None = None  #: NVIDIA's compute capability, or None
    architecture: str = ""  #: AMD's architecture, e.g. `gfx90a`; "" if unknown
    total: int | None = None  #: its memory in bytes, or None
    free: int | None = None  #: its free memory in bytes, or None
    kernel_driver: str = ""  #: its driver in the kernel, e.g. `nouveau`; "" if unknown


@dataclass(frozen=True)
class Hardware:
    """The GPUs and drivers of this machine."""

    gpus: tuple[Gpu, ...] = ()  #: all GPUs, in the order of the PCI bus
    driver: str | None = None  #: the version of the NVIDIA driver, or None
    driver_cuda: Pair | None = None  #: the newest CUDA that the driver supports, or None
    libcuda: bool = False  #: whether the driver's library, which torch needs, can be loaded
    complaint: str = ""  #: the driver's error message; "" if none
    denied: tuple[str, ...] = ()  #: existing device files that this user may not open


def look() -> Hardware:
    """Find the GPUs and drivers; raises nothing and prints nothing."""
    found = Hardware()
    with suppress(Exception):
        found = _nvml(found)
    if not found.gpus:
        with suppress(Exception):
            found = _nvidia_smi(found)
    with suppress(Exception):
        found = _libcuda(found)
    if found.driver is None:
        with suppress(Exception):
            text = Path("/proc/driver/nvidia/version").read_text()
            found = replace(found, driver=driver_version(text))
    if not found.gpus:
        for source in (_in_proc, _in_dev, _on_bus):
            with suppress(Exception):
                found = replace(found, gpus=found.gpus or tuple(source()))
    with suppress(Exception):
        found = replace(found, gpus=found.gpus + tuple(_amd()))
    return replace(found, denied=tuple(_denied_devices()))


def driver_version(text: str) -> str | None:
    """The driver's version in the text of /proc/driver/nvidia/version, or None."""
    match = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d+(?:\.\d+)+)", text)
    return match[1] if match else None


def parse_gpus(text: str) -> list[Gpu]:
    """The GPUs in the output of `nvidia-smi -L`."""
    found = re.findall(r"^GPU \d+: (.*) \(UUID: (GPU-[\w-]+)\)", text, re.MULTILINE)
    return [Gpu(NVIDIA, name, uuid, kernel_driver="nvidia") for name, uuid in found]


# -- NVIDIA ----------------------------------------------------------------------------------------


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def _load(names: tuple[str, ...], on_windows: str) -> Any:
    for name in (on_windows,) if sys.platform == "win32" else names:
        with suppress(OSError):
            return ctypes.CDLL(name)
    raise OSError("not there")


def _nvml(found: Hardware) -> Hardware:
    nvml = _load(_NVML, "nvml.dll")
    failed = nvml.nvmlInit_v2()
    if failed:
        nvml.nvmlErrorString.restype = ctypes.c_char_p
        return replace(found, complaint=nvml.nvmlErrorString(failed).decode(errors="replace"))
    try:
        text, number = ctypes.create_string_buffer(96), ctypes.c_int()
        if not nvml.nvmlSystemGetDriverVersion(text, 96):
            found = replace(found, driver=text.value.decode())
        if not nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(number)):
            found = replace(found, driver_cuda=_cuda(number.value))
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(number)):
            return found
        gpus = tuple(_query_gpu(nvml, index) for index in range(number.value))
        return replace(found, gpus=gpus)
    finally:
        nvml.nvmlShutdown()


def _query_gpu(nvml: Any, index: int) -> Gpu:
    handle, text = ctypes.c_void_p(), ctypes.create_string_buffer(96)
    gpu = Gpu(NVIDIA, kernel_driver="nvidia")
    if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
        return gpu
    if not nvml.nvmlDeviceGetName(handle, text, 96):
        gpu = replace(gpu, name=text.value.decode(errors="replace"))
    if not nvml.nvmlDeviceGetUUID(handle, text, 96):
        gpu = replace(gpu, uuid=text.value.decode())
    major, minor = ctypes.c_int(), ctypes.c_int()
    if not nvml.nvmlDeviceGetCudaComputeCapability(
        handle, ctypes.byref(major), ctypes.byref(minor)
    ):
        gpu = replace(gpu, capability=(major.value, minor.value))
    memory = _Memory()
    if not nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
        gpu = replace(gpu, total=memory.total, free=memory.free)
    return gpu


def _nvidia_smi(found: Hardware) -> Hardware:
    program = shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path=_WSL)
    if program is None:
        return found
    answer = subprocess.run(
        [program, "-L"],
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        timeout=_SECONDS,
        check=False,
    )
    said = (answer.stdout or answer.stderr).strip().partition("\n")[0]
    complaint = found.complaint or (said if answer.returncode else "")
    return replace(found, gpus=tuple(parse_gpus(answer.stdout)), complaint=complaint)


def _libcuda(found: Hardware) -> Hardware:
    version = ctypes.c_int()
    failed = _load(_LIBCUDA, "nvcuda.dll").cuDriverGetVersion(ctypes.byref(version))
    supported = None if failed or not version.value else _cuda(version.value)
    # This libcuda may be another than the driver's and support another CUDA, and torch loads it.
    return replace(found, libcuda=True, driver_cuda=supported or found.driver_cuda)


def _cuda(number: int) -> Pair:
    """12040 → (12, 4)."""
    return number // 1000, number % 1000 // 10


def _in_proc() -> Iterator[Gpu]:
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        lines = (line.partition(":") for line in path.read_text().splitlines())
        said = {key.strip(): value.strip() for key, _, value in lines}
        yield Gpu(NVIDIA, said.get("Model", ""), said.get("GPU UUID", ""), kernel_driver="nvidia")


def _in_dev() -> Iterator[Gpu]:
    for path in sorted(Path("/dev").glob("nvidia[0-9]*")):
        if path.name.removeprefix("nvidia").isdigit():
            yield Gpu(NVIDIA, kernel_driver="nvidia")


def _on_bus() -> Iterator[Gpu]:
    for path in sorted(Path("/sys/bus/pci/devices").iterdir()):
        with suppress(OSError):
            is_display = (path / "class").read_text().startswith(_PCI_DISPLAY)
            if is_display and (path / "vendor").read_text().strip() == _PCI_NVIDIA:
                driven = path / "driver"
                yield Gpu(NVIDIA, kernel_driver=driven.resolve().name if driven.exists() else "")


# -- AMD -------------------------------------------------------------------------------------------


def _amd() -> Iterator[Gpu]:
    for path in sorted(Path("/sys/class/kfd/kfd/topology/nodes").glob("*/properties")):
        with suppress(OSError):
            pairs = (line.partition(" ") for line in path.read_text().splitlines())
            said = {key: int(value) for key, _, value in pairs if value.strip().isdigit()}
            if said.get("simd_count"):  # CPUs are nodes too, but without SIMD units
                version = said.get("gfx_target_version", 0)
                name = (path.parent / "name").read_text().strip()
                yield Gpu(AMD, name, architecture=gfx(version), kernel_driver="amdgpu")


def gfx(version: int) -> str:
    """90010 → `gfx90a`, ROCm's name of an architecture; 0 → ""."""
    if not version:
        return ""
    major, minor, stepping = version // 10000, version // 100 % 100, version % 100
    return f"gfx{major}{minor:x}{stepping:x}"


def _denied_devices() -> Iterator[str]:
    for name in ("nvidiactl", "nvidia0", "nvidia-uvm", "kfd"):
        path = Path("/dev") / name
        with suppress(OSError):
            if path.exists() and not os.access(path, os.R_OK | os.W_OK):
                yield str(path)
