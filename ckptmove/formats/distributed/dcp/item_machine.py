"""Parse the objects of items in `.metadata` at once, if they are in the form that torch writes.

`item_patterns` has this form. A sequence is parsed at once if the values that it recalls are of the
right kind and no limit is near. In any other case nothing was changed yet, and its opcodes are run
one by one: there is no other way to fail. `tests/formats/distributed/test_item_machine.py` compares
both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ....pickles.device_tags import may_be_tag
from ....pickles.nodes import NOTHING, Call, Dict, Global, List, Node, Text, Tuple
from ....pickles.opcodes.memo import UNFILLED
from ....pickles.opcodes.tensor_layouts import integer_of, slot_of
from ....pickles.walk import Pickle, walk
from ....sources.budget import Budget
from ..boxes import Box
from .item_patterns import ANY, CHUNK_CLASS, INTS, MEMOIZE, PATTERNS, SIZE, Pattern
from .metadata_walk import (
    Content,
    Description,
    FrequentObject,
    ItemKey,
    ItemRange,
    MetadataMachine,
    Sizes,
    file_of,
    text_of,
)

_LONGEST_KNOWN, _MOST_KNOWN = 1 << 12, 8  # bytes of a tensor that is cached; how many are cached
_SHORT_TEXT = b"\x8c"
_MARK, _APPEND, _APPENDS, _CLOSE = b"(", b"a", b"e", b"ub"


class _Size(NamedTuple):
    """A torch.Size, parsed from certain bytes."""

    sizes: tuple[int, ...]
    nodes: tuple[Node, ...]  # nodes that are put into slots


class _Match(NamedTuple):
    """A matched part: its end, the nodes that it recalls, its numbers."""

    end: int
    nodes: tuple[Node, ...]
    numbers: Sequence[bytes]


class _Sequence(NamedTuple):
    """A sequence that can be parsed at once."""

    end: int
    content: Content
    nodes: list[Node]  # nodes that are put into slots, after the object itself


class _Tensor(NamedTuple):
    """The sequence of a tensor, as a cache entry for these bytes."""

    raw: bytes
    content: Description
    before: list[Node]  # nodes that are put into slots before the list of chunks
    chunks: list[FrequentObject]
    after: list[Node]

    def at(self, start: int) -> _Sequence:
        """The sequence at the offset `start`."""
        nodes = [*self.before, List([*self.chunks]), *self.after]  # type: ignore[list-item]
        return _Sequence(start + len(self.raw), self.content, nodes)


def walk_metadata(data: bytes, budget: Budget) -> Pickle:
    """Walk a `.metadata`; CorruptError if an object of an item is not as torch writes it."""
    return walk(data, budget=budget, machine_type=ItemMachine)


class ItemMachine(MetadataMachine):
    """A machine that parses the sequences of usual objects at once."""

    def __init__(
        self,
        data: bytes,
        base: int = 0,
        gaps: Mapping[int, int] | None = None,
        budget: Budget | None = None,
    ) -> None:
        super().__init__(data, base, gaps, budget)
        self._sizes_of: dict[bytes, _Size] = {}  # by their bytes
        # The nodes that the GETs of parts recall. They are valid as long as no slot is filled
        # again.
        self._recalled: dict[tuple[Pattern, object], tuple[Node, ...]] = {}
        self._tensors: list[_Tensor] = []  # the most recent ones
        self._gets: dict[str, bytes] = {}  # the GETs of the classes of usual objects
        self._refilled = 0
        self._patterns = PATTERNS[b""]
        self._size_class: Node = None

    def push_global(self, module: str, name: str) -> None:
        """Like `Machine.push_global`; remembers the name of torch.Size."""
        super().push_global(module, name)
        if self.globals[-1].qualname == SIZE:
            self._size_class = self.globals[-1]

    def recall(self, slot: int) -> None:
        """Like `Machine.recall`.

        The sequence after the class of a usual object is parsed with it, and so are the sequences
        that follow at once.
        """
        super().recall(slot)
        top = self.stack[-1]
        kind = self.kinds.get(id(top), "") if type(top) is Global else ""
        if kind not in _READERS or self.empty_tuple is None:
            return
        memo = self.memo
        if memo.refilled != self._refilled:
            self._recalled.clear()
            self._tensors.clear()
            self._gets.clear()
            self._refilled = memo.refilled
        self._gets[kind] = _get(slot)
        record, data = self._take(kind, self.position), self.data
        if record is None:
            return
        self.stack.pop()
        while record is not None:
            self.push(record)  # type: ignore[arg-type] # as its base
            kind = _FOLLOWING.get(kind, "")
            get = self._gets.get(kind, b"")
            if not get or not data.startswith(get, self.position):
                return
            record = self._take(kind, self.position + len(get))

    def _take(self, kind: str, start: int) -> FrequentObject | None:
        """Parse the sequence after its class at once, if it is there and usual."""
        memo, put = self.memo, self.data[start + 2 : start + 3]
        self._patterns = PATTERNS[put if put == MEMOIZE else b""]
        found = _READERS[kind](self, start)
        if found is None or found.end > self.frame_end >= 0 or not memo.is_row:
            return None
        if not self.fits_sequence(found.end - start):
            return None
        record = FrequentObject(kind, found.content)
        if put == MEMOIZE:
            memo.memoize([record, *found.nodes])  # type: ignore[list-item]
        self.position = found.end
        return record

    # -- the sequences of objects ----------------------------------------------------------------

    def read_chunk(self, start: int, part: str = "chunk") -> _Sequence | None:
        """The sequence of a chunk."""
        found = self._find(part, start)
        if found is None:
            return None
        offsets, sizes = map(self._size, found.numbers)
        if offsets is None or sizes is None:
            return None
        box, put = Box(offsets.sizes, sizes.sizes), [_EMPTIED, *offsets.nodes, *sizes.nodes]
        return _Sequence(found.end, box, put)

    def read_index(self, start: int) -> _Sequence | None:
        """The sequence of an index."""
        found, nth = self._find("index of a known name", start), 2
        if found is not None:
            text = self._recalled_text(found.numbers[0])
        else:
            head = self._find("index", start)
            text, at = (None, start) if head is None else self._text(head.end)
            found, nth = self._find("rest of index", at), 1
        offsets = None if found is None else self._size(found.numbers[nth])
        if found is None or text is None or offsets is None:
            return None
        is_new = isinstance(text, Text) and text.at >= self.at
        put = [_EMPTIED, text, *offsets.nodes] if is_new else [_EMPTIED, *offsets.nodes]
        return _Sequence(found.end, ItemKey(text_of(text), offsets.sizes), put)

    def read_place(self, start: int) -> _Sequence | None:
        """The sequence of the place of an item."""
        found = self._find("place", start)
        if found is None:
            return None
        (at, nbytes), name = map(integer_of, found.numbers), found.nodes[1]
        if type(name) is not Text or may_be_tag(name) or at < 0 or nbytes < 0:
            return None
        return _Sequence(found.end, ItemRange(file_of(name), at, nbytes), [_EMPTIED])

    def read_tensor(self, start: int) -> _Sequence | None:
        """The sequence of a tensor, with those of its chunks."""
        for known in self._tensors:
            if self.data.startswith(known.raw, start):
                return known.at(start)
        found, before = self._find("tensor", start), list[Node]((_EMPTIED,))
        if found is not None:
            about: object = found.nodes[1]
            dtype = about.content if isinstance(about, FrequentObject) else None
        else:
            found = self._find("described tensor", start)
            if found is None or not all(isinstance(each, Call) for each in found.nodes[3:5]):
                return None
            dtype = found.nodes[2] if isinstance(found.nodes[2], Global) else None
            before += (FrequentObject("TensorProperties", dtype), _EMPTIED_ROW)  # type: ignore[arg-type]
        shape, chunks = self._size(found.numbers[0]), self._chunks(found.end)
        if not isinstance(dtype, Global) or dtype.module != "torch" or not shape or not chunks:
            return None
        end, records, after = chunks
        boxes = tuple(each.content for each in records if isinstance(each.content, Box))
        content = Description(dtype, shape.sizes, boxes)
        raw = self.data[start:end]
        known = _Tensor(raw, content, [*before, *shape.nodes], records, after)
        if len(raw) <= _LONGEST_KNOWN:
            self._tensors = [known, *self._tensors[: _MOST_KNOWN - 1]]
        return known.at(start)

    def _chunks(self, at: int) -> tuple[int, list[FrequentObject], list[Node]] | None:
        """The chunks that are added to a list from an offset on, up to the end of its object."""
        data, records, put = self.data, list[FrequentObject](), list[Node]()
        while not data.startswith(_CLOSE, at):
            is_marked = data.startswith(_MARK, at)
            at, before = at + is_marked, len(records)
            while is_marked or len(records) == before:
                chunk = self.read_chunk(at, "class and chunk")
                if chunk is None:
                    break
                records.append(FrequentObject(CHUNK_CLASS, chunk.content))
                put += (records[-1], *chunk.nodes)  # type: ignore[arg-type] # as `MetadataMachine`
                at = chunk.end
            added = len(records) - before
            if not added or not data.startswith(_APPENDS if is_marked else _APPEND, at):
                return None
            at += 1
        return at + len(_CLOSE), records, put

    # -- parts of sequences ------------------------------------------------------------------------

    def _find(self, name: str, at: int) -> _Match | None:
        """The part at an offset, if it matches and recalls the right values."""
        part = self._patterns[name]
        found = part.match(self.data, at)
        if found is None:
            return None
        gets = found.group(*part.gets)
        nodes = self._recalled.get((part, gets))
        if nodes is None:
            slots = [slot_of(each) for each in (gets if isinstance(gets, tuple) else (gets,))]
            nodes = tuple(map(self.memo.get, slots))
            is_usual = all(map(self._is, nodes, part.recalls))
            if not is_usual or not self.memo.holds(tuple(zip(slots, nodes, strict=True))):
                return None
            self._recalled[part, gets] = nodes
        return _Match(found.end(), nodes, [found[n] for n in part.numbers])

    def _is(self, node: Node, word: str) -> bool:
        """Whether a node is what a GET should recall."""
        if word == ANY:
            is_text = type(node) is Text and node is not UNFILLED and not may_be_tag(node)
            return is_text or isinstance(node, (FrequentObject, Global, Call))
        if isinstance(node, Global):
            return word in (node.qualname, f".{self.kinds.get(id(node))}")
        return type(node) is Text and node == word

    def _text(self, at: int) -> tuple[str | None, int]:
        """The text that is pushed or recalled at an offset, and its end."""
        data = self.data
        if data.startswith(_SHORT_TEXT, at):
            end = at + 2 + data[at + 1]
            raw, put = data[at + 2 : end], self._patterns["put"].match(data, end)
            if put is None or not raw.isascii():
                return None, at
            return Text(raw.decode(), self.base + at), put.end()
        get = self._patterns["get"].match(data, at)
        return (None, at) if get is None else (self._recalled_text(get[1]), get.end())

    def _recalled_text(self, get: bytes) -> str | None:
        """The text that a GET recalls; None if it is not one, or has to be a node of its own."""
        node = self.memo.get(slot_of(get))
        if not isinstance(node, str) or node is UNFILLED or may_be_tag(node):
            return None
        return node

    def _size(self, raw: bytes) -> _Size | None:
        """The torch.Size that a row becomes; None if it is not a valid size."""
        found = self._sizes_of.get(raw)
        if found is None:
            numbers = tuple(map(integer_of, INTS.findall(raw)))
            width = {0x85: 1, 0x86: 2, 0x87: 3}.get(raw.removesuffix(MEMOIZE)[-1])
            if (numbers and min(numbers) < 0) or width not in (None, len(numbers)):
                return None
            known = self.sizes.get(numbers)
            if known is None:
                args = Tuple([Tuple(list(numbers), self.at)], self.at)
                known = self.sizes[numbers] = Sizes(self._size_class, args, numbers, self.at)
            is_new = raw != b")"
            nodes = (*known.row[:is_new], known.args, known)
            found = self._sizes_of[raw] = _Size(numbers, nodes)
        return found


def _get(slot: int) -> bytes:
    """The shortest GET of a slot."""
    return b"h" + bytes((slot,)) if slot < 256 else b"j" + slot.to_bytes(4, "little")


#: The objects that follow another at once: an item has an index and a place.
_FOLLOWING = {"MetadataIndex": "_StorageInfo", "_StorageInfo": "MetadataIndex"}
_EMPTIED, _EMPTIED_ROW = Dict(), Tuple(NOTHING, -1)
_EMPTIED.pairs = NOTHING
_READERS: dict[str, Callable[[ItemMachine, int], _Sequence | None]] = {
    CHUNK_CLASS: ItemMachine.read_chunk,
    "MetadataIndex": ItemMachine.read_index,
    "TensorStorageMetadata": ItemMachine.read_tensor,
    "_StorageInfo": ItemMachine.read_place,
}
