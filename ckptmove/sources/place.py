"""Places: where files and folders are. A path on this machine and a URL have the same methods.

`RemotePlace` of `remote_place` is the implementation for URLs.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from enum import Enum
from typing import ClassVar, NamedTuple, TypeVar

from ..errors import CkptmoveError, InputError, StrPath, UnsupportedError
from ..system import WINDOWS
from ..system.names import why_no_name, without_slash
from .file import File
from .source import Source

_T = TypeVar("_T")
_NOWHERE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}
_HUB = ("models--", "datasets--", "spaces--")
_SNAPSHOTS, BLOBS = "snapshots", "blobs"  # of a repository in that cache


def choose(path: StrPath, local: Callable[[str], _T], remote: Callable[[str], _T]) -> _T:
    """Call `remote` for a URL, `local` for a path here. Only here is asked which of them it is."""
    return remote(str(path)) if is_url(path) else local(os.fspath(path))


class EntryKind(Enum):
    """The kind of an entry of a folder."""

    FILE = "file"  # links to files among them
    FOLDER = "folder"
    FOLDER_LINK = "link to a folder"
    BROKEN_LINK = "broken link"
    SPECIAL = "special file"
    UNREADABLE = "unreadable"
    BAD_NAME = "bad name"  # an object whose name no file can have


class FolderEntry(NamedTuple):
    """An entry of a folder."""

    name: str  #: relative to the folder, with `/` between its parts
    path: str  #: a path, or a URL
    kind: EntryKind = EntryKind.FILE
    nbytes: int = 0  #: of a file
    stamp: str = ""  #: of a file: a text that changes if the file does
    mtime: float = 0.0  #: when a file was last changed, in seconds since 1970; 0 if unknown


class Place(ABC):
    """Where a file or folder is, or may be. Nothing is looked up before a method needs it."""

    __slots__ = ("path",)
    #: Whether a file there can be changed in place.
    changes_in_place: ClassVar[bool]
    #: Whether any program can open a file there by its path.
    opens_by_path: ClassVar[bool]

    def __init__(self, path: str) -> None:
        self.path = path  #: as it was given

    @property
    @abstractmethod
    def name(self) -> str:
        """The last part of the path."""

    @property
    @abstractmethod
    def parent(self) -> Place:
        """The folder that it is in; its path has no slash at the end."""

    @abstractmethod
    def child(self, name: str) -> Place:
        """The entry of this name in the folder; the name may have several parts."""

    @abstractmethod
    def absolute(self) -> str:
        """The path, such that it can be found from any working directory."""

    @abstractmethod
    def folder_identity(self) -> str:
        """Where a folder is, however it was named, with a slash at its end."""

    @abstractmethod
    def open(self) -> Source:
        """Open a regular file for reading. Raises InputError; a FIFO does not block."""

    @abstractmethod
    def exists(self) -> bool:
        """Whether something is there. Raises InputError if a store can't tell."""

    @abstractmethod
    def is_unreachable(self, error: InputError) -> bool:
        """Whether an error of reading it says nothing of its content."""

    @abstractmethod
    def is_folder(self) -> bool:
        """Whether this is a folder, or a prefix in a store below which something is."""

    @abstractmethod
    def size_and_stamp(self) -> tuple[int, str]:
        """The size in bytes, and a text that changes if the file does. Raises InputError."""

    def nbytes(self) -> int:
        """The size of a file in bytes; 0 for a folder, a missing file, or an unknown size."""
        try:
            return self.size_and_stamp()[0]
        except (ValueError, CkptmoveError):
            return 0

    @abstractmethod
    def entries(self) -> list[FolderEntry]:
        """The entries of a folder, sorted by name. Raises InputError if it can't be read."""

    @abstractmethod
    def files_below(
        self, ignored: Callable[[str], bool] = lambda _: False, most: int | None = None
    ) -> list[FolderEntry]:
        """All entries below a folder but the folders that hold something, in no order.

        An entry whose name is `ignored`, and all below it, is left out. UnsupportedError if there
        are more than `most`.
        """

    def check_link(self, folder: Place, source: Source | None = None) -> None:
        """Raise UnsupportedError if a file in a folder is a link that leads out of it.

        A folder that was downloaded may hold links to whatever its reader may read. So a link has
        to stay within its folder, unless that lies in the cache of the Hub, where every file is
        one: `models--x/snapshots/REVISION/config.json → ../../blobs/HASH` (`_create_symlink` in
        huggingface_hub/file_download.py). `source`, the open file, must be what was checked. A
        store has no links.
        """
        del folder, source


