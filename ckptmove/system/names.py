"""Names of files: which names this system allows, and whether two names are one file.

On Windows, `C:x` and `\\\\host\\share` lead elsewhere, `a:b` is a stream of `a`, `CON` and `NUL.pt`
are devices, and a dot or space at the end is dropped (Microsoft, "Naming Files, Paths, and
Namespaces"). A name comes from a checkpoint as often as from its owner.
"""

from __future__ import annotations

import contextlib
import os
import sys

from . import WINDOWS

_DEVICES = {
    *("CON", "PRN", "AUX", "NUL", "CONIN$", "CONOUT$"),
    *(f"{kind}{number}" for kind in ("COM", "LPT") for number in "0123456789¹²³"),
}
_NEVER = frozenset('<>:"|?*')


def why_no_name(name: str, *, windows: bool = WINDOWS) -> str:
    """Say why a file in a folder can't have this name or path; empty if it can."""
    for part in name.split("/"):
        if part in ("", ".", ".."):
            return "leads elsewhere"
        if "\0" in part:
            return "has a null byte"
        if not windows:
            continue
        if "\\" in part:
            return "has a backslash, which separates folders on Windows"
        if _NEVER.intersection(part) or any(ord(char) < 32 for char in part):
            return "has a character that no name has on Windows"
        if part.partition(".")[0].rstrip(" ").upper() in _DEVICES:
            return "is a device on Windows"
        if part[-1] in ". ":
            return "ends with a dot or a space, which Windows drops"
    return ""


def without_slash(path: str) -> str:
    """Return a path without separators at its end, unless it is nothing else."""
    drive, rest = os.path.splitdrive(path)
    return drive + (rest.rstrip(os.sep + (os.altsep or "")) or rest[:1])


def one_case(path: str) -> str:
    """Return a key that ignores case, and on macOS the encoding of accents."""
    if path.isascii():
        return path.casefold()
    from unicodedata import normalize

    return normalize("NFC", path).casefold()


def folds_case(folder: str) -> bool:
    """Whether names in a folder that differ only in case are one file, as far as can be told.

    Tests with an existing name; for an empty folder, assumes the system's usual behavior.
    """
    with contextlib.suppress(OSError), os.scandir(folder) as found:
        names = {each.name for _, each in zip(range(1000), found, strict=False)}
        for name in names:
            other = name.swapcase()
            if other != name and other not in names:
                return os.path.lexists(os.path.join(folder, other))
    return WINDOWS or sys.platform == "darwin"
