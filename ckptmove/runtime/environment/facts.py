"""Collect facts about the machine and the build of torch, as plain data.

This creates no CUDA context, so it uses no GPU memory.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import torch

from ...display.plain import Plain
from .machine import Gpu, look
from .wheels import Pair

#: Environment variables that hide GPUs from torch, or from the container in which it runs.
VISIBLE = (
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
)
_COMPANIONS = ("torchvision", "torchaudio")

T = TypeVar("T")


@dataclass(frozen=True)
class Device:
    """A device that torch sees, apart from the CPU."""

    tag: str  #: torch's name, e.g. `cuda:0`
    name: str = ""  #: its maker's name; "" if unknown
    capability: Pair | None = None  #: NVIDIA's compute capability, or None
    architecture: str = ""  #: AMD's architecture, e.g. `gfx90a`; "" for other makers
    total: int | None = None  #: its memory in bytes, or None
    free: int | None = None  #: its free memory in bytes, or None


@dataclass(frozen=True)
class Facts(Plain):
    """A machine and a build of torch."""

    python: str = ""  #: the version of Python
    platform: str = ""  #: the operating system, its version and the processor
    system: str = "Linux"  #: `Linux`, `Darwin`, `Windows`
    processor: str = "x86_64"  #: e.g. `x86_64`, `aarch64`, `arm64`
    torch: str = ""  #: the version of torch
    torch_at: str = ""  #: the folder from which torch was imported
    other_torches: tuple[str, ...] = ()  #: other folders on `sys.path` that contain a torch
    installer: str = ""  #: the program that installed torch: `pip`, `uv`, `conda`; "" if unknown
    #: Versions of installed packages whose build must match that of torch.
    companions: Mapping[str, str] = field(default_factory=dict)
    cuda: str | None = None  #: the CUDA version of the torch build, or None
    hip: str | None = None  #: the ROCm version of the torch build, or None
    xpu: bool = False  #: whether torch was built for Intel GPUs
    mps: bool = False  #: whether torch was built for Apple GPUs
    mps_available: bool = False  #: whether there is an Apple GPU that torch can use
    cudnn: str | None = None  #: the version of cuDNN, or None
    arch_list: tuple[str, ...] = ()  #: the architectures for which torch has kernels
    driver: str | None = None  #: the version of the NVIDIA driver, or None
    driver_cuda: Pair | None = None  #: the newest CUDA that the driver supports, or None
    libcuda: bool = False  #: whether the driver's library can be loaded
    complaint: str = ""  #: the driver's error message; "" if none
    denied: tuple[str, ...] = ()  #: device files that this user may not open
    gpus: tuple[Gpu, ...] = ()  #: the GPUs of the machine, even if torch does not see them
    devices: tuple[Device, ...] = ()  #: the devices that torch sees, apart from the CPU
    #: The variables of `VISIBLE`; None if unset.
    visible: Mapping[str, str | None] = field(default_factory=dict)
    said: tuple[str, ...] = ()  #: torch's messages when it searched for GPUs
    default_device: str = "cpu"  #: torch's default device for new tensors
    default_dtype: str = "float32"  #: torch's default dtype for new tensors

    def of(self, kind: str) -> list[Device]:
        """The devices of a type, such as `cuda`, that torch sees."""
        return [each for each in self.devices if each.tag.partition(":")[0] == kind]


def facts() -> Facts:
    """Collect all facts; raises nothing, prints nothing and creates no CUDA context."""
    machine = look()
    said: list[str] = []
    devices: list[Device] = []
    with _warnings_into(said):
        devices += _cuda_devices(machine.gpus, said)
        devices += _xpu_devices(said)
        devices += _other_devices(said)
        mps_available = _answer_or(torch.backends.mps.is_available, False, said)
        if mps_available:
            devices.append(Device("mps", _answer_or(_mps_name, "", [])))
        default = _answer_or(torch.get_default_device, torch.device("cpu"), said)
        cudnn = _answer_or(torch.backends.cudnn.version, None, said)
        arch_list: list[str] = _answer_or(torch.cuda.get_arch_list, [], said)
    return Facts(
        python=platform.python_version(),
        platform=platform.platform(),
        system=platform.system(),
        processor=platform.machine(),
        torch=str(torch.__version__),
        torch_at=str(Path(torch.__file__).parent),
        other_torches=tuple(_answer_or(_other_torches, [], [])),
        installer=_answer_or(_installer, "", []),
        companions=_answer_or(_companions, {}, []),
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        xpu=bool(getattr(torch._C, "_has_xpu", False)),
        mps=torch.backends.mps.is_built(),
        mps_available=mps_available,
        cudnn=None if cudnn is None else _cudnn(cudnn),
        arch_list=tuple(arch_list),
        driver=machine.driver,
        driver_cuda=machine.driver_cuda,
        libcuda=machine.libcuda,
        complaint=machine.complaint,
        denied=machine.denied,
        gpus=machine.gpus,
        devices=tuple(devices),
        visible={name: os.environ.get(name) for name in VISIBLE},
        said=tuple(dict.fromkeys(said)),
        default_device=str(default),
        default_dtype=str(torch.get_default_dtype()).removeprefix("torch."),
    )


# -- asking torch ----------------------------------------------------------------------------------


@contextmanager
def _warnings_into(said: list[str]) -> Iterator[None]:
    """Collect warnings in `said` instead of showing them."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        yield
    said += [plain_message(str(each.message)) for each in heard]


