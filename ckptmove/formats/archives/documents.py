"""Read JSON documents in a checkpoint strictly, and write them with some new values.

Everything else stays the same, except white space and escapes. The new text has the length of the
old one if possible: with the white space of `json.dumps`, otherwise with none, padded at its end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from typing import Any, TypeAlias

from ...errors import CorruptError, UnsupportedError
from ...pickles.terms import extent_of
from ..safetensors.header import Twice, unique

#: The result of `json.loads`.
Json: TypeAlias = Any
#: `id()` of an object in a document → its changed members, with their new values.
Changes = Mapping[int, Mapping[str, Json]]

#: The most lists and objects of any document, and the bytes that allow one more: empty ones take
#: much memory.
_LEAST_BRACKETS, _NBYTES_OF_BRACKET = 1 << 17, 8
_SPACINGS = ((", ", ": "), (",", ":"))


class Document:
    """One JSON text."""

    def __init__(self, name: str, content: bytes) -> None:
        self.name = name  #: name of the record, for messages
        self.nbytes = len(content)
        if extent_of(content).opened > _LEAST_BRACKETS + len(content) // _NBYTES_OF_BRACKET:
            raise CorruptError(f"the record {name!r} has too many brackets")
        try:
            text = content.decode("utf-8")
            self.root: Json = json.loads(
                text, object_pairs_hook=unique, parse_float=_finite, parse_constant=_finite
            )
        except RecursionError as error:
            raise CorruptError(f"the record {name!r} is nested too deeply") from error
        except Twice as error:
            raise CorruptError(f"the record {name!r} says {error.args[0]!r} twice") from error
        except ValueError as error:
            raise CorruptError(f"the record {name!r} is not JSON") from error
        # DEL is ASCII, but is escaped in documents that escape all other characters.
        self._ascii = text.isascii() and "\x7f" not in text

    def rewrite(self, changes: Changes) -> bytes:
        """The text with changed values; it has the same length if possible."""
        try:
            root = _replace_values(self.root, changes)
            made = [self._dump(root, spacing) for spacing in _SPACINGS]
        except RecursionError as error:
            raise UnsupportedError(f"the record {self.name!r} is nested too deeply") from error
        fitting = next((text for text in made if len(text) <= self.nbytes), made[-1])
        return fitting.ljust(self.nbytes)

    def with_values(self, changes: Changes) -> bytes:
        """The text with changed values, one per line, to be compared and shown."""
        try:
            return json.dumps(_replace_values(self.root, changes), indent=1).encode("ascii")
        except RecursionError as error:
            raise UnsupportedError(f"the record {self.name!r} is nested too deeply") from error

    def _dump(self, root: Json, spacing: tuple[str, str]) -> bytes:
        try:
            return json.dumps(root, ensure_ascii=self._ascii, separators=spacing).encode("utf-8")
        except UnicodeEncodeError:  # a lone surrogate, which only an escape can spell
            return json.dumps(root, separators=spacing).encode("utf-8")

    def differs(self, other: Document, changes: Changes) -> bool:
        """Whether the other document differs from this one with these changes."""
        todo: list[tuple[Json, Json]] = [(self.root, other.root)]
        while todo:
            old, new = todo.pop()
            if type(old) is not type(new):
                return True
            if isinstance(old, dict):
                if list(old) != list(new):
                    return True
                fresh = changes.get(id(old), {})
                todo += [(fresh[key] if key in fresh else old[key], new[key]) for key in old]
            elif isinstance(old, list):
                if len(old) != len(new):
                    return True
                todo += zip(old, new, strict=True)
            elif old != new and not (old != old and new != new):  # NaN is not equal to itself
                return True
        return False


def _finite(text: str) -> float:
    value = float(text)
    if not isfinite(value) and text not in ("NaN", "Infinity", "-Infinity"):
        raise ValueError
    return value


def _replace_values(node: Json, changes: Changes) -> Json:
    """A copy with changed values."""
    if isinstance(node, dict):
        fresh = changes.get(id(node), {})
        return {
            key: fresh[key] if key in fresh else _replace_values(each, changes)
            for key, each in node.items()
        }
    if isinstance(node, list):
        return [_replace_values(each, changes) for each in node]
    return node


def member(node: Json, key: str, kind: type, where: str) -> Json:
    """The member of an object; CorruptError if it is missing or of another type."""
    found = node.get(key) if isinstance(node, dict) else None
    if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
        raise CorruptError(f"{where} has no proper {key!r}")
    return found
