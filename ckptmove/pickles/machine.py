"""The stack machine of a walk: one method an opcode, none of which imports or calls anything.

It mirrors CPython's `Lib/pickle.py` (`_Unpickler`) for protocols 0 to 5, with three differences,
each on the safe side: a structural fault is always an error (an opcode that straddles a frame, a
target that can't take the operation, an object built twice); strings keep the place they were
pushed from; and what a pickle may make us allocate is bounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from pickletools import opcodes

from ..errors import UnsupportedError
from .literals import Literals
from .names import from_python2
from .nodes import Call, Dict, Global, List, Node, Persistent, Set, Text, Tuple

#: The most opcodes of one pickle that are walked; a checkpoint of a million tensors has fewer.
MAX_OPCODES = 40_000_000
#: The most lists, dicts, sets and calls that a pickle may build: these take a few hundred bytes
#: each, but one byte of the pickle.
MAX_CONTAINERS = 5_000_000
#: Longer strings are shared between their uses: nothing that is rewritten is this long, and a
#: copy for each use would let a small file ask for any amount of memory.
_LONGEST_USE = 64
_LONGEST_NAME = 2000  # characters of a module and a name in it
_MOST_MARKS = 1_000_000  # that wait for their end


class Machine(Literals):
    """The state of one walk. A MARK sets the stack aside, so no opcode can reach below it."""

    def __init__(self, data: bytes, base: int = 0, gaps: Mapping[int, int] | None = None) -> None:
        super().__init__(data, base, gaps or {})
        self.frame_end = -1
        self.below: list[list[Node]] = []
        self.memo: dict[int, Node] = {}
        self.globals: list[Global] = []
        self.persistents: list[Persistent] = []
        self.calls: list[Call] = []
        self.dropped: list[Node] = []
        self.containers = 0
        self.duplicated_text = False
        self.textual = False  # whether a persistent id is a line of text, as in protocol 0
        self.protocol = 0
        self.room_for_pairs = len(data)
        self.empty_tuple: Tuple | None = None

    def run(self) -> Node:
        """Every opcode up to STOP; gives the root."""
        data, base = self.data, self.base
        table = [None if name is None else getattr(self, name) for name in _HANDLERS]
        for _ in range(MAX_OPCODES):
            at = self.position
            self.at = at + base
            if at >= self.frame_end >= 0:
                self.leave_frame()
            code = data[at]
            self.position = at + 1
            if code == _STOP:
                root = self.stack.pop()
                self.dropped += [node for stack in (*self.below, self.stack) for node in stack]
                return root
            handler = table[code]
            if handler is None:
                raise self.fault(f"the pickle holds a byte that is no opcode ({code:#04x})")
            handler()
        raise self.fault(f"the pickle has more than {MAX_OPCODES:,} opcodes")

    def leave_frame(self) -> None:
        if self.position > self.frame_end:
            raise self.fault("an opcode straddles the end of its frame")
        self.frame_end = -1

    def contain(self, node: List | Set | Dict | Call) -> None:
        self.containers += 1
        if self.containers > MAX_CONTAINERS:
            raise self.fault(f"the pickle builds more than {MAX_CONTAINERS:,} containers")
        self.stack.append(node)

    def to_mark(self) -> list[Node]:
        items = self.stack
        self.stack = self.below.pop()
        return items

    # -- protocol, frames, marks -------------------------------------------------------------

    def op_proto(self) -> None:
        self.protocol = self.byte()
        if self.protocol > 5:
            raise UnsupportedError(f"the pickle is of protocol {self.protocol}; 5 is the newest")

    def op_frame(self) -> None:
        nbytes = self.number(8)
        if self.frame_end >= 0:
            raise self.fault("the pickle has a frame within a frame")
        if nbytes > len(self.data) - self.position:
            raise self.fault("the pickle has a frame longer than itself")
        self.frame_end = self.position + nbytes

    def op_mark(self) -> None:
        if len(self.below) >= _MOST_MARKS:
            raise self.fault("the pickle nests marks absurdly")
        self.below.append(self.stack)
        self.stack = []

    def op_pop(self) -> None:
        if self.stack:
            self.dropped.append(self.stack.pop())
        else:
            self.to_mark()

    def op_pop_mark(self) -> None:
        self.dropped += self.to_mark()

    def op_dup(self) -> None:
        self.duplicated_text |= isinstance(self.stack[-1], Text)
        self.push(self.stack[-1])

    # -- containers --------------------------------------------------------------------------

    def op_empty_tuple(self) -> None:
        if self.empty_tuple is None:
            self.empty_tuple = Tuple([], self.at)
        self.stack.append(self.empty_tuple)

    def op_tuple(self) -> None:
        items = self.to_mark()
        self.push(Tuple(items, self.at))

    def op_tuple1(self) -> None:
        self.push(Tuple([self.stack.pop()], self.at))

    def op_tuple2(self) -> None:
        second, first = self.stack.pop(), self.stack.pop()
        self.push(Tuple([first, second], self.at))

    def op_tuple3(self) -> None:
        third, second, first = self.stack.pop(), self.stack.pop(), self.stack.pop()
        self.push(Tuple([first, second, third], self.at))

    def op_empty_list(self) -> None:
        self.contain(List([]))

    def op_list(self) -> None:
        items = self.to_mark()
        self.push(List(items))

    def op_empty_set(self) -> None:
        self.contain(Set([], frozen=False))

    def op_frozenset(self) -> None:
        items = self.to_mark()
        self.push(Set(items, frozen=True))

    def op_empty_dict(self) -> None:
        self.contain(Dict())

    def op_dict(self) -> None:
        items = self.to_mark()
        self.push(Dict())
        self.set_pairs(items)

    def op_append(self) -> None:
        self.extend([self.stack.pop()])

    def op_appends(self) -> None:
        self.extend(self.to_mark())

    def extend(self, items: list[Node]) -> None:
        target = self.stack[-1]
        if not isinstance(target, (List, Call)):
            raise self.fault("the pickle appends to something that is no list")
        target.items.extend(items)

    def op_additems(self) -> None:
        items = self.to_mark()
        target = self.stack[-1]
        if (isinstance(target, Set) and target.frozen) or not isinstance(target, (Set, Call)):
            raise self.fault("the pickle adds to something that is no set")
        target.items.extend(items)

    def op_setitem(self) -> None:
        value = self.stack.pop()
        self.set_pairs([self.stack.pop(), value])

    def op_setitems(self) -> None:
        self.set_pairs(self.to_mark())

    def set_pairs(self, flat: list[Node]) -> None:
        target = self.stack[-1]
        if not isinstance(target, (Dict, Call)) or len(flat) % 2:
            raise self.fault("the pickle sets items of something that is no mapping")
        target.pairs.extend(zip(flat[::2], flat[1::2], strict=True))

    # -- globals, calls, persistent ids ------------------------------------------------------

    def push_global(self, module: str, name: str) -> None:
        if len(module) + len(name) > _LONGEST_NAME:
            raise self.fault("the pickle names a global at absurd length")
        if self.protocol < 3:
            module, name = from_python2(module, name)
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
            return None  # a list that many calls share would take absurd memory
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
        args = Tuple(self.to_mark(), self.at)
        self.op_global()
        self.push_call(self.stack.pop(), args, "INST", self.at)

    def op_obj(self) -> None:
        items = self.to_mark()
        function = items.pop(0)
        self.push_call(function, Tuple(items, self.at), "OBJ", self.at)

    def op_build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if not isinstance(target, Call) or target.built:
            raise self.fault("the pickle gives a state to something that takes none")
        target.state, target.built = state, True

    def op_bytearray8(self) -> None:
        content = Tuple([self.content(self.number(8))], self.at)
        self.push_call(Global("builtins", "bytearray", self.at), content, "BYTEARRAY8", self.at)

    def op_persid(self) -> None:
        self.textual = True
        self.push_persistent(self.line())

    def op_binpersid(self) -> None:
        self.push_persistent(self.stack.pop())

    def push_persistent(self, pid: Node) -> None:
        node = Persistent(pid, self.at)
        self.persistents.append(node)
        self.push(node)

    def push_call(
        self, function: Node, args: Node, opcode: str, at: int, kwargs: Node = None
    ) -> Call:
        node = Call(function, args, opcode, at, kwargs)
        self.calls.append(node)
        self.contain(node)
        return node

    # -- the memo ----------------------------------------------------------------------------

    def recall(self, slot: int) -> None:
        node = self.memo.get(slot, _UNFILLED)
        if node is _UNFILLED:
            raise self.fault(f"the pickle recalls slot {slot}, which was never filled")
        if isinstance(node, Text) and len(node) <= _LONGEST_USE:
            node = Text(node, self.at)
        self.stack.append(node)

    def op_get(self) -> None:
        self.recall(self.slot())

    def op_binget(self) -> None:
        self.recall(self.byte())

    def op_long_binget(self) -> None:
        self.recall(self.word())

    def op_put(self) -> None:
        self.memo[self.slot()] = self.stack[-1]

    def op_binput(self) -> None:
        self.memo[self.byte()] = self.stack[-1]

    def op_long_binput(self) -> None:
        self.memo[self.word()] = self.stack[-1]

    def op_memoize(self) -> None:
        self.memo[len(self.memo)] = self.stack[-1]


_STOP = ord(".")
_UNFILLED = Text("", -1)


def _handlers() -> list[str | None]:
    """For each byte, the name of the method that carries it out."""
    table: list[str | None] = [None] * 256
    for opcode in opcodes:
        if opcode.name != "STOP":
            table[ord(opcode.code)] = f"op_{opcode.name.lower()}"
    return table


_HANDLERS = _handlers()
