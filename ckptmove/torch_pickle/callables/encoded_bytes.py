"""Recognize bytes as protocols up to 2 spell them: a text that is encoded."""

from __future__ import annotations

from ...pickles.nodes import Call, Text, Tuple
from ...pickles.opcodes.literals import may_be_checkpoint
from .uses import ENCODE, LATIN_1


def bytes_as_text(call: Call) -> Text | None:
    """The text of `_codecs.encode(text, 'latin1')`, as protocols up to 2 spell bytes."""
    if call.qualname != ENCODE or not isinstance(call.args, Tuple):
        return None
    items = call.args.items
    if len(items) != 2 or not isinstance(items[0], Text) or items[1] not in LATIN_1:
        return None
    text = items[0]
    return text if may_be_checkpoint(text[:64].encode("latin-1", "replace")) else None


def latin_1(text: str) -> bytes | None:
    """The bytes whose numbers the characters of a text are, or None if one is none."""
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        return None
