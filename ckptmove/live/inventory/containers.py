"""Take objects of any class apart, and build objects of the same class with other contents.

No code of the object runs, because `__init__`, `__setitem__` or a property may check, convert or
refuse values. Attributes and slots are contents, too: some containers keep the same tensors in both
(`ModelOutput` of transformers).
"""

from __future__ import annotations

import gc
from collections import ChainMap, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from types import (
    BuiltinFunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    SimpleNamespace,
)
from typing import Any, ClassVar

import torch
from torch.nn.utils.rnn import PackedSequence

from ...manifest.paths import Key

#: The most values that are searched in a container, so that a list of millions of words is fast.
MOST_VALUES = 200_000

#: Returns the replacement of an object, or the object itself.
Swap = Callable[[Any], Any]
#: A label for the name, and the object; with an empty label, the name is that of the container.
LabeledObject = tuple[str, Any]

_PLACES = ("device", "_device")
_BARE = frozenset((dict, defaultdict, list, tuple, set, frozenset, deque))  # without attributes


class ContainerKind:
    """The way to take objects of one class apart, and to rebuild them."""

    #: Whether an object's contents are fixed when it is made, or decide its hash.
    fixed: ClassVar[bool] = False
    #: Whether an object can't be made without all its contents.
    complete: ClassVar[bool] = False
    #: Whether keys of contents are part of their names.
    names: ClassVar[bool] = True

    def __init__(self, kind: type, *, declares: bool = True) -> None:
        #: Whether the class declares that it holds data: it is a container, or has fields.
        self.declares = declares
        self._dict: GetSetDescriptorType | MemberDescriptorType | None = None
        self._slots: dict[str, MemberDescriptorType] = {}
        for base in () if kind in _BARE else kind.__mro__:
            own = vars(base).get("__dict__")
            if self._dict is None and isinstance(own, (GetSetDescriptorType, MemberDescriptorType)):
                self._dict = own
            if "__slots__" in vars(base):
                for name, slot in vars(base).items():
                    if isinstance(slot, MemberDescriptorType):
                        self._slots.setdefault(name, slot)

    def contents(self, whole: Any) -> Iterator[tuple[Key, Any]]:
        """The contents of a container, by key."""
        yield from ()

    def own(self, whole: Any) -> dict[str, Any]:
        """The `__dict__` of an object; empty if it has none."""
        return {} if self._dict is None else self._dict.__get__(whole)

    def attributes(self, whole: Any) -> Iterator[tuple[str, Any]]:
        """The attributes and slots of an object."""
        yield from list(self.own(whole).items())
        for name, slot in self._slots.items():
            try:
                value = slot.__get__(whole)
            except AttributeError:  # the slot is empty
                continue
            yield name, value

    def items(self, whole: Any) -> Iterator[tuple[Key, Any]]:
        """Contents and attributes; a value with the same name in both comes only once."""
        inside = {}
        for key, each in self.contents(whole):
            if type(key) is str:  # comparing other keys might run code
                inside[key] = each
            yield key, each
        for name, each in self.attributes(whole):
            if inside.get(name) is not each:
                yield name, each

    def parts(self, whole: Any) -> Iterator[LabeledObject]:
        """The parts that a rebuilt object gets."""
        yield from self.parts_needed_first(whole)
        yield from self.attributes(whole)

    def parts_needed_first(self, whole: Any) -> Iterator[LabeledObject]:
        """The parts that must exist before a new object is made, if the kind is `fixed`."""
        for key, each in self.contents(whole):
            yield str(key) if self.names else "", each

    def new_object(self, whole: Any, swap: Swap) -> Any:
        """A new object of the class: empty, unless the kind is `fixed`."""
        raise NotImplementedError

    def fill(self, whole: Any, new: Any, swap: Swap) -> None:
        """Put the contents of an object into a new one, swapped."""
        for name, value in self.attributes(whole):
            self._set(new, name, swap(value))

    def _set(self, whole: Any, name: str, value: Any) -> None:
        if name in self._slots:
            self._slots[name].__set__(whole, value)
        else:
            self.own(whole)[name] = value


