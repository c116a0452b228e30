"""Write terms as JSON text in one canonical form, and read it strictly."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import accumulate
from math import isfinite

from ...errors import CorruptError, UnsupportedError
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

_LONG_NUMBER = re.compile("[0-9]{20}")
_STRING = re.compile('"[^"]*"?')
_NO_BRACKET = re.compile(r"[^][{}]+")
_STEPS = {"[": 1, "{": 1, "]": -1, "}": -1}


def spelled(term: Term) -> str:
    """A term as JSON: in ASCII, without white space, the same for the same term.

    Raises:
        UnsupportedError: it is too deep or too large.
    """
    try:
        text = json.dumps(term, separators=(",", ":"), allow_nan=False, check_circular=False)
    except RecursionError:
        raise UnsupportedError(_too_deep()) from None
    excess = _excess(text)
    if excess is not None:
        raise UnsupportedError(excess)
    return text


def parsed(text: str) -> Term:
    """What JSON text says, if all readers agree on it.

    Raises:
        CorruptError: it is no JSON, says something twice, holds numbers that are none or that no
            double or 64-bit integer holds, or is too deep or too large.
    """
    excess = _excess(text)
    if excess is not None:
        raise CorruptError(excess)
    try:
        return json.loads(
            text,
            object_pairs_hook=_unique,
            parse_int=_integer_parser(text),
            parse_float=_finite,
            parse_constant=_finite,
        )
    except RecursionError:
        raise CorruptError(_too_deep()) from None
    except ValueError:
        raise CorruptError("the saved tree is not JSON") from None


def _too_deep() -> str:
    return f"the saved tree is nested more than {MAX_DEPTH} levels deep in JSON"


def _excess(text: str) -> str | None:
    """What JSON text has too much of, or None."""
    bare = text.replace("\\\\", "").replace('\\"', "") if "\\" in text else text
    if bare.count('"') > 2 * (LEAST_TEXTS + len(text) // CHARACTERS_OF_TEXT):
        return "the saved tree has far more texts in JSON than its length can need"
    brackets = _NO_BRACKET.sub("", _STRING.sub("", bare))
    opened = brackets.count("[") + brackets.count("{")
    if opened > LEAST_BRACKETS + len(text) // CHARACTERS_OF_BRACKET:
        return "the saved tree has far more lists and objects in JSON than its length can need"
    if max(accumulate(map(_STEPS.__getitem__, brackets)), default=0) > MAX_DEPTH:
        return _too_deep()
    return None


def _unique(pairs: list[tuple[str, Term]]) -> dict[str, Term]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise CorruptError("the saved tree has an object that says something twice")
    return found


def _integer_parser(text: str) -> Callable[[str], int] | None:
    """What makes integers of their digits in this text; None for Python's own, the fastest."""
    if _LONG_NUMBER.search(text):
        return _whole
    return _ShortIntegers().__getitem__ if len(text) > _LONG_TEXT else None


class _ShortIntegers(dict[str, int]):
    """Integers by their digits; short ones are there once, however often the text says them.

    A long row of them takes four characters each in the text, and would take thirty-six bytes.
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
