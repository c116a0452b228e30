"""Helps users who type `ckptmove` without a command, or with one that does not exist."""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import PurePath

from ..errors import UsageError

#: What checkpoints are mostly named like, the most telling first.
_SUFFIXES = (".ckpt", ".pt", ".pth", ".safetensors", ".bin")
_MOST_NAMES = 1000  # in the folder, that are looked at


def unknown_command(name: str, commands: Iterable[str]) -> UsageError:
    """The error for a command that does not exist, with a hint at what may have been meant."""
    close = difflib.get_close_matches(name, commands, n=1)
    if os.path.lexists(name):
        return UsageError(
            f"the command is missing before {name!r}", hint=f"ckptmove inspect {shlex.quote(name)}"
        )
    message = f"No such command {name!r}."
    if close:
        return UsageError(f"{message} Did you mean {close[0]!r}?", hint="see ckptmove --help")
    return UsageError(message, hint="see ckptmove --help")


def examples() -> Iterator[str]:
    """Commands to begin with, for a checkpoint in the current folder; none if there is none."""
    name = _checkpoint_here()
    if name is None:
        return
    path = PurePath(name)
    other = ".pt" if path.suffix == ".safetensors" else ".safetensors"
    source, target = shlex.quote(name), shlex.quote(path.stem + other)
    yield ""
    yield "For a file in this folder:"
    yield f"  ckptmove inspect {source}"
    yield f"  ckptmove convert {source} {target}"
    yield f"  ckptmove validate {source}"


def _is_usual(name: str) -> bool:
    """Whether a name can be typed, and ends as that of a checkpoint."""
    return name.isprintable() and name[0] not in ".-" and name.endswith(_SUFFIXES)


def _checkpoint_here() -> str | None:
    """The file of the current folder whose name looks most like that of a checkpoint."""
    try:
        with os.scandir() as entries:
            names = sorted(
                each.name
                for each in islice(entries, _MOST_NAMES)
                if _is_usual(each.name) and each.is_file()
            )
    except OSError:
        return None
    ranked = [name for suffix in _SUFFIXES for name in names if name.endswith(suffix)]
    return ranked[0] if ranked else None
