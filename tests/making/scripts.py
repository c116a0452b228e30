"""TorchScript archives: three pickles with storages of their own, and code that names devices.

What CUDA would have tagged is retagged in the pickles (`retag`), and the zip laid out again
(`relay`): to the byte what `torch.jit.save` writes, but for the identity record.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.making.expected import Expected, FileMaker, raw
from tests.making.relaying import relay
from tests.making.retagging import retag
from tests.making.walking import named_tensors


class Scripted(nn.Module):
    """Shared weights, a list of views of a buffer, devices as attributes and in the code."""

    def __init__(self, where: str = "cpu") -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("shift", torch.arange(3.0))
        self.views = [torch.arange(8.0)[2:5], torch.ones(2, dtype=torch.int64)]
        self.where = torch.device(where)
        self.device_name = "cuda:0"
        self.storage = "storage"
        self.host = "cpu"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor like `x`; its branches are compiled, one of them never runs on a CPU."""
        fresh = torch.zeros([3], device=torch.device("cpu"))
        if self.device_name == "cuda:1":
            fresh = fresh.to("cuda:0")
        y = self.second(self.first(x)) + self.shift + self.views[0].to(x.device)
        result: torch.Tensor = y + (fresh + torch.ones([3], device=self.where)).to(x.device)
        return result


