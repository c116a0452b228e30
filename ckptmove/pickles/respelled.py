"""Prove that changes to a pickle replace some of its strings and change nothing else.

The proof does not depend on how the changes were made. Outside of them the opcodes are unchanged;
within them, the same values are pushed, except for the strings to replace. What remains are memo
slots that the changes fill differently: each use of these is compared in both pickles. Only opcodes
that torch writes are understood; if others matter, nothing is proved, and the graphs of both
pickles have to be compared (`compare`).
"""

from __future__ import annotations

import re
import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ..errors import CorruptError
from .replacements import Replacement
from .scan import (
    BINGET,
    BININT,
    BINPUT,
    FRAME,
    GET,
    INTS,
    LONG_BINGET,
    LONG_BINPUT,
    MEMOIZE,
    PUT,
    STOP,
    Survey,
    argument,
    count_nbytes,
    end_of,
    row_of,
)

_TEXTS = frozenset(b"X\x8c\x8d")
_GETS, _PUTS = frozenset((BINGET, LONG_BINGET)), frozenset((BINPUT, LONG_BINPUT))
_POP, _POP_MARK, _DUP = b"012"
#: Opcodes that number slots by counting, write them as lines, or say how many bytes follow; and
#: opcodes after which an earlier value is on top of the stack again, where a PUT would memoize it.
_REFUSED = frozenset((MEMOIZE, PUT, GET, FRAME, _POP, _POP_MARK, _DUP))
_ROW = re.compile(row_of(_REFUSED) + b"{1,1000}", re.DOTALL)
_MOST_SLOTS = 16  # the most slots that are compared; a file of torch needs two or three

#: A pushed value: a text; or a number for a value that is the same in both pickles.
_Value = str | int


class _Opcodes(NamedTuple):
    """A push and the PUTs after it; either may be absent."""

    text: str | None
    get: int | None  # the slot
    number: int | None
    puts: tuple[int, ...]
    pushes: bool


class _Kind(NamedTuple):
    """The opcodes of a change, before and after."""

    old: _Opcodes
    new: _Opcodes
    #: whether values and slots are the same, only in more or fewer bytes
    is_form: bool


class _UnprovedError(Exception):
    """The changes do more than was asked, or it can't be shown that they do not."""


def is_respelling(survey: Survey, changes: Iterable[Replacement], texts: Mapping[int, str]) -> bool:
    """Whether changes of a walked pickle replace exactly these strings; False in case of doubt.

    `texts`: offset of each use of a string, as walked → the new string there. The changes are in
    order, each replaces whole opcodes, and they are read several times.
    """
    try:
        _Proof(survey, changes, texts).run()
    except (_UnprovedError, CorruptError, IndexError, UnicodeError, struct.error):
        return False
    return True


