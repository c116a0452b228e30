"""Find the names that unpickling broken data would import before it fails.

An unpickler runs opcodes as it reads them. Bytes that are cut short, or are not a pickle at all,
may have run something before the error.
"""

from __future__ import annotations

import struct
from contextlib import suppress

from ..errors import InputError
from ..sources.budget import MOST_PICKLES, Budget
from ..sources.source import Readable
from .nodes import Global
from .opcodes.machine import FramelessMachine

#: Stands for further pickles of a file when there are too many to read.
REST = f"(what follows {MOST_PICKLES:,} pickles)"


def names_reached(source: Readable, budget: Budget, start: int = 0) -> list[str]:
    """The names from `globals_reached`, without repetition."""
    return list(dict.fromkeys(each.qualname for each in globals_reached(source, budget, start)))


def globals_reached(source: Readable, budget: Budget, start: int = 0) -> list[Global]:
    """The names that an unpickler would import from `start` on, before it fails or reaches the end.

    After a pickle ends, a loader may continue with the next one, as `torch.load` does; these are
    read too while the budget of the file allows it. Beyond that, the last name is REST. Text that
    happens to start like a name, and leads to no call, does not count. UnsupportedError if a pickle
    is too long.
    """
    from .fetch import fetch_part  # few files have bytes that need this

    found: list[Global] = []
    while True:
        fetched = fetch_part(source, start)
        gaps = {at: gap.nbytes for at, gap in fetched.gaps.items()}
        # CPython's unpickler in C ignored frames for a long time.
        machine, ends = FramelessMachine(fetched.data, 0, gaps), False
        with suppress(InputError, IndexError, struct.error, UnicodeError):
            machine.run()
            ends = True
        found += machine.globals if machine.protocol or machine.calls else []
        start += fetched.place(machine.position)
        if not ends or start >= source.nbytes:
            return found
        if not budget.follow():
            rest = Global(REST, "", 0)
            rest.qualname = REST
            return [*found, rest]
