"""`torch.package` archives: pickles anywhere, shared storages, source code.

Its pickler is Python's: protocol 3, numbers as keys of storages, memoized tuples as ids.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.package import package_exporter
from torch.package.package_exporter import PackageExporter

from tests.making.expected import Expected, FileMaker, expecting, storage_bytes
from tests.making.modules import trained_net
from tests.making.relaying import relay
from tests.making.retagging import retag
from tests.making.tensors import of_dtype

Fill = Callable[[PackageExporter], None]

SCRIPT_PICKLE = re.compile(r"\.data/ts_code/\d+/(data|constants)\.pkl|\.data/constants\.pkl")

SOURCE = """import torch


class Net(torch.nn.Module):
    device = torch.device("cuda:0")

    def forward(self, x):
        return x.to("cuda:0")
"""


def save_package(
    saved: object, path: Path, tag: str, fill: Fill, elsewhere: tuple[str, ...] = ()
) -> Expected:
    """Write a package as a machine would on which the tensors in `saved` were on `tag`.

    `saved` has the contents of all pickles, by their expected names; `fill` puts them into the
    package; `elsewhere` are devices that it names beside its tensors.
    """
    with expecting(saved, tag, elsewhere) as expected, PackageExporter(path) as exporter:
        exporter.extern(["torch.**", "collections.**", "numpy.**", "builtins", "functools"])
        fill(exporter)
    return expected


def state_dicts(path: Path, tag: str) -> Expected:
    """Two pickles with shared storages, source, text, and devices in each of them."""
    shared = torch.arange(6.0)
    saved = {
        "state": {
            **nn.Linear(2, 2).state_dict(),
            "shared": shared,
            "where": torch.device("cuda:1"),
        },
        "views": {"view": shared[2:4], "again": shared, "scalar": torch.tensor(7), "cpu": "cpu"},
        "empty": {"empty": torch.empty(0), "device": "cuda:0"},
    }

    def fill(exporter: PackageExporter) -> None:
        exporter.save_pickle("models", "state.pkl", saved["state"])
        exporter.save_source_string("pkg.net", SOURCE)
        exporter.save_pickle("other", "views.pkl", saved["views"])
        exporter.save_pickle("other.deep", "empty", saved["empty"])
        exporter.save_text("notes", "a.txt", "cuda:0")
        exporter.save_binary("notes", "b.bin", b"\x80\x02.")

    named = ("cuda:1", "cpu", "cuda:0", *["cuda:0"] * 3)
    return save_package(saved, path, tag, fill, named)


def module(path: Path, tag: str) -> Expected:
    saved = {"net": trained_net()}

    def fill(exporter: PackageExporter) -> None:
        exporter.intern("tests.**")
        exporter.save_pickle("models", "net", saved["net"])

    return save_package(saved, path, tag, fill)


def optimizer(path: Path, tag: str) -> Expected:
    net = nn.Linear(3, 2)
    adam = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    adam.step()
    saved = {"checkpoint": {"model": net.state_dict(), "optimizer": adam.state_dict()}}

    def fill(exporter: PackageExporter) -> None:
        exporter.save_pickle("training", "checkpoint", saved["checkpoint"])

    return save_package(saved, path, tag, fill)


def dtypes(path: Path, tag: str) -> Expected:
    kinds = (torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.complex64, torch.int64)
    saved: dict[str, Any] = {"all": {f"d{i}": of_dtype(kind) for i, kind in enumerate(kinds)}}

    def fill(exporter: PackageExporter) -> None:
        exporter.save_pickle("all", "dtypes", saved["all"])

    return save_package(saved, path, tag, fill)


def script(path: Path, tag: str) -> Expected:
    """A script module beside tensors: a pickle of the C++ pickler within the package."""
    net = nn.Linear(2, 2)
    scripted: Any = torch.jit.script(net)
    saved = {"both": {"script": scripted, "weight": torch.arange(3.0)}}

    def fill(exporter: PackageExporter) -> None:
        exporter.save_pickle("models", "both", saved["both"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(package_exporter, "_gate_torchscript_serialization", False)
        expected = save_package({"both": {"weight": saved["both"]["weight"]}}, path, tag, fill)
    relay(path, lambda name, data: _retagged(name, data, tag))
    held = {f"both.script.{name}": part for name, part in net.named_parameters()}
    return expected._replace(
        devices={**expected.devices, **dict.fromkeys(held, tag)},
        storages={**expected.storages, **storage_bytes(held)},
    )


def _retagged(name: str, data: bytes, tag: str) -> bytes:
    return retag(data, lambda _: tag) if SCRIPT_PICKLE.fullmatch(name) else data


PACKAGED_MAKERS: dict[str, FileMaker] = {
    make.__name__: make for make in (state_dicts, module, optimizer, dtypes, script)
}

#: Package → a name for each of its pickles, and where it is.
PICKLES = {
    "state_dicts": {
        "state": ("models", "state.pkl"),
        "views": ("other", "views.pkl"),
        "empty": ("other.deep", "empty"),
    },
    "module": {"net": ("models", "net")},
    "optimizer": {"checkpoint": ("training", "checkpoint")},
    "dtypes": {"all": ("all", "dtypes")},
    "script": {"both": ("models", "both")},
}