def _answer_or(question: Callable[[], T], otherwise: T, said: list[str]) -> T:
    """The answer of a function; if it raises, `otherwise`, with the error in `said`."""
    try:
        return question()
    except Exception as error:
        said.append(plain_message(str(error)))
        return otherwise


def plain_message(text: str) -> str:
    """A message of torch, without the place in its source and without a Python traceback."""
    text = re.sub(r"\s*\(Triggered internally at .*", "", text, flags=re.DOTALL)
    text = text.partition("\n\nCUDA call was originally invoked at")[0]
    text = text.removeprefix("CUDA initialization: ")
    return " ".join(text.split())


def _cuda_devices(gpus: tuple[Gpu, ...], said: list[str]) -> Iterator[Device]:
    if not (torch.version.cuda or torch.version.hip):
        return
    if not _answer_or(torch.cuda.is_available, False, said):
        _answer_or(
            torch.cuda.init, None, said
        )  # torch warns only once per process, but this raises the error each time
        return
    for index in range(_answer_or(torch.cuda.device_count, 0, said)):
        found = _answer_or(partial(torch.cuda.get_device_properties, index), None, said)
        if found is None:
            continue
        uuid = str(getattr(found, "uuid", ""))
        same = [each for each in gpus if uuid and each.uuid == f"GPU-{uuid}"]
        is_amd = torch.version.hip is not None
        yield Device(
            f"cuda:{index}",
            found.name,
            None if is_amd else (found.major, found.minor),
            getattr(found, "gcnArchName", "").partition(":")[0] if is_amd else "",
            found.total_memory,
            same[0].free if same else None,
        )


def _xpu_devices(said: list[str]) -> Iterator[Device]:
    if not getattr(torch._C, "_has_xpu", False):
        return
    for index in range(_answer_or(torch.xpu.device_count, 0, said)):
        found = _answer_or(partial(torch.xpu.get_device_properties, index), None, said)
        name, total = getattr(found, "name", ""), getattr(found, "total_memory", None)
        yield Device(f"xpu:{index}", name, total=total)


def _other_devices(said: list[str]) -> Iterator[Device]:
    """Devices of another backend (`privateuseone`), under its current name."""
    name = str(torch._C._get_privateuse1_backend_name())
    count = getattr(getattr(torch, name, None), "device_count", None)
    for index in range(0 if count is None else _answer_or(count, 0, said)):
        yield Device(f"{name}:{index}")


def _mps_name() -> str:
    ask = getattr(torch.backends.mps, "get_name", None)
    return str(ask()) if ask else ""


def _cudnn(number: int) -> str:
    """90100 → `9.1.0`; before version 9, the parts have fewer digits: 8902 → `8.9.2`."""
    major = 10000 if number >= 90000 else 1000
    return f"{number // major}.{number % major // 100}.{number % 100}"


# -- how torch was installed -----------------------------------------------------------------------


def _installer() -> str:
    return (metadata.distribution("torch").read_text("INSTALLER") or "").strip()


def _companions() -> dict[str, str]:
    """The versions of packages that must match the build of torch."""
    found = {}
    for name in _COMPANIONS:
        with suppress(metadata.PackageNotFoundError):
            version = metadata.version(name)
            if "+" in version:
                found[name] = version
    return found


def _other_torches() -> list[str]:
    ours = Path(torch.__file__).parent.resolve()
    folders = [Path(entry or ".") / "torch" for entry in sys.path]
    found = {each.resolve() for each in folders if (each / "version.py").is_file()}
    return sorted(str(each) for each in found - {ours})
