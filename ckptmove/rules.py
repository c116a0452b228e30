"""The user's rules about devices: who goes where.

Of several kinds of rules the first that speaks for a tensor decides: place, device map, map, to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from .device import TagMap, parse
from .errors import DeviceError, StrPath, UsageError
from .manifest import TensorEntry

#: What a rule says a device is: its spelling, or anything that spells itself so.
Device = object


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules, checked.

    Attributes:
        place: (glob on names, device); of several that match, the last.
        device_map: module name → device; the longest prefix of a name wins.
        tags: present device → device.
        everything: move also what torch keeps on the CPU.
        values: rewrite also the user's own values that name a moved device.
    """

    place: tuple[tuple[str, str], ...] = ()
    device_map: Mapping[str, str] = field(default_factory=dict)
    tags: TagMap = field(default_factory=lambda: TagMap(()))
    everything: bool = False
    values: bool = False

    def wanted(self, entry: TensorEntry) -> str | None:
        """The device that the rules name for a tensor, or None."""
        named = self.named(entry)
        return self.tags.of(entry.device) if named is None else named

    def named(self, entry: TensorEntry) -> str | None:
        """The device that a rule gives a tensor by its name, or None."""
        names = [entry.name] if entry.part_of is None else [entry.name, entry.part_of]
        for glob, device in reversed(self.place):
            if any(fnmatchcase(name, glob) for name in names):
                return device
        key = self.map_key(entry)
        return None if key is None else self.device_map[key]

    def map_key(self, entry: TensorEntry) -> str | None:
        """The key of the device map that speaks for a tensor, or None.

        It is the longest that begins the tensor's name, whole keys at a time, be it the name within
        the model's state dict, as accelerate means it, or within the checkpoint. The empty key
        speaks for all that no other does.
        """
        found: list[str] = []
        for name in (entry.name, entry.state_key):
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
) -> Rules:
    """Check the rules of a user; the arguments are those of `relocate`.

    Raises:
        UsageError: they make no sense.
        DeviceError: a device does not.
    """
    if to is None and not map and not place and device_map is None:
        raise UsageError("no device is given", hint="try --to cuda:0")
    for name, value in (("map", map), ("place", place)):
        if value is not None and not isinstance(value, Mapping):
            raise UsageError(f"{name} must map names to devices")
    tags = [(str(tag), _device(device, f"map {tag}")) for tag, device in (map or {}).items()]
    if to is not None:
        tags.append(("*", _device(to, "to")))
    return Rules(
        place=tuple((glob, _device(each, f"place {glob}")) for glob, each in (place or {}).items()),
        device_map=_device_map(device_map),
        tags=TagMap(tuple(tags)),
        everything=all,
        values=values,
    )


def _device_map(given: Mapping[str, Device] | StrPath | None) -> dict[str, str]:
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return {name: _mapped(name, device) for name, device in given.items()}
    try:
        found = json.loads(Path(given).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"the device map can't be read: {error.strerror}", path=given) from error
    except (ValueError, RecursionError) as error:
        raise UsageError("the device map is not JSON", path=given) from error
    if not isinstance(found, dict):
        raise UsageError("the device map is not a JSON object of names and devices", path=given)
    try:
        return {name: _mapped(name, device) for name, device in found.items()}
    except UsageError as error:
        error.about(given)
        raise


def _mapped(name: str, device: Device) -> str:
    """A device in accelerate's spelling: a number n is `cuda:n`."""
    if device == "disk":
        raise UsageError(
            f"the device map offloads {name!r} to disk, which is no device a file can name"
        )
    number = isinstance(device, int) and not isinstance(device, bool)
    return _device(f"cuda:{device}" if number else device, f"device map, {name!r}")


def _device(device: Device, where: str) -> str:
    try:
        return parse(device)
    except DeviceError as error:
        raise DeviceError(f"{where}: {error}", hint=error.hint) from None
