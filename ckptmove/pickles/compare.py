"""Check that two pickles are the same, except for the intended changes."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence

from .nodes import Blob, Call, Dict, Global, Items, List, Node, Persistent, Set, Text, Tuple
from .opcodes.plain_tensors import (
    Form,
    PlainTensor,
    StorageForm,
    StorageReference,
    compact_form,
    is_compact,
    kind_of,
)
from .opcodes.rows import same_numbers
from .walk import Pickle

_NOBODY = Global("", "", -1)  # stands for the counterpart of a node that has none yet
_PLAIN_KEYS = (str, int)
_SHOWN = 64  # characters of a key, in a message


def difference(
    old: Pickle,
    new: Pickle,
    texts: Mapping[int, str],
    devices: Mapping[int, str],
    nested: Mapping[int, Node] | None = None,
) -> str | None:
    """The first difference between two pickles, or None.

    Values are compared by their bits, objects by their structure and by identity. Objects that a
    pickle builds and drops again count too, since unpickling runs them.

    The arguments describe intended changes of the old pickle. `texts`: offset of a use of a string
    → the new string there. `devices`: `id()` of a `torch.device` call → the new device. `nested`:
    `id()` of bytes or a text → its counterpart in the new pickle, which is not compared.
    """
    comparison = _Comparison(texts, devices, nested or {})
    made: tuple[tuple[str, Sequence[Node], Sequence[Node]], ...] = (
        ("a name", old.globals, new.globals),
        ("a storage", old.persistents, new.persistents),
    )
    for what, mine, others in made:
        if len(mine) != len(others):
            return f"the number of {what.partition(' ')[2]}s"
    if _count(old.calls) != _count(new.calls):
        return "the number of calls"
    comparison.add(_pairs_of_calls(old.calls, new.calls), "a call")
    for what, mine, others in made:
        comparison.add(zip(mine, others, strict=True), what)
    comparison.todo.append((old.root, new.root, "the tree"))
    return comparison.run()


def _count(calls: Sequence[Call]) -> int:
    return len(calls) + sum(isinstance(each, PlainTensor) for each in calls)


def _pairs_of_calls(old: Sequence[Call], new: Sequence[Call]) -> Iterator[tuple[Node, Node]]:
    """Pairs of calls from two pickles that make equally many.

    One call of a plain tensor in one pickle may be two calls in the other: its hooks come first.
    """
    left, right = iter(old), iter(new)
    for mine, theirs in zip(left, right, strict=False):
        if type(mine) is type(theirs):
            yield mine, theirs
        elif isinstance(mine, PlainTensor):
            yield mine.hooks, theirs
            yield mine, next(right, None)
        elif isinstance(theirs, PlainTensor):
            yield mine, theirs.hooks
            yield next(left, None), theirs
    yield from ((each, None) for each in (*left, *right))


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
        # forms of old tensors and storages, by `id()` → the forms of their counterparts
        self.forms: dict[int, Form | StorageForm] = {}
        # where a difference was found, if its place is not known exactly
        self.differing: str | None = None
        # `id()` of a text or bytes, which may be long → the node that it was last equal to
        self.alike: dict[int, Node] = {}

    def add(self, pairs: Iterable[tuple[Node, Node]], what: str) -> None:
        """Add pairs to compare; compact plain tensors, nearly all pairs, are compared at once."""
        for old, new in pairs:
            if self.are_met(old, new):
                continue
            if type(old) is PlainTensor and type(new) is PlainTensor:
                known, found = id(old), id(new)
                if known not in self.met and found not in self.met_new:
                    alike = self.same_compact(old, new, what)
                    if alike:
                        self.met[known], self.met_new[found] = new, old
                        continue
                    if alike is False:
                        self.start_again(what)
            self.todo.append((old, new, what))

    def are_met(self, old: Node, new: Node) -> bool:
        """Whether two nodes are already paired with each other."""
        return self.met.get(id(old), _NOBODY) is new and self.met_new.get(id(new), _NOBODY) is old

    def start_again(self, what: str) -> None:
        """Forget all pairs after a difference in a compact tensor, to find its exact place."""
        self.differing = what
        self.met.clear()
        self.met_new.clear()
        self.forms.clear()

    def run(self) -> str | None:
        while self.todo:
            old, new, where = self.todo.pop()
            if not self.same(old, new, where):
                return where
        return self.differing

    def same(self, old: Node, new: Node, where: str) -> bool:
        if self.are_met(old, new):
            return True
        if type(old) is not type(new) and kind_of(old) is not kind_of(new):
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
            return _are_same_scalar(old, new)
        if old is None or isinstance(old, (bool, int, str, bytes)):
            return old == new
        if id(old) in self.met or id(new) in self.met_new:
            return self.met.get(id(old)) is new and self.met_new.get(id(new)) is old
        self.met[id(old)] = new
        self.met_new[id(new)] = old
        if isinstance(old, PlainTensor) and isinstance(new, PlainTensor):
            alike = self.same_compact(old, new, where)
            if alike is not None:
                return alike
        return self.same_inside(old, new, where)

    def same_compact(self, old: PlainTensor, new: PlainTensor, where: str) -> bool | None:
        """Whether two compact tensors are the same; None if one of them is not compact."""
        mine, theirs = old.storage, new.storage
        if not (
            compact_form(old) and compact_form(new) and is_compact(mine) and is_compact(theirs)
        ):
            return None
        if id(mine) in self.met or id(theirs) in self.met_new:
            return None
        assert isinstance(mine, StorageReference)
        assert isinstance(theirs, StorageReference)
        self.met[id(mine)] = theirs
        self.met_new[id(theirs)] = mine
        if self.forms.get(id(old.form)) is not new.form:
            names: Sequence[Node] = old.form.names
            others: Sequence[Node] = new.form.names
            pairs = zip(names, others, strict=True)
            if not all(self.same(a, b, where) for a, b in pairs) or old.form[1:] != new.form[1:]:
                return False
            self.forms[id(old.form)] = new.form
        if self.forms.get(id(mine.form)) is not theirs.form:
            pairs = zip(mine.form[:2], theirs.form[:2], strict=True)
            if not all(self.same(a, b, where) for a, b in pairs):
                return False
            if mine.form.numel != theirs.form.numel:
                return False
            self.forms[id(mine.form)] = theirs.form
        return self.same_value(mine.key, theirs.key) and self.same_value(
            mine.location, theirs.location
        )

    def same_value(self, old: Blob | str | bytes, new: Node) -> bool:
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
            pairs = zip(old, new, strict=True)
            self.todo.extend((a, b, where) for a, b in pairs if not _are_same_scalar(a, b))
        return True

    def same_pairs(
        self, old: Sequence[tuple[Node, Node]], new: Sequence[tuple[Node, Node]], where: str
    ) -> bool:
        if len(old) != len(new):
            return False
        for (key, value), (new_key, new_value) in zip(old, new, strict=True):
            if isinstance(key, _PLAIN_KEYS):
                if not self.same(key, new_key, where):
                    return False
            else:
                self.todo.append((key, new_key, where))
            if not self.are_met(value, new_value):
                inside = repr(str(key[:_SHOWN])) if isinstance(key, str) else where
                self.todo.append((value, new_value, inside))
        return True


def _are_same_scalar(old: Node, new: Node) -> bool:
    """Whether both are the same number or None: rows may have millions of these."""
    if type(old) is not type(new):
        return False
    if isinstance(old, float) and isinstance(new, float):
        return struct.pack("<d", old) == struct.pack("<d", new)
    return (old is None or isinstance(old, int)) and old == new