class _Proof:
    def __init__(
        self, survey: Survey, changes: Iterable[Replacement], texts: Mapping[int, str]
    ) -> None:
        self.survey = survey
        self.data = survey.data
        self.changes = changes
        self.texts = texts
        self.kinds: dict[tuple[bytes, bytes], _Kind] = {}
        self.kind_of: list[_Kind] = []  # of each change
        #: the slots to compare, and a pattern that finds their uses
        self.slots: frozenset[int] = frozenset()
        self.memory: re.Pattern[bytes] | None = None
        #: the values in these slots, in the old pickle and in the new one
        self.old: dict[int, _Value] = {}
        self.new: dict[int, _Value] = {}
        self.proved = 0  # how many uses of strings are proved to be replaced correctly

    def run(self) -> None:
        changed = self._changed_slots()
        if len(changed) > _MOST_SLOTS:
            changed &= self._recalled()
        if len(changed) > _MOST_SLOTS:
            raise _UnprovedError
        self.slots = frozenset(changed)
        if changed:
            self.memory = _memory(changed)
        self._compare_values()
        if self.proved != len(self.texts):
            raise _UnprovedError

    def _kind(self, alike: tuple[bytes, bytes]) -> _Kind:
        """The kind of change from some bytes to others; there are few, and many changes of each."""
        before, after = _read(alike[0]), _read(alike[1])
        found = _Kind(before, after, before == after and before.text is None)
        if before.pushes != after.pushes or before.number != after.number:
            raise _UnprovedError
        self.kinds[alike] = found
        return found

    def _changed_slots(self) -> set[int]:
        """Check the opcodes; return the slots whose values may differ at some time."""
        data, kinds, changed = self.data, self.kinds, set[int]()
        filled = array("I")  # the slots of PUTs after the changes, often very many
        position = after_puts = 0
        for start, end, new_bytes in self.changes:
            if start < position:
                raise _UnprovedError
            # is it the start of an opcode?
            if start not in (position, after_puts) and start not in self.texts:
                for _ in self._rows(position, start):
                    pass
            position = end
            alike = data[start:end], new_bytes
            kind = kinds.get(alike) or self._kind(alike)
            self.kind_of.append(kind)
            if kind.is_form:
                continue
            old, new = kind.old, kind.new
            if old.puts or new.puts:
                changed.update(old.puts, new.puts)
            if old.get != new.get:
                changed.update(each for each in (old.get, new.get) if each is not None)
            while data[end] in _PUTS:
                filled.append(argument(data, end))
                end = end_of(data, end)
            after_puts = end
        if not self.survey.is_usual:
            for _ in self._rows(0, None):  # is there an opcode that is refused?
                pass
        return changed.union(
            self._recalled().intersection(filled) if len(filled) > _MOST_SLOTS else filled
        )

    def _rows(self, start: int, end: int | None) -> Iterator[tuple[int, int]]:
        """The rows of fixed-length opcodes between two edits, or up to STOP."""
        data, limit = self.data, len(self.data) if end is None else end
        while start < limit:
            row = _ROW.match(data, start, limit)
            if row is not None:
                yield row.span()
                start = row.end()
                continue
            code = data[start]
            if code in _REFUSED:
                raise _UnprovedError
            if code == STOP:
                break
            start = end_of(data, start)
        if start != end and (end is not None or data[start] != STOP):
            raise _UnprovedError

    def _recalled(self) -> set[int]:
        """The slots that either of the pickles recalls."""
        new = (kind.new.get for kind in self.kinds.values())
        return {*self.survey.recalled_slots, *(slot for slot in new if slot is not None)}

    def _compare_values(self) -> None:
        """Compare the values that all changes push, and the values recalled from changed slots."""
        if not self.slots:
            for (at, _, _), kind in zip(self.changes, self.kind_of, strict=True):
                if not kind.is_form and kind.old.pushes:
                    self._compare(at, _pushed(kind.old, {}, at), _pushed(kind.new, {}, at))
            return
        position, top = 0, None
        for (at, end, _), (old, new, _) in zip(self.changes, self.kind_of, strict=True):
            if at > position:
                top = self._pass_over(position, at, top)
            position = end
            if old.pushes:
                values = _pushed(old, self.old, at), _pushed(new, self.new, at)
                self._compare(at, *values)
                top = values
            mine, theirs = (at, at) if top is None else top
            self._fill(self.old, old.puts, mine)
            self._fill(self.new, new.puts, theirs)
        self._pass_over(position, None, top)

    def _compare(self, at: int, old: _Value, new: _Value) -> None:
        """Raise unless the new pickle pushes the expected value at an offset of the old one."""
        wanted = self.texts.get(at)
        if wanted is not None:
            self.proved += 1
        if new != (old if wanted is None else wanted):
            raise _UnprovedError

    def _fill(self, memo: dict[int, _Value], slots: Iterable[int], value: _Value) -> None:
        for slot in slots:
            if slot in self.slots:
                memo[slot] = value

    def _pass_over(
        self, at: int, end: int | None, top: tuple[_Value, _Value] | None
    ) -> tuple[_Value, _Value] | None:
        """Follow how unchanged opcodes use the changed slots.

        `top` is the pair of values that the two pickles have just pushed, or None if they are the
        same; the result is such a pair for the end of the range.
        """
        data = self.data
        while top is not None and at != end and data[at] in _PUTS:
            slots = (argument(data, at),)
            self._fill(self.old, slots, top[0])
            self._fill(self.new, slots, top[1])
            at = end_of(data, at)
        if at == end:
            return top
        assert self.memory is not None
        for row in self._rows(at, end):
            for found in self.memory.finditer(data, *row):
                if not found[1]:
                    continue
                place, slot = found.start(1), argument(found[1], 0)
                if found[1][0] in _PUTS:
                    self.old[slot] = self.new[slot] = place
                else:
                    self._compare(place, self.old.get(slot, ~slot), self.new.get(slot, ~slot))
        return None


def _pushed(opcodes: _Opcodes, memo: Mapping[int, _Value], at: int) -> _Value:
    """The pushed value; for a slot that never changed, a number that no other value has."""
    if opcodes.text is not None:
        return opcodes.text
    return at if opcodes.get is None else memo.get(opcodes.get, ~opcodes.get)


def _read(raw: bytes) -> _Opcodes:
    """Parse the opcodes of a change."""
    at, text, get, number = 0, None, None, None
    code = raw[0] if raw else STOP
    if code in _TEXTS:
        at = end_of(raw, 0)
        text = raw[1 + count_nbytes(code) : at].decode("utf-8", "surrogatepass")
    elif code in _GETS:
        at, get = end_of(raw, 0), argument(raw, 0)
    elif code in INTS:
        at = end_of(raw, 0)
        number = int.from_bytes(raw[1:at], "little", signed=code == BININT)
    puts = []
    while at < len(raw):
        if raw[at] not in _PUTS:
            raise _UnprovedError
        puts.append(argument(raw, at))
        at = end_of(raw, at)
    if at != len(raw):
        raise _UnprovedError
    pushes = (text, get, number) != (None, None, None)
    return _Opcodes(text, get, number, tuple(puts), pushes)


def _memory(slots: Iterable[int]) -> re.Pattern[bytes]:
    """A pattern: opcodes up to and including the next that fills or recalls one of these slots."""
    short = b"".join(re.escape(bytes([slot])) for slot in slots if slot < 256)
    long = b"|".join(re.escape(slot.to_bytes(4, "little")) for slot in slots)
    other = row_of((MEMOIZE, BINPUT, LONG_BINPUT, BINGET, LONG_BINGET))
    brief, briefly = (b"[^%b]" % short, b"[hq][%b]|" % short) if short else (b".", b"")
    return re.compile(
        b"(?:%b|[hq]%b|[jr](?!%b)....)*(%b[jr](?:%b)|\\Z)" % (other, brief, long, briefly, long),
        re.DOTALL,
    )
