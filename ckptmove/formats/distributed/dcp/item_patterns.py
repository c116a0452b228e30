"""The sequences of opcodes that torch writes for the objects of items in `.metadata`.

Except for a few bytes, a `.metadata` with very many items repeats these sequences:

    OPEN        EMPTY_TUPLE NEWOBJ PUT EMPTY_DICT PUT MARK      after a GET of the class
    SIZE        GET torch.Size
                (EMPTY_TUPLE | MARK INT… TUPLE PUT | INT… TUPLE1|2|3 PUT) TUPLE1 PUT REDUCE PUT
    chunk       OPEN GET 'offsets' SIZE GET 'sizes' SIZE SETITEMS BUILD
    index       OPEN GET 'fqn' (GET | SHORT_BINUNICODE PUT)
                GET 'index' INT GET 'offset' SIZE SETITEMS BUILD
    place       OPEN GET 'relative_path' GET GET 'offset' INT GET 'length' INT SETITEMS BUILD
    tensor      OPEN GET 'properties'
                (GET | GET class EMPTY_TUPLE NEWOBJ PUT MARK GET GET FLAG GET FLAG TUPLE PUT BUILD)
                GET 'size' SIZE GET 'chunks' EMPTY_LIST PUT
                (GET class chunk APPEND | MARK (GET class chunk)… APPENDS) SETITEMS BUILD

Either each PUT is a MEMOIZE, as torch writes them, or there are none, as in ckptmove.
`item_machine` parses them.
"""

from __future__ import annotations

import re

MEMOIZE = b"\x94"
_INT = rb"(?:K.|M..|J....|\x8a\x05.{5}|\x8a\x06.{6})"
_GET = rb"(h.|j....)"
INTS = re.compile(_INT, re.DOTALL)
SIZE, ANY, CHUNK_CLASS = "torch.Size", "?", "ChunkStorageMetadata"
#: Words that stand for opcodes: some include PUTs (P), and some have a group.
_WORDS = {
    "OPEN": rb"\)\x81P\}P\(",
    "CLOSE": rb"ub",
    "ROW": rb"(\)|(?:\(" + _INT + rb"{0,8}t|" + _INT + rb"{1,3}[\x85-\x87])P)",
    "SIZE": rb"\x85PRP",
    "INT": rb"(" + _INT + rb")",
    "RECALL": _GET,
    "PROPERTIES": rb"\)\x81P\(",
    "FLAG": rb"[\x88\x89]",
    "BUILD": rb"tPb",
    "LIST": rb"\]P",
    "PUT": rb"P",
}
_VALUES = ("ROW", "INT", "RECALL")  # words whose group may be different in each sequence
_CHUNK = f"OPEN offsets {SIZE} ROW SIZE sizes {SIZE} ROW SIZE CLOSE"
_INDEX = f"index INT offset {SIZE} ROW SIZE CLOSE"
_CHUNKS = f"size {SIZE} ROW SIZE chunks LIST"
#: Parts of sequences. Other words are values that a GET recalls: text, a class (`.X`), or a value
#: that is checked later (`?`).
_PARTS = {
    "chunk": _CHUNK,
    "class and chunk": f".{CHUNK_CLASS} {_CHUNK}",
    "index": "OPEN fqn",
    "rest of index": _INDEX,
    "index of a known name": f"OPEN fqn RECALL {_INDEX}",
    "place": "OPEN relative_path ? offset INT length INT CLOSE",
    "tensor": f"OPEN properties ? {_CHUNKS}",
    "described tensor": (
        f"OPEN properties .TensorProperties PROPERTIES ? ? FLAG ? FLAG BUILD {_CHUNKS}"
    ),
    "get": "?",
    "put": "PUT",
}


class Pattern:
    """The pattern of a part of a sequence."""

    def __init__(self, spelled: str, put: bytes) -> None:
        words = spelled.split()
        groups = [word for word in words if word in _VALUES or word not in _WORDS]
        raw = b"".join(_WORDS.get(word, _GET) for word in words)
        self.match = re.compile(raw.replace(b"P", put), re.DOTALL).match
        #: which groups are GETs, and what they recall
        self.gets = [n for n, word in enumerate(groups, 1) if word not in _WORDS]
        self.recalls = [word for word in groups if word not in _WORDS]
        #: which groups are numbers, rows of numbers, or recall any value
        self.numbers = [n for n, word in enumerate(groups, 1) if word in _WORDS]


#: The patterns by name, for pickles with a MEMOIZE after each object, and for those without.
PATTERNS = {
    put: {name: Pattern(spelled, put) for name, spelled in _PARTS.items()} for put in (MEMOIZE, b"")
}
