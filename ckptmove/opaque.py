"""What stands for an object that a checkpoint would have made by running code."""

from __future__ import annotations

from collections.abc import Mapping

_LONGEST_SHOWN = 100  # characters of one
_MOST_SHOWN = 6  # names in a repr


class Opaque:
    """An object that was not made: what would have been called, with what, and what then.

    It does nothing, and equals itself alone.

    Attributes:
        qualname: what would have been called or imported, `module.name`; "" if it has no name.
        function: what would have been called, where it has no name.
        args: the arguments, mostly a tuple; None if the name itself is meant.
        kwargs: keyword arguments, or None.
        items: what was appended.
        pairs: what was set by key, in order.
        state: what the object's state was to be, or None.
    """

    __slots__ = ("args", "function", "items", "kwargs", "pairs", "qualname", "state")

    def __init__(
        self,
        qualname: str,
        args: object = None,
        kwargs: object = None,
        function: object = None,
    ) -> None:
        self.qualname = qualname
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.items: list[object] = []
        self.pairs: list[tuple[object, object]] = []
        self.state: object = None

    def __repr__(self) -> str:
        """Flat: what it holds may hold it."""
        what = shown(self.qualname)
        told = [what if self.args is None else f"{what}({'...' if self.args else ''})"]
        if isinstance(self.state, Mapping):
            names = [shown(key) for key in self.state if isinstance(key, str)]
            told += [*names[:_MOST_SHOWN], *(["..."] if len(names) > _MOST_SHOWN else [])]
        if self.items or self.pairs:
            told.append(f"{len(self.items) + len(self.pairs):,} items")
        return f"<Opaque {' '.join(told)}>"


def shown(name: str) -> str:
    """A name that a file gives, fit to be shown."""
    if len(name) > _LONGEST_SHOWN:
        name = name[:_LONGEST_SHOWN] + "..."
    return (name if name.isprintable() else ascii(name)) or "something without a name"
