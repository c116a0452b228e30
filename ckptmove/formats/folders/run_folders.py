"""Folders of a run, in which checkpoints have folders of their own: `checkpoint-500`, `step_10`.

A run with one checkpoint, and none besides, is that checkpoint. With several nobody knows which is
meant, unless a file says it:

    latest_checkpointed_iteration.txt     Megatron: `100` is iter_0000100, `release` is release;
                                          verl: `100` is global_step_100

Sources: megatron/training/checkpointing.py (`get_checkpoint_tracker_filename`), verl's
utils/checkpoint/checkpoint_manager.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from ...errors import CorruptError, UnsupportedError
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
_OWN = re.compile(r"(?:checkpoint|(?:global_)?step|epoch|iter)[-_](\d+)")
_LATEST = "latest_checkpointed_iteration.txt"
_RELEASE = "release"
_LONGEST_NUMBER = 20  # digits
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
    """The only or latest checkpoint in the folder of a run, and a note that says so; or the folder.

    Raises as `Place.files_below`; CorruptError if the file that names the latest names none.
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
    """The checkpoint that a file in a folder says is the latest of these."""
    with folder.child(_LATEST).open() as source:
        content = source.read(0, min(source.nbytes, _LONGEST_NUMBER + 2))
    told = content.decode("utf-8", "replace").strip()
    is_number = told.isascii() and told.isdecimal() and len(told) <= _LONGEST_NUMBER
    names = [f"iter_{int(told):07}", f"global_step_{int(told)}"] if is_number else []
    found = [name for name in ([_RELEASE] if told == _RELEASE else names) if name in own]
    if len(found) != 1:
        raise CorruptError(
            f"its file {_LATEST!r} says {told!r:.40}, and what is in it is {few(own)}",
            path=folder.path,
            hint="give one of them",
        )
    return found[0]


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
