"""Take containers in a batch apart, and build the same kind of container with other contents.

No code of the container runs, neither `__init__` nor `__setitem__` nor `__post_init__`: they may
check, convert or refuse what is put in. Attributes and slots count as contents too, because some
containers keep the same tensors in both (`ModelOutput` of transformers).
"""

from __future__ import annotations

import gc
from collections import ChainMap, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import is_dataclass
from types import BuiltinFunctionType, MappingProxyType, MemberDescriptorType, SimpleNamespace
from typing import Any, ClassVar

import torch
from torch.nn.utils.rnn import PackedSequence

#: Gives what takes the place of an object: itself, where nothing does.
Swap = Callable[[Any], Any]
#: What a container holds: a label for the name, and the thing; it shares the name without a label.
Part = tuple[str, Any]

_PLACES = ("device", "_device")
_BARE = frozenset((dict, defaultdict, list, tuple, set, frozenset, deque))  # have no attributes


class Container:
    """One container.

    Attributes:
        whole: the container.
        fixed: whether its contents are there from its making on, or it is hashed by them.
        complete: whether it can't be made without them.
    """

    fixed: ClassVar[bool] = False
    complete: ClassVar[bool] = False

    def __init__(self, whole: Any) -> None:
        self.whole = whole
        self._slots = [] if type(whole) in _BARE else list(_slots(type(whole)))

    def parts(self) -> Iterator[Part]:
        """What it holds."""
        yield from self._contents()
        yield from self._attributes().items()
        for name, slot in self._slots:
            if (value := _in_slot(slot, self.whole)) is not _EMPTY:
                yield name, value

    def needed(self) -> Iterator[Part]:
        """What must be there before another is made, where it is `fixed`."""
        yield from self._contents()

    def begun(self, swap: Swap) -> Any:
        """Another of its kind: empty, unless it is `fixed`."""
        raise NotImplementedError

    def fill(self, new: Any, swap: Swap) -> None:
        """Put into another what this holds."""
        attributes = self._attributes()
        if attributes:
            new_attributes = own_attributes(new)
            for name, value in attributes.items():
                new_attributes[name] = swap(value)
        for _, slot in self._slots:
            if (value := _in_slot(slot, self.whole)) is not _EMPTY:
                slot.__set__(new, swap(value))

    def _contents(self) -> Iterator[Part]:
        yield from ()

    def _attributes(self) -> Mapping[str, Any]:
        return {} if type(self.whole) in _BARE else own_attributes(self.whole)


class _Dict(Container):
    def __init__(self, whole: Any) -> None:
        super().__init__(whole)
        kinds: tuple[Any, ...] = (OrderedDict, defaultdict, dict)
        self._base: Any = next(kind for kind in kinds if isinstance(whole, kind))

    def _contents(self) -> Iterator[Part]:
        for key, value in self._base.items(self.whole):
            yield str(key), value

    def begun(self, swap: Swap) -> Any:
        new = self._base.__new__(type(self.whole))
        if self._base is defaultdict:
            new.default_factory = self.whole.default_factory
        return new

    def fill(self, new: Any, swap: Swap) -> None:
        put = self._base.__setitem__
        for key, value in self._base.items(self.whole):
            put(new, key, swap(value))
        super().fill(new, swap)


class _List(Container):
    def _contents(self) -> Iterator[Part]:
        for index, value in enumerate(list.__iter__(self.whole)):
            yield str(index), value

    def begun(self, swap: Swap) -> Any:
        return list.__new__(type(self.whole))

    def fill(self, new: Any, swap: Swap) -> None:
        list.extend(new, map(swap, list.__iter__(self.whole)))
        super().fill(new, swap)


class _Deque(Container):
    def _contents(self) -> Iterator[Part]:
        for index, value in enumerate(deque.__iter__(self.whole)):
            yield str(index), value

    def begun(self, swap: Swap) -> Any:
        new = deque.__new__(type(self.whole))
        deque.__init__(new, (), self.whole.maxlen)
        return new

    def fill(self, new: Any, swap: Swap) -> None:
        deque.extend(new, map(swap, deque.__iter__(self.whole)))
        super().fill(new, swap)


class _Tuple(Container):
    fixed = complete = True

    def _contents(self) -> Iterator[Part]:
        names = getattr(type(self.whole), "_fields", ())
        for index, value in enumerate(tuple.__iter__(self.whole)):
            yield str(names[index]) if index < len(names) else str(index), value

    def begun(self, swap: Swap) -> Any:
        kind = type(self.whole)
        values = [swap(value) for value in tuple.__iter__(self.whole)]
        try:
            return tuple.__new__(kind, values)
        except TypeError:  # not safe for those made in C, such as torch.return_types.max
            return kind(values)


class _Packed(_Tuple):
    """A PackedSequence, whose `batch_sizes` always stay on the CPU."""

    def _contents(self) -> Iterator[Part]:
        return ((name, value) for name, value in super()._contents() if name != "batch_sizes")

    def begun(self, swap: Swap) -> Any:
        sizes = self.whole.batch_sizes
        return super().begun(lambda value: value if value is sizes else swap(value))


class _Set(Container):
    def _contents(self) -> Iterator[Part]:
        return (("", value) for value in set.__iter__(self.whole))

    def begun(self, swap: Swap) -> Any:
        return set.__new__(type(self.whole))

    def fill(self, new: Any, swap: Swap) -> None:
        set.update(new, map(swap, set.__iter__(self.whole)))
        super().fill(new, swap)


