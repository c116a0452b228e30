"""Count what a run does on devices, by site: an operation in a module at a line in a phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ....reports.events import Happening, Operand, Site, Span, Timeline, Usage

MOST_SITES = 4096  # operations at more sites are counted, but not by site
_MOST_SPANS = 4096  # of a step; later operations are only counted
Key = tuple[str, Site, str]  # the kind of an event, its site, and its devices


@dataclass
class EventCount:
    """An event, with the number of times that it happened."""

    count: int = 0
    nbytes: int = 0
    operands: tuple[Operand, ...] = ()
    asked: bool = False
    turns: int = 0
    latest: tuple[int, int] | None = None  # the latest of these turns


class SiteCount:
    """How often an operation ran at a site.

    Attributes:
        site: the operation, in a module at a line in a phase.
        count: how often it ran.
        used: by device, how often it ran there, and how many bytes it made.
    """

    __slots__ = ("count", "site", "used")

    def __init__(self, site: Site) -> None:
        self.site = site
        self.count = 0
        self.used: dict[str, list[int]] = {}

    def use(self, device: str, nbytes: int) -> None:
        """Count a run of the operation on a device, where it made `nbytes` bytes."""
        used = self.used.get(device)
        if used is None:
            used = self.used[device] = [0, 0]
        used[0] += 1
        used[1] += nbytes


@dataclass(slots=True)
class _Running:
    """Operations that run in one place, until an operation runs in another place."""

    site: Site
    device: str
    operations: int = 0
    nbytes: int = 0
    copied: dict[str, int] | None = None
    waits: int = 0

    def is_at(self, site: Site) -> bool:
        """Whether a site is in the same place; a site without a known place counts as the same."""
        own = self.site
        if own is site:
            return True
        if own.phase != site.phase:
            return False
        known = site.source or site.module
        return not known or (own.source == site.source and own.module == site.module)

    def span(self) -> Span:
        place = self.site.phase, self.site.module, self.site.source, self.device
        return Span(*place, self.operations, self.nbytes, self.copied or {}, self.waits)


class Tally:
    """The totals of a run.

    Attributes:
        happenings: events that are worth a look.
        dropped: how many events were left out, because there were too many different ones.
    """

    def __init__(self) -> None:
        self.happenings: dict[Key, EventCount] = {}
        self.dropped = 0
        self._places: dict[Site, SiteCount] = {}
        self._rest: dict[Site, SiteCount] = {}  # the operations of all further sites, by phase
        self._running: list[_Running] = []
        self._left_out = 0
        self._finished: Timeline | None = None

    def place(self, site: Site) -> SiteCount:
        """The place of a site; if there are too many, one place for all others in its phase."""
        found = self._places.get(site)
        if found is None and len(self._places) < MOST_SITES:
            found = self._places[site] = SiteCount(site)
        if found is None:
            found = self._rest.setdefault(other := Site(site.phase, "", "", ""), SiteCount(other))
        return found

    def use(self, place: SiteCount, device: str, nbytes: int) -> None:
        """Count an operation that ran on a device, and made `nbytes` bytes."""
        place.use(device, nbytes)
        running = self._running[-1] if self._running else None
        if running is None or running.device != device or not running.is_at(place.site):
            if len(self._running) >= _MOST_SPANS:
                self._left_out += 1
                return
            self._running.append(running := _Running(place.site, device))
        running.operations += 1
        running.nbytes += nbytes

    def note(
        self, key: Key, turn: tuple[int, int], nbytes: int, new: Callable[[], EventCount]
    ) -> None:
        """Count an event, and the turns in which it happens; `new` describes a new event."""
        self._mark(*key, nbytes)
        found = self.happenings.get(key)
        if found is None:
            if len(self.happenings) >= MOST_SITES:
                self.dropped += 1
                return
            found = self.happenings[key] = new()
        found.count += 1
        found.nbytes += nbytes
        if found.latest != turn:
            found.latest = turn
            found.turns += 1

    def _mark(self, kind: str, site: Site, devices: str, nbytes: int) -> None:
        """Add a copy, or a wait of the host, to the timeline."""
        if kind not in ("transfer", "sync"):
            return
        running = self._running[-1] if self._running else None
        if running is None or not running.is_at(site):
            if len(self._running) >= _MOST_SPANS:
                return
            self._running.append(running := _Running(site, devices.rpartition("→")[2]))
        if kind == "sync":
            running.waits += 1
        else:
            running.copied = running.copied or {}
            running.copied[devices] = running.copied.get(devices, 0) + nbytes

    def finish_step(self, step: int) -> None:
        """End a step that an optimizer has taken; later operations belong to the next step."""
        self._finished = self._timeline(step)
        self._running, self._left_out = [], 0

    def timeline(self, *, unfinished: bool) -> Timeline:
        """The last finished step; the operations since then if none is, or with `unfinished`."""
        unfinished = unfinished and bool(self._running)  # else the unfinished step was not watched
        return self._timeline() if unfinished or self._finished is None else self._finished

    def _timeline(self, step: int = 0) -> Timeline:
        return Timeline(tuple(each.span() for each in self._running), self._left_out, step)

    def forget(self, *kinds: str) -> None:
        """Remove the events of some kinds."""
        for key in [each for each in self.happenings if each[0] in kinds]:
            del self.happenings[key]

    @property
    def sites(self) -> int:
        """The number of sites that ran operations."""
        return len(self._places)

    @property
    def phases(self) -> dict[str, int]:
        """The number of operations by phase."""
        found: dict[str, int] = {}
        for each in (*self._places.values(), *self._rest.values()):
            if each.count:
                found[each.site.phase] = found.get(each.site.phase, 0) + each.count
        return found

    @property
    def operations(self) -> dict[str, int]:
        """The number of operations by device."""
        found: dict[str, int] = {}
        for each in (*self._places.values(), *self._rest.values()):
            for device, (count, _) in each.used.items():
                found[device] = found.get(device, 0) + count
        return found

    @property
    def modules(self) -> dict[str, dict[str, Usage]]:
        """The operations and bytes of each module, by device."""
        found: dict[str, dict[str, Usage]] = {}
        for each in self._places.values():
            for device, (count, nbytes) in each.used.items():
                devices = found.setdefault(each.site.module, {})
                before = devices.get(device, Usage(0, 0))
                devices[device] = Usage(before.operations + count, before.nbytes + nbytes)
        return found


def happened(noted: dict[Key, EventCount]) -> Iterator[Happening]:
    """The events in the form that reports have."""
    for (kind, site, devices), each in noted.items():
        counts = each.count, each.nbytes, each.operands, each.asked
        yield Happening(kind, site, devices, *counts, max(each.turns, 1))
