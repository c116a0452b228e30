"""Give a changed pickle exactly its old length.

There is nearly always room. Opcodes for numbers and for the memo have longer and shorter forms with
the same meaning, and picklers memoize values that nothing uses, so unused PUTs can be removed. A
removed PUT is lost, but a form can be changed back: so forms are tried first, and a file can be
relocated back and forth many times.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cached_property

from .replacements import Pieces
from .scan import (
    BINGET,
    BININT,
    BININT1,
    BININT2,
    BINPUT,
    INTS,
    LONG_BINGET,
    LONG_BINPUT,
    PUTS,
    Scan,
    argument,
    end_of,
)

# bytes → the offsets of opcodes whose size can change by so many bytes
_Coins = dict[int, list[int]]

_INTS_BY_WIDTH = {1: BININT1, 2: BININT2, 4: BININT}
_SEARCHED = 24  # how many bytes of additional change are tried in each direction
_WIDE = {BINGET: LONG_BINGET, BINPUT: LONG_BINPUT}
_NARROW = {LONG_BINGET: BINGET, LONG_BINPUT: BINPUT}


def fit(
    scan: Scan, pieces: Pieces, unused_puts: Callable[[], list[int]], excess: int
) -> Pieces | None:
    """Further changes that compensate for `pieces`; None if the old length can't be reached.

    `unused_puts` returns PUTs that are outside of `pieces` and never recalled. `excess` is how many
    bytes the pickle has grown; negative if it shrank.
    """
    return _Fitting(scan, pieces, unused_puts).run(excess)


class _Fitting:
    def __init__(self, scan: Scan, pieces: Pieces, unused_puts: Callable[[], list[int]]) -> None:
        self.scan = scan
        self.data = scan.data
        self.covered = Cover(pieces)
        self.unused_puts = unused_puts

    @cached_property
    def growable(self) -> _Coins:
        """The opcodes that can be made longer."""
        return self._growable()

    @cached_property
    def shrinkable(self) -> _Coins:
        """The opcodes that can be made shorter."""
        return self._shrinkable()

    @cached_property
    def droppable(self) -> _Coins:
        """PUTs that can be removed, except those that can be made shorter."""
        found: _Coins = defaultdict(list)
        forms = {at for ats in self.shrinkable.values() for at in ats}
        for at in self.unused_puts():
            if at not in forms:
                found[end_of(self.data, at) - at].append(at)
        return found

    def run(self, excess: int) -> Pieces | None:
        if excess <= 0:  # usually the first growable opcodes are enough
            growths = _change(-excess, self.growable)
            if growths is not None:
                return self._pieces({}, {}, growths, self.growable)
        forms = sum(by * len(ats) for by, ats in self.shrinkable.items())
        least = max(excess - forms, 0)
        for dropped in range(least, least + _SEARCHED):
            drops = _change(dropped, self.droppable)
            if drops is None:
                continue
            missing = excess - dropped
            for shrunk in range(max(missing, 0), max(missing, 0) + _SEARCHED):
                shrinks = _change(shrunk, self.shrinkable)
                growable = self._still_growable(drops, shrinks or {})
                growths = _change(shrunk - missing, growable)
                if shrinks is not None and growths is not None:
                    return self._pieces(drops, shrinks, growths, growable)
        return None

    def _pieces(
        self,
        drops: Mapping[int, int],
        shrinks: Mapping[int, int],
        growths: Mapping[int, int],
        growable: _Coins,
    ) -> Pieces:
        pieces: Pieces = {}
        for by, count in drops.items():
            pieces.update((at, (by, b"")) for at in self.droppable[by][:count])
        for by, count in shrinks.items():
            pieces.update((at, self._resized(at, -by)) for at in self.shrinkable[by][:count])
        for by, count in growths.items():
            pieces.update((at, self._resized(at, by)) for at in growable[by][:count])
        return pieces

    def _still_growable(self, drops: Mapping[int, int], shrinks: Mapping[int, int]) -> _Coins:
        """The opcodes that can grow after these drops and shrinks, including PUTs that are kept."""
        rest = self.droppable[2][drops.get(2, 0) :]
        taken = {at for by, count in shrinks.items() for at in self.shrinkable[by][:count]}
        grown = {**self.growable, 3: self.growable[3] + [p for p in rest if self._is(p, BINPUT)]}
        if taken:
            grown = {by: [at for at in ats if at not in taken] for by, ats in grown.items()}
        return grown

    def _is(self, at: int, code: int) -> bool:
        return self.data[at] == code

    def _growable(self) -> _Coins:
        """Opcodes outside the replaced ranges, by how many bytes longer they can be made.

        A one-byte int can grow by 1 or by 3; half of them are counted for each. PUTs that are never
        recalled are left out, because they may have to be removed.
        """
        ints = [at for at in self.scan.ints if not self.covered(at)]
        one_byte = [at for at in ints if self._is(at, BININT1)]
        kept = min(8, (len(one_byte) + 1) // 2)
        gets = [at for at in self.scan.gets if self._is(at, BINGET) and not self.covered(at)]
        return {
            3: gets + one_byte[kept:],
            2: [at for at in ints if self._is(at, BININT2)],
            1: one_byte[:kept],
        }

    def _shrinkable(self) -> _Coins:
        """Opcodes outside the replaced ranges, by how many bytes longer than necessary they are."""
        found: _Coins = {3: [], 2: [], 1: []}
        for at in (*self.scan.ints, *self.scan.gets, *self.scan.puts):
            code = self.data[at]
            if code not in (BININT, BININT2, LONG_BINGET, LONG_BINPUT):
                continue
            value = argument(self.data, at)
            if code == BININT2:
                spare = 1 if value < 1 << 8 else 0
            else:
                spare = 3 if value < 1 << 8 else 2 if code == BININT and value < 1 << 16 else 0
            if spare and not self.covered(at):
                found[spare].append(at)
        return found

    def _resized(self, at: int, by: int) -> tuple[int, bytes]:
        """The opcode at `at` in a form that is `by` bytes longer, or shorter if negative."""
        nbytes, code = end_of(self.data, at) - at, self.data[at]
        width = nbytes - 1 + by
        code = _INTS_BY_WIDTH[width] if code in INTS else (_WIDE if by > 0 else _NARROW)[code]
        return nbytes, _opcode(code, argument(self.data, at), width)


def balance_length(data: bytes, pieces: Pieces) -> Pieces:
    """Resize the numbers right after changed strings so that the total length stays the same.

    In the persistent id of a storage, the number of elements follows the device.
    """
    found: Pieces = {}
    known: dict[tuple[bytes, int], tuple[int, bytes] | None] = {}  # few, often
    for at, (nbytes, new) in pieces.items():
        by = nbytes - len(new)
        if not by:
            continue
        end = at + nbytes
        while data[end] in PUTS:
            end = end_of(data, end)
        if data[end] in INTS and end not in pieces:
            alike = old, _ = data[end : end_of(data, end)], by
            if alike not in known:
                known[alike] = _int_resized(old, by)
            resized = known[alike]
            if resized is not None:
                found[end] = resized
    return found


def _int_resized(old: bytes, by: int) -> tuple[int, bytes] | None:
    """The change to an opcode that pushes the same number and is `by` bytes longer, or None."""
    width, value = len(old) - 1 + by, argument(old, 0)
    code = _INTS_BY_WIDTH.get(width)
    if code is None or value >> 8 * width:
        return None
    return len(old), _opcode(code, value, width)


def _opcode(code: int, value: int, width: int) -> bytes:
    return bytes([code]) + value.to_bytes(width, "little")


class Cover:
    """Tells whether an offset lies in one of the replaced ranges."""

    def __init__(self, pieces: Pieces) -> None:
        self.starts = sorted(pieces)
        self.pieces = pieces

    def __call__(self, at: int) -> bool:
        nearest = bisect_left(self.starts, at + 1) - 1
        if nearest < 0:
            return False
        start = self.starts[nearest]
        return at < start + self.pieces[start][0]


def _change(amount: int, coins: Mapping[int, list[int]]) -> dict[int, int] | None:
    """How many of each coin add up to exactly `amount`: value → count; None if there is no way.

    The largest coins go first; for each, up to four fewer than possible are tried. This finds a
    way, if there is one, for values up to 5, and nearly always for larger ones.
    """
    if amount == 0:
        return {}
    if not coins:
        return None
    value = max(coins)
    smaller = {coin: ats for coin, ats in coins.items() if coin != value}
    most = min(amount // value, len(coins[value]))
    for count in range(most, max(most - 5, -1), -1):
        rest = _change(amount - count * value, smaller)
        if rest is not None:
            return {value: count, **rest}
    return None
