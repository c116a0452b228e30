"""Parts of reports of moves: values that name a device, and tensors that stay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from ..display.plain import derived_key
from ..display.report import Report
from ..display.text import first_names
from ..manifest.other_records import NamedDevice
from ..manifest.paths import PlainPath

if TYPE_CHECKING:
    from ..placement.move_totals import Kept


class RewrittenDevice(NamedTuple):
    """A `NamedDevice` that was rewritten; `to` is the new device."""

    path: PlainPath
    name: str
    value: str
    kind: str
    fixed: bool
    to: str


class DeviceValuesReport(Report):
    """A report with the treatment of such values; its own docstring explains each field."""

    values_rewritten: tuple[NamedDevice, ...]
    rewritten_to: tuple[str, ...]
    values_rewritable: tuple[NamedDevice, ...]
    values_unchanged: tuple[NamedDevice, ...]

    @derived_key(after="values_naming_devices", name="values_rewritten")
    def rewrites(self) -> tuple[RewrittenDevice, ...]:
        """`values_rewritten`, each with its new device."""
        pairs = zip(self.values_rewritten, self.rewritten_to, strict=True)
        return tuple(RewrittenDevice(*each, device) for each, device in pairs)

    @derived_key(after="values_unchanged")
    def values_could_follow(self) -> tuple[NamedDevice, ...]:
        """The old name of `values_rewritable`."""
        return self.values_rewritable

    @derived_key(after="values_unchanged")
    def values_left_behind(self) -> tuple[NamedDevice, ...]:
        """The old name of `values_unchanged`."""
        return self.values_unchanged


def what_stays(kept_ones: Iterable[Kept], *, full: bool = False) -> Iterator[str]:
    """Return a line for each reason why matched tensors stay."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for kept in kept_ones:
        reasons.setdefault((kept.device, kept.why), []).append(kept.name)
    for (device, why), names in reasons.items():
        yield f"kept on {device}: {first_names(names, len(names) if full else 1)} ({why})"
