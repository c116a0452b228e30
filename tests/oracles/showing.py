"""What a file's tensors show, read from where its manifest says that they lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from ckptmove import Manifest, TensorEntry


def told(manifest: Manifest) -> list[tuple[Any, ...]]:
    """What a manifest says about tensors, independent of the layout of the file."""
    names = ("name", "dtype", "shape", "device", "section", "requires_grad", "kind", "layout")
    return [
        (*(getattr(entry, name) for name in names), entry.part_of) for entry in manifest.tensors
    ]


def elements(path: Path, manifest: Manifest, *, swapped: bool = False) -> dict[str, bytes]:
    """Name → the elements of each strided tensor in the file, in order.

    `swapped` means that the most significant byte of each element comes first.
    """
    data = np.memmap(path, np.uint8, "r")
    found = {}
    for entry in manifest.tensors:
        if entry.layout == "strided" and entry.dtype not in ("quint4x2", "quint2x4"):
            shown = _elements(data, entry, manifest)
            if shown is not None:
                found[entry.name] = shown if not swapped else _swapped(shown, entry)
    return found


def _swapped(shown: bytes, entry: TensorEntry) -> bytes:
    width = getattr(torch, entry.dtype).itemsize
    return np.frombuffer(shown, np.uint8).reshape(-1, width)[:, ::-1].tobytes()


def _elements(data: Any, entry: TensorEntry, manifest: Manifest) -> bytes | None:
    storage = manifest.storages.get(entry.storage or "")
    if storage is None or storage.extent is None:
        return None
    if not entry.nbytes:
        return b""
    width = getattr(torch, entry.dtype).itemsize
    start = storage.extent.start + entry.offset * width
    view = np.lib.stride_tricks.as_strided(
        data[start : storage.extent.end],
        (*entry.shape, width),
        (*(n * width for n in entry.stride), 1),
        writeable=False,
    )
    return view.tobytes()