class _FrozenSet(Container):
    fixed = complete = True

    def _contents(self) -> Iterator[Part]:
        return (("", value) for value in frozenset.__iter__(self.whole))

    def begun(self, swap: Swap) -> Any:
        return frozenset.__new__(type(self.whole), map(swap, frozenset.__iter__(self.whole)))


class Fields(Container):
    """Attributes and slots alone."""

    def follow(self, new: Any, places: Mapping[torch.device, torch.device]) -> None:
        """Have another that says on which device it is say so truly."""
        for name, value in super().parts():
            if name in _PLACES and isinstance(value, torch.device) and value in places:
                own = own_attributes(new)
                if name in own:
                    own[name] = places[value]
                else:
                    object.__setattr__(new, name, places[value])

    def begun(self, swap: Swap) -> Any:
        """Another of its class, without attributes."""
        kind = type(self.whole)
        makers = (base.__dict__.get("__new__") for base in kind.__mro__)
        return next(each for each in makers if isinstance(each, BuiltinFunctionType))(kind)


class _Hashed(Fields):
    """Such whose hash is that of what it holds: a frozen dataclass, say."""

    fixed = True

    def needed(self) -> Iterator[Part]:
        yield from self.parts()


class _Wrapper(Fields):
    """What wraps a dict or list as `data`, which has no name of its own."""

    def parts(self) -> Iterator[Part]:
        for name, value in super().parts():
            yield "" if name == "data" else name, value


class _Chain(Fields):
    """Dicts one behind the other, whose names are its own."""

    def _contents(self) -> Iterator[Part]:
        return (("", each) for each in self.whole.maps)

    def _attributes(self) -> Mapping[str, Any]:
        return {name: value for name, value in super()._attributes().items() if name != "maps"}

    def fill(self, new: Any, swap: Swap) -> None:
        super().fill(new, swap)
        new.maps = [swap(each) for each in self.whole.maps]


class _Proxy(Container):
    """It shows a mapping to which nothing but the garbage collector leads."""

    fixed = complete = True

    def _contents(self) -> Iterator[Part]:
        return (("", each) for each in gc.get_referents(self.whole))

    def begun(self, swap: Swap) -> Any:
        (shown,) = gc.get_referents(self.whole)
        return MappingProxyType(swap(shown))


_PLAIN: tuple[tuple[type, type[Container]], ...] = (
    (dict, _Dict),
    (list, _List),
    (PackedSequence, _Packed),
    (tuple, _Tuple),
    (set, _Set),
    (frozenset, _FrozenSet),
    (deque, _Deque),
    (UserDict, _Wrapper),
    (UserList, _Wrapper),
    (ChainMap, _Chain),
    (MappingProxyType, _Proxy),
)


def plain(kind: type) -> type[Container] | None:
    """How a dict, list, tuple, set or deque of any kind is taken apart; None for all else."""
    return next((container for base, container in _PLAIN if issubclass(kind, base)), None)


def fielded(kind: type) -> type[Container] | None:
    """How an object that declares its fields is taken apart; None for all else."""
    declares = is_dataclass(kind) or hasattr(kind, "__attrs_attrs__")
    if not declares and not issubclass(kind, SimpleNamespace):
        return None
    return attributed(kind)


def attributed(kind: type) -> type[Fields]:
    """How an object is taken apart by its attributes."""
    hashed: Any = kind.__hash__  # None, where it can't be
    return Fields if hashed in (None, object.__hash__) else _Hashed


def rebuild_containers(containers: Mapping[int, Container], swapped: dict[int, Any]) -> None:
    """Make another of each container, with what takes the place of what it holds.

    Args:
        containers: by `id()`; none of them is changed.
        swapped: `id()` of an object → what takes its place; those made are added.
    """

    def swap(value: Any) -> Any:
        return swapped.get(id(value), value)

    for key, container in containers.items():
        if not container.complete:
            swapped[key] = container.begun(swap)
    late = {key: each for key, each in containers.items() if not each.fixed}
    for key in _inner_first({key: each for key, each in containers.items() if each.fixed}):
        container = containers[key]
        if key not in swapped:
            swapped[key] = container.begun(swap)
        parts = {id(part) for _, part in container.needed()}
        if isinstance(container, _Hashed) and swapped.keys() >= parts & containers.keys():
            container.fill(swapped[key], swap)
        else:  # a tuple's attributes, or what holds itself by way of a tuple
            late[key] = container
    for key, container in late.items():
        container.fill(swapped[key], swap)


def _inner_first(containers: Mapping[int, Container]) -> Iterator[int]:
    """The containers, each after those it holds itself, as far as that can be."""
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
                inner = [id(part) for _, part in containers[key].needed()]
                stack.extend((part, False) for part in inner if part in containers)


def own_attributes(whole: Any) -> dict[str, Any]:
    """The attributes of an object itself; none of its code runs."""
    try:
        found = object.__getattribute__(whole, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


_EMPTY: Any = object()


def _slots(kind: type) -> Iterator[tuple[str, MemberDescriptorType]]:
    for owner in kind.__mro__:
        said: str | Collection[str] = owner.__dict__.get("__slots__", ())
        for name in (said,) if isinstance(said, str) else said:
            mangled = name
            if name.startswith("__") and not name.endswith("__"):
                mangled = f"_{owner.__name__.lstrip('_')}{name}"
            slot = owner.__dict__.get(mangled)
            if isinstance(slot, MemberDescriptorType):
                yield name, slot


def _in_slot(slot: MemberDescriptorType, whole: Any) -> Any:
    try:
        return slot.__get__(whole)
    except AttributeError:  # nothing was put there
        return _EMPTY
