"""Check that two pickles are the same, except for the intended changes."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from .nodes import Blob, Call, Dict, Global, Items, List, Node, Persistent, Set, Text, Tuple
from .rows import same_numbers
from .walk import Pickle

_SHOWN = 64  # characters of a key, in a message


def difference(
    old: Pickle,
    new: Pickle,
    texts: Mapping[int, str],
    devices: Mapping[int, str],
    nested: Mapping[int, Node] | None = None,
) -> str | None:
    """The first difference between two pickles, or None.

    Values are compared by their bits, objects by their structure and by which of them are one and
    the same. What a pickle builds and drops again counts too, since unpickling runs it.

    Of the old pickle, `texts` has the offset of a use of a string → what the new one shall say
    there; `devices` the `id()` of a `torch.device` call → what the new one shall make; `nested` the
    `id()` of bytes, or text → those in the new one that stand for the same, and are not compared.
    """
    comparison = _Comparison(texts, devices, nested or {})
    made: tuple[tuple[str, Sequence[Node], Sequence[Node]], ...] = (
        ("a name", old.globals, new.globals),
        ("a storage", old.persistents, new.persistents),
        ("a call", old.calls, new.calls),
    )
    for what, mine, others in made:
        if len(mine) != len(others):
            return f"the number of {what.partition(' ')[2]}s"
        comparison.todo.extend((a, b, what) for a, b in zip(mine, others, strict=True))
    comparison.todo.append((old.root, new.root, "the tree"))
    return comparison.run()


class _Comparison:
    def __init__(
        self, texts: Mapping[int, str], devices: Mapping[int, str], nested: Mapping[int, Node]
    ) -> None:
        self.nested = nested
        self.texts = texts
        self.devices = devices
        self.todo: list[tuple[Node, Node, str]] = []
        self.met: dict[int, Node] = {}  # old container → its counterpart
        self.met_new: dict[int, Node] = {}
        self.alike: dict[int, Node] = {}  # text or bytes, which may be long → what it was last like

    def run(self) -> str | None:
        while self.todo:
            old, new, where = self.todo.pop()
            if not self.same(old, new, where):
                return where
        return None

    def same(self, old: Node, new: Node, where: str) -> bool:
        if type(old) is not type(new):
            return False
        if id(old) in self.nested:
            return self.nested[id(old)] is new
        if isinstance(old, (Blob, Text, bytes)):
            if self.alike.get(id(old)) is not new:
                if not self.same_value(old, new):
                    return False
                self.alike[id(old)] = new
            return True
        if isinstance(old, float) and isinstance(new, float):
            return struct.pack("<d", old) == struct.pack("<d", new)
        if old is None or isinstance(old, (bool, int, str, bytes)):
            return old == new
        if id(old) in self.met or id(new) in self.met_new:
            return self.met.get(id(old)) is new and self.met_new.get(id(new)) is old
        self.met[id(old)] = new
        self.met_new[id(new)] = old
        return self.same_inside(old, new, where)

    def same_value(self, old: Blob | Text | bytes, new: Node) -> bool:
        if isinstance(old, Blob) and isinstance(new, Blob):
            return (old.nbytes, old.content) == (new.nbytes, new.content)
        return new == (self.texts.get(old.at, old) if isinstance(old, Text) else old)

    def same_inside(self, old: Node, new: Node, where: str) -> bool:
        if isinstance(old, Global) and isinstance(new, Global):
            return (old.module, old.name) == (new.module, new.name)
        if isinstance(old, Persistent) and isinstance(new, Persistent):
            self.todo.append((old.pid, new.pid, "a storage"))
            return True
        if isinstance(old, Call) and isinstance(new, Call):
            return self.same_call(old, new, where)
        if isinstance(old, Dict) and isinstance(new, Dict):
            return self.same_pairs(old.pairs, new.pairs, where)
        if isinstance(old, Set) and isinstance(new, Set) and old.frozen != new.frozen:
            return False
        if isinstance(old, (Tuple, List, Set)) and isinstance(new, (Tuple, List, Set)):
            return self.same_items(old.items, new.items, where)
        return False

    def same_call(self, old: Call, new: Call, where: str) -> bool:
        if (old.opcode, old.built) != (new.opcode, new.built):
            return False
        self.todo.append((old.function, new.function, where))
        if id(old) in self.devices:
            args = new.args.items if isinstance(new.args, Tuple) else []
            return len(args) == 1 and args[0] == self.devices[id(old)]
        self.todo += [
            (old.args, new.args, where),
            (old.kwargs, new.kwargs, where),
            (old.state, new.state, where),
        ]
        return self.same_items(old.items, new.items, where) and self.same_pairs(
            old.pairs, new.pairs, where
        )

    def same_items(self, old: Items, new: Items, where: str) -> bool:
        if len(old) != len(new):
            return False
        if not same_numbers(old, new):
            self.todo.extend((a, b, where) for a, b in zip(old, new, strict=True))
        return True

    def same_pairs(
        self, old: list[tuple[Node, Node]], new: list[tuple[Node, Node]], where: str
    ) -> bool:
        if len(old) != len(new):
            return False
        for (key, value), (new_key, new_value) in zip(old, new, strict=True):
            inside = repr(str(key[:_SHOWN])) if isinstance(key, str) else where
            self.todo.append((key, new_key, where))
            self.todo.append((value, new_value, inside))
        return True
