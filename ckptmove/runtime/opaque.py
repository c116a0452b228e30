"""`Opaque`: the placeholder for an object that a checkpoint would build by running code."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

#: The function that a pickle in memory calls instead of the callable of an `Opaque`.
STAND_IN = "ckptmove.runtime.pickling.stand_in"
_LONGEST_SHOWN = 100  # characters of a name
_MOST_SHOWN = 6  # names in a repr


class Opaque:
    """A placeholder for an object that the pickle would build by calling code; runs nothing.

    It records the callable, the arguments and the state. It is equal only to itself.

    Attributes:
        qualname: the name that would be called or imported, `module.name`; "" if it has no name.
        module: the module part of that name; the rest of the name may contain dots too.
        how: the opcode that would build the object, for example `REDUCE` or `NEWOBJ`.
        function: the callable, if it has no name.
        args: the arguments, usually a tuple; None if only the name is meant.
        kwargs: keyword arguments, or None.
        items: the items that would be appended.
        pairs: the items that would be set by key, in order.
        state: the state that the object would get, or None.
    """

    __slots__ = (
        "args",
        "function",
        "how",
        "items",
        "kwargs",
        "module",
        "pairs",
        "qualname",
        "state",
    )

    def __init__(
        self,
        qualname: str,
        args: object = None,
        kwargs: object = None,
        function: object = None,
        module: str | None = None,
        how: str = "REDUCE",
    ) -> None:
        self.qualname = qualname
        self.module = qualname.rpartition(".")[0] if module is None else module
        self.how = how
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.items: list[object] = []
        self.pairs: list[tuple[object, object]] = []
        self.state: object = None

    def __repr__(self) -> str:
        """A summary without the contents, since these may contain the object itself."""
        what, args = printable_name(self.qualname), self.args
        empty = isinstance(args, tuple) and not args  # tensors, for example, have no truth value
        told = [what if args is None else f"{what}({'' if empty else '...'})"]
        if isinstance(self.state, Mapping):
            keys = (printable_name(key) for key in self.state if isinstance(key, str))
            names = list(islice(keys, _MOST_SHOWN + 1))
            told += [*names[:_MOST_SHOWN], *(["..."] if len(names) > _MOST_SHOWN else [])]
        if self.items or self.pairs:
            told.append(f"{len(self.items) + len(self.pairs):,} items")
        return f"<Opaque {' '.join(told)}>"


def printable_name(name: str) -> str:
    """A name from a file, shortened and escaped for display."""
    if len(name) > _LONGEST_SHOWN:
        name = name[:_LONGEST_SHOWN] + "..."
    told = name if name.isprintable() else ascii(name)
    if len(told) > 2 * _LONGEST_SHOWN:  # escapes take up to ten characters each
        told = told[: 2 * _LONGEST_SHOWN] + "..."
    return told or "something without a name"
