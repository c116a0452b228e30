"""Count what a run does on devices, by site: an operation in a module at a line in a phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ....reports.events import Happening, Operand, Site, Span, Timeline, Usage

MOST_SITES = 4096  # more are counted, and not told apart
_MOST_SPANS = 4096  # of a step; of more, the operations are counted
Key = tuple[str, Site, str]  # the kind of an event, where, and its devices


@dataclass
class Noted:
    """An event, however often it happened."""

    count: int = 0
    nbytes: int = 0
    operands: tuple[Operand, ...] = ()
    asked: bool = False
    turns: int = 0
    latest: tuple[int, int] | None = None  # of these turns


class Place:
    """What ran at a site.

    Attributes:
        site: the operation, in a module at a line in a phase.
        count: how often it ran.
        used: by device how often it computed there, and how many bytes it made.
    """

    __slots__ = ("count", "site", "used")

    def __init__(self, site: Site) -> None:
        self.site = site
        self.count = 0
        self.used: dict[str, list[int]] = {}

    def use(self, device: str, nbytes: int) -> None:
        """The operation computed on a device, and made so many bytes."""
        used = self.used.get(device)
        if used is None:
            used = self.used[device] = [0, 0]
        used[0] += 1
        used[1] += nbytes


@dataclass(slots=True)
class _Running:
    """What runs in one place, until something runs in another."""

    site: Site
    device: str
    operations: int = 0
    nbytes: int = 0
    copied: dict[str, int] | None = None
    waits: int = 0

    def is_at(self, site: Site) -> bool:
        """Whether an operation is of the same place; so is one whose place is not known."""
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
        happenings: what is worth a look.
        dropped: events that were not told apart.
    """

    def __init__(self) -> None:
        self.happenings: dict[Key, Noted] = {}
        self.dropped = 0
        self._places: dict[Site, Place] = {}
        self._rest: dict[Site, Place] = {}  # those of many sites, by phase
        self._running: list[_Running] = []
        self._left_out = 0
        self._finished: Timeline | None = None

    def place(self, site: Site) -> Place:
        """What ran at a site; of too many, what ran at all others in its phase."""
        found = self._places.get(site)
        if found is None and len(self._places) < MOST_SITES:
            found = self._places[site] = Place(site)
        if found is None:
            found = self._rest.setdefault(other := Site(site.phase, "", "", ""), Place(other))
        return found

    def use(self, place: Place, device: str, nbytes: int) -> None:
        """An operation computed on a device, and made so many bytes."""
        place.use(device, nbytes)
        running = self._running[-1] if self._running else None
        if running is None or running.device != device or not running.is_at(place.site):
            if len(self._running) >= _MOST_SPANS:
                self._left_out += 1
                return
            self._running.append(running := _Running(place.site, device))
        running.operations += 1
        running.nbytes += nbytes

    def note(self, key: Key, turn: tuple[int, int], nbytes: int, new: Callable[[], Noted]) -> None:
        """Count an event, once for each turn; `new` describes one that is new."""
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
        """Have the timeline show a copy, or that the host waited."""
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
        """An optimizer has taken this step; what runs now is of the next one."""
        self._finished = self._timeline(step)
        self._running, self._left_out = [], 0

    def timeline(self, *, unfinished: bool) -> Timeline:
        """The last finished step; or, if there is none or so asked for, what ran since."""
        unfinished = unfinished and bool(self._running)  # else that was not watched
        return self._timeline() if unfinished or self._finished is None else self._finished

    def _timeline(self, step: int = 0) -> Timeline:
        return Timeline(tuple(each.span() for each in self._running), self._left_out, step)

    def forget(self, *kinds: str) -> None:
        """Leave out events of some kinds."""
        for key in [each for each in self.happenings if each[0] in kinds]:
            del self.happenings[key]

    @property
    def sites(self) -> int:
        """How many places ran operations."""
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
        """What each module used, by device."""
        found: dict[str, dict[str, Usage]] = {}
        for each in self._places.values():
            for device, (count, nbytes) in each.used.items():
                devices = found.setdefault(each.site.module, {})
                before = devices.get(device, Usage(0, 0))
                devices[device] = Usage(before.operations + count, before.nbytes + nbytes)
        return found


def happened(noted: dict[Key, Noted]) -> Iterator[Happening]:
    """Events as reports have them."""
    for (kind, site, devices), each in noted.items():
        counts = each.count, each.nbytes, each.operands, each.asked
        yield Happening(kind, site, devices, *counts, max(each.turns, 1))
