"""Values that name a device, as the reports of `relocate` and `move` give them in JSON."""

from __future__ import annotations

from typing import Any, Protocol

from ...manifest.manifest import NamedDevice


class _Report(Protocol):
    """A report that tells what became of such values; its own docstring says what each is."""

    @property
    def values_naming_devices(self) -> tuple[NamedDevice, ...]: ...
    @property
    def values_rewritten(self) -> tuple[NamedDevice, ...]: ...
    @property
    def rewritten_to(self) -> tuple[str, ...]: ...
    @property
    def values_rewritable(self) -> tuple[NamedDevice, ...]: ...
    @property
    def values_unchanged(self) -> tuple[NamedDevice, ...]: ...


def device_values_json(report: _Report) -> dict[str, Any]:
    """Return these values as plain data; two kinds also have their former names."""
    rewritable = [value.to_json() for value in report.values_rewritable]
    unchanged = [value.to_json() for value in report.values_unchanged]
    return {
        "values_naming_devices": [value.to_json() for value in report.values_naming_devices],
        "values_rewritten": [
            {**value.to_json(), "to": device}
            for value, device in zip(report.values_rewritten, report.rewritten_to, strict=True)
        ],
        "values_rewritable": rewritable,
        "values_unchanged": unchanged,
        "values_could_follow": rewritable,  # its former name
        "values_left_behind": unchanged,  # its former name
    }
