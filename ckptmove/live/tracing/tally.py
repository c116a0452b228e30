"""Count what a run does on devices, by site: an operation in a module at a line in a phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ...reports.events import Happening, Operand, Site, Usage

MOST_SITES = 4096  # more are counted, and not told apart
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

    def note(self, key: Key, turn: tuple[int, int], nbytes: int, new: Callable[[], Noted]) -> None:
        """Count an event, once for each turn; `new` describes one that is new."""
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
