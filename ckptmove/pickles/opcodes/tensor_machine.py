"""Walk plain tensors fast: one compact node replaces the thirty nodes of each tensor.

Except for a few bytes, a checkpoint with very many tensors repeats this sequence, which
`torch.save` has written for every tensor since 0.4, and which a relocation keeps:

    GET _rebuild_tensor_v2                          the function, named before
    MARK MARK GET 'storage'  GET class              the persistent id of the storage
      BINUNICODE key PUT | GET key                  its number
      BINUNICODE location PUT | GET location        its device
      INT TUPLE PUT BINPERSID                       its elements
    INT                                             the offset
    INT… TUPLE1|2|3 PUT | MARK INT… TUPLE PUT | EMPTY_TUPLE       the shape, and so the stride
    NEWTRUE | NEWFALSE                              whether it requires a gradient
    GET OrderedDict EMPTY_TUPLE REDUCE PUT          hooks, of which there are none
    TUPLE PUT REDUCE PUT                            the arguments; the call

INT is one of BININT1, BININT2, BININT and LONG1 of five bytes; a GET or PUT has either width, and
any PUT may be missing. Alternatives always start with different bytes, so these bytes have no other
meaning, wherever they are run. The sequence is walked in one step if the values that it recalls are
of the right kind, if the slots that it fills are new and in order, and if no limit is near. In any
other case nothing was changed yet, and `Machine` runs its opcodes one by one: there is no other way
to fail.

A later GET of a slot within the sequence gets the node that the opcodes would have made.
`tests/pickles/test_plain_tensors.py` compares both walks.
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

from ...sources.budget import Budget
from ..device_tags import may_be_tag
from ..nodes import Global, Node, Text, Tuple
from .machine import Machine
from .memo import UNFILLED
from .plain_tensors import (
    Form,
    OpcodeOffsets,
    PlainTensor,
    RecalledNames,
    StorageForm,
    StorageReference,
)

_REBUILD, _HOOKS = "torch._utils._rebuild_tensor_v2", "collections.OrderedDict"
_GET, _PUT = rb"(?:h.|j....)", rb"(q.|r....|)"
_INT = rb"(?:K.|M..|J....|\x8a\x05.....)"
_SIZES = rb"(?:\)|\(?" + _INT + rb"{1,12}[\x85-\x87t])"
_SEQUENCE = re.compile(
    rb"(\(\(" + _GET + _GET + rb")"  # 1 word and class
    + rb"(?:X(....)([0-9]{1,12})" + _PUT + rb"|(" + _GET + rb"))"  # key: 2 length, 3, 4; or 5
    + rb"(" + _GET + rb"|X.\0\0\0[a-z]{2,12}(?::[0-9]{1,4})?)" + _PUT  # 6, 7 location
    + rb"(" + _INT + rb")t" + _PUT + rb"()Q"  # 8, 9 elements; 10 where BINPERSID is
    + rb"(" + _INT + _SIZES + rb")" + _PUT  # 11, 12 offset and shape
    + rb"(" + _SIZES + rb")" + _PUT  # 13, 14 stride
    + rb"([\x88\x89]" + _GET + rb"\)R)" + _PUT  # 15, 16 gradient and hooks
    + rb"t" + _PUT + rb"()R" + _PUT,  # 17 arguments; 18 where REDUCE is, 19
    re.DOTALL,
)  # fmt: skip
_KEY_NBYTES, _KEY, _KEY_PUT, _RECALLED_KEY, _LOCATION, _LOCATION_PUT = range(2, 8)
_PID_PUT, _PERSID, _ARGS_PUT, _CALL = 9, 10, 17, 18
#: Groups that are the same in similar tensors: head, location, elements, sizes and hooks.
_ALIKE = (1, 6, 8, 11, 13, 15)
#: The PUT groups, in order; `_WITHIN` has those whose node is not yet created, and `_IN_ARGS` the
#: index of those among the arguments.
_PUTS = (_KEY_PUT, _LOCATION_PUT, _PID_PUT, 12, 14, 16, _ARGS_PUT, 19)
_WITHIN = _PUTS[:-1]
_IN_ARGS = {12: 2, 14: 3, 16: 5}
_GETS = re.compile(_GET, re.DOTALL)
_INTS = re.compile(_INT, re.DOTALL)
_LONGEST_KEY = 12
_KEY_HEAD = 5  # bytes before the number of a storage: BINUNICODE and its length
_MOST_RECENT = 4  # layouts that are tried before the pattern
_NONE = Global("", "", -1)  # stands for a name that was not found yet
_AT = attrgetter("at")
_TRUE, _MARK, _BINUNICODE, _LONG1 = 0x88, ord("("), ord("X"), 0x8A


class _Usual(NamedTuple):
    """The parsed values of a sequence; valid as long as its GETs recall the same nodes."""

    form: Form
    storage: StorageForm
    #: the slots of the GETs, and their nodes
    recalled: tuple[tuple[int, Node], ...]
    location: str


class _Layout(NamedTuple):
    """The layout of similar sequences, which differ only in the storage's number and the slots."""

    usual: _Usual
    nbytes: int
    #: returns all bytes at an offset: constant and variable parts in turn
    unpack: Callable[[bytes, int], tuple[Any, ...]]
    same: tuple[bytes, ...]
    #: whether the number of the storage is written out, not recalled
    has_key: bool
    #: whether the tensor is put into a slot
    is_put: bool
    places: OpcodeOffsets


