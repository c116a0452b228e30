"""Find and rewrite the devices that the text of TorchScript names.

Scripted code says `torch.device("cuda:0")` where a device is fixed; tracing fixes it in every
factory call. `torch.jit.load(map_location=...)` moves tensors and never the code. A device spelled
as such a literal can be rewritten; a bare string may mean anything, and is only listed.

Source: torch/csrc/jit/serialization/python_print.cpp (`printConstant`), whose output has the tokens
of Python.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ..errors import CorruptError
from ..pickles.device_tags import names_device

#: The tokens to recognize: comments, and strings in Python's four kinds of quotes. The last
#: alternative matches a quote that is never closed.
_TOKEN = re.compile(
    r"""\#[^\n]*|
    \"\"\"(?:[^\\"]|\\.|\"(?!\"\"))*\"\"\"|\'\'\'(?:[^\\']|\\.|'(?!''))*\'\'\'|
    "(?P<double>(?:[^"\\\n]|\\.)*)"|'(?P<single>(?:[^'\\\n]|\\.)*)'|
    (?P<open>["'])""",
    re.VERBOSE | re.DOTALL,
)
_CALL = re.compile(r"(?<![\w.])torch\s*\.\s*device\s*\(\s*")
_LONGEST_CALL = 200  # characters from `torch` to the string
_END = re.compile(r"\s*\)")


class Literal(NamedTuple):
    """A string in the code that names a device."""

    record: str
    #: the line number, from 1
    line: int
    #: the offsets of the quoted string in the text, in characters
    start: int
    end: int
    #: the device
    value: str
    #: whether it is the argument of `torch.device`
    sure: bool


def literals(record: str, text: str) -> Iterator[Literal]:
    """The strings that name devices in the text of a record, in order."""
    line, counted, before = 1, 0, 0
    for token in _TOKEN.finditer(text):
        if token["open"]:
            raise CorruptError(f"the code in {record!r} can't be parsed")
        value = token["double"] or token["single"] or ""
        start = token.start()
        prefixed = text[start - 1 : start].isalnum()  # r"", b"", f"": torch prints no such strings
        if names_device(value) and not prefixed:
            line += text.count("\n", counted, start)
            counted = start
            calls = _CALL.fullmatch(text, _last_word(text, before, start), start)
            sure = calls is not None and _END.match(text, token.end()) is not None
            yield Literal(record, line, start, token.end(), value, sure)
        before = token.end()


def _last_word(text: str, least: int, end: int) -> int:
    """The offset of the last `torch` before `end`; or `end`."""
    found = text.rfind("torch", max(least, end - _LONGEST_CALL), end)
    return end if found < 0 else found


def rewrite(text: str, changes: Iterable[tuple[Literal, str]]) -> str:
    """The text with some devices replaced."""
    parts, position = [], 0
    for literal, device in sorted(changes):
        parts += [text[position : literal.start], f'"{device}"']
        position = literal.end
    return "".join([*parts, text[position:]])
