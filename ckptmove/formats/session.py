"""Open pickles, and the checkpoints nested in their bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count

from ..errors import CorruptError, InputError, UnsupportedError
from ..manifest.other_records import HeldRecord
from ..pickles.opcodes.literals import may_be_checkpoint
from ..pickles.reached_globals import REST, names_reached
from ..sources.budget import Budget, Excess
from ..sources.source import Readable
from ..torch_pickle.callables.uses import LOADER, not_surely_harmless
from ..torch_pickle.merged_contents import loaded_from
from ..torch_pickle.streams import Candidate, Container, InnerFile, PickleStream

_HEAD_NBYTES = 64  # bytes needed to recognize a possible checkpoint
_DEEPEST = 8  # levels of checkpoints nested in bytes
_NO_STORAGE = "the pickle loads a storage from bytes that are not a storage"


class ReadSession:
    """One reading of a checkpoint: numbers its pickles, and opens what is nested in them."""

    def __init__(self, open_nested: Callable[[Readable, ReadSession], Container | None]) -> None:
        """`open_nested` reads bytes as a container; None if they are not a checkpoint."""
        self._open_nested = open_nested
        #: the remaining budget of objects for the file and everything nested in it
        self.budget = Budget()
        self._streams = count()
        self._containers = count()
        #: the ZeRO weights to read: `master` or `module`; None leaves it to the format
        self.weights: str | None = None
        self.has_two_weights = False  #: whether the checkpoint has both
        self.unread = 0  #: how many nested checkpoints could not be read
        #: names that unpickling these would import
        self.reached: list[str] = []
        self._base = ""
        self._depth = 0
        self.too_deep = False  #: whether checkpoints are nested deeper than they are opened

    def begin_file(self, name: str) -> None:
        """Start the ids of all further storages with the name of a file, one of several."""
        self._base, self._containers = f"{name}/", count()

    def folder(self) -> str:
        """The prefix of the storage ids of a new container."""
        number = next(self._containers)
        return f"{self._base}nested/{number}/" if number else self._base

    def stream(self, source: Readable, start: int = 0, *, broken: bool = False) -> PickleStream:
        """Read the pickle at `start`, and the checkpoints nested in it.

        If `broken`, as much of both as makes sense.
        """
        stream = PickleStream(source, start, next(self._streams), self.budget, broken=broken)
        unread, reached = self.unread, len(self.reached)
        loaded = {id(loaded_from(call)) for call in stream.calls_of(LOADER)} - {id(None)}
        loaded = set() if broken else loaded
        opened: dict[int, Container | None] = {}
        for candidate in stream.candidates():
            needed = id(candidate.maker) in loaded
            loaded.discard(id(candidate.maker))
            known = id(candidate.node)
            if known not in opened or (needed and opened[known] is None):
                opened[known] = self._nested(candidate, needed=needed)
            container = opened[known]
            if container is not None:
                stream.nested.append(InnerFile(candidate.node, candidate.maker, container))
        if loaded:
            raise CorruptError(_NO_STORAGE)
        stream.unread, stream.reached = self.unread - unread, self.reached[reached:]
        return stream

    def plain(self, source: Readable, start: int) -> PickleStream:
        """Read a pickle that must hold only plain data.

        CorruptError if it imports or calls anything.
        """
        stream = self.stream(source, start)
        pickle = stream.pickle
        if pickle.globals or pickle.calls or pickle.persistents:
            self.reached += (each.qualname for each in pickle.globals)
            name = pickle.globals[0].qualname if pickle.globals else "an object"
            raise CorruptError(
                f"a pickle that should hold only plain data names {name!r:.100}, "
                "which torch would import"
            )
        return stream

    def open(self, source: Readable) -> Container | None:
        """Open bytes as a checkpoint; None if they are not one."""
        with self.inside():
            return self._open_nested(source, self)

    def callables_beside(self, records: Iterable[HeldRecord]) -> Iterator[str]:
        """The unknown callables that a program would import if it unpickled these records."""
        for about, content, _ in records:
            yield from self.callables_in(content(False), f"the record {about.name!r}")

    def callables_in(self, content: Readable, where: str) -> list[str]:
        """The unknown callables that a program would import if it unpickled these bytes.

        What can't be read counts as one, named by `where`.
        """
        unread, unclear = self.unread, f"(in {where})"
        container, found = None, list[str]()
        try:
            if may_be_checkpoint(content.read(0, min(_HEAD_NBYTES, content.nbytes))):
                container = self.open(content)
        except InputError:
            found += [unclear] * (self.too_deep or self.unread > unread)
        if container is None:
            reached = not_surely_harmless(names_reached(content, self.budget))
            return [*found, *(unclear if name == REST else name for name in reached)]
        with self.inside():
            for each in container.everything():
                found += each.unknown_callables()
        return found

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Count everything opened in this context as nested; UnsupportedError if it is too deep."""
        if self._depth == _DEEPEST:
            self.too_deep = True
            raise UnsupportedError(f"checkpoints are nested more than {_DEEPEST} levels deep")
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _nested(self, candidate: Candidate, *, needed: bool) -> Container | None:
        """Open nested bytes. Bytes that torch would load (`needed`) must be a checkpoint."""
        try:
            container = self.open(candidate.source)
        except InputError as error:
            if needed or self.too_deep or isinstance(error, Excess):
                raise
            self.reached += names_reached(candidate.source, self.budget)
            return None
        if needed and (container is None or len(container.roots) != 1):
            raise CorruptError(_NO_STORAGE)
        return container
