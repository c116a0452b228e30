"""Replace some strings of a pickle, and keep the meaning of all other bytes.

torch's picklers memoize strings: the literal `cpu` of the first storage is the definition that all
others, *and the user's own strings*, refer to. So a change is made per use, never per literal. If a
literal changes but some uses do not, the definition moves to the first of these uses.

The result can have exactly the old length, so that the rest of the file stays in place; see
`fitting`. Only opcodes that both torch's `weights_only` unpickler and libtorch's know are written.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import partial

from ..errors import UnsupportedError
from .fitting import Cover, balance_length, fit
from .nodes import Call, Text, Tuple
from .replacements import Pieces, Replacements, apply_replacements, in_order
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
    Survey,
    argument,
    count_nbytes,
    end_of,
)

#: Bytes of a pickle that are scanned for compensating opcodes, and more for each byte of change.
_AT_FIRST, _PER_BYTE = 1 << 16, 8
_TUPLE1, _TUPLE2 = 0x85, 0x86
_STRING, _UNICODE = ord("S"), ord("V")
_OF_PYTHON_2 = frozenset(b"STU")
#: SHORT_BINBYTES and SHORT_BINSTRING have forms for longer content: BINBYTES, BINSTRING.
_WIDER = {ord("C"): (ord("B"), 4), ord("U"): (ord("T"), 4)}
_ESCAPED = {ord(char): f"\\u{ord(char):04x}" for char in "\\\0\n\r\x1a"}


class Respelling:
    """The strings and bytes that a pickle will push instead."""

    def __init__(
        self, base: int = 0, texts: dict[int, str] | None = None, *, python2: bool = False
    ) -> None:
        """`base` is subtracted from offsets of nodes; `python2`: its strings are of Python 2."""
        self.base = base
        self.python2 = python2
        #: offset of the opcode that pushes a string use → the new string
        self.texts = {} if texts is None else texts
        #: the opcodes that are replaced as a whole
        self.spans: Pieces = {}
        #: offset of an opcode → how many bytes its content will grow by, which is replaced
        #: elsewhere
        self.growths: dict[int, int] = {}
        #: the offsets among `spans` of strings that spell bytes
        self.contents: list[int] = []

    def __bool__(self) -> bool:
        return bool(self.texts or self.spans or self.growths)

    def text(self, use: Text, new: str) -> None:
        """Replace one use of a string."""
        self.texts[use.at - self.base] = new

    def content(self, data: bytes, at: int, new: bytes) -> None:
        """Replace the bytes that the opcode at `at` spells as text."""
        self.contents.append(at)
        self.spans[at] = (end_of(data, at) - at, _pushed(data[at], new))

    def length(self, data: bytes, at: int, old: int, new: int) -> None:
        """Change the count of the opcode at `at` from `old` to `new`.

        Its bytes are replaced elsewhere.
        """
        code, width = data[at], count_nbytes(data[at])
        if new >= 1 << 8 * width:
            code, width = _WIDER.get(code, (code, width))
        if new >= 1 << 8 * width:
            raise UnsupportedError("bytes within the pickle outgrow the opcode that holds them")
        if new != old:
            counted = bytes([code]) + new.to_bytes(width, "little")
            self.spans[at] = (1 + count_nbytes(data[at]), counted)
            self.growths[at] = new - old

    def device(self, data: bytes, call: Call, new: str) -> None:
        """Change `torch.device('cuda', 1)` into `torch.device(new)`."""
        args, base = call.args, self.base
        kind = args.items[0] if isinstance(args, Tuple) and args.items else None
        if not isinstance(args, Tuple) or not isinstance(kind, Text):
            raise UnsupportedError("a torch.device is spelled in a way that can't be rewritten")
        self.text(kind, new)
        if len(args.items) == 1:
            return
        at = end_of(data, kind.at - base)
        while data[at] in PUTS:
            at = end_of(data, at)
        index_end = end_of(data, at)
        if (
            data[at] not in (BININT1, BININT2, BININT)
            or index_end != args.at - base
            or data[index_end] != _TUPLE2
        ):
            raise UnsupportedError("a torch.device is spelled in a way that can't be rewritten")
        self.spans[at] = (index_end + 1 - at, bytes([_TUPLE1]))


def splice(data: bytes, new: Respelling, *, exact: bool) -> bytes | None:
    """The changed pickle; parameters and errors are those of `changes`."""
    found = changes(Survey(data), new, exact=exact)
    return None if found is None else apply_replacements(data, found)


def changes(survey: Survey, new: Respelling, *, exact: bool) -> Replacements | None:
    """The changes, in order, that respell a walked pickle.

    Bytes after its STOP are kept. If `exact`, the result has exactly the old length; None if that
    can't be reached. UnsupportedError if a string is memoized in a way that can't be separated.
    """
    for pooled in (False, True):
        found = _Edits(survey)
        found.respell(new, pooled=pooled and not found.numbered)
        if not exact or found.reach_old_length():
            return found.result()
    return None


class _Edits:
    """Replacements of byte ranges, by offset."""

    def __init__(self, survey: Survey) -> None:
        self.survey = survey
        self.data = survey.data
        #: the same as in `Scan`
        self.numbered = survey.is_odd and survey.scan.numbered
        self.pieces: Pieces = {}
        self.growths: Mapping[int, int] = {}
        self.python2 = False
        self.taken: set[int] = set()  # the slots given to new definitions

    # -- the new spelling ----------------------------------------------------------------------

    def respell(self, new: Respelling, *, pooled: bool) -> None:
        """Replace every string in `new`.

        If `pooled`, memoize each new text once for all its uses, even where uses have their own
        literals: this is shorter, but changes more.
        """
        self.pieces.update(new.spans)
        self.growths = new.growths
        self.python2 = new.python2
        if any(self._uses_of_literals(dict.fromkeys(new.contents, "")).values()):
            raise UnsupportedError(
                "bytes in the pickle are spelled by a text that is used elsewhere"
            )
        homeless: dict[bytes, list[int]] = defaultdict(list)  # literal → its uses
        data, texts, served = self.data, new.texts, self._uses_of_literals(new.texts)
        done: set[int] = set()
        known: dict[tuple[bytes, str], tuple[int, bytes]] = {}  # few, often
        for at in sorted(texts):
            text, end = texts[at], end_of(data, at)
            if data[at] not in LITERALS:
                if data[end] in PUTS:
                    raise UnsupportedError(
                        "the pickle memoizes a string twice: it can't be rewritten"
                    )
                if at not in done:
                    homeless[self._literal(at, text)].append(at)
            elif pooled or at in served:
                uses = served.get(at, [])
                done.update(self._respell_literal(at, uses, texts, homeless, pooled))
            else:  # nothing recalls it
                alike = data[at:end], text
                piece = known.get(alike)
                if piece is None:
                    piece = known[alike] = end - at, self._literal(at, text)
                self.pieces[at] = piece
        for literal, uses in homeless.items():
            self._house(literal, sorted(uses))

    def _uses_of_literals(self, texts: Mapping[int, str]) -> dict[int, list[int]]:
        """For each literal to change that is recalled, the GETs that recall it."""
        data, recalled, uses = (
            self.data,
            self.survey.recalled_slots,
            defaultdict[int, list[int]](list),
        )
        definition_of = {}  # offset of a PUT → the literal it memoizes
        slots = set[int]()
        for at in texts:
            if data[at] in LITERALS:
                put = end_of(data, at)
                while put < len(data) and data[put] in PUTS:
                    slot = self._slot(put)
                    if slot in recalled:
                        definition_of[put] = at
                        slots.add(slot)
                    put = end_of(data, put)
        if not slots:
            return uses
        fills: dict[int, list[int]] = defaultdict(list)
        for put, slot in self.survey.puts_of(slots):
            fills[slot].append(put)
        for get, slot in self.survey.gets_of(slots):
            filled = bisect_left(fills[slot], get)
            literal = definition_of.get(fills[slot][filled - 1]) if filled else None
            if literal is not None:
                uses[literal].append(get)
        return uses

    def _slot(self, put: int) -> int:
        if not self.numbered:
            return argument(self.data, put)
        scan = self.survey.scan
        return scan.put_slots[bisect_left(scan.puts, put)]

    def _respell_literal(
        self,
        at: int,
        uses: list[int],
        texts: Mapping[int, str],
        homeless: dict[bytes, list[int]],
        pooled: bool,
    ) -> list[int]:
        """Change a literal; returns the GETs that need no further change because of that."""
        text = texts[at]
        end = put_end = end_of(self.data, at)
        others = [use for use in uses if use not in texts]
        if not others and not pooled:
            self.pieces[at] = (end - at, self._literal(at, text))
            return [use for use in uses if texts[use] == text]
        while put_end < len(self.data) and self.data[put_end] in PUTS:
            put_end = end_of(self.data, put_end)
        if others:
            if put_end != end_of(self.data, end):
                raise UnsupportedError("the pickle memoizes a string twice: it can't be rewritten")
            first = others[0]
            moved = self.data[at:end] + _put(self._slot(end))
            self.pieces[first] = (end_of(self.data, first) - first, moved)
            if self.numbered:  # the slot must be filled here, at least so that it is counted
                self.pieces[at] = (end - at, self._literal(at, text))
                return [use for use in uses if use < first and texts[use] == text]
        homeless[self._literal(at, text)].append(at)
        self.pieces[at] = (put_end - at, b"")  # the PUT has moved, or nothing recalls its slot now
        return []

    def _literal(self, at: int, text: str) -> bytes:
        """The opcode of a string for the use at `at`, of the same kind as before."""
        code = self.data[at]
        if code in _OF_PYTHON_2 or (code not in LITERALS and self.python2):
            return _narrow(text)
        return _literal(text)

    def _house(self, literal: bytes, uses: list[int]) -> None:
        """Write a literal for uses without a definition: in full once, then recalled."""
        slot = self._free_slot() if len(uses) > 1 and not self.numbered else None
        for n, at in enumerate(uses):
            nbytes = self.pieces[at][0] if at in self.pieces else end_of(self.data, at) - at
            if slot is None:
                self.pieces[at] = (nbytes, literal)
            else:
                self.pieces[at] = (nbytes, _get(slot) if n else literal + _put(slot))

    def _free_slot(self) -> int | None:
        """A memo slot without a use; if an unused PUT has a low slot, that PUT is removed."""
        scan = self.survey.scan
        times = Counter(scan.put_slots)
        once = [put for put in self._unused_puts(scan) if times[self._slot(put)] == 1]
        put = min(once, key=self._slot, default=None)
        if put is not None and self._slot(put) < 256:
            self.pieces[put] = (end_of(self.data, put) - put, b"")
            slot = self._slot(put)
        else:
            slot = max((255, *scan.put_slots, *self.survey.recalled_slots, *self.taken)) + 1
            if slot >= 1 << 32:
                return None
        self.taken.add(slot)
        return slot

    def _unused_puts(self, scan: Scan) -> list[int]:
        """The scanned PUTs of memo slots that are not used, outside the replaced ranges."""
        if self.numbered:
            return []
        recalled = self.taken.union(self.survey.recalled_slots)
        covered = Cover(self.pieces)
        return [
            put
            for put, slot in zip(scan.puts, scan.put_slots, strict=True)
            if slot not in recalled and not covered(put)
        ]

    def reach_old_length(self) -> bool:
        """Change nearby opcodes to restore the old length; False if that is not possible.

        First resize the numbers that follow changed strings; then any other opcodes, if needed.
        """
        excess = self._excess()
        if not excess:
            return True
        more: Pieces = {}
        if not self.growths:  # after what grows inside come the bytes of an argument
            more = balance_length(self.data, self.pieces)
            self.pieces.update(more)
        if self._fit(self._excess()):
            return True
        for at in more:
            del self.pieces[at]
        return self._fit(excess)

    def _excess(self) -> int:
        """How many bytes longer the pickle is now; negative if it is shorter."""
        grown = sum(len(new) - nbytes for nbytes, new in self.pieces.values())
        return grown + sum(self.growths.values())

    def _fit(self, excess: int) -> bool:
        """Make it `excess` bytes shorter; False if that is not possible."""
        if not excess:
            return True
        for scan in self.survey.parts(_AT_FIRST + _PER_BYTE * abs(excess)):
            more = fit(scan, self.pieces, partial(self._unused_puts, scan), excess)
            # A PUT is removed only if changes of the opcodes in the whole pickle are not enough.
            if more is not None and (scan.is_whole or all(new for _, new in more.values())):
                self.pieces.update(more)
                return True
        return False

    # -- the result ----------------------------------------------------------------------------

    def result(self) -> Replacements:
        """The changes, in order, with corrected lengths of frames."""
        found = in_order(self.pieces)
        return in_order(self.pieces | self._frames(found)) if self.survey.frames else found

    def _frames(self, found: Replacements) -> Pieces:
        """The new lengths of frames that change."""
        starts, grown = list[int](), [0]
        for start, end, new in found:
            starts.append(start)
            grown.append(grown[-1] + len(new) - (end - start) + self.growths.get(start, 0))
        frames: Pieces = {}
        for at in self.survey.frames:
            nbytes = argument(self.data, at)
            first, last = bisect_left(starts, at), bisect_left(starts, at + 9 + nbytes)
            growth = grown[last] - grown[first]
            if growth:
                frames[at + 1] = 8, (nbytes + growth).to_bytes(8, "little")
        return frames


def _literal(text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogatepass")
    return b"X" + len(encoded).to_bytes(4, "little") + encoded


def _narrow(text: str) -> bytes:
    """The opcode for a string of Python 2."""
    encoded = text.encode("utf-8", "surrogateescape")
    if len(encoded) < 256:
        return b"U" + bytes([len(encoded)]) + encoded
    return b"T" + len(encoded).to_bytes(4, "little") + encoded


def _pushed(code: int, content: bytes) -> bytes:
    """An opcode that pushes bytes as text: one character per byte, or quoted."""
    if code == _STRING:
        return b"S" + ascii(content)[1:].encode() + b"\n"
    text = content.decode("latin-1")
    if code == _UNICODE:  # escaped like in CPython's pickler
        return b"V" + text.translate(_ESCAPED).encode("raw-unicode-escape") + b"\n"
    return _literal(text)


def _put(slot: int) -> bytes:
    return _memo(slot, BINPUT, LONG_BINPUT)


def _get(slot: int) -> bytes:
    return _memo(slot, BINGET, LONG_BINGET)


def _memo(slot: int, short: int, long: int) -> bytes:
    return bytes([short, slot]) if slot < 256 else bytes([long]) + slot.to_bytes(4, "little")
