"""`torch.export` archives: raw weights, JSON that says where they go, nested checkpoints.

What CUDA would have said is edited in the JSON, and nested checkpoints are saved with its tag.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._export.serde.schema import SCHEMA_VERSION
from torch._export.serde.serialize import serialize
from torch.export import ExportedProgram
from torch.export.pt2_archive._package import package_pt2
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from tests.making.expected import Expected, FileMaker, once, storage_bytes
from tests.making.relaying import relay
from tests.making.saving import tagging
from tests.making.subclasses import PairTensor
from tests.making.walking import named_tensors

Programs = Mapping[str, ExportedProgram]

HOST = "ones"  # the graph's node that is on the CPU whatever the rest is on


class Everything(nn.Module):
    """Tied weights, each kind of buffer and constant, autocast, branches, devices as arguments."""

    shift: torch.Tensor
    transient: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("shift", torch.arange(3.0))
        self.register_buffer("transient", torch.ones(2), persistent=False)
        self.constant = torch.arange(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        host = torch.ones((), device="cpu")
        lifted = torch.tensor([1.0, 2.0, 3.0])
        y = self.second(self.first(x)) + self.shift + torch.zeros(3, device=x.device)
        y = y + self.constant.to(x.device) + lifted + self.transient.sum() * host
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            y = y @ self.first.weight
        y = y.float().to(x.device, torch.float64).to(torch.float32)
        result: torch.Tensor = torch.cond(y.sum() > 0, _above, _below, (y,))
        return result


def _above(y: torch.Tensor) -> torch.Tensor:
    return y + torch.full((3,), 2.0, device=y.device)


def _below(y: torch.Tensor) -> torch.Tensor:
    return y - 1


class Views(nn.Module):
    """Buffers that are views of one storage, an empty one, one without dimensions, dtypes."""

    part: torch.Tensor
    tail: torch.Tensor
    turned: torch.Tensor
    empty: torch.Tensor
    scalar: torch.Tensor
    brain: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        base = torch.arange(10.0)
        self.register_buffer("part", base[2:5])
        self.register_buffer("tail", base[7:])
        self.register_buffer("turned", torch.arange(6.0).view(2, 3).t())
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("scalar", torch.tensor(2.0))
        self.register_buffer("brain", torch.ones(3, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = x * self.scalar + self.part + self.tail + self.brain.float()
        return scaled + self.empty.sum() + self.turned.sum()


class Wrapped(nn.Module):
    """A buffer of a tensor subclass, which is pickled."""

    pair: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("pair", PairTensor(torch.ones(3), torch.zeros(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.pair


def export(module: nn.Module) -> ExportedProgram:
    """A program for inputs of 2×3."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        return torch.export.export(module, (torch.ones(2, 3),))


def everything() -> ExportedProgram:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return export(Everything())


def save_exported(
    programs: Programs, path: Path, tag: str, write: Callable[[], object] | None = None
) -> Expected:
    """Write programs, by name, as a machine with this device would, except for `HOST`.

    `write` writes them to `path`; by default `torch.export.save` does.
    """
    with tagging(tag), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write() if write else torch.export.save(programs["model"], path)
    relay(path, lambda name, data: on_device(name, data, tag))
    return expect(programs, tag)


def expect(programs: Programs, tag: str) -> Expected:
    """What a file of these programs holds; with several, names start with the program's."""
    devices: dict[str, str] = {}
    storages: dict[str, bytes] = {}
    elsewhere: list[str] = []
    for name, program in programs.items():
        prefix = "" if name == "model" else f"{name}."
        held = {**program.state_dict, **program.constants, "sample_inputs": program.example_inputs}
        devices |= {prefix + at: tag for at, _ in named_tensors(held)}
        storages |= {prefix + at: data for at, data in storage_bytes(held).items()}
        elsewhere += list(_named(program.graph_module, tag))
    return Expected(devices, storages, tuple(elsewhere))


def _named(module: GraphModule, tag: str) -> Iterator[str]:
    """The devices among the arguments of a graph and its subgraphs, as often as they occur."""
    for graph in module.modules():
        for node in graph.graph.nodes if isinstance(graph, GraphModule) else ():
            for leaf in tree_leaves((node.args, node.kwargs)):
                if isinstance(leaf, torch.device):
                    yield str(leaf) if node.name == HOST else tag
            if "autocast" in str(node.target):
                yield tag.partition(":")[0]


def on_device(name: str, data: bytes, tag: str) -> bytes:
    """A record with another device in its JSON, except `HOST` and the user's own strings."""
    if not name.endswith(".json") or name.startswith(("extra/", "data/aotinductor/")):
        return data
    kind, _, index = tag.partition(":")
    device: dict[str, object] = {"type": kind, "index": int(index) if index else None}
    return json.dumps(_moved(json.loads(data), device)).encode()


