"""Inert nodes: the objects that a pickle would build, as data that runs nothing.

Scalars are plain Python values. Long rows of numbers are an array (`rows`), and long rows of
booleans a `FlagRow`; both create the values anew at each access. Everything else is one of the few
classes below: code that meets a node handles each kind or raises. Identity is aliasing: two paths
to one node are two names of one object. Nodes are never hashed, compared with `==` or copied by
value, because a hostile graph could make that take forever.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, MutableSequence, Sequence
from typing import Any, TypeAlias

from .flag_row import FlagRow


class Text(str):
    """One use of a string: `at` is the offset of the opcode that pushed this use.

    Strings are shared through the memo, so one literal may have many uses; each use can be
    rewritten without touching the others.
    """

    __slots__ = ("at",)
    at: int

    def __new__(cls, value: str, at: int) -> Text:
        text = str.__new__(cls, value)
        text.at = at
        return text

    def __reduce__(self) -> tuple[type[Text], tuple[str, int]]:
        return Text, (str(self), self.at)


#: The types of strings: with the offset of a use, or without.
TEXTS = frozenset((str, Text))


class Global:
    """A name that unpickling would import. `at` is the offset of its opcode."""

    __slots__ = ("at", "module", "name", "qualname")

    def __init__(self, module: str, name: str, at: int) -> None:
        self.module = module
        self.name = name
        self.qualname = f"{module}.{name}"
        self.at = at


class Tuple:
    """A tuple. `at` is the offset of the opcode that closed it."""

    __slots__ = ("at", "items")

    def __init__(self, items: Items, at: int) -> None:
        self.items = items
        self.at = at


class List:
    """A list."""

    __slots__ = ("items",)

    def __init__(self, items: Items) -> None:
        self.items = items


class Set:
    """A set, or a frozenset."""

    __slots__ = ("frozen", "items")

    def __init__(self, items: Items, frozen: bool) -> None:
        self.items = items
        self.frozen = frozen


class Mapping:
    """A node with key/value pairs in order.

    A key that is set twice keeps its place, as in a dict.
    """

    __slots__ = ("pairs",)

    def __init__(self) -> None:
        self.pairs: MutableSequence[tuple[Node, Node]] = []

    def get(self, key: str) -> Node:
        """The last value set under a string key, or None."""
        for found, value in reversed(self.pairs):
            if isinstance(found, str) and found == key:
                return value
        return None

    def keys_among(self, names: Collection[str]) -> set[str]:
        """The names from `names` that are keys of this node."""
        return {str(key) for key, _ in self.pairs if isinstance(key, str) and key in names}


class Dict(Mapping):
    """A dict."""

    __slots__ = ()


class Call(Mapping):
    """An object made by a call: REDUCE, NEWOBJ, INST …, then filled and given a state.

    The arguments are usually a Tuple; `opcode` and `at` describe the opcode that made the object.
    """

    __slots__ = ("args", "at", "built", "function", "items", "kwargs", "opcode", "state")

    def __init__(
        self, function: Node, args: Node, opcode: str, at: int, kwargs: Node = None
    ) -> None:
        self.pairs = NOTHING
        self.function = function
        self.args = args
        #: NEWOBJ_EX's keyword arguments, or None
        self.kwargs = kwargs
        self.opcode = opcode
        self.at = at
        #: the items appended to it; values set by key are in `pairs`
        self.items: Items = NOTHING
        #: the state that BUILD gave it, or None; `built` is whether there was a BUILD
        self.state: Node = None
        self.built = False

    @property
    def qualname(self) -> str | None:
        """The dotted name of the called function or class, if it is a plain name; else None."""
        function = self.function
        if type(function) is not Global:
            function = without_source_text(function)
        return function.qualname if isinstance(function, Global) else None


class Blob:
    """Bytes that may be a nested checkpoint, or were too many to hold in memory."""

    __slots__ = ("at", "content", "nbytes", "string")

    def __init__(
        self, at: int, nbytes: int, content: bytes | None, *, string: bool = False
    ) -> None:
        self.at = at
        self.nbytes = nbytes
        #: the bytes, or None if they were skipped
        self.content = content
        #: whether Python 2 wrote them as a string: then they are text if they are valid UTF-8
        self.string = string

    def __str__(self) -> str:
        return f"{self.nbytes:,} bytes"


class Persistent:
    """An object outside the pickle, by its persistent id. `at` is the offset of its opcode."""

    __slots__ = ("at", "pid")

    def __init__(self, pid: Node, at: int) -> None:
        self.pid = pid
        self.at = at


#: The pairs and items of a call that has none; adding to it raises.
NOTHING: Any = ()


def without_source_text(node: Node) -> Node:
    """The class in a persistent id that also holds its source text, as torch wrote until 1.5.

    Such an id is `('module', class, source file, source text)`; torch 0.1 had no 'module'. Any
    other node is returned unchanged.
    """
    if isinstance(node, Persistent) and isinstance(node.pid, Tuple):
        items = node.pid.items
        if len(items) == 4 and items[0] == "module" and isinstance(items[1], Global):
            return items[1]
        if len(items) == 3 and isinstance(items[0], Global):
            return items[0]
    return node


def are_plain(nodes: Sequence[Node]) -> bool:
    """Whether all nodes are numbers, booleans or None; fast even for millions."""
    is_row = type(nodes) is not list and isinstance(nodes, (array, FlagRow))
    return is_row or _PLAIN.issuperset(map(type, nodes))


_PLAIN = frozenset((type(None), bool, int, float))

Scalar: TypeAlias = bool | int | float | str | bytes
#: The items of a node: a list, or a compact sequence of plain values.
Items: TypeAlias = "MutableSequence[Node]"
Node: TypeAlias = Scalar | Blob | Global | Tuple | List | Set | Dict | Call | Persistent | None
