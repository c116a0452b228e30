"""What a format may read to recognize a file or folder, and how a checkpoint's files are opened."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import cached_property

from ..errors import CkptmoveError, CorruptError, InputError, StrPath, UnsupportedError
from ..sources import place_of
from ..sources.place import EntryKind, FolderEntry, Place
from ..sources.source import Memory, Readable, Source
from ..writing.in_place import recover_if_interrupted
from ..zips.archive import LOCAL_MAGIC, Archive
from .checkpoint import Checkpoint
from .session import ReadSession

_HEAD_NBYTES = 512
_MOST_FILES = 100_000  # in a folder that is one checkpoint
_JSON_SPACE = b" \t\r\n"


class Probe:
    """A file, bytes within a file, or a folder, which a format examines to recognize its own.

    Formats recognize a file by its content, never by its name, and a folder by the names in it.
    """

    def __init__(
        self,
        source: Readable,
        session: ReadSession,
        opener: Opener | None = None,
        entries: Iterable[FolderEntry] | None = None,
        *,
        is_alone: bool | None = None,
    ) -> None:
        #: The bytes; empty for a folder.
        self.source = source
        self.session = session
        #: Whether the bytes are everything: no other file belongs to them.
        self.is_alone = opener is None if is_alone is None else is_alone
        self._opener = opener
        self.is_folder = entries is not None
        #: The entries of a folder, by name.
        self.entries = {each.name: each for each in entries or ()}
        self._sniffed: dict[str, bool] = {}

    @classmethod
    def folder(cls, place: Place, entries: Iterable[FolderEntry], session: ReadSession) -> Probe:
        """A probe of a folder, without means to open its files."""
        return cls(Memory(b"", place.path), session, None, entries)

    @property
    def path(self) -> str:
        """The path, for messages."""
        return self.source.path

    @property
    def file(self) -> Source:
        """Its source, if it is a whole file."""
        assert isinstance(self.source, Source)
        return self.source

    @cached_property
    def entries_below(self) -> list[FolderEntry]:
        """All entries below a folder, sorted by name; links to folders are not followed.

        UnsupportedError if there are more than a checkpoint has.
        """
        return sorted(place_of(self.path).files_below(most=_MOST_FILES))

    def names_below(self) -> list[str]:
        """The names of all entries below a folder."""
        return [each.name for each in self.entries_below]

    @cached_property
    def head(self) -> bytes:
        """The first 512 bytes."""
        return self.source.read(0, min(self.source.nbytes, _HEAD_NBYTES))

    @cached_property
    def archive(self) -> Archive | None:
        """The zip directory, if it is a zip file."""
        if not self.head.startswith(LOCAL_MAGIC):
            return None
        return Archive(self.source, self.session.budget)

    @cached_property
    def is_json(self) -> bool:
        """Whether it starts like a JSON object."""
        return self.head.lstrip(_JSON_SPACE)[:1] == b"{" and b"\0" not in self.head

    def open(self, name: str) -> Probe:
        """Open the file of this name in the folder, or beside the file.

        UnsupportedError if it is a link that leads elsewhere and links are not followed.
        """
        assert self._opener is not None
        place = place_of(self.path)
        folder = place if self.is_folder else place.parent
        return Probe(self._opener.open(folder.child(name), folder), self.session, self._opener)

    def content(self, name: str, most: int) -> bytes:
        """Read a small file in the folder and close it again; raises the same errors as `open`.

        UnsupportedError if it has more than `most` bytes.
        """
        assert self._opener is not None
        folder = place_of(self.path)
        with self._opener.open_unclosed(folder.child(name), folder) as source:
            if source.nbytes > most:
                raise UnsupportedError(f"it was not checked: it has {source.nbytes:,} bytes")
            return source.read(0, source.nbytes)

    def is_checkpoint(self, name: str) -> bool:
        """Whether a file in the folder is a checkpoint by its content, even a damaged one.

        False if it can't be read. The file is closed again; each file is examined once.
        """
        if name not in self._sniffed:
            self._sniffed[name] = self._is_checkpoint(name)
        return self._sniffed[name]

    def _is_checkpoint(self, name: str) -> bool:
        assert self._opener is not None
        folder, head = place_of(self.path), b""
        try:
            with self._opener.open_unclosed(folder.child(name), folder) as source:
                head = source.read(0, min(source.nbytes, _HEAD_NBYTES))
                return self._opener.sniff(source) is not None
        except CorruptError:
            return b"data.pkl" in head
        except InputError:
            return False

    def open_folder(self, name: str) -> Probe:
        """Open the folder of this name in the folder."""
        assert self._opener is not None
        place = place_of(self.path).child(name)
        return Probe(Memory(b"", place.path), self.session, self._opener, place.entries())

    def read(self, name: str) -> Checkpoint:
        """Read the checkpoint in the file of this name.

        Raises the same as `open` and `formats.read`.
        """
        return self.read_from(self.open(name))

    def read_from(self, found: Probe) -> Checkpoint:
        """Read the checkpoint in an opened file or folder.

        Raises the same errors as `formats.read`.
        """
        assert self._opener is not None
        try:
            return self._opener.read(found)
        except CkptmoveError as error:
            error.about(found.path)
            raise

    def note(self, *notes: str) -> None:
        """Tell the user about something unusual in the place of the checkpoint, not in a file."""
        if self._opener is not None:
            self._opener.notes += notes

    def leave(self, names: Iterable[str]) -> None:
        """Record which files named like checkpoints are not read.

        `names`: entries of the folder itself; a subfolder stands for everything below it.
        """
        from .folders.run_folders import LIKE_CHECKPOINTS

        files = set(names)
        folders = {each for each in files if self.entries[each].kind is EntryKind.FOLDER}
        if folders:
            files.update(each for each in self.names_below() if each.partition("/")[0] in folders)
        if self._opener is not None:
            start = place_of(self.path).child("").path.removeprefix(self._opener.root)
            left = sorted(each for each in files if each.endswith(LIKE_CHECKPOINTS))
            self._opener.left += [start + each for each in left]


class Opener:
    """Opens the files of one checkpoint, all in the same way, until a stack is closed.

    Errors that name no file are about the first one.
    """

    def __init__(
        self,
        stack: ExitStack,
        read: Callable[[Probe], Checkpoint],
        sniff: Callable[[Readable], object | None],
        *,
        follow_links: bool,
    ) -> None:
        """`sniff` returns None for a file that is not a checkpoint; it raises InputError.

        `follow_links`: whether links may lead out of the folder that they are in.
        """
        self.read = read
        self.sniff = sniff
        self.notes: list[str] = []
        #: files that are named like checkpoints but were not read
        self.left: list[str] = []
        #: the common start of the paths of files in the folder
        self.root = ""
        self._stack = stack
        self._follow_links = follow_links
        self._is_first = True

    def probe(self, path: StrPath, session: ReadSession) -> Probe:
        """Open the file or folder that a user named."""
        place = place_of(path)
        if place.is_folder():
            from .folders.run_folders import checkpoint_in

            self.root = place.child("").path
            self.notes += recover_if_interrupted(place.path)
            chosen, notes = checkpoint_in(place)
            self.notes += notes
            if notes:
                self.notes += recover_if_interrupted(chosen.path)
            return Probe(Memory(b"", chosen.path), session, self, chosen.entries())
        return Probe(self.open(place), session, self)

    def open(self, place: Place, folder: Place | None = None) -> Source:
        """Open a file, after undoing an interrupted change in it; refuse links out of `folder`."""
        first, self._is_first = self._is_first, False
        start = "" if first else f"{place.name}: "
        source = self.open_unclosed(place, folder, start)
        if first:
            self._stack.enter_context(source)
        else:
            # such a file adds its path to no error
            self._stack.callback(source.__exit__, None, None, None)
        return source

    def open_unclosed(self, place: Place, folder: Place | None, start: str = "") -> Source:
        """Like `open`, but the caller closes the file; notes begin with `start`."""
        checked = None if self._follow_links else folder
        if checked is not None:
            place.check_link(checked)
        self.notes += (f"{start}{note}" for note in recover_if_interrupted(place.path))
        source = place.open()
        if checked is not None:
            try:
                place.check_link(checked, source)
            except BaseException:
                source.__exit__(None, None, None)
                raise
        return source
