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
to fail. Keys of a dict and tensors that follow each other are walked a thousand at once, if their
layouts are recent ones.

A later GET of a slot within the sequence gets the node that the opcodes would have made.
`tests/pickles/test_plain_tensors.py` compares both walks.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from operator import attrgetter
from sys import getsizeof
from typing import Any

from ...sources.budget import TEXT, Budget
from ..device_tags import may_be_tag
from ..nodes import Call, Global, Node, Persistent, Text, Tuple
from .machine import Machine
from .memo import UNFILLED
from .plain_tensors import Form, PlainTensor, RecalledNames, StorageForm, StorageReference
from .tensor_layouts import (
    ALIKE,
    ARGS_PUT,
    BINUNICODE,
    GETS,
    IN_ARGS,
    INTS,
    KEY,
    KEY_NBYTES,
    KEY_PUT,
    LOCATION,
    LOCATION_PUT,
    PID_PUT,
    PUTS,
    SEQUENCE,
    TRUE,
    WITHIN,
    SequenceLayout,
    Usual,
    integer_of,
    layout_of,
    sizes_of,
    slot_of,
)

_REBUILD, _HOOKS = "torch._utils._rebuild_tensor_v2", "collections.OrderedDict"
_LONGEST_KEY = 12
_MOST_RECENT = 4  # layouts that are tried before the pattern
_MOST_PAIRS = 1 << 10  # keys with tensors that are walked at once
_LONGEST_NAME = 1 << 8  # bytes of such a key
_TEXT_HEAD = struct.Struct("<BI")
_NONE = Global("", "", -1)  # stands for a name that was not found yet
_AT = attrgetter("at")


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
        self._known: dict[tuple[Any, ...], SequenceLayout] = {}
        self._recent: list[SequenceLayout] = []
        self._refilled = 0
        self._pairs_are_usual = True

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
            if self._take_tensor() and self._pairs_are_usual:
                self._pairs_are_usual = self._take_pairs()
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

    def _take_tensor(self) -> bool:
        """Walk the sequence after its function in one step, if it is there and usual."""
        start, memo, data = self.position, self.memo, self.data
        if self.frame_end >= 0:
            return False
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
                return False
            layout = found
            parts = layout.unpack(data, start)
        key, slots, usual = parts[1], parts[3::2], layout.usual
        if layout.has_key:
            if not key.isdigit() or not memo.takes(slots, start):
                return False
            name = key.decode()
        else:
            node = self.content_of(key)
            if type(node) is not Text or node is UNFILLED or not _is_key(node):
                return False
            if not memo.takes(slots, start):
                return False
            self.recalled.add(key)
            name = node
        if not self.fits_sequence(layout.nbytes):
            return False
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
        return True

    def _take_pairs(self) -> bool:
        """Walk the keys with tensors that follow in one step: a state dict has thousands of them.

        It stops at the first that is unusual. None is walked, and False, if one of them names a
        storage that was named before, or a limit is near.
        """
        data, base, end, most = self.data, self.base, self.position, len(self.data)
        if data[end : end + 1] != b"X":
            return True
        depth, nbytes, first = len(self.stack), 0, self.memo.next_slot
        names, keys, starts = list[str](), list[str](), list[int]()
        storages, tensors = list[Persistent](), list[Call]()
        pushed, filled = list[Node](), list[Node]()  # on the stack, and into the slots
        while end + _TEXT_HEAD.size <= most and len(names) < _MOST_PAIRS and first is not None:
            code, length = _TEXT_HEAD.unpack_from(data, end)
            put = end + _TEXT_HEAD.size + length
            if code != BINUNICODE or length > _LONGEST_NAME:
                break
            for layout in self._recent:
                after_key = layout.after_key
                if after_key is not None:
                    raw = data[put : put + after_key.nbytes]
                    number = int.from_bytes(raw, "little") - first * after_key.slots
                    if number & after_key.mask == after_key.form:
                        break
            else:
                break
            name, key = data[put - length : put], raw[after_key.key]
            if len(raw) < after_key.nbytes or not name.isascii() or not key.isdigit():
                break
            names.append(name.decode())
            keys.append(key.decode())
            text = self.use_of(names[-1], base + end, depth + len(pushed))
            end = put + after_key.nbytes
            nbytes += layout.nbytes
            starts.append(end - layout.nbytes)
            usual, at = layout.usual, base + starts[-1]
            storage = StorageReference(usual.storage, keys[-1], usual.location, layout.places, at)
            tensor = PlainTensor(usual.form, storage)
            storages.append(storage)
            tensors.append(tensor)
            pushed += (text, tensor)
            filled += (text, *(storage,) * (after_key.filled - 1))
            first += after_key.filled
            if layout.is_put:
                filled[-1] = tensor
        before, besides = self.spent, TEXT * len(names) + sum(map(getsizeof, names))
        if not self.fits_sequence(nbytes, pushed=len(pushed), besides=besides):
            return False
        if not self.allow_storages(keys, starts):
            self.spent = before
            return False
        self.memo.memoize(filled)
        self.stack += pushed
        self.persistents += storages
        self.calls += tensors
        self.position = end
        return True

    def _layout_at(self, start: int) -> SequenceLayout | None:
        """The layout of the sequence at `start`; None if there is none, or an unusual one.

        It becomes the first of the recent layouts.
        """
        found = SEQUENCE.match(self.data, start)
        if found is None:
            return None
        puts = [found[n] or b"" for n in PUTS]
        signature = found.group(*ALIKE)
        alike = (*signature, found[KEY_NBYTES], found[KEY] and len(found[KEY]), *map(len, puts))
        layout = self._known.get(alike)
        if layout is None:
            usual = self._usual(signature)
            if usual is None:
                return None
            key, form = found[KEY], usual.form
            _, location_put, _, shape_put, stride_put, *_ = puts
            if (
                (location_put and found[LOCATION][0] != BINUNICODE)
                or (shape_put and not form.shape)
                or (stride_put and not form.stride)
                or (key is not None and int.from_bytes(found[KEY_NBYTES], "little") != len(key))
            ):
                return None
            layout = layout_of(found, usual, self.data[self.at - self.base : start])
            self.recalled.update(slot for slot, _ in usual.recalled)
            if not self.memo.holds(usual.recalled):
                return layout
            self._known[alike] = layout
        recent = [layout, *(each for each in self._recent if each is not layout)]
        self._recent = recent[:_MOST_RECENT]
        return layout

    def _usual(self, signature: Sequence[bytes]) -> Usual | None:
        """The parsed values of these parts of a sequence; None if they are unusual."""
        head, location, elements, shape, stride, hooks = signature
        gets = [slot_of(each) for part in (head[2:], hooks[1:-2]) for each in GETS.findall(part)]
        recalled = [(slot, self.memo.get(slot)) for slot in gets]
        if location[0] != BINUNICODE:
            slot = slot_of(location)
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
        first = INTS.match(shape)
        assert first is not None
        sizes, strides = sizes_of(shape[first.end() :]), sizes_of(stride)
        counts = integer_of(elements), integer_of(first[0])
        if sizes is None or strides is None or len(sizes) != len(strides) or min(counts) < 0:
            return None
        numel, offset = counts
        names = RecalledNames(self._rebuild, self._hooks, self.empty_tuple)
        form = Form(names, offset, sizes, strides, hooks[0] == TRUE)
        storage = StorageForm(word, kind, numel)
        return Usual(form, storage, tuple(recalled), place)

    def _inside(self, storage: StorageReference, slot: int) -> Node:
        """The node that a tensor's sequence put into a slot; not the tensor itself."""
        tensor = self.calls[bisect_left(self.calls, storage.at, key=_AT)]
        found = SEQUENCE.match(self.data, storage.start - self.base)
        assert found is not None
        assert isinstance(tensor, PlainTensor)
        (group,) = (each for each in WITHIN if found[each] and slot_of(found[each]) == slot)
        if group == KEY_PUT:
            storage.key = storage.key_text
            return storage.key
        if group == LOCATION_PUT:
            storage.tag = storage.location
            return storage.tag
        if group == PID_PUT:
            return storage.pid
        if group == ARGS_PUT:
            return tensor.args
        assert isinstance(tensor.args, Tuple)
        return tensor.args.items[IN_ARGS[group]]


def _is_key(text: str) -> bool:
    """Whether a recalled string is the number of a storage."""
    return 0 < len(text) <= _LONGEST_KEY and text.isdecimal() and text.isascii()
