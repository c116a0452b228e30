"""Count what a run does on devices, by site: an operation in a module at a line in a phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ...reports.events import Happening, Operand, Site, Span, Timeline, Usage

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
        operations: by device.
        phases: operations by phase.
        happenings: what is worth a look.
        dropped: events that were not told apart.
    """

    def __init__(self) -> None:
        self.operations: dict[str, int] = {}
        self.phases: dict[str, int] = {}
        self.happenings: dict[Key, Noted] = {}
        self.dropped = 0
        self._modules: dict[str, dict[str, list[int]]] = {}
        self._sites: set[Site] = set()
        self._running: list[_Running] = []
        self._left_out = 0
        self._finished: Timeline | None = None

    def met(self, site: Site) -> None:
        """An operation ran."""
        if len(self._sites) < MOST_SITES:
            self._sites.add(site)
        self.phases[site.phase] = self.phases.get(site.phase, 0) + 1

    def use(self, site: Site, device: str, nbytes: int) -> None:
        """An operation computed on a device, and made so many bytes."""
        self.operations[device] = self.operations.get(device, 0) + 1
        if site.module in self._modules or len(self._modules) < MOST_SITES:
            used = self._modules.setdefault(site.module, {}).setdefault(device, [0, 0])
            used[0] += 1
            used[1] += nbytes
        running = self._running[-1] if self._running else None
        if running is None or running.device != device or not running.is_at(site):
            if len(self._running) >= _MOST_SPANS:
                self._left_out += 1
                return
            self._running.append(running := _Running(site, device))
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

    def finish_step(self) -> None:
        """An optimizer has stepped; what runs now is of the next step."""
        self._finished = self._timeline()
        self._running, self._left_out = [], 0

    def timeline(self, *, unfinished: bool) -> Timeline:
        """The last finished step; or, if there is none or so asked for, what ran since."""
        return self._timeline() if unfinished or self._finished is None else self._finished

    def _timeline(self) -> Timeline:
        return Timeline(tuple(each.span() for each in self._running), self._left_out)

    def forget(self, *kinds: str) -> None:
        """Leave out events of some kinds."""
        for key in [each for each in self.happenings if each[0] in kinds]:
            del self.happenings[key]

    @property
    def sites(self) -> int:
        """How many places ran operations."""
        return len(self._sites)

    @property
    def modules(self) -> dict[str, dict[str, Usage]]:
        """What each module used, by device."""
        return {
            name: {device: Usage(*usage) for device, usage in each.items()}
            for name, each in self._modules.items()
        }


def happened(noted: dict[Key, Noted]) -> Iterator[Happening]:
    """Events as reports have them."""
    for (kind, site, devices), each in noted.items():
        counts = each.count, each.nbytes, each.operands, each.asked
        yield Happening(kind, site, devices, *counts, max(each.turns, 1))
