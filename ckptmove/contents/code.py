"""Devices that the text of TorchScript names.

Scripted code says `torch.device("cuda:0")` where a device is fixed; tracing fixes it in every
factory call. `torch.jit.load(map_location=...)` moves tensors and never the code. A device that is
spelled so as a literal can be rewritten; a bare string may be anything, and is only listed.

Source: torch/csrc/jit/serialization/python_print.cpp (`printConstant`), whose output is Python as
far as its tokens are concerned.
"""

from __future__ import annotations

import io
import re
import tokenize
from ast import literal_eval
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ..device import names_device
from ..errors import CorruptError

_WORTH_A_LOOK = re.compile(r"[\"'][a-z][a-z0-9_]{1,14}(:[0-9]{1,3})?[\"']")
_CALL = ["torch", ".", "device", "("]
_SKIPPED = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT)


class Literal(NamedTuple):
    """A string in the code that names a device.

    Attributes:
        record: the name of the record.
        line: its number, from 1.
        start, end: where the quoted string lies in the text, in characters.
        value: the device.
        sure: whether it is the argument of `torch.device`.
    """

    record: str
    line: int
    start: int
    end: int
    value: str
    sure: bool


def literals(record: str, text: str) -> Iterator[Literal]:
    """The strings that name devices in the text of a record, in order.

    Raises:
        CorruptError: the text can't be taken apart.
    """
    if not any(names_device(match[0][1:-1]) for match in _WORTH_A_LOOK.finditer(text)):
        return
    lines = [0]
    for each in io.StringIO(text, newline=""):
        lines.append(lines[-1] + len(each))
    before: list[str] = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(text, newline="").readline):
            if token.type in _SKIPPED:
                continue
            if token.type == tokenize.STRING:
                value = literal_eval(token.string)
                if isinstance(value, str) and names_device(value):
                    line, column = token.start
                    start = lines[line - 1] + column
                    end = lines[token.end[0] - 1] + token.end[1]
                    yield Literal(record, line, start, end, value, before[-4:] == _CALL)
            before = [*before[-3:], token.string]
    except (tokenize.TokenError, SyntaxError, ValueError) as error:
        raise CorruptError(f"the code in {record!r} can't be taken apart") from error


def rewritten(text: str, changes: Iterable[tuple[Literal, str]]) -> str:
    """The text with other devices in the place of some."""
    parts, position = [], 0
    for literal, device in sorted(changes):
        parts += [text[position : literal.start], f'"{device}"']
        position = literal.end
    return "".join([*parts, text[position:]])