class Traced(nn.Module):
    """Tensors and factory calls that tracing bakes in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("scale", torch.full((3,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        constant = torch.tensor([1.0, 2.0, 3.0], device=x.device)
        scaled: torch.Tensor = self.layer(x) * self.scale
        return scaled + constant + torch.zeros(3, device=x.device)


class Many(nn.Module):
    """More than 256 memo slots, and every dtype that scripts take."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(60))
        for dtype in (torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.complex64):
            self.register_buffer(f"of_{str(dtype)[6:]}", torch.ones(3).to(dtype))
        self.register_buffer("scalar", torch.tensor(1.5))
        self.register_buffer("empty", torch.empty(0, 2))
        self.register_buffer("transposed", torch.arange(6.0).view(2, 3).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Helped(nn.Module):
    """A tuple of tensors, a dict of tensors, and a method in addition to forward."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = (torch.ones(2), torch.zeros(3))
        self.table = {"cpu": torch.arange(2.0), "cuda:0": torch.arange(4)}

    @torch.jit.export
    def device_of(self, x: torch.Tensor) -> torch.device:
        return x.device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.pair[0].sum() + self.table["cpu"].sum()


Save = Callable[[torch.jit.ScriptModule, Path], None]


class Stays(NamedTuple):
    """A storage that is on the CPU whatever the tag: its pickle and its key there."""

    pickled: str
    key: str


def save_script(
    module: torch.jit.ScriptModule,
    path: Path,
    tag: str,
    elsewhere: tuple[str, ...] = (),
    *,
    attributes: tuple[str, ...] = (),
    save: Save = torch.jit.save,
    stays: Mapping[str, Stays] | None = None,
    inputs: int = 0,
    baked: bool = False,
) -> Expected:
    """Save a script as a machine would on which all of it was on `tag`, except `stays`.

    `elsewhere` are devices that attributes and code name; `attributes` the names of those that hold
    tensors and are no parameters or buffers; `stays` maps names to storages on the CPU; `inputs` is
    the number of tensors it was traced with, whose bytes are not in the file. `baked` means that
    the code names the tag where it says `cpu`, so the CPU can't run it.
    """
    save(module, path)
    kept = dict(stays or {})
    relay(path, lambda name, data: _edit(name, data, tag, set(kept.values()), baked))
    tensors = dict(_tensors(module, attributes))
    storages = {name: raw(tensor.untyped_storage()) for name, tensor in tensors.items()}
    storages |= {f"traced_inputs.forward.{index}": b"" for index in range(inputs)}
    devices = {name: "cpu" if name in kept else tag for name in storages}
    return Expected(devices, storages, elsewhere)


def _edit(name: str, data: bytes, tag: str, stays: set[Stays], baked: bool) -> bytes:
    pickled = name.removesuffix(".pkl")
    if pickled in ("data", "constants", "traced_inputs", "bytecode"):
        return retag(data, lambda key: "cpu" if Stays(pickled, key) in stays else tag)
    if name.endswith(".py") and baked:
        return data.replace(b'torch.device("cpu")', f'torch.device("{tag}")'.encode())
    return data


def _tensors(
    module: torch.jit.ScriptModule, attributes: tuple[str, ...]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor by its dotted name, shared ones under each of their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
    _, constants = module.code_with_constants
    for name, constant in constants.const_mapping.items():
        yield f"CONSTANTS.{name}", constant
    for name in attributes:
        yield from named_tensors({name: getattr(module, name)})


# The register


def _script(kind: Callable[[], nn.Module]) -> torch.jit.ScriptModule:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module: torch.jit.ScriptModule = torch.jit.script(kind().eval())
    return module


def _trace(example: torch.Tensor) -> torch.jit.ScriptModule:
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the constant
        torch.manual_seed(0)
        module: torch.jit.ScriptModule = torch.jit.trace(Traced().eval(), example)
    return module


NAMED = ("cpu", "cuda:0", "cpu", "cpu", "cuda:0")  # by `Scripted`: three attributes, then code


def scripted(path: Path, tag: str, **options: Any) -> Expected:
    """A module with shared weights, devices in attributes and code."""
    return save_script(_script(Scripted), path, tag, NAMED, attributes=("views",), **options)


def scripted_with_files(path: Path, tag: str) -> Expected:
    """The same with the user's own files, one of which names a device."""
    files = {"notes.txt": "trained on cuda:0", "a/b.bin": b"\0\1"}
    return scripted(path, tag, save=lambda module, path: torch.jit.save(module, path, files))


def scripted_mixed(path: Path, tag: str) -> Expected:
    """The same with a buffer that is on the CPU."""
    return scripted(path, tag, stays={"shift": Stays("data", "0")})


def scripted_where(path: Path, tag: str) -> Expected:
    """The same with its `torch.device` attribute at the tag, which shares the location's slot."""
    module, named = _script(lambda: Scripted(tag)), (tag, *NAMED[1:])
    return save_script(module, path, tag, named, attributes=("views",))


def many(path: Path, tag: str) -> Expected:
    """So many storages that the memo needs long opcodes; every dtype."""
    return save_script(_script(Many), path, tag)


def helped(path: Path, tag: str) -> Expected:
    """Tensors in a tuple and in a dict whose keys are device strings."""
    return save_script(_script(Helped), path, tag, ("cpu", "cuda:0"), attributes=("pair", "table"))


def traced(path: Path, tag: str, *, baked: bool = False) -> Expected:
    """A trace: a constant, devices baked into the code, and the shapes of its inputs."""
    module = _trace(torch.ones(2, 3))
    named = ("cpu",) * DEVICES_TRACED if not baked else (tag,) * DEVICES_TRACED
    return save_script(module, path, tag, named, inputs=1, baked=baked)


DEVICES_TRACED = 2  # `.to` of the constant, and what is made anew


def traced_on_device(path: Path, tag: str) -> Expected:
    """A trace as made on the device: its code names it."""
    return traced(path, tag, baked=True)


def frozen(path: Path, tag: str) -> Expected:
    """A frozen module: no attributes, all tensors are constants."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module: torch.jit.ScriptModule = torch.jit.freeze(_script(Scripted))
    return save_script(module, path, tag)


def lite(path: Path, tag: str, **options: bool) -> Expected:
    """A module for the mobile interpreter: a fourth pickle with bytecode and devices in it."""
    named = (*NAMED, "cuda:0", "cuda:1", "cpu")  # the constants of the bytecode
    return scripted_lite(path, tag, named, **options)


def scripted_lite(path: Path, tag: str, named: tuple[str, ...], **options: bool) -> Expected:
    """`Scripted` by `_save_for_lite_interpreter`."""

    def save(module: torch.jit.ScriptModule, path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module._save_for_lite_interpreter(os.fspath(path), **options)

    return save_script(_script(Scripted), path, tag, named, attributes=("views",), save=save)


def lite_with_debug_info(path: Path, tag: str) -> Expected:
    """The same with a map from bytecode to source."""
    return lite(path, tag, _save_mobile_debug_info=True)


SCRIPT_MAKERS: dict[str, FileMaker] = {
    make.__name__: make
    for make in (
        *(scripted, scripted_with_files, scripted_mixed, scripted_where, many, helped),
        *(traced, traced_on_device, frozen, lite, lite_with_debug_info),
    )
}
