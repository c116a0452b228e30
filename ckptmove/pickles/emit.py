"""Write a graph of inert nodes as a pickle of protocol 2, like torch.save.

It mirrors `save` of CPython's `Modules/_pickle.c`: the same opcodes in the same batches, the same
values memoized in the same order, whether they are recalled or not. So the pickle of an ordinary
object is reproduced byte for byte, except for strings: these are shared by value, since a walk does
not record which strings were one object.

Only opcodes that both torch's `weights_only` unpickler and libtorch's know are written (except
LONG4, for integers of more than 255 bytes). Other nodes are expressed with these opcodes:

- bytes become `_codecs.encode(text, 'latin1')`, and a BYTEARRAY8 becomes `bytearray(bytes)`;
- sets become `set([...])` and `frozenset([...])`;
- names within a class become `getattr(class, name)`;
- NEWOBJ_EX becomes `copyreg.__newobj_ex__(class, args, kwargs)`;
- INST and OBJ become NEWOBJ if there are no arguments, else REDUCE.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..errors import UnsupportedError
from .nodes import Blob, Call, Dict, Global, List, Node, Persistent, Set, Text, Tuple
from .opcodes.plain_tensors import PlainTensor, StorageReference, compact_form, is_compact
from .opcodes.python2_names import to_python2
from .opcodes.rows import opcodes_of

#: The most items of one APPENDS or SETITEMS.
BATCH = 1000
_LONG = 255  # integers of more bytes are written only once
_MOST = 0xFFFF_FFFF  # the most bytes of a string or an integer, and slots of the memo
_TUPLES = {1: b"\x85", 2: b"\x86", 3: b"\x87"}
_OPEN = -1  # instead of a slot number: the parts of the node are still being written


def emit(root: Node) -> bytes:
    """The pickle of a graph; the graph is not changed.

    A node that occurs again is recalled from the memo. A cycle may lead through the items, the
    pairs or the state of a list, a dict or an object that a call made.

    UnsupportedError if protocol 2 can't express the graph without POP, which torch refuses: a cycle
    through a tuple, a set, a persistent id or the arguments of a call; bytes that were left out; a
    name that has a newline, is in a registry of the process that wrote it, or would be read as
    another name; a string of 4 GiB.
    """
    return Emitter().run(root)


class Emitter:
    """One pickle while it is written."""

    def __init__(self) -> None:
        self.out = bytearray(b"\x80\2")
        #: how many slots of the memo are filled
        self.filled = 0
        #: `id()` of a node → its slot
        self.slots: dict[int, int] = {}
        #: the slots of texts and bytes, which are shared by value
        self.texts: dict[str, int] = {}
        self.contents: dict[bytes, int] = {}
        #: module and name, or the slot of a class and a name in it → the slot of that name
        self.names: dict[tuple[str | int, str], int] = {}
        #: `id()` of a Persistent or long integer (CPython memoizes none) → the offset after it
        self.resolved: dict[int, int] = {}
        #: PUTs of such nodes that occur again: the offset in `out`, and the bytes to insert there
        self.late: list[tuple[int, bytes]] = []
        self.scalars: dict[type, Callable[[Any], None]] = {
            type(None): self.spell_constant,
            bool: self.spell_constant,
            int: self.spell_int,
            float: self.spell_float,
            str: self.spell_text,
            Text: self.spell_text,
            bytes: self.spell_bytes,
        }
        self.others: dict[type, Callable[[Any], Iterator[Node] | None]] = {
            Blob: self.spell_blob,
            Global: self.spell_global,
            Persistent: self.spell_persistent,
            Tuple: self.spell_tuple,
            List: self.spell_list,
            Set: self.spell_set,
            Dict: self.spell_dict,
            Call: self.spell_call,
            PlainTensor: self.spell_tensor,
            StorageReference: self.spell_persistent,
        }

    def run(self, root: Node) -> bytes:
        """Write a node and all its parts; a generator yields the parts to write first."""
        scalars, others, slots = self.scalars, self.others, self.slots
        unfinished: list[Iterator[Node]] = [iter([root])]
        while unfinished:
            for node in unfinished[-1]:
                scalar = scalars.get(type(node))
                if scalar is not None:
                    scalar(node)
                elif id(node) in slots:
                    self.get(slots[id(node)])
                else:
                    parts = others[type(node)](node)
                    if parts is not None:
                        unfinished.append(parts)
                        break
            else:
                unfinished.pop()
        self.out += b"."
        scalars.clear()  # they refer back to this object: leave no cycle for garbage collection
        others.clear()
        return self.with_late_puts()

    def with_late_puts(self) -> bytes:
        """The written bytes, with late PUTs inserted."""
        if not self.late:
            return bytes(self.out)
        pieces: list[bytes | memoryview] = []
        start, out = 0, memoryview(self.out)
        for at, put in sorted(self.late):
            pieces += [out[start:at], put]
            start = at
        return b"".join([*pieces, out[start:]])

    # -- the memo ----------------------------------------------------------------------------

    def put(self) -> int:
        """Memoize the last written node; returns its slot."""
        self.out += self.next_put()
        return self.filled - 1

    def next_put(self) -> bytes:
        """The opcode that memoizes the last written node."""
        slot = self.filled
        self.filled += 1
        return b"q%c" % slot if slot < 256 else b"r" + _counted(slot)

    def get(self, slot: int) -> None:
        """Recall the node in a slot."""
        if slot == _OPEN:
            raise UnsupportedError(
                "an object is among the parts that it is made of, "
                "which torch's safe unpickler has no opcodes for"
            )
        self.out += b"h%c" % slot if slot < 256 else b"j" + _counted(slot)

    # -- numbers, text, bytes ----------------------------------------------------------------

    def spell_constant(self, value: bool | None) -> None:
        """Write None, True or False."""
        self.out += b"N" if value is None else b"\x88" if value else b"\x89"

    def spell_int(self, value: int) -> None:
        """Write an integer; a very long one only once."""
        if value.bit_length() <= 8 * _LONG:
            return self.push_int(value)
        if id(value) in self.slots:  # picklers write long integers again each time
            return self.get(self.slots[id(value)])
        after = self.resolved.pop(id(value), None)
        if after is not None:
            return self.put_late(value, after)
        self.push_int(value)
        self.resolved[id(value)] = len(self.out)
        return None

    def push_int(self, value: int) -> None:
        """Write an integer with the shortest opcode."""
        if 0 <= value < 1 << 8:
            self.out += b"K%c" % value
        elif 0 <= value < 1 << 16:
            self.out += b"M" + value.to_bytes(2, "little")
        elif -1 << 31 <= value < 1 << 31:
            self.out += b"J" + value.to_bytes(4, "little", signed=True)
        else:
            nbytes = (value if value >= 0 else ~value).bit_length() // 8 + 1
            self.out += b"\x8a%c" % nbytes if nbytes < 256 else b"\x8b" + _counted(nbytes)
            self.out += value.to_bytes(nbytes, "little", signed=True)

    def spell_float(self, value: float) -> None:
        """Write a float."""
        self.out += b"G" + struct.pack(">d", value)

    def spell_text(self, text: str) -> None:
        """Write a string, or recall it if it was written before."""
        if text in self.texts:
            return self.get(self.texts[text])
        encoded = text.encode("utf-8", "surrogatepass")
        self.out += b"X" + _counted(len(encoded))
        self.out += encoded
        self.texts[text] = self.put()
        return None

    def spell_bytes(self, content: bytes) -> None:
        """Write bytes, or recall them if they were written before."""
        if content in self.contents:
            return self.get(self.contents[content])
        self.contents[content] = self.encode_bytes(content)
        return None

    def spell_blob(self, node: Blob) -> None:
        """Write bytes that look like a checkpoint."""
        if node.content is None:
            raise UnsupportedError("bytes within the pickle were passed over, and can't be written")
        self.slots[id(node)] = self.encode_bytes(node.content)

    def encode_bytes(self, content: bytes) -> int:
        """Write bytes as protocol 2 does; returns their slot."""
        self.spell_name("_codecs", "encode")
        self.spell_text(content.decode("latin-1"))
        self.spell_text("latin1")
        return self.reduce(2)

    def reduce(self, count: int) -> int:
        """Call a function with the last `count` arguments; returns the slot of the result."""
        self.out += _TUPLES[count]
        self.put()
        self.out += b"R"
        return self.put()

    # -- names and persistent ids ------------------------------------------------------------

    def spell_global(self, node: Global) -> None:
        """Write a name in a module; nested names are resolved with `getattr`."""
        if node.module == "copyreg extension":
            raise UnsupportedError("the pickle names an object by its number in a registry")
        name, *inner = node.name.split(".")
        slot, known = self.names.get((node.module, name)), 0
        while slot is not None and known < len(inner) and (slot, inner[known]) in self.names:
            slot = self.names[slot, inner[known]]
            known += 1
        for _ in inner[known:]:
            self.spell_name("builtins", "getattr")
        if slot is None:
            slot = self.spell_name(node.module, name)
        else:
            self.get(slot)
        for part in inner[known:]:
            self.spell_text(part)
            key = (slot, part)
            slot = self.names[key] = self.reduce(2)
        self.slots[id(node)] = slot

    def spell_name(self, module: str, name: str) -> int:
        """Write a name in a module; returns its slot."""
        slot = self.names.get((module, name))
        if slot is not None:
            self.get(slot)
            return slot
        old_module, old_name = to_python2(module, name)
        self.out += b"c%b\n%b\n" % (_line(old_module), _line(old_name))
        slot = self.names[module, name] = self.put()
        return slot

    def spell_persistent(self, node: Persistent) -> Iterator[Node] | None:
        """Write a persistent id, or recall it."""
        after = self.resolved.pop(id(node), None)
        if after is None:
            return self.resolve(node)
        self.put_late(node, after)
        return None

    def put_late(self, node: Node, after: int) -> None:
        """Memoize the node whose bytes end at the offset `after`, and recall it."""
        self.slots[id(node)] = slot = self.filled
        self.late.append((after, self.next_put()))
        self.get(slot)

    def resolve(self, node: Persistent) -> Iterator[Node]:
        """Write a persistent id for the first time."""
        self.slots[id(node)] = _OPEN
        yield node.pid
        self.out += b"Q"
        del self.slots[id(node)]
        self.resolved[id(node)] = len(self.out)

    # -- containers and calls ----------------------------------------------------------------

    def spell_tuple(self, node: Tuple) -> Iterator[Node] | None:
        """Write a tuple."""
        if node.items:
            return self.enclose(node)
        self.out += b")"
        return None

    def enclose(self, node: Tuple) -> Iterator[Node]:
        """Write a tuple that is not empty."""
        self.slots[id(node)] = _OPEN
        opcode = _TUPLES.get(len(node.items))
        if opcode is None:
            self.out += b"("
        yield from self.unwritten(node.items)
        self.out += opcode or b"t"
        self.slots[id(node)] = self.put()

    def unwritten(self, items: Sequence[Node]) -> Sequence[Node]:
        """Write a row of numbers at once; return the items that are still to be written."""
        opcodes = opcodes_of(items)
        if opcodes is None:
            return items
        self.out += opcodes
        return ()

    def spell_list(self, node: List) -> Iterator[Node]:
        """Write a list."""
        self.out += b"]"
        self.slots[id(node)] = self.put()
        return self.append(node.items, alone=len(node.items) == 1)

    def spell_set(self, node: Set) -> Iterator[Node]:
        """Write a set."""
        self.slots[id(node)] = _OPEN
        self.spell_name("builtins", "frozenset" if node.frozen else "set")
        self.out += b"]"
        self.put()
        yield from self.append(node.items, alone=len(node.items) == 1)
        self.slots[id(node)] = self.reduce(1)

    def spell_dict(self, node: Dict) -> Iterator[Node]:
        """Write a dict."""
        self.out += b"}"
        self.slots[id(node)] = self.put()
        # CPython recognizes the end of a dict only by a batch that is not full.
        end = len(node.pairs) + 1 if node.pairs else 0
        return self.set_items(node.pairs, end, alone=len(node.pairs) == 1)

    def append(self, items: Sequence[Node], *, alone: bool) -> Iterator[Node]:
        """Write items in batches; a last batch of one item, if `alone`, is an APPEND."""
        for start in range(0, len(items), BATCH):
            batch = items[start : start + BATCH]
            single = alone and len(batch) == 1
            self.out += b"" if single else b"("
            yield from self.unwritten(batch)
            self.out += b"a" if single else b"e"

    def set_items(
        self, pairs: Sequence[tuple[Node, Node]], end: int, *, alone: bool
    ) -> Iterator[Node]:
        """Write pairs in batches that start before `end`; a last single pair may be `alone`."""
        for start in range(0, end, BATCH):
            batch = pairs[start : start + BATCH]
            single = alone and len(batch) == 1
            self.out += b"" if single else b"("
            for pair in batch:
                yield from pair
            self.out += b"s" if single else b"u"

    def spell_call(self, node: Call) -> Iterator[Node]:
        """Write a call, with its items, pairs and state."""
        self.slots[id(node)] = _OPEN
        yield from self.make(node)
        self.slots[id(node)] = self.put()
        yield from self.append(node.items, alone=True)
        yield from self.set_items(node.pairs, len(node.pairs), alone=True)
        if node.built:
            yield node.state
            self.out += b"b"

    def spell_tensor(self, node: PlainTensor) -> Iterator[Node] | None:
        """Write a plain tensor; a compact one at once, with the same result as `spell_call`."""
        form, storage = compact_form(node), node.storage
        fresh = id(storage) not in self.slots and id(storage) not in self.resolved
        if form is None or not (fresh and is_compact(storage)):
            return self.spell_call(node)
        assert isinstance(storage, StorageReference)
        word, storage_class, numel = storage.form
        self.recall(form.names.function)
        self.out += b"(("
        self.spell_text(word)
        self.recall(storage_class)
        self.spell_text(storage.key)
        self.spell_text(storage.location)
        self.push_int(numel)
        self.out += b"t"
        self.put()
        self.out += b"Q"
        self.resolved[id(storage)] = len(self.out)
        self.push_int(form.offset)
        self.spell_sizes(form.shape)
        self.spell_sizes(form.stride)
        self.spell_constant(form.requires_grad)
        self.recall(form.names.hooks)
        self.out += b")R"
        self.put()
        self.out += b"t"
        self.put()
        self.out += b"R"
        self.slots[id(node)] = self.put()
        return None

    def recall(self, node: Global) -> None:
        """Write a name, or recall it if it was written before."""
        if id(node) in self.slots:
            self.get(self.slots[id(node)])
        else:
            self.spell_global(node)

    def spell_sizes(self, sizes: tuple[int, ...]) -> None:
        """Write a tuple of numbers that occurs only here."""
        opcode = _TUPLES.get(len(sizes))
        if not sizes:
            self.out += b")"
            return
        self.out += b"" if opcode else b"("
        for size in sizes:
            self.push_int(size)
        self.out += opcode or b"t"
        self.put()

    def make(self, node: Call) -> Iterator[Node]:
        """Write a call with its arguments."""
        if node.opcode == "NEWOBJ_EX":
            self.spell_name("copyreg", "__newobj_ex__")
            yield from (node.function, node.args, node.kwargs)
            self.out += _TUPLES[3]
            self.put()
            self.out += b"R"
            return
        yield from (node.function, node.args)
        bare = isinstance(node.args, Tuple) and not node.args.items
        new = node.opcode == "NEWOBJ" or (node.opcode in ("INST", "OBJ") and bare)
        self.out += b"\x81" if new else b"R"


def _line(text: str) -> bytes:
    try:
        line = text.encode()
    except UnicodeEncodeError:
        line = b"\n"
    if b"\n" in line:
        raise UnsupportedError(f"a pickle of protocol 2 can't name {text!r:.100}")
    return line


def _counted(count: int) -> bytes:
    if count > _MOST:
        raise UnsupportedError("the pickle holds more than a pickle of protocol 2 can count")
    return count.to_bytes(4, "little")
