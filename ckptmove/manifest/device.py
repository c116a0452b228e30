"""Device tags such as `cuda:0`: what a user may ask for, and the rules that map one to another."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import lru_cache
from typing import NamedTuple

from ..errors import DeviceError
from ..pickles.device_tags import INDEXED, PLAIN, RENAMED, TAG

#: A device from the user: its text, or an object with such a text.
Device = object

#: Devices whose tensors torch saves through the CPU: no storage ever carries their tag.
_THROUGH_CPU = ("xla", "maia", "lazy", "vulkan", "ipu", "ort")
_MAX_INDEX = 127  # c10::DeviceIndex is a signed byte
_MOST_KNOWN = 1 << 10  # cached strings
_MOST_DIGITS = 3  # Python itself refuses to read a number of thousands

_WRITTEN_LIKE = {"gpu": "cuda", "nvidia": "cuda", "rocm": "cuda", "hip": "cuda", "amd": "cuda"}


def parse(device: object) -> str:
    """Return the tag that torch writes for a user's device, e.g. `mps:0` → `mps`.

    Args:
        device: its spelling, or an object that spells itself so, such as a `torch.device`.

    Raises:
        DeviceError: torch could not load a storage with this tag; the message says why.
    """
    if not isinstance(device, str) and type(device).__name__ != "device":
        number = isinstance(device, int) and not isinstance(device, bool)
        raise DeviceError(
            f"{device!r} is not a device", hint=f"did you mean cuda:{device}?" if number else None
        )
    text = str(device)
    match = TAG.fullmatch(text)
    kind, index = (match[1], match[2]) if match else (text.partition(":")[0], None)
    if kind in _THROUGH_CPU:
        raise DeviceError(
            f"'{text}' can't be a device tag: torch saves {kind} tensors as CPU tensors",
            hint="use --to cpu",
        )
    if kind not in PLAIN + INDEXED + RENAMED:
        meant = _WRITTEN_LIKE.get(kind.lower(), kind.lower())
        known = meant in PLAIN + INDEXED + RENAMED
        raise DeviceError(
            f"'{text}' is not a device type of torch",
            hint=f"did you mean {meant}{'' if meant in PLAIN else ':0'}?"
            if known
            else "devices are written like cpu, cuda:0, mps, xpu:0, npu:0, meta",
        )
    if match is None:
        raise DeviceError(
            f"'{text}' is not a device: the index must be a plain number",
            hint=f"did you mean {kind if kind in PLAIN else f'{kind}:0'}?",
        )
    if kind in PLAIN and index is not None:
        if kind == "mps" and index == "0":
            return "mps"
        raise DeviceError(
            f"'{text}' can't be loaded by torch: the tag {kind} takes no index",
            hint=f"did you mean {kind}?",
        )
    if index is not None and (len(index) > _MOST_DIGITS or int(index) > _MAX_INDEX):
        raise DeviceError(f"'{text}': torch counts devices only up to {_MAX_INDEX}")
    return text


def is_tag(text: str) -> bool:
    """Whether torch writes this as the location of a storage; in a file it may be any text."""
    try:
        return parse(text) == text
    except DeviceError:
        return False


def with_index(device: object) -> str:
    """Return the compute device that a user means, e.g. `cuda` → `cuda:0`.

    Raises: DeviceError: it is not a device, or not one for computing.
    """
    tag = parse(device)
    if tag == "meta":
        raise DeviceError("the device meta cannot compute anything")
    return tag if tag in PLAIN or ":" in tag else f"{tag}:0"


def kind_of(tag: str) -> str:
    """`cuda:1` → `cuda`."""
    return tag.partition(":")[0]


class TagMap(NamedTuple):
    """Which tag becomes which: `cuda:1=cuda:0`, `cuda:*=cpu`, `*=cpu`; exact tags win, then order.

    Attributes:
        rules: pairs of (tag or pattern with `*`, new tag).
    """

    rules: tuple[tuple[str, str], ...]

    @lru_cache(_MOST_KNOWN)  # noqa: B019 (it keeps a few rules alive)
    def of(self, tag: str) -> str | None:
        """Return the new tag, or None if no rule matches."""
        for pattern, new in self.rules:
            if pattern == tag:
                return new
        for pattern, new in self.rules:
            if "*" in pattern and fnmatchcase(tag, pattern.replace("[", "[[]")):
                return new
        return None
