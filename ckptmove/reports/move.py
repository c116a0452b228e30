"""The report of a move in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..manifest.manifest import NamedDevice
from ..phrases import plural
from ..placement.place import Kept, Moved
from .blocks import Block, html_of, text_of
from .data.device_values import device_values_json
from .text import listed, size

SCHEMA = 1
_MOST_KEPT = 1
_MOST_UNREGISTERED = 5
_MOST_VALUES = 5


@dataclass(frozen=True)
class MoveReport:
    """What a move did, or would do, in memory. `print` and notebooks show it in a few lines.

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
    values_rewritten: tuple[NamedDevice, ...] = ()
    rewritten_to: tuple[str, ...] = ()
    values_rewritable: tuple[NamedDevice, ...] = ()
    values_unchanged: tuple[NamedDevice, ...] = ()
    warnings: tuple[str, ...] = ()
    nbytes: int = 0
    seconds: float = field(default=0.0, compare=False)

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "done": self.done,
            "moved": {name: moved._asdict() for name, moved in self.moved.items()},
            "kept": [kept._asdict() for kept in self.kept],
            "unregistered": dict(self.unregistered),
            **device_values_json(self),
            "warnings": list(self.warnings),
            "nbytes": self.nbytes,
            "seconds": round(self.seconds, 3),
        }

    def __str__(self) -> str:
        return "\n".join(text_of([Block(list(_lines(self)))]))

    def _repr_html_(self) -> str:
        return html_of([Block(list(_lines(self)))])


def _lines(report: MoveReport) -> Iterator[str]:
    would = "" if report.done else "would be "
    for way, moved in report.moved.items():
        parts = []
        if moved.storages:
            parts.append(f"{plural(moved.storages, 'storage')}, {size(moved.nbytes)}")
        if moved.tensors:
            parts.append(f"{plural(moved.tensors, 'tensor')} composed of other tensors")
        yield f"{would}moved: {way}: {', '.join(parts)}"
    if not report.moved:
        yield "nothing to move"
    reasons: dict[tuple[str, str], list[str]] = {}
    for kept in report.kept:
        reasons.setdefault((kept.device, kept.why), []).append(kept.name)
    for (device, why), names in reasons.items():
        yield f"kept on {device}: {listed(names, _MOST_KEPT)} ({why})"
    advised: dict[str, list[str]] = {}
    for name, advice in report.unregistered.items():
        advised.setdefault(advice, []).append(name)
    for n, (advice, names) in enumerate(advised.items()):
        if n < _MOST_UNREGISTERED:
            yield f"not registered: {listed(names, _MOST_UNREGISTERED)}: {advice}"
    more = sum(map(len, list(advised.values())[_MOST_UNREGISTERED:]))
    if more:
        yield f"not registered: {more:,} more"
    rewritten = [
        f"{value.name} ({value.value}→{device})"
        for value, device in zip(report.values_rewritten, report.rewritten_to, strict=True)
    ]
    for what, values in (
        (f"{would}rewritten", rewritten),
        ("unchanged", [f"{v.name} ({v.value})" for v in report.values_rewritable]),
        ("not rewritten", [f"{v.name} ({v.value})" for v in report.values_unchanged]),
    ):
        if values:
            yield f"values that name a device, {what}: {listed(values, _MOST_VALUES)}"
    yield from (f"warning: {each}" for each in report.warnings)
