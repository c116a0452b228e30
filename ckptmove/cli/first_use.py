"""Helps users who type `ckptmove` without a command, or with one that does not exist."""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import PurePath

from ..errors import UsageError

#: Usual suffixes of checkpoints, the most specific first.
_SUFFIXES = (".ckpt", ".pt", ".pth", ".safetensors", ".bin")
_MOST_NAMES = 1000  # the most names in the folder to look at


def unknown_command(name: str, commands: Iterable[str]) -> UsageError:
    """Return the error for an unknown command, with a hint at the likely command."""
    close = difflib.get_close_matches(name, commands, n=1)
    if os.path.lexists(name):
        return UsageError(
            f"the command is missing before {name!r}", hint=f"ckptmove inspect {shlex.quote(name)}"
        )
    message = f"No such command {name!r}"
    if close:
        return UsageError(f"{message}; did you mean {close[0]!r}?", hint="see ckptmove --help")
    return UsageError(message, hint="see ckptmove --help")


def examples() -> Iterator[str]:
    """Return example commands for a checkpoint in the current folder; none without a checkpoint."""
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
    """Whether a name is easy to type and has the suffix of a checkpoint."""
    return name.isprintable() and name[0] not in ".-" and name.endswith(_SUFFIXES)


def _checkpoint_here() -> str | None:
    """Return the file in the current folder whose name is most like a checkpoint's."""
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
