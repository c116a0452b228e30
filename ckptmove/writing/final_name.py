"""The name of a new file: check the name and the free space, and choose a temporary name."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import reduce
from operator import and_

from ..errors import RefusedError, StrPath, WriteError
from ..plans.plan import Plan
from ..sources.source import Source
from ..system.files import OpenFolder, free_nbytes
from ..system.names import why_no_name, without_slash

HIDDEN = ".ckptmove-tmp"  # the suffix of temporary names
NO_ROOM = "not enough free space"
EXISTS_HINT = "--force replaces it; or choose another name"
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.ELOOP}
_later: ContextVar[set[str] | None] = ContextVar("_later", default=None)
_before: ContextVar[Callable[[], object] | None] = ContextVar("_before", default=None)


class FinalName:
    """The final name of a new file, in a directory kept open so that renaming it does no harm."""

    def __init__(self, path: str) -> None:
        """Raises RefusedError or WriteError if the directory can't be opened."""
        self.path = path  #: as it was given
        folder, self.name = os.path.split(path)
        try:
            #: the open directory
            self.folder = OpenFolder(folder)
        except OSError as error:
            raise failure_of(error, path) from error
        self.hidden = hidden_name(self.name)  #: its name until then, beside it

    def sync(self) -> None:
        """Put the names on disk. When it raises WriteError, the file has its name already."""
        try:
            self.folder.sync()
        except OSError as error:
            raise WriteError(
                f"is complete and in place, but may not survive a power failure: {error.strerror}",
                path=self.path,
            ) from error

    def sync_in_time(self) -> None:
        """Sync the directory, or leave that to the caller of `syncing_later`."""
        later = _later.get()
        if later is None:
            self.sync()
        else:
            later.add(os.path.dirname(os.path.abspath(self.path)))

    def close(self) -> None:
        """Close the directory."""
        self.folder.close()


@contextlib.contextmanager
def syncing_later() -> Iterator[set[str]]:
    """A context that does not sync new file names; it yields the directories to sync.

    Until they are synced, a power cut may lose the names. The content is on disk before it is
    named.
    """
    folders = set[str]()
    token = _later.set(folders)
    try:
        yield folders
    finally:
        _later.reset(token)


@contextlib.contextmanager
def before_commit(call: Callable[[], object] | None) -> Iterator[None]:
    """A context that calls a function before a written file is committed.

    After verification only the name is missing, so a time limit ends at this point.
    """
    token = _before.set(call)
    try:
        yield
    finally:
        _before.reset(token)


def announce_commit() -> None:
    """Announce that verified output is about to be committed, which can't be undone."""
    call = _before.get()
    if call is not None:
        call()


def hidden_name(name: str) -> str:
    """Return a free temporary name for a file that will get this name, or that had it."""
    return f".{_stem(name)}.{os.urandom(4).hex()}{HIDDEN}"


def is_hidden(hidden: str, name: str) -> bool:
    """Whether `hidden_name` may have returned this temporary name for this name."""
    start = f".{_stem(name)}."
    number = hidden[len(start) : -len(HIDDEN)]
    return (
        hidden.startswith(start)
        and hidden.endswith(HIDDEN)
        and len(number) == 8
        and set(number) <= set("0123456789abcdef")
    )


def _stem(name: str) -> str:
    return os.fsdecode(os.fsencode(name)[:200])


def mode_of(path: str, sources: Sequence[Source]) -> int | None:
    """Return the mode at a destination (of a link itself); None if nothing is there.

    Raises RefusedError if its directory is missing, or if it is one of the sources.
    """
    folder, name = os.path.split(path)
    folder = folder or "."
    why = why_no_name(name) if name not in ("", ".", "..") and "\0" not in name else ""
    if why:
        raise RefusedError(f"the name of the destination {why}", path=path)
    try:
        if not stat.S_ISDIR(os.stat(folder).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    except (OSError, ValueError) as error:
        raise failure_of(error, path) from error
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise failure_of(error, path) from error
    if any(source.same_file(path) for source in sources):
        raise RefusedError("the destination is the source itself", path=path)
    return mode


def check_file(destination: StrPath, sources: Sequence[Source], *, force: bool) -> None:
    """Raises RefusedError if the file must not be written, before anything is."""
    path = os.fspath(destination)
    if not os.path.basename(path):
        raise RefusedError("the destination is a directory", path=path)
    mode = mode_of(path, sources)
    if mode is None:
        return
    if stat.S_ISDIR(mode):
        raise RefusedError("the destination is a directory", path=path)
    if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
        raise RefusedError("the destination exists and is not a file", path=path)
    if not force:
        raise exists_error(path)


def check_room(
    destination: StrPath, plans: Sequence[Plan], sources: Sequence[Source], besides: int = 0
) -> None:
    """Raises RefusedError if no file can be created there, or if the plans do not fit."""
    path = os.fspath(destination)
    folder = os.path.dirname(without_slash(path)) or "."
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RefusedError("can't be written: no file can be created in the directory", path=path)
    check_free_space(free_nbytes(folder), plans, sources, path, besides)


def check_free_space(
    free: int,
    plans: Iterable[Plan],
    sources: Sequence[Source],
    path: str,
    besides: int = 0,
) -> None:
    """Raises RefusedError if the output can't fit; holes that are kept take no space."""
    whole = gathered = 0
    for plan in plans:
        whole += plan.nbytes
        gathered += sum(gather.nbytes for gather in plan.gathers)
    needed = whole
    if sources:
        needed = min(whole, gathered + sum(source.allocated_nbytes for source in sources))
    needed += besides
    if needed > free:
        raise RefusedError(f"{NO_ROOM}: {needed:,} bytes are needed, {free:,} are free", path=path)


def mode_from(sources: Sequence[Source]) -> int:
    """Return permission bits for the output: the bits that all sources have."""
    return reduce(and_, (source.mode for source in sources)) if sources else 0o666


def exists_error(path: str) -> RefusedError:
    """Return the error for a name that is taken."""
    return RefusedError("the destination exists", path=path, hint=EXISTS_HINT)


def failure_of(error: OSError | ValueError, path: str) -> RefusedError | WriteError:
    """Convert a system error while writing into one of ours."""
    if isinstance(error, ValueError):
        return RefusedError("the destination is not a path", path=path)
    folder = os.path.dirname(without_slash(path)) or "."
    if error.errno == errno.ENOENT and not os.path.exists(folder):
        hint = "make it first, or check the spelling"
        return RefusedError("can't be written: its directory is not there", path=path, hint=hint)
    if error.errno in _FORBIDDEN:
        return RefusedError(f"can't be written: {error.strerror}", path=path)
    return WriteError(f"writing failed: {error.strerror}", path=path)
