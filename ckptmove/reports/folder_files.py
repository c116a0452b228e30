"""Show what each file of a folder is, and of which tensors it stores no devices."""

from __future__ import annotations

from collections.abc import Iterator

from ..manifest.folder_files import MISSING, FolderFile
from ..manifest.manifest import NOT_STORED, Manifest
from .display.blocks import Block, Table
from .display.text import cut, listed, size

_FILES = "file", "format", "section", "tensors", "device", "bytes"
_MOST_OTHERS = 10
_LONGEST_NAME = 64  # letters of a path, unless all of it is shown


def files_of(manifest: Manifest, *, full: bool = False) -> Iterator[Block]:
    """What each file of a folder is, a line each; nothing for other checkpoints.

    Long names are cut in their middle, unless `full`.
    """
    if not manifest.files:
        return
    longest = None if full else _LONGEST_NAME
    rows = [_row(each, longest) for each in manifest.files if each.format or each.not_read]
    yield from ("", Table(rows, _FILES, right=(3, 5)))
    others = [each.name for each in manifest.files if not each.format and not each.not_read]
    if others:
        names = [cut(name, longest) for name in others]
        yield f"other files: {listed(names, len(others) if full else _MOST_OTHERS)}"


def _row(file: FolderFile, longest: int | None) -> tuple[str, ...]:
    name = cut(file.name, longest)
    if file.not_read is not None:
        return name, "missing" if file.not_read == MISSING else "not read", "", "", "", ""
    devices = ", ".join(file.devices) or (NOT_STORED if file.tensors else "")
    sections = ", ".join(file.sections)
    if file.copy_of is not None:
        sections = f"as {cut(file.copy_of, longest)}?"
    return name, file.format, sections, f"{file.tensors:,}", devices, size(file.nbytes)
