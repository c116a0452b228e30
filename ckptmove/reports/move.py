"""The report of a move in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from ..display.phrases import plural
from ..display.plain import OMITTED, Seconds
from ..display.text import first_names, size
from ..manifest.other_records import NamedDevice
from ..placement.move_totals import Kept, Moved
from .device_values import DeviceValuesReport, what_stays

_MOST_UNREGISTERED = 5
_MOST_VALUES = 5


@dataclass(frozen=True)
class MoveReport(DeviceValuesReport):
    """What a move did, or would do, in memory.

    Attributes:
        model: the name of the model's class.
        done: whether it moved; False after a dry run.
        moved: from `cpu→cuda:0` to the totals of storages and bytes, and of tensors that store
            their own device.
        kept: tensors that the rules match and that stay, with the reason.
        unregistered: from tensors that moved, but that `Module.to` would have left behind, to the
            code to write instead.
        values_naming_devices: attributes of modules that name a device and were not changed.
        values_rewritten: attributes that named the old device and were rewritten.
        rewritten_to: the new device of each of these.
        values_rewritable: attributes that were not changed and that `values=True` would rewrite.
        values_unchanged: attributes that name an old device and are not rewritten: strings that may
            mean something else, and devices whose tensors went to several devices.
        warnings: what the user should know, one sentence each.
        nbytes: the bytes of the storages that moved.
        seconds: how long it took.
    """

    model: str
    done: bool
    moved: Mapping[str, Moved]
    kept: tuple[Kept, ...] = ()
    unregistered: Mapping[str, str] = field(default_factory=dict)
    values_naming_devices: tuple[NamedDevice, ...] = ()
    values_rewritten: Annotated[tuple[NamedDevice, ...], OMITTED] = ()
    rewritten_to: Annotated[tuple[str, ...], OMITTED] = ()
    values_rewritable: tuple[NamedDevice, ...] = ()
    values_unchanged: tuple[NamedDevice, ...] = ()
    warnings: tuple[str, ...] = ()
    nbytes: int = 0
    seconds: Seconds = field(default=0.0, compare=False)

    def blocks(self, *, full: bool = False) -> Iterator[str]:
        """Show what moved, what stayed and why, and what to look at."""
        would = "" if self.done else "would be "
        for way, moved in self.moved.items():
            parts = []
            if moved.storages:
                parts.append(f"{plural(moved.storages, 'storage')}, {size(moved.nbytes)}")
            if moved.tensors:
                parts.append(f"{plural(moved.tensors, 'tensor')} composed of other tensors")
            yield f"{would}moved: {way}: {', '.join(parts)}"
        if not self.moved:
            yield "nothing to move"
        yield from what_stays(self.kept)
        advised: dict[str, list[str]] = {}
        for name, advice in self.unregistered.items():
            advised.setdefault(advice, []).append(name)
        for n, (advice, names) in enumerate(advised.items()):
            if n < _MOST_UNREGISTERED:
                yield f"not registered: {first_names(names, _MOST_UNREGISTERED)}: {advice}"
        more = sum(map(len, list(advised.values())[_MOST_UNREGISTERED:]))
        if more:
            yield f"not registered: {more:,} more"
        rewritten = [
            f"{value.name} ({value.value}→{device})"
            for value, device in zip(self.values_rewritten, self.rewritten_to, strict=True)
        ]
        for what, values in (
            (f"{would}rewritten", rewritten),
            ("unchanged", [f"{v.name} ({v.value})" for v in self.values_rewritable]),
            ("not rewritten", [f"{v.name} ({v.value})" for v in self.values_unchanged]),
        ):
            if values:
                yield f"values that name a device, {what}: {first_names(values, _MOST_VALUES)}"
        yield from (f"warning: {each}" for each in self.warnings)

    def remarks(self) -> tuple[str, ...]:
        """Return nothing: `blocks` shows the warnings."""
        return ()
