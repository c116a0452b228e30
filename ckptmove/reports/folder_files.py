"""Show what each file of a folder is."""

from __future__ import annotations

from collections.abc import Iterator

from ..manifest.folder_files import MISSING, FolderFile
from ..manifest.manifest import Manifest
from .blocks import Block, Table
from .text import listed, size

_FILES = "file", "format", "section", "tensors", "device", "bytes"
_MOST_OTHERS = 10


def files_of(manifest: Manifest, *, full: bool = False) -> Iterator[Block]:
    """What each file of a folder is, a line each; nothing for other checkpoints."""
    if not manifest.files:
        return
    rows = [_row(each) for each in manifest.files if each.format or each.not_read]
    yield from ("", Table(rows, _FILES, right=(3, 5)))
    others = [each.name for each in manifest.files if not each.format and not each.not_read]
    if others:
        yield f"other files: {listed(others, len(others) if full else _MOST_OTHERS)}"


def _row(file: FolderFile) -> tuple[str, ...]:
    if file.not_read is not None:
        return file.name, "missing" if file.not_read == MISSING else "not read", "", "", "", ""
    devices = ", ".join(file.devices) or ("not stored" if file.tensors else "")
    sections = ", ".join(file.sections) if file.copy_of is None else f"as {file.copy_of}?"
    return file.name, file.format, sections, f"{file.tensors:,}", devices, size(file.nbytes)