class LocalPlace(Place):
    """A path on this machine."""

    __slots__ = ()
    changes_in_place = True
    opens_by_path = True

    @property
    def name(self) -> str:
        return os.path.basename(without_slash(self.path))

    @property
    def parent(self) -> LocalPlace:
        return LocalPlace(os.path.dirname(self.path))

    def child(self, name: str) -> LocalPlace:
        if WINDOWS and name and (why := why_no_name(name)):
            raise UnsupportedError(f"holds {name!r}, which {why}", path=self.path)
        return LocalPlace(os.path.join(self.path, name))

    def absolute(self) -> str:
        return os.path.abspath(self.path)

    def folder_identity(self) -> str:
        return os.path.join(os.path.realpath(self.path), "")

    def open(self) -> Source:
        try:
            return File.open(self.path)
        except InputError as error:
            if looks_like_url(self.path):
                error.hint = "a URL must be a string with two slashes"
            raise

    def exists(self) -> bool:
        return os.path.exists(self.path)

    def is_unreachable(self, error: InputError) -> bool:
        """As `Place.is_unreachable`: it is not there."""
        return not self.exists()

    def is_folder(self) -> bool:
        return os.path.isdir(self.path)

    def size_and_stamp(self) -> tuple[int, str]:
        """As `Place.size_and_stamp`; 0 bytes for what is no regular file."""
        try:
            return _size_and_stamp(os.stat(self.path))
        except OSError as error:
            raise _unreadable(self.path, error) from error

    def entries(self) -> list[FolderEntry]:
        """As `Place.entries`; nothing that goes meanwhile."""
        try:
            with os.scandir(self.path) as found:
                entries = [_entry(each) for each in found]
        except OSError as error:
            raise _unreadable(self.path, error) from error
        return sorted(each for each in entries if each is not None)

    def files_below(
        self, ignored: Callable[[str], bool] = lambda _: False, most: int | None = None
    ) -> list[FolderEntry]:
        """As `Place.files_below`; links to folders are not followed."""
        found, todo = list[FolderEntry](), [""]
        while todo:
            within = todo.pop()
            path = os.path.join(self.path, within) if within else self.path
            entries = LocalPlace(path).entries()
            if within and not entries:
                found.append(FolderEntry(within, path, EntryKind.FOLDER))
            for each in entries:
                if ignored(each.name):
                    continue
                if each.kind is EntryKind.FOLDER:
                    todo.append(f"{within}{each.name}/")
                else:
                    found.append(each._replace(name=within + each.name))
            check_count(found, most, self.path)
        return found

    def check_link(self, folder: Place, source: Source | None = None) -> None:
        root, leads_to = os.path.realpath(folder.path), os.path.realpath(self.path)
        allowed = leads_to.startswith(os.path.join(root, "")) or _is_blob(leads_to, root)
        if not allowed or (source is not None and not source.same_file(leads_to)):
            raise UnsupportedError(
                "is a link that leads outside its folder",
                path=self.path,
                hint="--follow-links follows it",
            )


def walk(
    root: str, unreadable: Callable[[OSError], object] = lambda _: None
) -> Iterator[tuple[str, list[str], list[str]]]:
    """As `os.walk`: each folder, the names of those in it, and of files; however deep they are.

    That of Python 3.11 and older calls itself for each level. Links to folders are not followed;
    `unreadable` is called with the error of a folder that can't be listed.
    """
    todo = [root]
    while todo:
        folder = todo.pop()
        try:
            with os.scandir(folder) as found:
                entries = list(found)
        except OSError as error:
            unreadable(error)
            continue
        folders = [each.name for each in entries if _is_folder(each)]
        inside = set(folders)
        yield folder, folders, [each.name for each in entries if each.name not in inside]
        links = {each.name for each in entries if each.is_symlink()}
        todo += (os.path.join(folder, each) for each in reversed(folders) if each not in links)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # such as a link that leads to itself
        return False


def folders_above(name: str) -> Iterator[str]:
    """The folders that an entry is in, by their names in the same folder, the innermost first."""
    while name := name.rpartition("/")[0]:
        yield name


