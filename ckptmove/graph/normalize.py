"""Replace calls that old protocols use for plain values with these values.

Protocols up to 2 spell bytes as `_codecs.encode(text, 'latin1')`, sets as `set([…])`, names within
a class as `getattr(class, name)`, and `__newobj_ex__` as a function. Both spellings mean the same,
and a program that reads the tree should not have to know both. `pickles.emit` does the reverse.
Source: CPython, Lib/pickle.py.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable

from ..errors import UnsupportedError
from ..pickles.nodes import Blob, Call, Global, Items, List, Node, Set, Tuple
from ..pickles.opcodes.literals import may_be_checkpoint
from ..pickles.opcodes.plain_tensors import compact_form
from ..sources.source import MAX_NBYTES, Readable
from ..torch_pickle.callables.uses import LATIN_1, latin_1

#: Longer bytes in a tree are tensors of their own.
LONGEST_INLINE = 4096
_READ = 1 << 20


def normalize(
    node: Node, is_only_here: Callable[[List], bool], encoded: dict[int, bytes | None]
) -> Node:
    """Return the value that a node stands for, or the node itself, which may be changed.

    `is_only_here` tells whether a list is held only by one tuple of arguments. `encoded` keeps the
    bytes of each text, by its `id()`: all calls that encode it give the same object.
    """
    if isinstance(node, bytes):
        return _as_bytes(node)
    if not isinstance(node, Call) or compact_form(node) is not None:
        return node
    items = node.args.items if isinstance(node.args, Tuple) else None
    filled = node.built or node.pairs or node.items
    if items is None or node.kwargs is not None:
        return node
    if node.opcode in ("INST", "OBJ", "BYTEARRAY8"):
        node.opcode = "REDUCE" if items else "NEWOBJ"
    if node.opcode != "REDUCE":
        return node
    name = node.qualname
    if name == "builtins.bytearray" and len(items) == 2:
        content = _encode(items, encoded)
        if content is not None:
            node.args = Tuple([content], 0)
    if filled:
        return node
    if name == "_codecs.encode" or (name == "builtins.bytes" and not items):
        content = _encode(items, encoded) if items else b""
        return node if content is None else content
    if name in ("builtins.set", "builtins.frozenset") and len(items) == 1:
        inside = items[0]
        if isinstance(inside, List) and is_only_here(inside):
            return Set(inside.items, name == "builtins.frozenset")
    return _nested_name(node) if name == "builtins.getattr" else node


def _as_bytes(content: bytes) -> bytes | Blob:
    if len(content) <= LONGEST_INLINE and not may_be_checkpoint(content):
        return content
    return Blob(0, len(content), content)


def text_of(blob: Blob, window: Readable | None) -> str | None:
    """Return the text of long bytes, as Python 2 kept it; None if they are not UTF-8.

    `window` reads bytes that were skipped. UnsupportedError if they are too many.
    """
    if not blob.string:
        return None
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        if window is None:
            return decoder.decode(blob.content or b"", final=True)
        if window.nbytes > MAX_NBYTES:
            raise UnsupportedError(f"a string within it is longer than {MAX_NBYTES:,} bytes")
        parts = []
        for at in range(0, window.nbytes, _READ):
            part = window.read(at, min(_READ, window.nbytes - at))
            parts.append(decoder.decode(part, final=at + len(part) == window.nbytes))
    except UnicodeDecodeError:
        return None
    return "".join(parts)


def _encode(items: Items, encoded: dict[int, bytes | None]) -> bytes | None:
    if len(items) != 2 or not isinstance(items[0], str) or items[1] not in LATIN_1:
        return None
    text = items[0]
    if id(text) not in encoded:
        encoded[id(text)] = latin_1(text)
    return encoded[id(text)]


def _nested_name(node: Call) -> Node:
    """Return a name inside a class, or the call itself."""
    parts: list[str] = []
    inner: Node = node
    while isinstance(inner, Call) and inner.qualname == "builtins.getattr":
        items = inner.args.items if isinstance(inner.args, Tuple) else []
        plain = inner.opcode == "REDUCE" and not (inner.built or inner.pairs or inner.items)
        if len(items) != 2 or not isinstance(items[1], str) or "." in items[1] or not plain:
            return node
        parts.append(str(items[1]))
        inner = items[0]
    if not isinstance(inner, Global):
        return node
    return Global(inner.module, ".".join([inner.name, *reversed(parts)]), 0)
