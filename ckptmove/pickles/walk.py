"""Walk a pickle symbolically, from opcodes to inert nodes; nothing is imported or called."""

import contextlib
import struct
from collections.abc import Mapping
from typing import NamedTuple

from ..errors import InputError
from ..sources.budget import Budget
from ..sources.source import Memory, Readable
from .gaps import FetchedPickle, is_bare
from .nodes import Blob, Call, Global, Node, Persistent
from .opcodes.machine import Machine
from .opcodes.tensor_machine import TensorMachine


class Pickle(NamedTuple):
    """A walked pickle: its calls, names and persistent ids in order, popped ones included."""

    #: the node on top of the stack at STOP
    root: Node
    globals: tuple[Global, ...]
    persistents: tuple[Persistent, ...]
    calls: tuple[Call, ...]
    #: byte strings that may be nested checkpoints, or were skipped
    blobs: tuple[Blob, ...]
    #: nodes popped from the stack, or left on it; the root may still refer to them
    dropped: tuple[Node, ...]
    #: the protocol that PROTO declares, or 0
    protocol: int
    #: whether it has strings that only Python 2 writes
    python2: bool
    #: offsets of strings with several uses that can't be told apart
    shared_texts: frozenset[int]
    #: whether a persistent id is a line of text, as in protocol 0
    textual: bool
    #: bytes up to and including STOP; an unpickler does not read beyond
    nbytes: int
    #: the memo slots that it recalls; None if it is not usual: if it has frames, numbers slots by
    #: counting or in lines, takes a value from the stack, or pushes it twice
    recalled: frozenset[int] | None = None


def walk(
    data: bytes,
    base: int = 0,
    gaps: Mapping[int, int] | None = None,
    budget: Budget | None = None,
    machine_type: type[Machine] = TensorMachine,
) -> Pickle:
    """Walk the pickle at the start of `data`; bytes after it are ignored.

    Offsets of nodes are counted from `base`. `gaps`: offset of an opcode that pushes bytes → how
    many bytes were left out of `data`. `budget` is that of the file; without one the pickle has its
    own. UnsupportedError if it needs buffers from outside.
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
        frozenset(machine.recalled) if machine.is_usual else None,
    )


def walk_at(
    source: Readable, start: int, base: int, budget: Budget
) -> tuple[FetchedPickle, Pickle]:
    """Walk the pickle that starts at `start` in a file.

    For a pickle in memory without skipped bytes, the walk itself finds the end. Only if it fails is
    the pickle fetched first, so that the same bytes always give the same error.
    """
    if not start and isinstance(source, Memory) and is_bare(source.content):
        with contextlib.suppress(InputError), budget.attempt():
            pickle = walk(source.content, base, None, budget)
            return FetchedPickle(source.content[: pickle.nbytes], []), pickle
    from .fetch import fetch  # most pickles are bare

    fetched = fetch(source, start)
    return fetched, walk(fetched.data, base, fetched.gap_sizes(), budget)
