"""Folders of a run, in which checkpoints have folders of their own: `checkpoint-500`, `step_10`.

A run with one checkpoint, and none besides, is that checkpoint. With several nobody knows which is
meant.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from ...errors import UnsupportedError
from ...reports.display.phrases import few
from ...sources.place import EntryKind, FolderEntry, Place, folders_above
from .weight_names import INDEXES

#: What files are called that are checkpoints, whatever they hold.
LIKE_CHECKPOINTS = (
    *(".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".pkl", ".tar", ".pt2"),
    *INDEXES,
)
#: What files are called that are none; any other file is looked into.
UNLIKE_CHECKPOINTS = (
    *(".json", ".jsonl", ".txt", ".md", ".rst", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".xml"),
    *(".csv", ".tsv", ".log", ".py", ".ipynb", ".sh", ".html", ".jinja", ".png", ".jpg", ".jpeg"),
    *(".gz", ".distcp"),
)
_MOST_FILES = 100_000
_OWN = re.compile(r"(?:checkpoint|(?:global_)?step|epoch)[-_](\d+)")
_EPOCH = re.compile(r"epoch_\d+/")


def is_own(name: str) -> bool:
    """Whether a folder of this name is a checkpoint of its own."""
    return _OWN.fullmatch(name.rpartition("/")[2]) is not None


def own_folders(names: Iterable[str]) -> list[str]:
    """The outermost folders that files are in and that are checkpoints of their own, by number.

    The name of a folder ends with a slash. Those of torchtune (`epoch_0`) hold the weights alone,
    and `recipe_state` beside them holds what they are trained with.
    """
    names = list(names)
    if any(each.startswith("recipe_state/") for each in names):
        names = [each for each in names if not _EPOCH.match(each)]
    return sorted({own for name in names for own in _own(name)}, key=_in_order)


def own_folders_in(entries: Iterable[FolderEntry]) -> list[str]:
    """The same of the folders right in one."""
    return own_folders(f"{each.name}/" for each in entries if each.kind is EntryKind.FOLDER)


def checkpoint_in(folder: Place) -> tuple[Place, Sequence[str]]:
    """The only checkpoint in the folder of a run, and a note that says so; else the folder itself.

    Raises as `Place.files_below`.
    """
    inside = folder.entries()
    own = own_folders_in(inside)
    if len(own) != 1 or any(each.name.endswith(LIKE_CHECKPOINTS) for each in inside):
        return folder, ()
    for each in folder.files_below(most=_MOST_FILES):
        if each.name.endswith(LIKE_CHECKPOINTS) and own[0] not in folders_above(each.name):
            return folder, ()
    return folder.child(own[0]), (f"{own[0]} is the only checkpoint in it",)


def several_checkpoints(own: Sequence[str], folder: Place) -> UnsupportedError:
    """The error for a folder with checkpoints of their own in it, such as that of a run."""
    what = "are checkpoints of their own" if len(own) > 1 else "is a checkpoint of its own"
    last = folder.child(own[-1]).path
    return UnsupportedError(
        f"{few(own)} in it {what}",
        path=folder.path,
        hint=f"give one of them, such as {last}; or use batch, which takes all in the folder",
    )


def _own(name: str) -> Iterator[str]:
    """The outermost folder in a path that is a checkpoint of its own."""
    outermost_first = reversed(list(folders_above(name)))
    yield from islice(filter(is_own, outermost_first), 1)


def _in_order(name: str) -> tuple[str, int, str]:
    folder, _, own = name.rpartition("/")
    match = _OWN.fullmatch(own)
    return folder, 0 if match is None else int(match[1]), own