def _moved(node: Any, device: dict[str, object]) -> Any:
    if isinstance(node, list):
        return [_moved(each, device) for each in node]
    if not isinstance(node, dict):
        return node
    if node.keys() == {"type", "index"}:
        return dict(device)
    if node.get("name") == HOST and "target" in node:
        return node
    if node == {"as_string": "cpu"}:
        return {"as_string": device["type"]}
    return {key: each if key == HOST else _moved(each, device) for key, each in node.items()}


# The register


def model(path: Path, tag: str) -> Expected:
    """One program with everything."""
    return save_exported({"model": everything()}, path, tag)


def views(path: Path, tag: str) -> Expected:
    return save_exported({"model": export(Views())}, path, tag)


def subclass(path: Path, tag: str) -> Expected:
    program = export(Wrapped())
    pair = PairTensor(torch.ones(3), torch.zeros(3), torch.device(tag))
    program.state_dict["pair"] = pair
    expected = save_exported({"model": program}, path, tag)
    return expected._replace(elsewhere=(*(expected.elsewhere or ()), str(torch.device(tag))))


def extra_files(path: Path, tag: str) -> Expected:
    """With the user's own files, one of which names a device."""
    program = export(Views())
    files: dict[str, Any] = {"notes.txt": "made on cuda:0", "a/b.json": '{"device": "cpu"}'}
    return save_exported(
        {"model": program}, path, tag, lambda: torch.export.save(program, path, extra_files=files)
    )


def two_programs(path: Path, tag: str) -> Expected:
    """Two programs in one archive; the numbers of their weights continue."""
    programs = {"one": everything(), "two": export(Views())}
    return save_exported(
        programs, path, tag, lambda: package_pt2(path, exported_programs=dict(programs))
    )


def aotinductor(path: Path, tag: str) -> Expected:
    """A program beside a stand-in for a compiled model: torch cannot load it."""
    program = export(Views())
    kind = tag.partition(":")[0]
    metadata = {"AOTI_DEVICE_KEY": kind, "AOTI_PLATFORM": "linux"}
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "model.wrapper.so")
        library.write_bytes(b"\x7fELF" + bytes(60))
        described = Path(folder, "model.wrapper_metadata.json")
        described.write_text(json.dumps(metadata))
        files: Any = {"model": [os.fspath(library), os.fspath(described)]}
        expected = save_exported(
            {"model": program},
            path,
            tag,
            lambda: package_pt2(path, exported_programs={"model": program}, aoti_files=files),
        )
    elsewhere = (*(expected.elsewhere or ()), kind)
    return expected._replace(elsewhere=elsewhere, readable=False)


def pickled_weights(path: Path, tag: str) -> Expected:
    """As torch 2.8 laid it out: all weights in one checkpoint, all constants in another."""
    program = everything()
    artifact = _serialized(program, tag)
    writer: Any = torch._C.PyTorchFileWriter(os.fspath(path))
    records = {
        "archive_format": b"pt2",
        "archive_version": b"0",
        "models/model.json": on_device("model.json", artifact.exported_program, tag),
        "data/weights/model.pt": artifact.state_dict,
        "data/constants/model.pt": artifact.constants,
        "data/sample_inputs/model.pt": artifact.example_inputs,
    }
    for name, data in records.items():
        writer.write_record(name, data, len(data))
    writer.write_end_of_file()
    return expect({"model": program}, tag)


def plain_zip(path: Path, tag: str) -> Expected:
    """As torch 2.1 to 2.7 wrote it: a zip of Python's, without a prefix."""
    program = everything()
    artifact = _serialized(program, tag)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("version", ".".join(map(str, SCHEMA_VERSION)))
        moved = on_device("model.json", artifact.exported_program, tag)
        archive.writestr("serialized_exported_program.json", moved)
        archive.writestr("serialized_state_dict.pt", artifact.state_dict)
        archive.writestr("serialized_constants.pt", artifact.constants)
        archive.writestr("serialized_example_inputs.pt", artifact.example_inputs)
        archive.writestr("extra_files/notes.txt", "made on cuda:0")
    return expect({"model": program}, tag)


def _serialized(program: ExportedProgram, tag: str) -> Any:
    with tagging(tag), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return serialize(program)


EXPORTED_MAKERS: dict[str, FileMaker] = {
    make.__name__: once(make)
    for make in (
        *(model, views, subclass, extra_files, two_programs, aotinductor),
        *(pickled_weights, plain_zip),
    )
}
