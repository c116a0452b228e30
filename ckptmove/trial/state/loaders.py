"""Decide which library loads a format, and onto which device, before torch is imported.

Importing torch takes a hundred megabytes and a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ...manifest.device import is_tag
from ...manifest.manifest import Manifest, Role, Total
from ...reports.validate import SKIPPED, Finding
from ...sources.budget import reserve

#: Without tar files: torch refuses them; up to 2.5, it unpacked them to any path, CVE-2025-32434.
BY_TORCH_LOAD = ("torch-zip", "torch-legacy", "torch-sharded")
BY_SAFETENSORS = ("safetensors", "safetensors-sharded")
_BY_TORCH = (*BY_TORCH_LOAD, *BY_SAFETENSORS, "torchscript")
#: Formats of which torch.load can load only single files, if any.
_BY_RANKS = ("dcp", "dcp-safetensors", "deepspeed", "universal", "fsdp-ranks")
#: The memory that the library needs for any file, and for each byte of the header, in bytes. It
#: needs 1300 for a tensor, and the shortest entry of a tensor has 60.
_SAFETENSORS_FLOOR, _PER_HEADER_BYTE = 32 << 20, 24
_WITHOUT_DEVICE = (Role.ARRAY, Role.UNTAGGED)


def not_loaded(format: str) -> Finding | None:
    """The finding that no library loads this format without running code; None if one does."""
    if format in _BY_TORCH:
        return None
    why = f"torch can load {format} only by running its code"
    if format == "nemo":
        why = "torch does not load nemo; NeMo unpacks it"
    elif format in _BY_RANKS:
        why = f"not tried: the library that wrote {format} loads it on its ranks, into a model"
    return Finding("reload", SKIPPED, why)


def reserve_for_safetensors(path: str) -> None:
    """Raise MemoryError if memory is too short for the safetensors library, which would crash."""
    with Path(path).open("rb") as file:
        header_nbytes = int.from_bytes(file.read(8), "little")
    reserve(_SAFETENSORS_FLOOR + _PER_HEADER_BYTE * header_nbytes)


def usual_device(manifest: Manifest) -> str:
    """The device on which most of a checkpoint is stored, if it can compute; else the CPU."""
    usable = (each for each in devices_of(manifest) if is_tag(each) and each != "meta")
    return next(usable, "cpu")


def devices_of(manifest: Manifest) -> Mapping[str, Total]:
    """The devices of its tensors, the one with most bytes first; some tensors have no device."""
    untold = {each.storage for each in manifest.tensors if each.role in _WITHOUT_DEVICE}
    tensors = tuple(entry for entry in manifest.tensors if entry.role not in _WITHOUT_DEVICE)
    storages = {key: each for key, each in manifest.storages.items() if key not in untold}
    return replace(manifest, tensors=tensors, storages=storages).devices
