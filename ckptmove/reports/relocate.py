"""What a relocation did, in a few lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from ..api.relocate import RelocateReport
from ..placement.place import Kept, Moved
from .text import listed, printable, size

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