class _Dict(ContainerKind):
    def __init__(self, kind: type) -> None:
        super().__init__(kind)
        bases: tuple[Any, ...] = (OrderedDict, defaultdict, dict)
        self._base: Any = next(base for base in bases if issubclass(kind, base))

    def contents(self, whole: Any) -> Iterator[tuple[Key, Any]]:
        return iter(list(self._base.items(whole)))

    def new_object(self, whole: Any, swap: Swap) -> Any:
        new = self._base.__new__(type(whole))
        if self._base is defaultdict:
            new.default_factory = whole.default_factory
        return new

    def fill(self, whole: Any, new: Any, swap: Swap) -> None:
        put = self._base.__setitem__
        for key, value in self._base.items(whole):
            put(new, key, swap(value))
        super().fill(whole, new, swap)


class _List(ContainerKind):
    def contents(self, whole: Any) -> Iterator[tuple[Key, Any]]:
        return enumerate(list.__iter__(whole))

    def new_object(self, whole: Any, swap: Swap) -> Any:
        return list.__new__(type(whole))

    def fill(self, whole: Any, new: Any, swap: Swap) -> None:
        list.extend(new, map(swap, list.__iter__(whole)))
        super().fill(whole, new, swap)


class _Deque(ContainerKind):
    def contents(self, whole: Any) -> Iterator[tuple[Key, Any]]:
        return enumerate(deque.__iter__(whole))

    def new_object(self, whole: Any, swap: Swap) -> Any:
        new = deque.__new__(type(whole))
        deque.__init__(new, (), whole.maxlen)
        return new

    def fill(self, whole: Any, new: Any, swap: Swap) -> None:
        deque.extend(new, map(swap, deque.__iter__(whole)))
        super().fill(whole, new, swap)


class _Tuple(ContainerKind):
    fixed = complete = True

    def contents(self, whole: Any) -> Iterator[tuple[Key, Any]]:
        names = getattr(type(whole), "_fields", ())
        for index, value in enumerate(tuple.__iter__(whole)):
            yield names[index] if index < len(names) else index, value

    def new_object(self, whole: Any, swap: Swap) -> Any:
        kind = type(whole)
        values = [swap(value) for value in tuple.__iter__(whole)]
        try:
            return tuple.__new__(kind, values)
        except TypeError:  # not allowed for classes in C, such as torch.return_types.max
            return kind(values)


class _PackedSequences(_Tuple):
    """A PackedSequence; its `batch_sizes` always stay on the CPU."""

    def parts_needed_first(self, whole: Any) -> Iterator[LabeledObject]:
        return (part for part in super().parts_needed_first(whole) if part[0] != "batch_sizes")

    def new_object(self, whole: Any, swap: Swap) -> Any:
        sizes = whole.batch_sizes
        return super().new_object(whole, lambda value: value if value is sizes else swap(value))


class _Set(ContainerKind):
    names = False

    def contents(self, whole: Any) -> Iterator[tuple[Key, Any]]:
        return enumerate(set.__iter__(whole))

    def new_object(self, whole: Any, swap: Swap) -> Any:
        return set.__new__(type(whole))

    def fill(self, whole: Any, new: Any, swap: Swap) -> None:
        set.update(new, map(swap, set.__iter__(whole)))
        super().fill(whole, new, swap)


class _FrozenSet(ContainerKind):
    fixed = complete = True
    names = False

    def contents(self, whole: Any) -> Iterator[tuple[Key, Any]]:
        return enumerate(frozenset.__iter__(whole))

    def new_object(self, whole: Any, swap: Swap) -> Any:
        return frozenset.__new__(type(whole), map(swap, frozenset.__iter__(whole)))


class _Proxy(ContainerKind):
    """A mapping proxy; only the garbage collector can find the mapping behind it."""

    fixed = complete = True

    def contents(self, whole: Any) -> Iterator[tuple[Key, Any]]:
        for each in gc.get_referents(whole):
            if isinstance(each, dict):
                yield from _Dict(type(each)).contents(each)

    def parts_needed_first(self, whole: Any) -> Iterator[LabeledObject]:
        return (("", each) for each in gc.get_referents(whole))

    def new_object(self, whole: Any, swap: Swap) -> Any:
        (shown,) = gc.get_referents(whole)
        return MappingProxyType(swap(shown))


class Fields(ContainerKind):
    """Objects with attributes and slots only."""

    def follow(self, whole: Any, new: Any, places: Mapping[torch.device, torch.device]) -> None:
        """Correct the attribute of a new object that names its device."""
        for name, value in self.attributes(whole):
            if name in _PLACES and isinstance(value, torch.device) and value in places:
                self._set(new, name, places[value])

    def new_object(self, whole: Any, swap: Swap) -> Any:
        """A new object of the class, without attributes."""
        return maker_of(type(whole))(type(whole))


