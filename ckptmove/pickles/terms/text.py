"""Write terms as JSON text in one canonical form, and read it strictly."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Iterator
from itertools import accumulate, chain
from math import isfinite
from typing import Any, NamedTuple

from ...errors import CorruptError, UnsupportedError
from ..flag_row import FlagRow
from ..nodes import Items
from ..opcodes.mixed_rows import MixedRow, is_worth_it
from ..opcodes.rows import extended, packed
from .spelling import Term

#: How deep the text may be: `json` recurses, and Python's stack is 1000 calls.
MAX_DEPTH = 500
#: The most lists and objects of any tree, and characters for each more: they take hundreds of bytes
#: of memory each, but three characters.
LEAST_BRACKETS, CHARACTERS_OF_BRACKET = 1 << 17, 12
#: The same of texts.
LEAST_TEXTS, CHARACTERS_OF_TEXT = 1 << 18, 12
_LONGEST_INT, _LONGEST_FLOAT = 20, 32  # characters; what is written takes at most 20 and 24
_LONG_TEXT = 1 << 20  # characters, from which on equal short integers are shared
_SHORT_INT = 5  # characters

#: Digits, and characters of numbers, so many in a row that what parses them must look at them.
_LONG_RUNS = (
    (bytes.maketrans(b"0123456789", b"0" * 10), b"0" * 20),
    (bytes.maketrans(b"0123456789-+.eE", b"0" * 15), b"0" * 25),
)
#: Numbers that follow each other in a row, in more characters than the sizes of any tensor take:
#: all of them, since what is before can't be a part of a number.
_LONG, _OF_NUMBERS = 1500, "-+.,0123456789eE"
_LONG_RUN = re.compile(
    r"""(?:(?<=\[)|(?<=["\]}],)|(?<=ll,)|(?<=ue,)|(?<=se,))([-+.,0-9eE]{1500,})(?=[\],])"""
)
_OF_NUMBERS_ALONE = re.compile("[-+.,0-9eE]+")
_PART = 1 << 16  # numbers of a row, or characters, that are converted at once
_ROW = "NaN"  # a constant that Python reads, and JSON does not have; stands for a row
#: Text that no term holds, which stands for a row as well.
_NO_TEXT, _NO_TEXT_ESCAPED = "\ud800", "\\ud800"
_CHUNK = 1 << 18
_NO_MARKS = bytes(set(range(256)) - set(b'[]{}"'))
_BRACKETS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # as signed bytes: down, and up again


def term_json(term: Term) -> str:
    """A term as JSON: in ASCII, without white space, the same for the same term.

    UnsupportedError if it is too deep or too large.
    """
    text = "".join(json_parts(term, bounded=True))
    excess = _excess(text, _runs_within(text))
    if excess is not None:
        raise UnsupportedError(excess)
    return text


def json_parts(term: Term, *, bounded: bool = False) -> Iterator[str]:
    """The JSON of `term_json` in parts, however large; rows of numbers are not made text at once.

    `bounded`: UnsupportedError if it has too many texts, before all of it is there as one.
    """
    rows: list[array[Any] | FlagRow | MixedRow] = []

    def set_aside(row: array[Any] | FlagRow | MixedRow) -> str:
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
    for before, row in zip(others, rows, strict=False):
        yield f"{before}["
        for at in range(0, len(row), _PART):
            yield ("," if at else "") + _encoder().encode(list(row[at : at + _PART]))[1:-1]
        yield "]"
    yield others[-1]


def parse_term(text: str) -> Term:
    """What JSON text says, if all readers agree on it; long rows of numbers as arrays, and those
    with other things in between as `MixedRow`.

    CorruptError if it says something twice, holds numbers that are none or that no double or 64-bit
    integer holds, or is too deep or too large.
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
            object_pairs_hook=_unique,
            parse_int=_integer_parser(others),
            parse_float=_finite,
            parse_constant=constant,
        )
    except RecursionError:
        raise CorruptError(_too_deep()) from None
    except ValueError:
        raise CorruptError("the saved tree is not JSON") from None
    return term if all(run.is_row for run in runs) else _joined(term)


def _encoder(
    default: Callable[[array[Any] | FlagRow | MixedRow], str] | None = None,
) -> json.JSONEncoder:
    return json.JSONEncoder(
        separators=(",", ":"), allow_nan=False, check_circular=False, default=default
    )


class _Run(NamedTuple):
    """Where long runs of nothing but numbers are, and whether one is all that its row has."""

    start: int
    end: int
    is_row: bool


class _PartOfRow(NamedTuple):
    """Numbers that stand in a row with other things."""

    numbers: Items


def _runs_within(text: str) -> list[_Run]:
    """Where long runs of numbers are, if it is JSON."""
    runs: list[_Run] = []
    before, quoted = 0, False  # `before` is never within an escape, as a run is not
    for start, end in long_runs(text):
        between = map(_without_escapes, _parts_of(text[before:start]))
        quoted ^= sum(part.count(b'"') for part in between) % 2 == 1
        before = end
        if not quoted:
            runs.append(_Run(start, end, text[start - 1] == "[" and text[end] == "]"))
    return runs


def long_runs(text: str) -> Iterator[tuple[int, int]]:
    """Where `_LONG_RUN` matches: only around characters of numbers at multiples of its length."""
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
    """What is before, between and behind runs, without the brackets of whole rows."""
    starts = [0, *(run.end + run.is_row for run in runs)]
    ends = [*(run.start - run.is_row for run in runs), len(text)]
    return [text[start:end] for start, end in zip(starts, ends, strict=True)]


def _joined(term: Term) -> Term:
    """A term with its rows as they are meant, of which some are in parts."""
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
        row = extended(row, numbers) if row else packed(numbers)
        start = stop + 1
        if start == end:
            raise ValueError("a comma without a number")
    return row


def _too_deep() -> str:
    return f"the saved tree is nested more than {MAX_DEPTH} levels deep in JSON"


def _excess(text: str, runs: list[_Run]) -> str | None:
    """What JSON text has too much of, or None: of its parts but for long runs of numbers."""
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
    """UnsupportedError if JSON with so many texts would be refused at such a length."""
    excess = _excess_of_texts(2 * texts, characters)
    if excess is not None:
        raise UnsupportedError(excess)


def _excess_of_texts(quotes: int, nbytes: int) -> str | None:
    if quotes > 2 * (LEAST_TEXTS + nbytes // CHARACTERS_OF_TEXT):
        return "the saved tree has far more texts in JSON than its length can need"
    return None


class Extent(NamedTuple):
    """Of JSON: how deep its brackets are nested, how many are opened, how many quotes it has."""

    depth: int
    opened: int
    quotes: int


def extent_of(content: str | bytes) -> Extent:
    """The extent of JSON, before any of it is parsed; of what is no JSON, any numbers."""
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
    return Extent(deepest, opened, quotes)


def _parts_of(content: str | bytes) -> Iterator[bytes]:
    """Parts of JSON as bytes; none ends within an escape."""
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


def _unique(pairs: list[tuple[str, Term]]) -> dict[str, Term]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise CorruptError("the saved tree has an object that says something twice")
    return found


def _integer_parser(parts: list[str]) -> Callable[[str], int] | None:
    """What makes integers of their digits in this text; None for Python's own, the fastest."""
    if any(map(has_long_number, parts)):
        return _whole
    return _ShortIntegers().__getitem__ if sum(map(len, parts)) > _LONG_TEXT else None


def has_long_number(content: str | bytes) -> bool:
    """Whether JSON may have a whole number of 20 digits or more, or any of 25 characters."""
    for at in range(0, len(content), _CHUNK):
        part = content[at : at + _CHUNK + _LONGEST_FLOAT]
        part = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        if any(run in part.translate(digits) for digits, run in _LONG_RUNS):
            return True
    return False


class _ShortIntegers(dict[str, int]):
    """Integers by their digits; short ones are there once, however often the text says them.

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
