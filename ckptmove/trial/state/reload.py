"""Load a checkpoint with torch itself, and check the devices of its tensors."""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ...display.phrases import format_error, join_names, plural
from ...manifest.manifest import Manifest
from ...reports.validate import FAILED, PASSED, SKIPPED, Finding
from ..sandbox.torchscript import danger, makes_itself
from ..trial import is_there
from .loaders import BY_TORCH_LOAD, not_loaded, reserve_for_safetensors, usual_device

_HOLDING = (dict, list, tuple, set, frozenset)
_END = object()
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")


def there(manifest: Manifest, device: str) -> str:
    """Resolve `auto`: the device of most of the checkpoint if this machine has it, else the CPU."""
    if device != "auto":
        return device
    usual = usual_device(manifest)
    return usual if is_there(usual) else "cpu"


def check_reload(files: Sequence[str], format: str, device: str) -> Finding:
    """Load a checkpoint onto a device with torch, and check that all tensors are there."""
    if not is_there(device):
        return Finding("reload", SKIPPED, f"there is no {device} on this machine")
    skipped = not_loaded(format)
    if skipped is not None:
        return skipped
    how, tensors, stray = "", 0, list[str]()
    try:
        for file in files:
            if format == "torchscript" and makes_itself(file):
                title = "torch.jit.load would run code of the file, its __setstate__"
                return Finding("reload", SKIPPED, title)
            if format == "torchscript" and danger(file) is not None:
                title = "torch.jit.load would create unknown objects of the file"
                return Finding("reload", SKIPPED, title)
            how, found = _load(file, format, device)
            for name, tensor in tensors_in(found):
                tensors += 1
                if tensor.device != torch.device(device) and not tensor.is_meta:
                    stray.append(name)
    except pickle.UnpicklingError as error:
        return Finding("reload", SKIPPED, "torch.load(weights_only=True) refuses it", _why(error))
    except Exception as error:  # whatever torch raises is the finding
        return Finding("reload", FAILED, "torch can't load it", [format_error(error)])
    data = {"by": how, "device": device, "tensors": tensors, "elsewhere": stray}
    if stray:
        title = f"{plural(len(stray), 'tensor')} of {tensors:,} are not on {device} after loading"
        return Finding("reload", FAILED, title, [join_names(stray)], data)
    title = f"{how} put {plural(tensors, 'tensor')} on {device}"
    return Finding("reload", PASSED, title, (), data)


def _why(error: BaseException) -> list[str]:
    """Lines about the names that torch's restricted unpickler refuses."""
    names = _GLOBAL.findall(str(error))
    refused = [f"it names {name}" for name in dict.fromkeys(names)]
    return [*refused, "ckptmove.load returns placeholders for such objects; convert keeps them"]


def _load(path: str, format: str, device: str) -> tuple[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about old formats and their contents
        if format in BY_TORCH_LOAD:
            mapped = _can_be_mapped(path)
            loaded = torch.load(path, map_location=device, weights_only=True, mmap=mapped)
            return f"torch.load(weights_only=True{', mmap=True' if mapped else ''})", loaded
        if format == "torchscript":
            script = torch.jit.load(path, map_location=device)
            return "torch.jit.load", dict(script.state_dict())
        from safetensors.torch import load_file

        reserve_for_safetensors(path)
        return "safetensors.torch.load_file", load_file(path, device=device)


def _can_be_mapped(path: str) -> bool:
    """Whether it is a zip without compression; torch would map compressed bytes as tensors."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return all(each.compress_type == zipfile.ZIP_STORED for each in archive.infolist())


def tensors_in(root: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in dicts, lists, tuples and sets, with its name."""
    met: set[int] = set()
    # Iterators avoid a list of the names of all items of a long list.
    todo: list[tuple[str, Iterator[tuple[object, object]]]] = [("", iter([("", root)]))]
    while todo:
        prefix, rest = todo[-1]
        key, value = next(rest, (None, _END))
        if value is _END:
            todo.pop()
        elif isinstance(value, torch.Tensor):
            yield f"{prefix}{key}" or "(root)", value
        elif isinstance(value, _HOLDING) and id(value) not in met:
            met.add(id(value))
            inside = value.items() if isinstance(value, dict) else enumerate(value)
            name = f"{prefix}{key}"
            todo.append((f"{name}." if name else "", iter(inside)))