class _HashedByContents(Fields):
    """Objects whose hash depends on their contents, such as frozen dataclasses."""

    fixed = True
    parts = parts_needed_first = ContainerKind.attributes


class _Wrapper(Fields):
    """A class that wraps a dict or list as `data`; `data` is not part of names."""

    def contents(self, whole: Any) -> Iterator[tuple[Key, Any]]:
        for name, value in self.attributes(whole):
            if name == "data" and type(value) in (dict, OrderedDict, list):
                yield from (_List if type(value) is list else _Dict)(type(value)).contents(value)
            else:
                yield name, value

    items = contents

    def parts(self, whole: Any) -> Iterator[LabeledObject]:
        for name, value in self.attributes(whole):
            yield "" if name == "data" else name, value


class _Chain(Fields):
    """A ChainMap; its dicts are not part of names."""

    def parts(self, whole: Any) -> Iterator[LabeledObject]:
        for name, value in self.attributes(whole):
            yield from (("", each) for each in value) if name == "maps" else [(name, value)]

    def fill(self, whole: Any, new: Any, swap: Swap) -> None:
        super().fill(whole, new, swap)
        new.maps = [swap(each) for each in whole.maps]


_KINDS: tuple[tuple[type, Callable[[type], ContainerKind]], ...] = (
    (dict, _Dict),
    (list, _List),
    (PackedSequence, _PackedSequences),
    (tuple, _Tuple),
    (set, _Set),
    (frozenset, _FrozenSet),
    (deque, _Deque),
    (UserDict, _Wrapper),
    (UserList, _Wrapper),
    (ChainMap, _Chain),
    (MappingProxyType, _Proxy),
)


def container(kind: type) -> ContainerKind | None:
    """The kind of a dict, list, tuple, set, deque or similar class; None for other classes."""
    return next((row(kind) for base, row in _KINDS if issubclass(kind, base)), None)


def kind_with_fields(kind: type) -> ContainerKind | None:
    """The kind of a class that declares its fields; None for other classes."""
    if is_dataclass(kind) or hasattr(kind, "__attrs_attrs__") or issubclass(kind, SimpleNamespace):
        return kind_by_attributes(kind)
    return None


def kind_by_attributes(kind: type, *, declares: bool = True) -> Fields:
    """The kind of a class whose objects are taken apart by their attributes."""
    hashed: Any = kind.__hash__  # None if objects are not hashable
    is_by_identity = hashed in (None, object.__hash__)
    return (Fields if is_by_identity else _HashedByContents)(kind, declares=declares)


def maker_of(kind: type) -> Any:
    """The first `__new__` written in C among a class's bases: it runs no code of the class."""
    makers = (base.__dict__.get("__new__") for base in kind.__mro__)
    return next(each for each in makers if isinstance(each, BuiltinFunctionType))


def rebuild_containers(
    containers: Mapping[int, tuple[ContainerKind, Any]], swapped: dict[int, Any]
) -> None:
    """Rebuild containers with swapped contents; keys are `id()`s, results go into `swapped`."""

    def swap(value: Any) -> Any:
        return swapped.get(id(value), value)

    for key, (kind, whole) in containers.items():
        if not kind.complete:
            swapped[key] = kind.new_object(whole, swap)
    late = [key for key, (kind, _) in containers.items() if not kind.fixed]
    for key in _inner_first({key: each for key, each in containers.items() if each[0].fixed}):
        kind, whole = containers[key]
        if key not in swapped:
            swapped[key] = kind.new_object(whole, swap)
        parts = {id(part) for _, part in kind.parts_needed_first(whole)}
        if isinstance(kind, _HashedByContents) and swapped.keys() >= parts & containers.keys():
            kind.fill(whole, swapped[key], swap)
        else:  # attributes of a tuple, or a cycle through a tuple
            late.append(key)
    for key in late:
        kind, whole = containers[key]
        kind.fill(whole, swapped[key], swap)


def _inner_first(containers: Mapping[int, tuple[ContainerKind, Any]]) -> Iterator[int]:
    """The containers, inner ones first, except in cycles."""
    seen: set[int] = set()
    for root in containers:
        stack: list[tuple[int, bool]] = [(root, False)]
        while stack:
            key, is_done = stack.pop()
            if is_done:
                yield key
            elif key not in seen:
                seen.add(key)
                stack.append((key, True))
                kind, whole = containers[key]
                inner = [id(part) for _, part in kind.parts_needed_first(whole)]
                stack.extend((part, False) for part in inner if part in containers)