class TensorMachine(Machine):
    """A machine that walks the sequence of a plain tensor in one step."""

    def __init__(
        self,
        data: bytes,
        base: int = 0,
        gaps: Mapping[int, int] | None = None,
        budget: Budget | None = None,
    ) -> None:
        super().__init__(data, base, gaps, budget)
        self._rebuild = self._hooks = _NONE
        # The layouts by their signature, and the most recent ones. They are valid as long as no
        # slot is filled again, and the function is not imported again.
        self._known: dict[tuple[Any, ...], _Layout] = {}
        self._recent: list[_Layout] = []
        self._refilled = 0

    def push_global(self, module: str, name: str) -> None:
        """Like `Machine.push_global`; remembers the two names that the sequence needs."""
        super().push_global(module, name)
        node = self.globals[-1]
        if node.qualname == _REBUILD:
            self._rebuild = node
            self._forget()
        elif node.qualname == _HOOKS:
            self._hooks = node

    def recall(self, slot: int) -> None:
        """Like `Machine.recall`; the sequence after a tensor's function is walked with it."""
        stack = self.stack
        if self.memo.get(slot) is self._rebuild:
            self.recalled.add(slot)
            stack.append(self._rebuild)
            if len(stack) > self.longest_row:
                self.check_row()
            self._take_tensor()
            return
        super().recall(slot)

    def content_of(self, slot: int) -> Node:
        """Like `Machine.content_of`; creates the node for which a reference to a storage stands."""
        node = self.memo.get(slot)
        if type(node) is StorageReference:
            node = self._inside(node, slot)
            self.memo.settle(slot, node)
        return node

    def _forget(self) -> None:
        self._known.clear()
        self._recent.clear()

    def _take_tensor(self) -> None:
        """Walk the sequence after its function in one step, if it is there and usual."""
        start, memo, data = self.position, self.memo, self.data
        if self.frame_end >= 0:
            return
        if memo.refilled != self._refilled:
            self._forget()
            self._refilled = memo.refilled
        for layout in self._recent:
            if start + layout.nbytes <= len(data):
                parts = layout.unpack(data, start)
                if parts[::2] == layout.same:
                    break
        else:
            found = self._layout_at(start)
            if found is None:
                return
            layout = found
            parts = layout.unpack(data, start)
        key, slots, usual = parts[1], parts[3::2], layout.usual
        if layout.has_key:
            if not key.isdigit() or not memo.takes(slots, start):
                return
            name = key.decode()
        else:
            node = self.content_of(key)
            if type(node) is not Text or node is UNFILLED or not _is_key(node):
                return
            if not memo.takes(slots, start):
                return
            self.recalled.add(key)
            name = node
        if not self.fits_sequence(layout.nbytes):
            return
        # From here on the sequence is taken.
        at = self.base + start
        storage = StorageReference(usual.storage, name, usual.location, layout.places, at)
        tensor = PlainTensor(usual.form, storage)
        filled: list[Node] = [storage] * len(slots)
        if layout.is_put:
            filled[-1] = tensor
        memo.take(slots, filled)
        self.shared_texts.add(usual.storage.word.at)
        if layout.has_key:
            self.allow_storage(name)
        else:
            self.shared_texts.add(name.at)
        self.persistents.append(storage)
        self.calls.append(tensor)
        self.stack[-1] = tensor
        self.position = start + layout.nbytes

    def _layout_at(self, start: int) -> _Layout | None:
        """The layout of the sequence at `start`; None if there is none, or an unusual one.

        It becomes the first of the recent layouts.
        """
        found = _SEQUENCE.match(self.data, start)
        if found is None:
            return None
        puts = [found[n] or b"" for n in _PUTS]
        signature = found.group(*_ALIKE)
        alike = (*signature, found[_KEY_NBYTES], found[_KEY] and len(found[_KEY]), *map(len, puts))
        layout = self._known.get(alike)
        if layout is None:
            usual = self._usual(signature)
            if usual is None:
                return None
            key, form = found[_KEY], usual.form
            _, location_put, _, shape_put, stride_put, *_ = puts
            if (
                (location_put and found[_LOCATION][0] != _BINUNICODE)
                or (shape_put and not form.shape)
                or (stride_put and not form.stride)
                or (key is not None and int.from_bytes(found[_KEY_NBYTES], "little") != len(key))
            ):
                return None
            layout = _layout_of(found, usual)
            self.recalled.update(slot for slot, _ in usual.recalled)
            if not self.memo.holds(usual.recalled):
                return layout
            self._known[alike] = layout
        recent = [layout, *(each for each in self._recent if each is not layout)]
        self._recent = recent[:_MOST_RECENT]
        return layout

    def _usual(self, signature: Sequence[bytes]) -> _Usual | None:
        """The parsed values of these parts of a sequence; None if they are unusual."""
        head, location, elements, shape, stride, hooks = signature
        gets = [_slot(each) for part in (head[2:], hooks[1:-2]) for each in _GETS.findall(part)]
        recalled = [(slot, self.memo.get(slot)) for slot in gets]
        if location[0] != _BINUNICODE:
            slot = _slot(location)
            node = self.content_of(slot)
            if type(node) is not Text or node is UNFILLED or not may_be_tag(node):
                return None
            recalled.append((slot, node))
            place = str(node)
        else:
            place = location[5:].decode()
            if location[1] != len(place):
                return None
        (_, word), (_, kind), (_, made) = recalled[:3]
        if type(word) is not Text or word != "storage" or may_be_tag(word):
            return None
        if type(kind) is not Global or made is not self._hooks or self.empty_tuple is None:
            return None
        first = _INTS.match(shape)
        assert first is not None
        sizes, strides = _sizes(shape[first.end() :]), _sizes(stride)
        counts = _integer(elements), _integer(first[0])
        if sizes is None or strides is None or len(sizes) != len(strides) or min(counts) < 0:
            return None
        numel, offset = counts
        names = RecalledNames(self._rebuild, self._hooks, self.empty_tuple)
        form = Form(names, offset, sizes, strides, hooks[0] == _TRUE)
        storage = StorageForm(word, kind, numel)
        return _Usual(form, storage, tuple(recalled), place)

    def _inside(self, storage: StorageReference, slot: int) -> Node:
        """The node that a tensor's sequence put into a slot; not the tensor itself."""
        tensor = self.calls[bisect_left(self.calls, storage.at, key=_AT)]
        found = _SEQUENCE.match(self.data, storage.start - self.base)
        assert found is not None
        assert isinstance(tensor, PlainTensor)
        (group,) = (each for each in _WITHIN if found[each] and _slot(found[each]) == slot)
        if group == _KEY_PUT:
            storage.key = storage.key_text
            return storage.key
        if group == _LOCATION_PUT:
            storage.tag = storage.location
            return storage.tag
        if group == _PID_PUT:
            return storage.pid
        if group == _ARGS_PUT:
            return tensor.args
        assert isinstance(tensor.args, Tuple)
        return tensor.args.items[_IN_ARGS[group]]


