"""Read and write the record, in a one-file checkpoint, of the folder that it was made from.

It is text in the metadata of safetensors, or in the record of metadata of a torch-zip file, under
the key `ckptmove-folder`:

    {"version": 1, "parts": [[NAME, [KEY, …], FORMAT], …], "files": {NAME: BASE64, …}}

A part is a checkpoint in the folder: the name of its file, the keys that lead to it in the tree,
and `torch-zip` or `safetensors`. The content of the other files, such as `trainer_state.json`, is
included; in base64, since readers of JSON limit quotation marks. No two parts have the same keys,
and no keys of a part begin with the keys of another part.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeGuard

from ...errors import CorruptError, UnsupportedError
from ...manifest.paths import Path
from ...writing.final_name import HIDDEN
from ...writing.in_place.journal_name import SUFFIX
from ..safetensors.header import read_json
from ..writing import FOLDER

_VERSION = 1
_WHAT = f"its metadata {FOLDER!r}"
_MOST_LEVELS = 32  # of folders and the file
_LONGEST_NAME = 4096  # bytes, with the folders
_LONGEST_LEVEL = 255  # bytes
_OURS = (HIDDEN, SUFFIX)


class RecordedPart(NamedTuple):
    """A checkpoint that was in the folder."""

    name: str  #: name of its file
    keys: Path  #: keys that lead to it in the tree
    format: str  #: `torch-zip` or `safetensors`


class FolderRecord(NamedTuple):
    """The files that were in the folder."""

    parts: Sequence[RecordedPart]
    files: Mapping[str, bytes]

    def to_text(self) -> str:
        """The text for the metadata."""
        files = {
            name: base64.b64encode(self.files[name]).decode("ascii") for name in sorted(self.files)
        }
        parts = [[each.name, list(each.keys), each.format] for each in self.parts]
        said = {"version": _VERSION, "parts": parts, "files": files}
        return json.dumps(said, separators=(",", ":"))


def read_record(text: str) -> FolderRecord:
    """Read the text of `to_text`; raises CorruptError if it is malformed."""
    said = read_json(text.encode("utf-8", "surrogatepass"), _WHAT)
    if not isinstance(said, dict) or said.keys() != {"version", "parts", "files"}:
        raise _malformed()
    if said["version"] != _VERSION:
        raise UnsupportedError(f"{_WHAT} was written by a newer version of ckptmove")
    parts, files = said["parts"], said["files"]
    if not isinstance(parts, list) or not isinstance(files, dict) or not parts:
        raise _malformed()
    read = [_part(each) for each in parts]
    contents = {name: _bytes(each) for name, each in files.items()}
    names = [*(each.name for each in read), *contents]
    if len(names) != len({*names}):
        raise _malformed()
    _check_names(names)
    mixed = mixed_parts(read)
    if mixed:
        raise CorruptError(f"{_WHAT} mixes {mixed[0][0]!r:.100} with {mixed[0][1]!r:.100}")
    return FolderRecord(read, contents)


def is_name(name: str) -> bool:
    """Whether a file in a folder may have this name, which includes its subfolders."""
    try:
        levels = name.encode("utf-8").split(b"/")
    except UnicodeEncodeError:
        return False
    return (
        len(levels) <= _MOST_LEVELS
        and sum(map(len, levels)) + len(levels) - 1 <= _LONGEST_NAME
        and all(0 < len(each) <= _LONGEST_LEVEL for each in levels)
        and not {b".", b".."}.intersection(levels)
        and "\0" not in name
        and not any(each.endswith(_OURS) for each in name.split("/"))
    )


def mixed_parts(parts: Sequence[RecordedPart]) -> list[tuple[str, str]]:
    """Pairs of part names: a part that is within another or has the same keys, and the other."""
    names: dict[Path, str] = {}
    for part in parts:
        names.setdefault(part.keys, part.name)
    found: list[tuple[str, str]] = []
    for part in parts:
        above = (part.keys[:n] for n in range(len(part.keys) + 1))
        other = next((names[keys] for keys in above if keys in names), part.name)
        if other != part.name:
            found.append((part.name, other))
    return found


def _check_names(names: Sequence[str]) -> None:
    """Raises CorruptError if files of these names can't exist in one folder."""
    for name in names:
        if not is_name(name):
            raise CorruptError(f"{_WHAT} names {name!r:.100}, which is not a valid file name")
    files = {*names}
    for name in names:
        levels = name.split("/")
        for n in range(1, len(levels)):
            folder = "/".join(levels[:n])
            if folder in files:
                raise CorruptError(f"{_WHAT} names {folder!r:.100}, both a file and a folder")


def _part(said: object) -> RecordedPart:
    if not isinstance(said, list) or len(said) != 3:
        raise _malformed()
    name, keys, format = said
    if type(name) is not str or format not in ("torch-zip", "safetensors") or not _are_keys(keys):
        raise _malformed()
    return RecordedPart(name, tuple(keys), format)


def _are_keys(said: object) -> TypeGuard[list[str | int]]:
    if type(said) is not list or len(said) > _MOST_LEVELS:
        return False
    return all(type(each) in (str, int) for each in said)


def _bytes(said: object) -> bytes:
    try:
        if type(said) is str:
            return base64.b64decode(said, validate=True)
    except ValueError as error:
        raise _malformed() from error
    raise _malformed()


def _malformed() -> CorruptError:
    return CorruptError(f"{_WHAT} is malformed")
