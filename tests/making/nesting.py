"""Containers of every kind a batch may be made of, and random nestings of them."""

from __future__ import annotations

from argparse import Namespace
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

MAX: Any = torch.return_types.max


class Pair(NamedTuple):
    x: Any
    y: Any


class Strict(tuple[Any, ...]):
    """A tuple with its own constructor, and an attribute."""

    def __new__(cls, x: Any, *, note: Any = None) -> Strict:
        made = super().__new__(cls, (x,))
        made.note = note
        return made

    note: Any


class Loud(dict[str, Any]):
    """A dict that checks how it is made and filled."""

    def __init__(self, *, size: int) -> None:
        super().__init__()
        self.size = size

    def __setitem__(self, key: str, value: Any) -> None:
        assert not isinstance(value, Tensor) or not value.is_meta
        super().__setitem__(key, value)


class Listed(list[Any]):
    lengths: Any = None


@dataclass
class Plain:
    x: Any
    y: Any = None
    hidden: Any = field(default=None, init=False, repr=False)


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    y: Any = None


@dataclass(unsafe_hash=True)
class Hashed:
    x: Any


@dataclass(init=False)
class Uninitialised:
    x: Any

    def __init__(self, given: Any) -> None:
        self.x = given


class Failure(Exception):
    """Made in C, and a dataclass below."""


@dataclass
class Failed(Failure):
    x: Any


class Object:
    def __init__(self, x: Any) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Object) and bool(self.x == other.x)

    __hash__ = object.__hash__


class Told(Object):
    """Hashed by its contents, some of which are in slots."""

    __slots__ = ("y",)

    def __init__(self, x: Any) -> None:
        super().__init__(x)
        self.y = x

    def __hash__(self) -> int:
        return hash((self.x, self.y))


class Slotted:
    __slots__ = ("__own", "x")

    def __init__(self, x: Any) -> None:
        self.x, self.__own = x, x

    @property
    def own(self) -> Any:
        return self.__own


@dataclass
class Below(Slotted):
    y: Any

    def __init__(self, x: Any) -> None:
        super().__init__(x)
        self.y = x


def ordered(x: Any) -> OrderedDict[str, Any]:
    made = OrderedDict(b=1, a=x)
    made._metadata = {"version": 1}  # type: ignore[attr-defined]
    return made


def loud(x: Any) -> Loud:
    made = Loud(size=3)
    dict.__setitem__(made, "x", x)
    return made


def listed(x: Any) -> Listed:
    made = Listed([1, x])
    made.lengths = x
    return made


def hidden(x: Any) -> Plain:
    made = Plain(1)
    made.hidden = x
    return made


#: How to put something into a container of each kind, and how to get it back.
KINDS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "dict": (lambda x: {"a": 1, 2: x}, lambda c: c[2]),
    "OrderedDict": (ordered, lambda c: c["a"]),
    "defaultdict": (lambda x: defaultdict(list, x=x), lambda c: c["x"]),
    "Counter": (lambda x: Counter({"x": x}), lambda c: c["x"]),
    "a dict that minds": (loud, lambda c: c["x"]),
    "UserDict": (lambda x: UserDict(x=x), lambda c: c["x"]),
    "UserList": (lambda x: UserList([x]), lambda c: c[0]),
    "list": (lambda x: [None, x], lambda c: c[1]),
    "a list with attributes": (listed, lambda c: c.lengths),
    "tuple": (lambda x: (x, 2), lambda c: c[0]),
    "a tuple with attributes": (lambda x: Strict(1, note=x), lambda c: c.note),
    "namedtuple": (lambda x: Pair(1, x), lambda c: c.y),
    "torch.return_types": (lambda x: MAX((x, 1)), lambda c: c.values),
    "deque": (lambda x: deque([1, x], maxlen=2), lambda c: c[1]),
    "set": (lambda x: {x}, lambda c: next(iter(c))),
    "frozenset": (lambda x: frozenset((x,)), lambda c: next(iter(c))),
    "dataclass": (lambda x: Plain(1, x), lambda c: c.y),
    "a field that isn't in init": (hidden, lambda c: c.hidden),
    "a frozen dataclass with slots": (lambda x: Frozen(x), lambda c: c.x),
    "a dataclass with an init of its own": (Uninitialised, lambda c: c.x),
    "a dataclass that is an exception": (Failed, lambda c: c.x),
    "slots of a parent": (Below, lambda c: c.own),
    "an object": (Object, lambda c: c.x),
    "an object that is hashed by its contents": (Told, lambda c: c.y),
    "a set of such": (lambda x: {Told(x)}, lambda c: next(iter(c)).x),
    "Namespace": (lambda x: Namespace(x=x), lambda c: c.x),
    "ChainMap": (lambda x: ChainMap({"a": 1}, {"x": x}), lambda c: c["x"]),
    "MappingProxyType": (lambda x: MappingProxyType({"x": x}), lambda c: c["x"]),
    "SimpleNamespace": (lambda x: SimpleNamespace(x=x, y=2), lambda c: c.x),
    "a set of what is hashed by its contents": (lambda x: {Hashed(x)}, lambda c: next(iter(c)).x),
    "a frozenset of frozen dataclasses": (
        lambda x: frozenset((Frozen((x,)),)),
        lambda c: next(iter(c)).x[0],
    ),
}


