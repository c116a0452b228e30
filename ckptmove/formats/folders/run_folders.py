"""Folders of a run, in which each checkpoint has its own folder: `checkpoint-500`, `step_10`.

If a run has exactly one checkpoint, and no other files like checkpoints, that one is read. If it
has several, the user must choose, unless a file names the latest:

    latest_checkpointed_iteration.txt     Megatron: `100` is iter_0000100, `release` is release;
                                          verl: `100` is global_step_100

Sources: megatron/training/checkpointing.py (`get_checkpoint_tracker_filename`), verl's
utils/checkpoint/checkpoint_manager.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from ...display.phrases import few
from ...errors import CorruptError, UnsupportedError
from ...sources.place import EntryKind, FolderEntry, Place, folders_above
from .weight_names import INDEXES

#: Suffixes of checkpoints, whatever the file holds.
LIKE_CHECKPOINTS = (
    *(".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".pkl", ".tar", ".pt2"),
    *INDEXES,
)
#: Suffixes of files that are not checkpoints; any other file is opened to find out.
UNLIKE_CHECKPOINTS = (
    *(".json", ".jsonl", ".txt", ".md", ".rst", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".xml"),
    *(".csv", ".tsv", ".log", ".py", ".ipynb", ".sh", ".html", ".jinja", ".png", ".jpg", ".jpeg"),
    *(".gz", ".distcp"),
)
_MOST_FILES = 100_000
_OWN = re.compile(r"(?:checkpoint|(?:global_)?step|epoch|iter)[-_](\d+)")
_LATEST = "latest_checkpointed_iteration.txt"
_RELEASE = "release"
_LONGEST_NUMBER = 20  # digits
_EPOCH = re.compile(r"epoch_\d+/")


def is_own(name: str) -> bool:
    """Whether a folder of this name is a separate checkpoint."""
    return _OWN.fullmatch(name.rpartition("/")[2]) is not None


def own_folders(names: Iterable[str]) -> list[str]:
    """The outermost folders of these file names that are separate checkpoints, sorted by number.

    The name of such a folder ends with a slash. Folders of torchtune (`epoch_0`) hold only weights,
    with the state of training in `recipe_state` beside them.
    """
    names = list(names)
    if any(each.startswith("recipe_state/") for each in names):
        names = [each for each in names if not _EPOCH.match(each)]
    return sorted({own for name in names for own in _own(name)}, key=_in_order)


def own_folders_in(entries: Iterable[FolderEntry]) -> list[str]:
    """Like `own_folders`, for the folders directly in a folder."""
    return own_folders(f"{each.name}/" for each in entries if each.kind is EntryKind.FOLDER)


def checkpoint_in(folder: Place) -> tuple[Place, Sequence[str]]:
    """The only or latest checkpoint in the folder of a run, with a note.

    Otherwise the folder itself. Raises the same errors as `Place.files_below`; CorruptError if the
    file that names the latest checkpoint does not name one of those in the folder.
    """
    inside = folder.entries()
    own = own_folders_in(inside)
    latest = any(each.name == _LATEST and each.kind is EntryKind.FILE for each in inside)
    if any(each.name.endswith(LIKE_CHECKPOINTS) for each in inside):
        return folder, ()
    if latest:
        own += [each.name for each in inside if each.name == _RELEASE]
        chosen = _latest(folder, own) if own else None
    else:
        chosen = own[0] if len(own) == 1 else None
    if chosen is None:
        return folder, ()
    for each in folder.files_below(most=_MOST_FILES):
        if each.name.endswith(LIKE_CHECKPOINTS) and set(own).isdisjoint(folders_above(each.name)):
            return folder, ()
    others = [each for each in own if each != chosen]
    if not others:
        return folder.child(chosen), (f"{chosen} is the only checkpoint in it",)
    return folder.child(chosen), (
        f"only {chosen} was looked at, the latest in it as {_LATEST} says; not {few(others)}",
    )


def _latest(folder: Place, own: Sequence[str]) -> str:
    """The checkpoint in a folder that its tracker file names as the latest."""
    with folder.child(_LATEST).open() as source:
        content = source.read(0, min(source.nbytes, _LONGEST_NUMBER + 2))
    told = content.decode("utf-8", "replace").strip()
    is_number = told.isascii() and told.isdecimal() and len(told) <= _LONGEST_NUMBER
    names = [f"iter_{int(told):07}", f"global_step_{int(told)}"] if is_number else []
    found = [name for name in ([_RELEASE] if told == _RELEASE else names) if name in own]
    if len(found) != 1:
        raise CorruptError(
            f"its file {_LATEST!r} names {told!r:.40}, but the folder has {few(own)}",
            path=folder.path,
            hint="give one of them",
        )
    return found[0]


def several_checkpoints(own: Sequence[str], folder: Place) -> UnsupportedError:
    """The error for a folder that contains separate checkpoints, such as that of a run."""
    what = "are checkpoints of their own" if len(own) > 1 else "is a checkpoint of its own"
    last = folder.child(own[-1]).path
    return UnsupportedError(
        f"{few(own)} in it {what}",
        path=folder.path,
        hint=f"give one of them, such as {last}; or use batch, which takes all in the folder",
    )


def _own(name: str) -> Iterator[str]:
    """The outermost folder in a path that is a separate checkpoint."""
    outermost_first = reversed(list(folders_above(name)))
    yield from islice(filter(is_own, outermost_first), 1)


def _in_order(name: str) -> tuple[str, int, str]:
    folder, _, own = name.rpartition("/")
    match = _OWN.fullmatch(own)
    return folder, 0 if match is None else int(match[1]), own
