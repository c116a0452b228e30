"""Values that name a device, as the reports of `relocate` and `move` give them in JSON."""

from __future__ import annotations

from dataclasses import dataclass

from ..manifest.manifest import NamedDevice
from .display.plain import derived
from .display.report import Report


@dataclass(frozen=True)
class RewrittenDevice(NamedDevice):
    """A value that named a device and was rewritten; `to` is the new device."""

    to: str = ""


class DeviceValuesReport(Report):
    """A report that tells what became of such values; its own docstring says what each is."""

    values_rewritten: tuple[NamedDevice, ...]
    rewritten_to: tuple[str, ...]
    values_rewritable: tuple[NamedDevice, ...]
    values_unchanged: tuple[NamedDevice, ...]

    @derived(after="values_naming_devices", name="values_rewritten")
    def rewrites(self) -> tuple[RewrittenDevice, ...]:
        """`values_rewritten`, each with its new device."""
        pairs = zip(self.values_rewritten, self.rewritten_to, strict=True)
        return tuple(
            RewrittenDevice(each.path, each.name, each.value, each.kind, each.fixed, device)
            for each, device in pairs
        )

    @derived(after="values_unchanged")
    def values_could_follow(self) -> tuple[NamedDevice, ...]:
        """The old name of `values_rewritable`."""
        return self.values_rewritable

    @derived(after="values_unchanged")
    def values_left_behind(self) -> tuple[NamedDevice, ...]:
        """The old name of `values_unchanged`."""
        return self.values_unchanged