class Tree(NamedTuple):
    """A batch of random nesting, whose parts may occur more than once."""

    root: Any

    def __repr__(self) -> str:
        return f"<{type(self.root).__name__}>"


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Each part holds some of the parts before it."""
    base = torch.arange(24.0).reshape(4, 6)
    looks = [base, base[1:], base[:, ::2], base.t(), torch.ones(()), base[:0], torch.ones(2)]
    parts: list[Any] = [1, "x", None, object(), *looks]
    lists: list[list[Any]] = []
    for _ in range(draw(st.integers(1, 12))):
        one = st.integers(0, len(parts) - 1).map(parts.__getitem__)
        some: list[Any] = draw(st.lists(one, min_size=1, max_size=3))
        make = draw(st.sampled_from([list, tuple, *(make for make, _ in KINDS.values())]))
        try:
            made = make(some) if make in (list, tuple) else make(some[0])
        except TypeError:  # what can't be hashed is in no set
            made = [*some]
        parts.append(made)
        if type(made) is list:
            lists.append(made)
    if draw(st.booleans()) and lists:
        lists[draw(st.integers(0, len(lists) - 1))].append(parts[-1])
    return Tree(parts[-1])


def contents(value: Any) -> Iterator[tuple[Any, Any]]:
    """What a container holds, in order, found without our code."""
    if isinstance(value, (dict, UserDict, MappingProxyType)):
        yield from dict(value).items()
    elif isinstance(value, ChainMap):
        yield from enumerate(value.maps)
    elif isinstance(value, (list, tuple, deque, UserList, set, frozenset)):
        yield from enumerate(value)
    if isinstance(value, Slotted):
        yield from (("x", value.x), ("own", value.own))
    if isinstance(value, Frozen):
        yield from (("x", value.x), ("y", value.y))
    if isinstance(
        value, (Listed, Strict, OrderedDict, Plain, Hashed, Uninitialised, Failed, Below)
    ):
        yield from vars(value).items()
    if isinstance(value, (SimpleNamespace, Namespace, Object)):
        yield from vars(value).items()
    if isinstance(value, Told):
        yield ("y", value.y)


def compared(old: Any, new: Any, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Check that a batch is a copy of another on a device; pairs of their tensors."""
    twins: dict[int, Any] = {}
    kept: list[Any] = []
    tensors: list[tuple[Tensor, Tensor]] = []
    changed: dict[int, bool] = {}
    holders: list[tuple[int, int]] = []
    todo = [(old, new)]
    while todo:
        one, other = todo.pop()
        assert type(one) is type(other)
        if id(one) in twins:
            assert twins[id(one)] is other
            continue
        twins[id(one)] = other
        kept.append(one)
        if isinstance(one, Tensor):
            assert other.device == device
            changed[id(one)] = one.device != device
            assert (one is not other) == changed[id(one)]
            tensors.append((one, other))
            continue
        ones, others = list(contents(one)), list(contents(other))
        assert len(ones) == len(others)
        if not ones:
            assert one is other
        if not isinstance(one, (set, frozenset)):
            assert [key for key, _ in ones] == [key for key, _ in others]
            todo += [(a, b) for (_, a), (_, b) in zip(ones, others, strict=True)]
            holders += [(id(one), id(part)) for _, part in ones]
        elif one is other:
            assert not any(isinstance(part, Tensor) and part.device != device for _, part in ones)
        else:
            changed[id(one)] = True
    for _ in kept:  # as often as there is depth
        for holder, part in holders:
            if changed.get(part):
                changed[holder] = True
    for one in kept:
        assert (twins[id(one)] is not one) == changed.get(id(one), False)
    made = [id(twins[key]) for key in map(id, kept)]
    assert len(set(made)) == len(made)  # what were two are two
    return tensors


def snapshot(root: Any) -> dict[int, list[tuple[Any, int]]]:
    """What each container in a batch holds, by identity."""
    found: dict[int, list[tuple[Any, int]]] = {}
    todo = [root]
    while todo:
        each = todo.pop()
        if id(each) not in found:
            found[id(each)] = [(key, id(part)) for key, part in contents(each)]
            todo += [part for _, part in contents(each)]
    return found