def _is_key(text: str) -> bool:
    """Whether a recalled string is the number of a storage."""
    return 0 < len(text) <= _LONGEST_KEY and text.isdecimal() and text.isascii()


def _sizes(raw: bytes) -> tuple[int, ...] | None:
    """The numbers of a tuple; None if its opcodes make something else, or one is below zero."""
    if raw == b")":
        return ()
    numbers = tuple(map(_integer, _INTS.findall(raw)))
    width = {0x85: 1, 0x86: 2, 0x87: 3}.get(raw[-1])
    right = width is None if raw[0] == _MARK else width == len(numbers)
    return numbers if right and min(numbers) >= 0 else None


def _layout_of(found: re.Match[bytes], usual: _Usual) -> _Layout:
    """The layout of a sequence that matched."""
    start, end = found.span()
    layout, same, at = "<", [], start
    key = _KEY if found[_KEY] is not None else _RECALLED_KEY
    for group in (key, *_PUTS):
        first, after = found.span(group)
        if first == after:
            continue
        if group == _KEY:
            form = f"{after - first}s"
        else:  # a GET or PUT: its slot
            first, form = first + 1, "B" if after - first == 2 else "I"
        layout += f"{first - at}s{form}"
        same.append(found.string[at:first])
        at = after
    layout += f"{end - at}s"
    same.append(found.string[at:end])
    return _Layout(
        usual=usual,
        nbytes=end - start,
        unpack=_struct(layout).unpack_from,
        same=tuple(same),
        has_key=key == _KEY,
        is_put=bool(found[_PUTS[-1]]),
        places=OpcodeOffsets(
            key=found.start(_KEY) - _KEY_HEAD - start,
            location=found.start(_LOCATION) - start,
            id=found.start(_PERSID) - start,
            call=found.start(_CALL) - start,
        ),
    )


_struct = cache(struct.Struct)


def _slot(opcode: bytes) -> int:
    """The slot of a GET or PUT."""
    return opcode[1] if len(opcode) == 2 else int.from_bytes(opcode[1:], "little")


def _integer(opcode: bytes) -> int:
    """The number that an opcode pushes."""
    if len(opcode) == 2:
        return opcode[1]
    if opcode[0] == _LONG1:
        return int.from_bytes(opcode[2:], "little", signed=True)
    return int.from_bytes(opcode[1:], "little", signed=len(opcode) == 5)
