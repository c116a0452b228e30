"""The report of a relocation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..manifest.manifest import NamedDevice
from ..placement.place import Kept, Moved
from .data.device_values import device_values_json
from .text import listed, printable, size

SCHEMA = 1


@dataclass(frozen=True)
class RelocateReport:
    """What a relocation did, or would do.

    Attributes:
        source: the checkpoint.
        destination: the new checkpoint; `source` after a change in place; None if there was nothing
            to write.
        written: whether it was written; False after a dry run.
        method: `patch` (a copy of the file with a new pickle of the same length), `relay` (the zip
            laid out again), `clone` (nothing had to change), `in-place` (a new pickle of the same
            length, over the old one) or `none` (nothing to write).
        copied: how the bytes were copied: `reflink`, `kernel` or `read`; `fetch` from an object
            store, `upload` to one; None if nothing was copied.
        moved: from `cpu→cuda:0` to the totals of storages and bytes, and of tensors that store
            their own device.
        kept: tensors that the rules match and that stay, with the reason.
        values_naming_devices: your own values that name a device and were not changed.
        values_rewritten: values that were rewritten (with `values=True`), and devices in an
            exported program.
        rewritten_to: the new device of each of these.
        values_rewritable: values that were not changed and that `values=True` would rewrite.
        values_unchanged: values that name a moved device and that cannot be rewritten.
        unknown_callables: callables not known to be harmless that loading the file would import;
            they were copied unchanged.
        warnings: what the user should know, one sentence each.
        nbytes: the size of the source.
        bytes_written: the size of the destination; for a change in place, the bytes written to the
            file.
        seconds: how long it took.
        in_place: whether the source itself was to be changed.
    """

    source: str
    destination: str | None
    written: bool
    method: str
    copied: str | None
    moved: Mapping[str, Moved]
    kept: tuple[Kept, ...] = ()
    values_naming_devices: tuple[NamedDevice, ...] = ()
    values_rewritten: tuple[NamedDevice, ...] = ()
    rewritten_to: tuple[str, ...] = ()
    values_rewritable: tuple[NamedDevice, ...] = ()
    values_unchanged: tuple[NamedDevice, ...] = ()
    unknown_callables: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    nbytes: int = 0
    bytes_written: int = 0
    seconds: float = field(default=0.0, compare=False)
    in_place: bool = False

    @property
    def values_could_follow(self) -> tuple[NamedDevice, ...]:
        """The old name of `values_rewritable`."""
        return self.values_rewritable

    @property
    def values_left_behind(self) -> tuple[NamedDevice, ...]:
        """The old name of `values_unchanged`."""
        return self.values_unchanged

    def to_json(self) -> dict[str, Any]:
        """Return plain data: the same as `ckptmove relocate --json` prints."""
        return {
            "schema": SCHEMA,
            "source": self.source,
            "destination": self.destination,
            "written": self.written,
            "method": self.method,
            "copied": self.copied,
            "moved": {
                name: {
                    "storages": moved.storages,
                    "nbytes": moved.nbytes,
                    "tensors": moved.tensors,
                }
                for name, moved in self.moved.items()
            },
            "kept": [{"name": k.name, "device": k.device, "why": k.why} for k in self.kept],
            **device_values_json(self),
            "unknown_callables": list(self.unknown_callables),
            "warnings": list(self.warnings),
            "nbytes": self.nbytes,
            "bytes_written": self.bytes_written,
            "seconds": round(self.seconds, 3),
            "in_place": self.in_place,
        }


_MOST_VALUES = 5
_HOW = {"clone": "as an exact copy", "patch": "as a patched clone", "relay": "with a new layout"}


def relocation(report: RelocateReport, *, full: bool = False) -> Iterator[str]:
    """What moved, what stayed and why, and where the result is.

    Args:
        report: what was done.
        full: whether to shorten nothing.
    """
    for move, moved in report.moved.items():
        yield f"{printable(move)}: {_moved(moved)}"
    yield from what_stays(report.kept, full=full)
    yield from _values(report, full)
    if report.destination is None and report.in_place:
        yield "nothing to move, so nothing was changed"
    elif report.destination is None:
        yield "nothing to move, so nothing was written; give DST to make a copy"
    elif report.method == "in-place":
        yield _in_place(report)
    elif report.written:
        nothing = "nothing to move; " if report.method == "clone" else ""
        yield printable(
            f"{nothing}wrote {report.destination} {_HOW[report.method]}: "
            f"{size(report.bytes_written)} in {report.seconds:.2f} s, verified"
        )
    else:
        yield printable(f"would write {report.destination} {_HOW[report.method]}")


def _in_place(report: RelocateReport) -> str:
    if not report.written:
        return printable(f"would change {report.destination} in place")
    return printable(
        f"changed {report.destination} in place: {size(report.bytes_written)} of "
        f"{size(report.nbytes)} written in {report.seconds:.2f} s, verified"
    )


def _moved(moved: Moved) -> str:
    what = []
    if moved.storages:
        plural = "" if moved.storages == 1 else "s"
        what.append(f"{moved.storages:,} storage{plural}, {size(moved.nbytes)}")
    if moved.tensors:
        plural = "" if moved.tensors == 1 else "s"
        what.append(f"{moved.tensors:,} tensor{plural} that store their own device")
    return ", ".join(what)


def _values(report: RelocateReport, full: bool) -> Iterator[str]:
    """What else names a device: of a program how many places, of the user's values each."""
    places: Counter[str] = Counter()
    rewritten = []
    for value, device in zip(report.values_rewritten, report.rewritten_to, strict=True):
        if value.follows:
            places[f"{value.value}→{device}"] += 1
        if full or not value.follows:
            rewritten.append(f"{value.name} ({value.value}→{device})")
    for move, n in places.items():
        yield printable(f"graph of the program: {n:,} place{'' if n == 1 else 's'} {move}")
    follow, stay = (
        [f"{value.name} ({value.value})" for value in values if not value.kind.startswith("code")]
        for values in (report.values_rewritable, report.values_unchanged)
    )  # of code there is a warning
    for what, values in (
        ("rewrote values that name a device", rewritten),
        ("unchanged values that --values would rewrite", follow),
        ("unchanged values that can't be rewritten", stay),
    ):
        if values:
            yield f"{what}: {listed(values, len(values) if full else _MOST_VALUES)}"


def what_stays(kept_ones: Iterable[Kept], *, full: bool) -> Iterator[str]:
    """What was named and stays, a line for each reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for kept in kept_ones:
        reasons.setdefault((kept.device, kept.why), []).append(kept.name)
    for (device, why), names in reasons.items():
        shown = names if full else names[:1]
        more = "" if len(shown) == len(names) else f" and {len(names) - 1:,} more"
        some = ", ".join(printable(name) for name in shown)
        yield f"kept on {printable(device)}: {some}{more} ({why})"
