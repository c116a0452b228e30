"""What stands for an object that a checkpoint would have made by running code."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

#: What a pickle in memory calls in the place of what an `Opaque` stands for.
STAND_IN = "ckptmove.runtime.pickling.stand_in"
_LONGEST_SHOWN = 100  # characters of one
_MOST_SHOWN = 6  # names in a repr


class Opaque:
    """An object that was not made: what would have been called, with what, and what then.

    It does nothing, and equals itself alone.

    Attributes:
        qualname: what would have been called or imported, `module.name`; "" if it has no name.
        module: the module of that name: what follows in it may hold dots, too.
        how: the opcode of the pickle that would have made it, e.g. `REDUCE` or `NEWOBJ`.
        function: what would have been called, where it has no name.
        args: the arguments, mostly a tuple; None if the name itself is meant.
        kwargs: keyword arguments, or None.
        items: what was appended.
        pairs: what was set by key, in order.
        state: what the object's state was to be, or None.
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
        """Flat: what it holds may hold it."""
        what, args = shown(self.qualname), self.args
        empty = isinstance(args, tuple) and not args  # tensors among others have no truth
        told = [what if args is None else f"{what}({'' if empty else '...'})"]
        if isinstance(self.state, Mapping):
            keys = (shown(key) for key in self.state if isinstance(key, str))
            names = list(islice(keys, _MOST_SHOWN + 1))
            told += [*names[:_MOST_SHOWN], *(["..."] if len(names) > _MOST_SHOWN else [])]
        if self.items or self.pairs:
            told.append(f"{len(self.items) + len(self.pairs):,} items")
        return f"<Opaque {' '.join(told)}>"


def shown(name: str) -> str:
    """A name that a file gives, fit to be shown."""
    if len(name) > _LONGEST_SHOWN:
        name = name[:_LONGEST_SHOWN] + "..."
    told = name if name.isprintable() else ascii(name)
    if len(told) > 2 * _LONGEST_SHOWN:  # escapes take up to ten characters each
        told = told[: 2 * _LONGEST_SHOWN] + "..."
    return told or "something without a name"
