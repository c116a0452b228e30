"""The stack machine of the pickle walker: one method per opcode; none imports or calls anything.

It mirrors CPython's `Lib/pickle.py` (`_Unpickler`) for protocols 0 to 5, with three differences,
each on the safe side: a structural fault is always an error (an opcode that straddles a frame, a
target that can't take the operation, an object built twice); strings keep the offset where they
were pushed; and the memory that a pickle can make us allocate is limited.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from sys import getsizeof

from ...errors import UnsupportedError
from ...sources.budget import (
    APPEND,
    CALL,
    CONTAINER,
    FIELD,
    IDLE,
    KEY_CHARACTER,
    MEMBER,
    NAME,
    OTHER_KEY,
    PAIR,
    RECORD,
    SLOT,
    STORAGE,
    TEXT,
    TUPLE,
    TUPLE_ITEM,
    Budget,
)
from ..device_tags import may_be_tag
from ..hash_costs import check_added
from ..nodes import TEXTS, Call, Dict, Global, Items, List, Node, Persistent, Set, Text, Tuple
from .copies import Copies
from .marked_stack import MarkedStack
from .memo import UNFILLED, Memo
from .pairs import RecordKinds, keys_of, with_pairs
from .python2_names import from_python2
from .rows import compact_row, extend_row, memory_of
from .table import NAMES as OPCODE_NAMES

_LONGEST_NAME = 2000  # characters of a module and a name together


class Machine(MarkedStack):
    """The state of one walk. A MARK sets the stack aside, so no opcode can reach below it."""

    def __init__(
        self,
        data: bytes,
        base: int = 0,
        gaps: Mapping[int, int] | None = None,
        budget: Budget | None = None,
    ) -> None:
        super().__init__(data, base, gaps or {}, Budget() if budget is None else budget)
        self.memo = Memo()
        self.globals: list[Global] = []
        self.persistents: list[Persistent] = []
        self.calls: list[Call] = []
        self.copies = Copies()
        self.records = RecordKinds()
        self.textual = False  # whether a persistent id is a line of text, as in protocol 0
        self.protocol = 0
        self.room_for_pairs = len(data) >> 3
        self.empty_tuple: Tuple | None = None
        self.recalled: set[int] = set()

    def run(self) -> Node:
        """Run all opcodes up to STOP; return the root."""
        try:
            return self.perform()
        finally:
            self.budget.take(self.position - self.blob_nbytes, self.spent - self.allowed)

    def perform(self) -> Node:
        data, base = self.data, self.base
        table = [None if name is None else getattr(self, name) for name in _HANDLERS]
        while True:
            at = self.position
            self.at = at + base
            if at >= self.frame_end >= 0:
                self.leave_frame()
            code = data[at]
            self.position = at + 1
            if code == _STOP:
                # it would not be clear where the next pickle starts
                if self.position < self.frame_end:
                    raise self.fault("the pickle ends within a frame")
                root = self.stack.pop()
                self.dropped += [node for stack in (*self.below, self.stack) for node in stack]
                return root
            handler = table[code]
            if handler is None:
                raise self.fault(f"the pickle holds a byte that is no opcode ({code:#04x})")
            handler()

    def leave_frame(self) -> None:
        if self.position > self.frame_end:
            raise self.fault("an opcode straddles the end of its frame")
        self.frame_end = -1

    def contain(self, node: List | Set | Dict | Call) -> None:
        self.charge(CONTAINER)
        self.stack.append(node)

    def close(self, items: Items) -> None:
        self.charge(TUPLE)
        self.stack.append(Tuple(items, self.at))

    # -- protocol, frames -------------------------------------------------------------------

    def op_proto(self) -> None:
        self.charge(IDLE)
        self.protocol = self.byte()
        if self.protocol > 5:
            raise UnsupportedError(f"the pickle is of protocol {self.protocol}; 5 is the newest")

    def op_frame(self) -> None:
        self.charge(IDLE)
        self.is_usual = False
        nbytes = self.number(8)
        if self.frame_end >= 0:
            raise self.fault("the pickle has a frame within a frame")
        if nbytes > len(self.data) - self.position:
            raise self.fault("the pickle has a frame longer than itself")
        self.frame_end = self.position + nbytes

    # -- containers --------------------------------------------------------------------------

    def op_empty_tuple(self) -> None:
        if self.empty_tuple is None:
            self.empty_tuple = Tuple([], self.at)
        self.stack.append(self.empty_tuple)
        if self.data.startswith(b")", self.position):
            self.repeat_last(1)
        if len(self.stack) > self.longest_row:
            self.check_row()

    def op_tuple(self) -> None:
        self.close(self.row_to_mark())

    def op_tuple1(self) -> None:
        self.charge(TUPLE_ITEM)
        self.close([self.stack.pop()])

    def op_tuple2(self) -> None:
        second, first = self.stack.pop(), self.stack.pop()
        self.charge(2 * TUPLE_ITEM)
        self.close([first, second])

    def op_tuple3(self) -> None:
        third, second, first = self.stack.pop(), self.stack.pop(), self.stack.pop()
        self.charge(3 * TUPLE_ITEM)
        self.close([first, second, third])

    def op_empty_list(self) -> None:
        self.contain(List([]))

    def op_list(self) -> None:
        self.contain(List(self.row_to_mark()))

    def op_empty_set(self) -> None:
        self.contain(Set([], frozen=False))

    def op_frozenset(self) -> None:
        items = self.row_to_mark()
        self.charge(MEMBER * len(items))
        check_added(items, len(items), self.budget)
        self.contain(Set(items, frozen=True))

    def op_empty_dict(self) -> None:
        self.contain(Dict())

    def op_dict(self) -> None:
        items = self.to_mark()
        self.contain(Dict())
        self.set_pairs(items)

    def op_append(self) -> None:
        self.extend([self.stack.pop()])

    def op_appends(self) -> None:
        self.extend(self.to_mark())

    def extend(self, items: list[Node]) -> None:
        target = self.stack[-1]
        if not isinstance(target, (List, Call)):
            raise self.fault("the pickle appends to something that is no list")
        self.add(target, items)

    def add(self, target: List | Set | Call, items: list[Node]) -> None:
        if not items:
            return self.charge(IDLE)
        if not target.items:
            target.items = compact_row(items)
            return self.charge(memory_of(target.items))
        before = memory_of(target.items)
        target.items = extend_row(target.items, items)
        return self.charge(max(APPEND, memory_of(target.items) - before))

    def op_additems(self) -> None:
        items = self.to_mark()
        target = self.stack[-1]
        if (isinstance(target, Set) and target.frozen) or not isinstance(target, (Set, Call)):
            raise self.fault("the pickle adds to something that is no set")
        self.charge(MEMBER * len(items))
        self.add(target, items)
        check_added(target.items, len(items), self.budget)

    def op_setitem(self) -> None:
        value = self.stack.pop()
        self.set_pairs([self.stack.pop(), value])

    def op_setitems(self) -> None:
        self.set_pairs(self.to_mark())

    def set_pairs(self, flat: list[Node]) -> None:
        target = self.stack[-1]
        if not isinstance(target, (Dict, Call)) or len(flat) % 2:
            raise self.fault("the pickle sets items of something that is no mapping")
        if type(target) is Dict and not target.pairs:
            record = self.records.pairs_of(flat)
            if record is not None:
                characters = sum(map(len, record.keys))
                self.charge(RECORD - CONTAINER + FIELD * len(record) + KEY_CHARACTER * characters)
                target.pairs = record
                return
        others = sum(type(key) not in TEXTS for key in flat[::2])
        self.charge(0 if flat else IDLE)
        self.charge(PAIR * (len(flat) // 2) + OTHER_KEY * others)
        target.pairs = with_pairs(target.pairs, flat)
        check_added(keys_of(target.pairs), len(flat) // 2, self.budget)

    # -- globals, calls, persistent ids ------------------------------------------------------

    def push_global(self, module: str, name: str) -> None:
        if len(module) + len(name) > _LONGEST_NAME:
            raise self.fault("the pickle names a global at absurd length")
        if self.protocol < 3:
            module, name = from_python2(module, name)
        self.charge(NAME)
        node = Global(module, name, self.at)
        self.globals.append(node)
        self.push(node)

    def op_global(self) -> None:
        module = self.line()
        self.push_global(module, self.line())

    def op_stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise self.fault("the pickle names a global by something that is no string")
        self.push_global(str(module), str(name))

    def op_ext1(self) -> None:
        self.push_global("copyreg extension", str(self.byte()))

    def op_ext2(self) -> None:
        self.push_global("copyreg extension", str(self.number(2)))

    def op_ext4(self) -> None:
        self.push_global("copyreg extension", str(self.word()))

    def op_reduce(self) -> None:
        args, function = self.stack.pop(), self.stack.pop()
        pairs = self.pairs_of(function, args)
        if pairs is None:
            self.push_call(function, args, "REDUCE", self.at)
        else:
            self.push_call(function, Tuple([], self.at), "REDUCE", self.at).pairs = pairs

    def pairs_of(self, function: Node, args: Node) -> list[tuple[Node, Node]] | None:
        # Python 2 pickled an OrderedDict as a call with a list of pairs, which are lists.
        if not isinstance(function, Global) or function.qualname != "collections.OrderedDict":
            return None
        held = args.items[0] if isinstance(args, Tuple) and len(args.items) == 1 else None
        if not isinstance(held, List) or len(held.items) > self.room_for_pairs:
            return None  # a list that many calls share would take too much memory
        pairs = [each.items for each in held.items if isinstance(each, (List, Tuple))]
        if len(pairs) != len(held.items) or any(len(pair) != 2 for pair in pairs):
            return None
        self.room_for_pairs -= len(pairs)
        return [(key, value) for key, value in pairs]

    def op_newobj(self) -> None:
        args = self.stack.pop()
        self.push_call(self.stack.pop(), args, "NEWOBJ", self.at)

    def op_newobj_ex(self) -> None:
        kwargs, args = self.stack.pop(), self.stack.pop()
        self.push_call(self.stack.pop(), args, "NEWOBJ_EX", self.at, kwargs)

    def op_inst(self) -> None:
        args = Tuple(self.loose_to_mark(), self.at)
        self.op_global()
        self.push_call(self.stack.pop(), args, "INST", self.at)

    def op_obj(self) -> None:
        items = self.loose_to_mark()
        function = items.pop(0)
        self.push_call(function, Tuple(items, self.at), "OBJ", self.at)

    def op_build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if not isinstance(target, Call) or target.built:
            raise self.fault("the pickle gives a state to something that takes none")
        target.state, target.built = state, True
        price = self.copies.price_of_state(state)
        if price:
            self.charge(price)

    def op_bytearray8(self) -> None:
        content = Tuple([self.content(self.number(8))], self.at)
        self.push_call(Global("builtins", "bytearray", self.at), content, "BYTEARRAY8", self.at)

    def op_persid(self) -> None:
        self.textual = True
        self.push_persistent(self.line())

    def op_binpersid(self) -> None:
        self.push_persistent(self.stack.pop())

    def push_persistent(self, pid: Node) -> None:
        self.charge(STORAGE)
        node = Persistent(pid, self.at)
        key = pid.items[2] if isinstance(pid, Tuple) and len(pid.items) > 2 else None
        if isinstance(key, Text):
            self.allow_storage(key)
        self.persistents.append(node)
        self.push(node)

    def push_call(
        self, function: Node, args: Node, opcode: str, at: int, kwargs: Node = None
    ) -> Call:
        node = Call(function, args, opcode, at, kwargs)
        self.calls.append(node)
        self.charge(CALL + self.copies.price(node))
        self.stack.append(node)
        return node

    # -- the memo ----------------------------------------------------------------------------

    def recall(self, slot: int) -> None:
        self.recalled.add(slot)
        node = self.content_of(slot)
        if type(node) is Text:
            if node is UNFILLED:
                raise self.fault(f"the pickle recalls slot {slot}, which was never filled")
            if may_be_tag(node) and self.can_copy(TEXT + getsizeof(node)):
                node = Text(node, self.at)
            else:  # it is never rewritten, and a copy for each use would take too much memory
                self.shared_texts.add(node.at)
        self.stack.append(node)
        if len(self.stack) > self.longest_row:
            self.check_row()

    def content_of(self, slot: int) -> Node:
        """The node in a slot of the memo, or `UNFILLED`."""
        return self.memo.get(slot)

    def op_get(self) -> None:
        self.is_usual = False
        self.recall(self.slot())

    def op_binget(self) -> None:
        slot = self.data[self.position]
        self.position = end = self.position + 1
        self.recall(slot)
        if self.position == end:  # no following opcode was taken together with it
            self.recall_again(2)

    def op_long_binget(self) -> None:
        slot = self.word()
        end = self.position
        self.recall(slot)
        if self.position == end:
            self.recall_again(5)

    def recall_again(self, width: int) -> None:
        """Recall the slot again for each identical opcode that follows."""
        data, at = self.data, self.position
        if data[at : at + width] != data[at - width : at]:
            return
        top = self.stack[-1]
        is_copy = type(top) is Text and top.at == self.at  # each use has its own node
        if type(top) is not Global and not is_copy:
            self.repeat_last(width)

    def fill(self, slot: int) -> None:
        if not self.memo.put(slot, self.stack[-1], self.position):
            self.charge(SLOT)

    def op_put(self) -> None:
        self.is_usual = False
        self.fill(self.slot())

    def op_binput(self) -> None:
        self.fill(self.byte())

    def op_long_binput(self) -> None:  # one of the most frequent opcodes: avoids a method call
        (slot,) = _WORD(self.data, self.position)
        self.position += 4
        if not self.memo.put(slot, self.stack[-1], self.position):
            self.charge(SLOT)

    def op_memoize(self) -> None:
        self.is_usual = False
        self.fill(self.memo.filled)


_STOP = ord(".")
_WORD = struct.Struct("<I").unpack_from


def _handlers() -> list[str | None]:
    """For each byte, the name of the method that handles the opcode."""
    table: list[str | None] = [None] * 256
    for code, name in OPCODE_NAMES.items():
        if code != _STOP:
            table[code] = f"op_{name.lower()}"
    return table


_HANDLERS = _handlers()


class FramelessMachine(Machine):
    """A walk that ignores frames: in damaged data, one may be longer than the data."""

    def op_frame(self) -> None:
        """Pass over the length of a frame."""
        self.number(8)
