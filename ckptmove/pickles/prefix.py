"""Walk a pickle that is cut short or damaged, as far as it makes sense.

Unfinished values go to where the pickler would have put them: items above a mark to the dict or
list below it, a state to its object. A key without a value is dropped, and so is the last pair
behind an empty dict, which might belong into that dict.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import NamedTuple

from ..errors import InputError
from ..sources.budget import Budget, Excess
from .nodes import Call, Dict, List, Node, Tuple
from .opcodes.machine import FramelessMachine
from .walk import Pickle


class Prefix(NamedTuple):
    """The part of a pickle that could be walked."""

    pickle: Pickle
    #: whether this is the whole pickle
    is_whole: bool


def walk_prefix(
    data: bytes,
    base: int = 0,
    gaps: Mapping[int, int] | None = None,
    budget: Budget | None = None,
) -> Prefix:
    """Walk the pickle at the start of `data`; the arguments are those of `walk`.

    Excess if it would take too much memory.
    """
    machine = FramelessMachine(data, base, gaps or {}, budget)
    is_whole = True
    try:
        root = machine.run()
    except Excess:
        raise
    except (InputError, IndexError, struct.error, UnicodeError):
        root, is_whole = _closed([*machine.below, machine.stack], machine.at), False
    pickle = Pickle(
        root,
        tuple(machine.globals),
        tuple(machine.persistents),
        tuple(machine.calls),
        tuple(machine.blobs),
        tuple(machine.dropped) if is_whole else (),
        machine.protocol,
        machine.python2,
        frozenset(machine.shared_texts),
        machine.textual,
        machine.position,
        frozenset(machine.recalled) if machine.is_usual else None,
    )
    return Prefix(pickle, is_whole)


def _closed(stacks: list[list[Node]], at: int) -> Node:
    """The root that the stacks between the marks would have become."""
    items = stacks.pop()
    while stacks:
        outer = stacks.pop()
        _fold(items)
        top = outer[-1] if outer else None
        if isinstance(top, (Dict, Call)):
            _put(top, items)
        elif isinstance(top, List):
            top.items = [*top.items, *items]
        elif items:
            outer.append(Tuple(items, at))
        items = outer
    _fold(items)
    root = items[0] if items else None
    if isinstance(root, (Dict, Call)):
        _put(root, items[1:])
    elif isinstance(root, List):
        root.items = [*root.items, *items[1:]]
    return root


def _fold(items: list[Node]) -> None:
    """Give states that follow their objects on the stack to those objects."""
    while len(items) > 1:
        state, target = items[-1], items[-2]
        if not (isinstance(state, Dict) and isinstance(target, Call)) or target.built:
            return
        target.state, target.built = state, True
        items.pop()


def _put(target: Dict | Call, items: list[Node]) -> None:
    pairs = list(zip(items[::2], items[1::2], strict=False))
    if len(pairs) > 1:
        before = pairs[-2][1]
        if isinstance(before, Dict) and not before.pairs and len(items) % 2 == 0:
            pairs.pop()
    pairs = [pair for pair in pairs if isinstance(pair[0], (str, int, float, bytes, Tuple))]
    target.pairs = [*target.pairs, *pairs]
