"""Write terms as JSON text in one canonical form, and read it strictly."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Iterator
from itertools import accumulate, chain
from math import isfinite
from typing import Any, NamedTuple, TypeAlias

from ...errors import CorruptError, UnsupportedError
from ..flag_row import FlagRow
from ..nodes import Items
from ..opcodes.mixed_rows import MixedRow, is_worth_it
from ..opcodes.pairs import Pairs, RecordKinds
from ..opcodes.rows import compact_row, extend_row
from .spelling import Term, are_terms, has_surrogates

#: The deepest nesting of the text: `json` recurses, and Python's stack is 1000 calls.
MAX_DEPTH = 500
#: The most lists and objects of any tree, and the characters that allow one more: each takes
#: hundreds of bytes of memory, but only three characters.
LEAST_BRACKETS, CHARACTERS_OF_BRACKET = 1 << 17, 12
#: The same for texts.
LEAST_TEXTS, CHARACTERS_OF_TEXT = 1 << 18, 12
_LONGEST_INT, _LONGEST_FLOAT = 20, 32  # characters; written numbers take at most 20 and 24
_LONG_TEXT = 1 << 20  # characters; in a longer text, equal short integers are shared
_SHORT_INT = 5  # characters

#: Runs of digits, and of characters of numbers, that are long enough to need checks while parsing.
_LONG_RUNS = (
    (bytes.maketrans(b"0123456789", b"0" * 10), b"0" * 20),
    (bytes.maketrans(b"0123456789-+.eE", b"0" * 15), b"0" * 25),
)
#: A long run of consecutive numbers in a row, with more characters than the sizes of any tensor
#: take. The run is complete: the characters before it can't be part of a number.
_LONG, _OF_NUMBERS = 1500, "-+.,0123456789eE"
_LONG_RUN = re.compile(
    r"""(?:(?<=\[)|(?<=["\]}],)|(?<=ll,)|(?<=ue,)|(?<=se,))([-+.,0-9eE]{1500,})(?=[\],])"""
)
_OF_NUMBERS_ALONE = re.compile("[-+.,0-9eE]+")
_PART = 1 << 16  # numbers of a row, or characters, that are converted at once
_Aside: TypeAlias = "array[Any] | FlagRow | MixedRow | Pairs"
_ROW = "NaN"  # a constant that Python reads but JSON does not have; stands for a row
#: A text that occurs in no term; it stands for a row as well.
_NO_TEXT, _NO_TEXT_ESCAPED = "\ud800", "\\ud800"
_CHUNK = 1 << 18
_NO_MARKS = bytes(set(range(256)) - set(b'[]{}"'))
# as signed bytes: +1 for opening, -1 for closing
_BRACKETS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")


def term_json(term: Term) -> str:
    """A term as JSON: ASCII, without white space, always the same for the same term.

    UnsupportedError if it is too deep or too large.
    """
    text = "".join(_joined_parts(json_parts(term, bounded=True)))
    excess = _excess(text, _runs_within(text))
    if excess is not None:
        raise UnsupportedError(excess)
    return text


def json_parts(term: Term, *, bounded: bool = False) -> Iterator[str]:
    """The JSON of `term_json` in parts, however large.

    Rows and records are converted piece by piece. `bounded`: UnsupportedError if it has too many
    texts, before the parts are joined.
    """
    rows: list[_Aside] = []

    def set_aside(row: _Aside) -> str:
        rows.append(row)
        return _NO_TEXT

    try:
        parts = list(_encoder(set_aside).iterencode(term, _one_shot=True))  # in C
    except RecursionError:
        raise UnsupportedError(_too_deep()) from None
    if bounded and not rows:
        quotes = sum(_without_escapes(part.encode("ascii")).count(b'"') for part in parts)
        check_texts(quotes // 2, sum(map(len, parts)))
    text = "".join(parts)
    del parts
    others = text.split(f'"{_NO_TEXT_ESCAPED}"') if rows else [text]
    del text
    encode = _encoder().encode
    for before, row in zip(others, rows, strict=False):
        if isinstance(row, Pairs):
            yield before + encode(dict(iter(row)))
            continue
        yield f"{before}["
        for at in range(0, len(row), _PART):
            yield ("," if at else "") + encode(list(row[at : at + _PART]))[1:-1]
        yield "]"
    yield others[-1]


def _joined_parts(parts: Iterator[str]) -> Iterator[str]:
    """The same text in fewer parts: that of a record is no longer than a string object."""
    held, length = list[str](), 0
    for part in parts:
        held.append(part)
        length += len(part)
        if length > _CHUNK:
            yield "".join(held)
            held, length = [], 0
    yield "".join(held)


def parse_term(text: str) -> Term:
    """Parse JSON text that all readers read alike; long rows of numbers become arrays.

    Rows that mix numbers with other values become `MixedRow`, and objects within others that are
    records become their pairs. CorruptError if an object has a key twice, if a number is invalid or
    fits neither a double nor a 64-bit integer, or if the text is too deep or too large.
    """
    runs = _runs_within(text)
    excess = _excess(text, runs)
    if excess is not None:
        raise CorruptError(excess)
    others = _between(text, runs)
    rows = ((_row(text, run.start, run.end), run.is_row) for run in runs)

    def constant(said: str) -> Term:
        row, is_row = next(rows, (None, True)) if said == _ROW else (None, True)
        if row is None:
            raise CorruptError("the saved tree has a number that is none")
        return row if is_row else _PartOfRow(row)

    try:
        term = json.loads(
            _ROW.join(others),
            object_pairs_hook=_Objects().unique,
            parse_int=_integer_parser(others),
            parse_float=_finite,
            parse_constant=constant,
        )
    except RecursionError:
        raise CorruptError(_too_deep()) from None
    except ValueError:
        raise CorruptError("the saved tree is not JSON") from None
    if isinstance(term, Pairs):
        return dict(iter(term))
    return term if all(run.is_row for run in runs) else _joined(term)


def _encoder(
    default: Callable[[_Aside], str] | None = None,
) -> json.JSONEncoder:
    return json.JSONEncoder(
        separators=(",", ":"), allow_nan=False, check_circular=False, default=default
    )


class _Run(NamedTuple):
    """A long run of numbers, and whether it is the whole row."""

    start: int
    end: int
    is_row: bool


class _PartOfRow(NamedTuple):
    """Numbers in a row that also has other values."""

    numbers: Items


def _runs_within(text: str) -> list[_Run]:
    """The long runs of numbers outside of strings, if the text is JSON."""
    runs: list[_Run] = []
    before, quoted = 0, False  # `before` is never within an escape, because a run is not
    for start, end in long_runs(text):
        between = map(_without_escapes, _parts_of(text[before:start]))
        quoted ^= sum(part.count(b'"') for part in between) % 2 == 1
        before = end
        if not quoted:
            runs.append(_Run(start, end, text[start - 1] == "[" and text[end] == "]"))
    return runs


def long_runs(text: str) -> Iterator[tuple[int, int]]:
    """Spans that match `_LONG_RUN`.

    Searched only near number characters at multiples of its length.
    """
    done = 0
    for at in range(0, len(text), _LONG):
        if at < done or text[at] not in _OF_NUMBERS:
            continue
        before = text[max(done, at - _LONG) : at]
        start = at - len(before) + len(before.rstrip(_OF_NUMBERS))
        run = _OF_NUMBERS_ALONE.match(text, at)
        assert run is not None
        done = run.end()
        if done - start >= _LONG:
            yield from (each.span(1) for each in _LONG_RUN.finditer(text, start, done + 1))


def _between(text: str, runs: list[_Run]) -> list[str]:
    """The text before, between and after the runs, without the brackets of whole rows."""
    starts = [0, *(run.end + run.is_row for run in runs)]
    ends = [*(run.start - run.is_row for run in runs), len(text)]
    return [text[start:end] for start, end in zip(starts, ends, strict=True)]


def _joined(term: Term) -> Term:
    """A term with the parts of its rows joined."""
    whole = [term]
    todo: list[Any] = [whole]  # lists and objects
    while todo:
        outer = todo.pop()
        for key, each in outer.items() if isinstance(outer, dict) else enumerate(outer):
            if isinstance(each, list) and any(type(part) is _PartOfRow for part in each):
                row = MixedRow()
                for part in each:
                    row.extend(part.numbers if type(part) is _PartOfRow else (part,))
                each = outer[key] = row if is_worth_it(row) else list(row)
            if isinstance(each, MixedRow):
                each = each.others
            if isinstance(each, (list, dict)):
                todo.append(each)
    return whole[0]


def _row(text: str, start: int, end: int) -> Items:
    """The numbers of a row."""
    row: Items = []
    while start < end:
        stop = text.find(",", start + _PART, end)
        stop = end if stop < 0 else stop
        part = text[start:stop]
        checked = has_long_number(part)
        numbers = json.loads(
            f"[{part}]",
            parse_int=_whole if checked else None,
            parse_float=_finite if checked else None,
        )
        if not all(map(isfinite, numbers)):
            raise ValueError("a number that no double holds")
        row = extend_row(row, numbers) if row else compact_row(numbers)
        start = stop + 1
        if start == end:
            raise ValueError("a comma without a number")
    return row


def _too_deep() -> str:
    return f"the saved tree is nested more than {MAX_DEPTH} levels deep in JSON"


def _excess(text: str, runs: list[_Run]) -> str | None:
    """Which limit the JSON text exceeds, or None; long runs of numbers are not counted."""
    brackets = ["[]" if run.is_row else "" for run in runs]
    others = zip(_between(text, runs), [*brackets, ""], strict=True)
    extent = extent_of("".join(chain.from_iterable(others)) if runs else text)
    excess = _excess_of_texts(extent.quotes, len(text))
    if excess is not None:
        return excess
    if extent.opened > LEAST_BRACKETS + len(text) // CHARACTERS_OF_BRACKET:
        return "the saved tree has far more lists and objects in JSON than its length can need"
    return _too_deep() if extent.depth > MAX_DEPTH else None


def check_texts(texts: int, characters: int) -> None:
    """UnsupportedError if JSON with so many texts and characters would be refused."""
    excess = _excess_of_texts(2 * texts, characters)
    if excess is not None:
        raise UnsupportedError(excess)


def _excess_of_texts(quotes: int, nbytes: int) -> str | None:
    if quotes > 2 * (LEAST_TEXTS + nbytes // CHARACTERS_OF_TEXT):
        return "the saved tree has far more texts in JSON than its length can need"
    return None


class JsonExtent(NamedTuple):
    """The extent of JSON: the depth and number of its brackets, and the number of its quotes."""

    depth: int
    opened: int
    quotes: int


def extent_of(content: str | bytes) -> JsonExtent:
    """The extent of JSON before it is parsed; arbitrary numbers if it is not JSON."""
    deepest = depth = opened = quotes = within = 0  # within: 1 within a string
    for part in _parts_of(content):
        marks = _without_escapes(part).translate(_BRACKETS, _NO_MARKS)
        parts = marks.split(b'"')
        outside = b"".join(parts[within::2])
        quotes += len(parts) - 1
        within = quotes % 2
        opened += outside.count(b"\x01")
        steps = memoryview(outside).cast("b")
        deepest = max(deepest, max(accumulate(steps, initial=depth)))
        depth += sum(steps)
    return JsonExtent(deepest, opened, quotes)


def _parts_of(content: str | bytes) -> Iterator[bytes]:
    """The JSON in parts, as bytes; none ends within an escape."""
    start, backslash = 0, "\\" if isinstance(content, str) else b"\\"
    while start < len(content):
        end = start + _CHUNK
        while content[end - 1 : end] == backslash:
            end += 1
        part = content[start:end]
        yield part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        start = end


def _without_escapes(content: bytes) -> bytes:
    return content.replace(b"\\\\", b"").replace(b'\\"', b"")


class _Objects:
    """The objects of one text."""

    def __init__(self) -> None:
        self._records = RecordKinds()

    def unique(self, pairs: list[tuple[str, Term]]) -> dict[str, Term] | Pairs:
        """An object, or the pairs of a record."""
        found = dict(pairs)
        if len(found) != len(pairs):
            raise CorruptError("the saved tree has an object that says something twice")
        if "$" in found:  # nearly all: a term is no record
            return found
        record = self._records.pairs_of(list(chain.from_iterable(pairs)))
        if record is None or any(map(has_surrogates, found)):
            return found
        return record if are_terms(record.values) else found


def _integer_parser(parts: list[str]) -> Callable[[str], int] | None:
    """A parser of integers for this text; None for Python's own, which is the fastest."""
    if any(map(has_long_number, parts)):
        return _whole
    return _ShortIntegers().__getitem__ if sum(map(len, parts)) > _LONG_TEXT else None


def has_long_number(content: str | bytes) -> bool:
    """Whether JSON may have an integer of 20 digits or more, or any number of 25 characters."""
    for at in range(0, len(content), _CHUNK):
        part = content[at : at + _CHUNK + _LONGEST_FLOAT]
        part = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        if any(run in part.translate(digits) for digits, run in _LONG_RUNS):
            return True
    return False


class _ShortIntegers(dict[str, int]):
    """Integers by their digits; short ones are stored once, however often they occur.

    In a long row each takes four characters of text, and would take thirty-six bytes.
    """

    def __missing__(self, digits: str) -> int:
        value = int(digits)
        if len(digits) <= _SHORT_INT:
            self[digits] = value
        return value


def _whole(text: str) -> int:
    if len(text) > _LONGEST_INT:
        raise CorruptError("the saved tree has a number of absurd length")
    return int(text)


def _finite(text: str) -> float:
    value = float(text) if len(text) <= _LONGEST_FLOAT else float("inf")
    if not isfinite(value):
        raise CorruptError("the saved tree has a number that is none, or of absurd length")
    return value
