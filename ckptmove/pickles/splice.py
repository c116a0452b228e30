"""Spell some strings of a pickle differently, leaving every other byte's meaning as it was.

torch's picklers memoise: the literal `cpu` of the first storage is the definition that all others,
*and the user's own strings*, fetch. So a change is made per use, never per literal. Where a literal
that changes is fetched by uses that don't, the definition moves to the first of those.

The result can be asked for at exactly the old length, which lets the rest of the file stay where it
is. There is nearly always room: picklers memoise what nobody fetches, so unused PUTs can go; a
spelling that many uses share is memoised once; and small ints, PUTs and GETs have longer forms to
fill up with. What is dropped and widened is chosen by a small search, not greedily.

Only opcodes that torch's `weights_only` unpickler and libtorch's both know are written.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping

from ..errors import UnsupportedError
from .nodes import Call, Text, Tuple
from .scan import (
    BINGET,
    BININT,
    BININT1,
    BININT2,
    BINPUT,
    LITERALS,
    LONG_BINGET,
    LONG_BINPUT,
    PUTS,
    Scan,
    end_of,
)

_TUPLE1, _TUPLE2 = 0x85, 0x86


class Respelling:
    """What a pickle shall say instead.

    Attributes:
        texts: offset of the opcode that pushes a string use → the new string.
        spans: offset → (end offset, new bytes), for whole opcodes that are replaced as they are.
    """

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}
        self.spans: dict[int, tuple[int, bytes]] = {}

    def text(self, use: Text, new: str) -> None:
        """Spell one use of a string differently."""
        self.texts[use.at] = new

    def device(self, data: bytes, call: Call, new: str) -> None:
        """Make `torch.device('cuda', 1)` a `torch.device(new)`.

        Raises:
            UnsupportedError: the call is spelled in a way that can't be rewritten.
        """
        args = call.args
        kind = args.items[0] if isinstance(args, Tuple) and args.items else None
        if not isinstance(args, Tuple) or not isinstance(kind, Text):
            raise UnsupportedError("a torch.device is spelled in a way that can't be rewritten")
        self.text(kind, new)
        if len(args.items) == 1:
            return
        at = end_of(data, kind.at)
        while data[at] in PUTS:
            at = end_of(data, at)
        index_end = end_of(data, at)
        if (
            data[at] not in (BININT1, BININT2, BININT)
            or index_end != args.at
            or data[args.at] != _TUPLE2
        ):
            raise UnsupportedError("a torch.device is spelled in a way that can't be rewritten")
        self.spans[at] = (args.at + 1, bytes([_TUPLE1]))


def splice(data: bytes, new: Respelling, *, exact: bool) -> bytes | None:
    """The pickle with its new spelling.

    Args:
        data: a pickle that has been walked; bytes after its STOP are kept.
        new: what to spell differently.
        exact: whether the result must have exactly the old length.

    Returns:
        The new pickle, or None where `exact` can't be had.

    Raises:
        UnsupportedError: a string to change is memoised in a way that can't be untangled.
    """
    scan = Scan(data)
    for pooled in (False, True):
        edits = _Edits(scan)
        edits.respell(new, pooled=pooled and not scan.numbered)
        if not exact or edits.reach_old_length():
            return edits.apply()
    return None


class _Edits:
    """Replacements of byte ranges: offset → (end, new bytes)."""

    def __init__(self, scan: Scan) -> None:
        self.scan = scan
        self.data = scan.data
        self.pieces: dict[int, tuple[int, bytes]] = {}
        self.taken: set[int] = set()  # slots given to new definitions

    # -- the new spelling ----------------------------------------------------------------------

    def respell(self, new: Respelling, *, pooled: bool) -> None:
        """Put every new spelling in its place.

        Args:
            new: the spellings.
            pooled: memoise each new text once for all its uses, even where uses have literals of
                their own; shorter, but further from what was there.
        """
        self.pieces.update(new.spans)
        homeless: dict[str, list[int]] = defaultdict(list)
        served = self._uses_of_literals(new.texts)
        done: set[int] = set()
        for at in sorted(new.texts):
            if at in served:
                done.update(self._respell_literal(at, served[at], new.texts, homeless, pooled))
            elif at not in done:
                homeless[new.texts[at]].append(at)
        for text, uses in homeless.items():
            self._house(text, sorted(uses))

    def _uses_of_literals(self, texts: Mapping[int, str]) -> dict[int, list[int]]:
        """For each literal to be changed, the GETs that recall it."""
        definition_of = {}  # offset of a PUT → the literal it memoises
        for at in texts:
            if self.data[at] in LITERALS:
                put = end_of(self.data, at)
                while put < len(self.data) and self.data[put] in PUTS:
                    definition_of[put] = at
                    put = end_of(self.data, put)
        slots = {self._slot(put) for put in definition_of}
        fills: dict[int, list[int]] = defaultdict(list)
        for put, slot in zip(self.scan.puts, self.scan.put_slots, strict=True):
            if slot in slots:
                fills[slot].append(put)
        uses: dict[int, list[int]] = {at: [] for at in texts if self.data[at] in LITERALS}
        for get, slot in zip(self.scan.gets, self.scan.get_slots, strict=True):
            if slot in slots:
                filled = bisect_left(fills[slot], get)
                literal = definition_of.get(fills[slot][filled - 1]) if filled else None
                if literal is not None:
                    uses[literal].append(get)
        return uses

    def _slot(self, put: int) -> int:
        return self.scan.put_slots[bisect_left(self.scan.puts, put)]

    def _respell_literal(
        self,
        at: int,
        uses: list[int],
        texts: Mapping[int, str],
        homeless: dict[str, list[int]],
        pooled: bool,
    ) -> list[int]:
        """Change a literal; gives the GETs that are right already because of that."""
        text = texts[at]
        end = put_end = end_of(self.data, at)
        while put_end < len(self.data) and self.data[put_end] in PUTS:
            put_end = end_of(self.data, put_end)
        others = [use for use in uses if use not in texts]
        if not others and not pooled:
            self.pieces[at] = (end, _literal(text))
            return [use for use in uses if texts[use] == text]
        if others:
            if put_end != end_of(self.data, end):
                raise UnsupportedError("the pickle memoises a string twice: it can't be rewritten")
            first = others[0]
            moved = self.data[at:end] + _put(self._slot(end))
            self.pieces[first] = (end_of(self.data, first), moved)
            if self.scan.numbered:  # the slot must be filled here, if only to be counted
                self.pieces[at] = (end, _literal(text))
                return [use for use in uses if use < first and texts[use] == text]
        homeless[text].append(at)
        self.pieces[at] = (put_end, b"")  # the PUT has moved, or nobody recalls it now
        return []

    def _house(self, text: str, uses: list[int]) -> None:
        """Spell a text at uses that have no definition: once as a literal, then recalled."""
        literal = _literal(text)
        slot = self._free_slot() if len(uses) > 1 and not self.scan.numbered else None
        for n, at in enumerate(uses):
            end = self.pieces[at][0] if at in self.pieces else end_of(self.data, at)
            if slot is None:
                self.pieces[at] = (end, literal)
            else:
                self.pieces[at] = (end, _get(slot) if n else literal + _put(slot))

    def _free_slot(self) -> int | None:
        """A slot that nobody recalls, freed of its PUT: a low one if there is any."""
        times = Counter(self.scan.put_slots)
        once = [put for put in self._unused_puts() if times[self._slot(put)] == 1]
        put = min(once, key=self._slot, default=None)
        if put is not None and self._slot(put) < 256:
            self.pieces[put] = (end_of(self.data, put), b"")
            slot = self._slot(put)
        else:
            slot = max((255, *self.scan.put_slots, *self.scan.get_slots, *self.taken)) + 1
            if slot >= 1 << 32:
                return None
        self.taken.add(slot)
        return slot

    def _unused_puts(self) -> list[int]:
        """PUTs, outside what is replaced, of slots that nobody recalls."""
        if self.scan.numbered:
            return []
        recalled = self.taken.union(self.scan.get_slots)
        covered = _Cover(self.pieces)
        return [
            put
            for put, slot in zip(self.scan.puts, self.scan.put_slots, strict=True)
            if slot not in recalled and not covered(put)
        ]

    # -- the old length ------------------------------------------------------------------------

    def reach_old_length(self) -> bool:
        """Drop unused PUTs and widen opcodes until the length is the old one, if it can be."""
        excess = sum(len(new) - (end - at) for at, (end, new) in self.pieces.items())
        unused = self._unused_puts()
        droppable = {
            width: [at for at in unused if end_of(self.data, at) - at == width] for width in (2, 5)
        }
        growable = {True: self._growable(unused), False: self._growable([])}
        for dropped in range(max(excess, 0), max(excess, 0) + 24):
            drops = _change(dropped, {width: len(ats) for width, ats in droppable.items()})
            grow = growable[dropped == 0]
            growths = _change(dropped - excess, {by: len(ats) for by, ats in grow.items()})
            if drops is None or growths is None:
                continue
            for by, count in growths.items():
                self.pieces.update((at, self._widened(at, by)) for at in grow[by][:count])
            for width, count in drops.items():
                self.pieces.update((at, (at + width, b"")) for at in droppable[width][:count])
            return True
        return False

    def _growable(self, unused: list[int]) -> dict[int, list[int]]:
        """Opcodes outside what is replaced, by how many bytes longer they can be made.

        A one-byte int can grow by 1 or by 3; half of them are counted for each. Of the PUTs that
        nobody recalls, only the `unused` ones given may grow: the others may have to go.
        """
        covered = _Cover(self.pieces)
        data = self.data
        ints = [at for at in self.scan.ints if not covered(at)]
        one_byte = [at for at in ints if data[at] == BININT1]
        kept = min(8, (len(one_byte) + 1) // 2)
        gets = [at for at in self.scan.gets if data[at] == BINGET and not covered(at)]
        puts = [at for at in unused if data[at] == BINPUT]
        return {
            3: gets + one_byte[kept:] + puts,
            2: [at for at in ints if data[at] == BININT2],
            1: one_byte[:kept],
        }

    def _widened(self, at: int, by: int) -> tuple[int, bytes]:
        """The opcode at `at` in a form that is longer `by` so many bytes."""
        end = end_of(self.data, at)
        width = end - at - 1 + by
        wide = {BINGET: LONG_BINGET, BINPUT: LONG_BINPUT, BININT2: BININT, BININT1: BININT}
        code = BININT2 if width == 2 else wide[self.data[at]]
        return end, bytes([code]) + self.scan.argument(at).to_bytes(width, "little")

    # -- the result ----------------------------------------------------------------------------

    def apply(self) -> bytes:
        """The new pickle, with the lengths of its frames put right."""
        edits = sorted((at, end, new) for at, (end, new) in self.pieces.items())
        edits = sorted(edits + self._reframed(edits))
        parts, position = [], 0
        for at, end, new in edits:
            parts += [self.data[position:at], new]
            position = end
        parts.append(self.data[position:])
        return b"".join(parts)

    def _reframed(self, edits: list[tuple[int, int, bytes]]) -> list[tuple[int, int, bytes]]:
        starts = [at for at, _, _ in edits]
        grown = [0]
        for at, end, new in edits:
            grown.append(grown[-1] + len(new) - (end - at))
        frames = []
        for at in self.scan.frames:
            nbytes = self.scan.argument(at)
            first, last = bisect_left(starts, at), bisect_left(starts, at + 9 + nbytes)
            nbytes += grown[last] - grown[first]
            frames.append((at + 1, at + 9, nbytes.to_bytes(8, "little")))
        return frames


class _Cover:
    """Whether an offset lies in one of the replaced ranges."""

    def __init__(self, pieces: Mapping[int, tuple[int, bytes]]) -> None:
        self.starts = sorted(pieces)
        self.ends = [pieces[at][0] for at in self.starts]

    def __call__(self, at: int) -> bool:
        nearest = bisect_left(self.starts, at + 1) - 1
        return nearest >= 0 and at < self.ends[nearest]


def _change(amount: int, coins: Mapping[int, int]) -> dict[int, int] | None:
    """How many of each coin (value → how many there are) make up `amount` exactly.

    The largest coins go first; of each, up to four fewer than possible are tried, which finds a way
    if there is one, for values up to 5.
    """
    if amount == 0:
        return {}
    if not coins:
        return None
    value = max(coins)
    smaller = {coin: count for coin, count in coins.items() if coin != value}
    most = min(amount // value, coins[value])
    for count in range(most, max(most - 5, -1), -1):
        rest = _change(amount - count * value, smaller)
        if rest is not None:
            return {value: count, **rest}
    return None


def _literal(text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogatepass")
    return b"X" + len(encoded).to_bytes(4, "little") + encoded


def _put(slot: int) -> bytes:
    return _memo(slot, BINPUT, LONG_BINPUT)


def _get(slot: int) -> bytes:
    return _memo(slot, BINGET, LONG_BINGET)


def _memo(slot: int, short: int, long: int) -> bytes:
    return bytes([short, slot]) if slot < 256 else bytes([long]) + slot.to_bytes(4, "little")
