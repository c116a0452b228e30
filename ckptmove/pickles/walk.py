"""Walk a pickle symbolically, from opcodes to inert nodes; nothing is imported or called."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Mapping
from typing import NamedTuple

from ..errors import InputError
from ..sources.budget import Budget
from ..sources.source import Memory, Readable
from .fetch import Fetched, fetch, is_bare
from .nodes import Blob, Call, Global, Node, Persistent
from .opcodes.machine import Machine
from .opcodes.tensor_machine import TensorMachine


class Pickle(NamedTuple):
    """One pickle, walked: its calls, names and ids in order, popped or not."""

    #: the node on top of the stack at STOP
    root: Node
    globals: tuple[Global, ...]
    persistents: tuple[Persistent, ...]
    calls: tuple[Call, ...]
    #: the bytes that may be checkpoints of their own, or were passed over
    blobs: tuple[Blob, ...]
    #: what was taken off the stack, or left on it; it may be reachable all the same
    dropped: tuple[Node, ...]
    #: as declared by PROTO, or 0
    protocol: int
    #: whether it has strings that only Python 2 writes
    python2: bool
    #: offsets of strings that have several uses, which can't be told apart
    shared_texts: frozenset[int]
    #: whether a persistent id is a line of text, as in protocol 0
    textual: bool
    #: bytes up to and with STOP; what follows is never read by an unpickler
    nbytes: int


def walk(
    data: bytes,
    base: int = 0,
    gaps: Mapping[int, int] | None = None,
    budget: Budget | None = None,
    machine_type: type[Machine] = TensorMachine,
) -> Pickle:
    """Walk the pickle at the start of `data`; what follows it is not looked at.

    Offsets of nodes are counted from `base`. `gaps`: offset of an opcode that pushes bytes → how
    many were left out of `data`. `budget` is of the file that the pickle is in; without one it has
    a budget of its own. UnsupportedError if it needs buffers from outside.
    """
    machine = machine_type(data, base, gaps or {}, budget)
    try:
        root = machine.run()
    except (IndexError, struct.error) as error:
        raise machine.fault("the pickle is truncated or malformed") from error
    except UnicodeError as error:
        raise machine.fault("the pickle holds invalid text") from error
    return Pickle(
        root,
        tuple(machine.globals),
        tuple(machine.persistents),
        tuple(machine.calls),
        tuple(machine.blobs),
        tuple(machine.dropped),
        machine.protocol,
        machine.python2,
        frozenset(machine.shared_texts),
        machine.textual,
        machine.position,
    )


def walk_at(source: Readable, start: int, base: int, budget: Budget) -> tuple[Fetched, Pickle]:
    """Walk the pickle that starts there in a file.

    Of one in memory of which all is kept, the walk finds the end: it is not looked for before,
    unless it fails, so that the same fault is told of the same bytes.
    """
    if not start and isinstance(source, Memory) and is_bare(source.content):
        with contextlib.suppress(InputError):
            pickle = walk(source.content, base, None, budget)
            return Fetched(source.content[: pickle.nbytes], []), pickle
    fetched = fetch(source, start)
    return fetched, walk(fetched.data, base, fetched.gap_sizes(), budget)
