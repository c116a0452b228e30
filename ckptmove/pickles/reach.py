"""Find what unpickling broken data would call before it fails.

An unpickler runs opcodes as it reads them. Bytes that are cut off, or were never meant to be a
pickle, may have run something before the error.
"""

from __future__ import annotations

import struct
from contextlib import suppress

from ..errors import InputError
from ..sources.source import Readable
from .fetch import fetch_part
from .nodes import Global
from .opcodes.machine import Machine

_MOST = 10_000  # pickles that follow each other, as in a file of them


class _Unframed(Machine):
    """A walk that minds no frames, as CPython's unpickler in C did for long."""

    def op_frame(self) -> None:
        self.number(8)


def names_reached(source: Readable, start: int = 0) -> list[str]:
    """The names of `globals_reached`, each once."""
    return list(dict.fromkeys(each.qualname for each in globals_reached(source, start)))


def globals_reached(source: Readable, start: int = 0) -> list[Global]:
    """What an unpickler that starts there would import before it fails, or to the end.

    Where a pickle ends, a loader may go on with the next one, as `torch.load` does; of very many,
    the last name stands for the rest. Text that happens to start like a name, and leads to no call,
    counts for nothing. UnsupportedError if a pickle goes on for too long.
    """
    found: list[Global] = []
    for _ in range(_MOST):
        fetched = fetch_part(source, start)
        gaps = {at: gap.nbytes for at, gap in fetched.gaps.items()}
        machine, ends = _Unframed(fetched.data, 0, gaps), False
        with suppress(InputError, IndexError, struct.error, UnicodeError):
            machine.run()
            ends = True
        found += machine.globals if machine.protocol or machine.calls else []
        start += fetched.place(machine.position)
        if not ends or start >= source.nbytes:
            return found
    return [*found, Global(f"(what follows {_MOST:,} pickles)", "*", 0)]
