"""The user's rules about devices: parse them, and find the one for a tensor.

If several kinds of rules match a tensor, the first of these wins: place, device map, map, to.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from ..display.phrases import class_name
from ..errors import DeviceError, StrPath, UsageError
from ..manifest.device import Device, TagMap, parse
from ..manifest.manifest import TensorEntry
from ..manifest.paths import Path as KeyPath

#: The prefix that `torch.compile` adds to names in a module.
_WRAPPED = r"\b_orig_mod\."


class Rules(NamedTuple):
    """Rules, checked."""

    #: (glob on names, device); the last matching glob wins.
    place: tuple[tuple[str, str], ...] = ()
    #: Module name → device; the longest prefix of a name wins.
    device_map: Mapping[str, str] = {}
    tags: TagMap = TagMap(())
    everything: bool = False  #: also move tensors that torch keeps on the CPU
    values: bool = False  #: also rewrite the user's values that name a moved device
    #: Path of a tensor → its device, regardless of the rules.
    fixed: Mapping[KeyPath, str] = {}

    def device_for(self, entry: TensorEntry) -> str | None:
        """Return the device that the rules name for a tensor, or None."""
        named = self.device_by_name(entry)
        return self.tags.of(entry.device) if named is None else named

    def device_by_name(self, entry: TensorEntry) -> str | None:
        """Return the device that a rule gives a tensor by name, or None."""
        if self.fixed and entry.path in self.fixed:
            return self.fixed[entry.path]
        for glob, device in reversed(self.place):
            names = [entry.name] if entry.part_of is None else [entry.name, entry.part_of]
            if any(fnmatchcase(name, glob) for name in names):
                return device
        key = self.map_key(entry) if self.device_map else None
        return None if key is None else self.device_map[key]

    def map_key(self, entry: TensorEntry) -> str | None:
        """Return the key of the device map that applies to a tensor, or None.

        It is the longest key that is a prefix of the tensor's name, compared by whole parts. The
        name may be that in the model's state dict, as in accelerate, or that in the checkpoint,
        with or without the prefix of `torch.compile`. The empty key applies to all other tensors.
        """
        found: list[str] = []
        names = [each for each in (entry.name, entry.state_key) if each]
        names += [re.sub(_WRAPPED, "", each) for each in names if "_orig_mod." in each]
        for name in names:
            while name and self.device_map:
                if name in self.device_map:
                    found.append(name)
                    break
                name = name.rpartition(".")[0]
        if found:
            return max(found, key=lambda key: key.count("."))
        return "" if "" in self.device_map else None


def rules_of(
    *,
    to: Device | None = None,
    map: Mapping[str, Device] | None = None,
    place: Mapping[str, Device] | None = None,
    device_map: Mapping[str, Device] | StrPath | None = None,
    all: bool = False,
    values: bool = False,
    tag_of: Callable[[Device], str] = parse,
) -> Rules:
    """Check a user's rules, with the names of `relocate`; `tag_of` returns a device's tag."""
    if to is None and not map and not place and device_map is None:
        raise UsageError("the device is missing", hint="for example --to cuda:0")
    for name, value in (("map", map), ("place", place)):
        if value is not None and not isinstance(value, Mapping):
            raise UsageError(f"{name} must map names to devices")
    tags = [(str(tag), _tag(each, f"map {tag}", tag_of)) for tag, each in (map or {}).items()]
    if to is not None:
        tags.append(("*", _tag(to, "to", tag_of)))
    return Rules(
        place=tuple(
            (glob, _tag(each, f"place {glob}", tag_of)) for glob, each in (place or {}).items()
        ),
        device_map=_device_map(device_map, tag_of),
        tags=TagMap(tuple(tags)),
        everything=all,
        values=values,
    )


def _device_map(
    given: Mapping[str, Device] | StrPath | None, tag_of: Callable[[Device], str]
) -> dict[str, str]:
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return _tags_by_module(given, tag_of)
    if not isinstance(given, (str, os.PathLike)):
        raise UsageError(
            f"{class_name(given)} is not a device map",
            hint='a device map gives a device for each module name, as {"encoder": "cuda:0", '
            '"": "cpu"}, or is the path of such a JSON file',
        )
    import json

    try:
        with open(given, encoding="utf-8") as file:  # noqa: PTH123 -- pathlib is slow to import
            found = json.load(file)
    except OSError as error:
        raise UsageError(f"the device map can't be read: {error.strerror}", path=given) from error
    except (ValueError, RecursionError) as error:
        raise UsageError("the device map is not JSON", path=given) from error
    if not isinstance(found, dict):
        raise UsageError("the device map is not a JSON object of names and devices", path=given)
    try:
        return _tags_by_module(found, tag_of)
    except UsageError as error:
        error.about(given)
        raise


def _tags_by_module(given: Mapping[str, Device], tag_of: Callable[[Device], str]) -> dict[str, str]:
    """Devices in accelerate's spelling: a number n is `cuda:n`."""
    found = {}
    for name, device in given.items():
        if not isinstance(name, str):
            raise UsageError(
                f"the device map has the key {name!r}, which is not the name of a module"
            )
        if device == "disk":
            raise UsageError(f"the device map offloads {name!r} to disk, which is not a device")
        number = isinstance(device, int) and not isinstance(device, bool)
        plain = f"cuda:{device}" if number else device
        found[name] = _tag(plain, f"device map, {name!r}", tag_of)
    return found


def _tag(device: Device, where: str, tag_of: Callable[[Device], str]) -> str:
    try:
        return tag_of(device)
    except DeviceError as error:
        raise DeviceError(f"{where}: {error}", hint=error.hint) from error.__cause__