def check_count(found: Sequence[FolderEntry], most: int | None, path: str) -> None:
    """Raises UnsupportedError if there are more entries below a folder than wanted."""
    if most is not None and len(found) > most:
        raise UnsupportedError(
            f"is a directory with more than {most:,} files",
            path=path,
            hint="give the folder of one checkpoint; ckptmove batch takes a tree of them",
        )


def _unreadable(path: str, error: OSError) -> InputError:
    return InputError(f"can't be read: {error.strerror}", path=path)


def _entry(entry: os.DirEntry[str]) -> FolderEntry | None:
    """The entry with its kind; None if it has gone."""
    try:
        if entry.is_dir(follow_symlinks=False):
            return FolderEntry(entry.name, entry.path, EntryKind.FOLDER)
        about = entry.stat()
    except OSError as error:
        if error.errno not in _NOWHERE:
            return FolderEntry(entry.name, entry.path, EntryKind.UNREADABLE)
        if entry.is_symlink():
            return FolderEntry(entry.name, entry.path, EntryKind.BROKEN_LINK)
        return None
    if stat.S_ISDIR(about.st_mode):
        return FolderEntry(entry.name, entry.path, EntryKind.FOLDER_LINK)
    if not stat.S_ISREG(about.st_mode):
        return FolderEntry(entry.name, entry.path, EntryKind.SPECIAL)
    nbytes, stamp = _size_and_stamp(about)
    return FolderEntry(entry.name, entry.path, EntryKind.FILE, nbytes, stamp, about.st_mtime)


def _size_and_stamp(about: os.stat_result) -> tuple[int, str]:
    nbytes = about.st_size if stat.S_ISREG(about.st_mode) else 0
    return nbytes, stamp_of(about)


def stamp_of(about: os.stat_result) -> str:
    """The stamp of a file here, as `Place.size_and_stamp` has it."""
    return f"{about.st_size}-{about.st_mtime_ns}-{about.st_ino}"


def _is_blob(path: str, folder: str) -> bool:
    """Whether a file is a blob of the repository, in the cache of the Hub, that a folder is of."""
    while os.path.basename(folder) != _SNAPSHOTS:
        folder, before = os.path.dirname(folder), folder
        if folder == before:
            return False
    repository = os.path.dirname(folder)
    if not _is_of_hub(repository):
        return False
    try:
        is_file = stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False
    return is_file and os.path.dirname(path) == os.path.join(repository, BLOBS)


def has_blobs_of_hub(folder: str, names: Collection[str]) -> bool:
    """Whether a folder with these names is of the Hub's cache: its snapshots link to blobs."""
    return _is_of_hub(os.path.abspath(folder)) and {_SNAPSHOTS, BLOBS} <= {*names}


def _is_of_hub(repository: str) -> bool:
    return os.path.basename(repository).startswith(_HUB)


_PROTOCOL = r"[A-Za-z][A-Za-z0-9+.-]+"  # two letters at least: one is a drive of Windows
_URL = rf"(?:{_PROTOCOL}::)*{_PROTOCOL}://"
WEB = re.compile(r"https?://", re.IGNORECASE)
#: What in a URL lets whoever has it in.
_USER = r"(://)[^/?#\s@]*:[^/?#\s]*@"
_SIGNED = (
    r"(?i)([?&](?:X-(?:Amz|Goog)-(?:Signature|Credential|Security-Token)|Signature|AWSAccessKeyId"
    r"|GoogleAccessId|sig|token|access_token|key|api_key|password)=)[^&#\s'\"]+"
)


def is_url(path: StrPath) -> bool:
    """Whether this names an object in a store, as `s3://bucket/run.pt` does, not a path here."""
    return isinstance(path, str) and "://" in path and re.match(_URL, path) is not None


def looks_like_url(path: StrPath) -> bool:
    """Whether a path was a URL once, before `pathlib` made `s3:/bucket` of it."""
    return re.match(rf"{_PROTOCOL}:/", os.fspath(path)) is not None


def mask_secrets(text: str) -> str:
    """The text with secrets in URLs (passwords, signatures, tokens) replaced by `***`."""
    if "@" in text:
        text = re.sub(_USER, r"\1***@", text)
    return re.sub(_SIGNED, r"\1***", text) if "=" in text else text
