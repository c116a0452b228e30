"""Show the kind of each file of a folder, and its share of which tensors."""

from __future__ import annotations

from collections.abc import Iterator

from ..display.blocks import Block, Table
from ..display.text import cut, first_names, shape, size
from ..manifest.folder_files import MISSING, FolderFile
from ..manifest.manifest import NOT_STORED, Manifest

_FILES = "file", "format", "section", "tensors", "device", "bytes"
_MOST_OTHERS = 10
_LONGEST_NAME = 64  # most characters of a path, unless it is shown in full


def files_of(manifest: Manifest, *, full: bool = False) -> Iterator[Block]:
    """Return a line for each file of a folder; empty for other checkpoints.

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
        yield f"other files: {first_names(names, len(others) if full else _MOST_OTHERS)}"


def shares_of(manifest: Manifest) -> Iterator[Block]:
    """Return a line for each of several files, with its share of the tensors."""
    shares = manifest.file_shares
    if not shares:
        return
    ranked = any(each.rank is not None for each in shares)
    rows = [
        (
            each.name,
            *([str(each.rank)] if ranked and each.rank is not None else [""] * ranked),
            f"{each.tensors:,}",
            size(each.nbytes),
        )
        for each in shares
    ]
    head = ("file", *["rank"] * ranked, "tensors", "bytes")
    yield Table(rows, head, right=range(1, len(head)))


def chunks(manifest: Manifest) -> Iterator[Block]:
    """Return a line for each chunk of every tensor."""
    yield manifest.verdict
    divisions, before, rows = manifest.divisions, "", list[tuple[str, ...]]()
    for each in manifest.chunks:
        first = each.name != before
        name, how = (each.name, divisions.get(each.name, "")) if first else ("", "")
        rows.append((name, how, shape(each.offsets), shape(each.sizes), each.file))
        before = each.name
    if not rows:
        yield "nothing of it is saved in chunks"
        return
    yield Table(rows, ("tensor", "divided", "offsets", "sizes", "file"))


def _row(file: FolderFile, longest: int | None) -> tuple[str, ...]:
    name = cut(file.name, longest)
    if file.not_read is not None:
        return name, "missing" if file.not_read == MISSING else "not read", "", "", "", ""
    devices = ", ".join(file.devices) or (NOT_STORED if file.tensors else "")
    sections = ", ".join(file.sections)
    if file.copy_of is not None:
        sections = f"as {cut(file.copy_of, longest)}?"
    return name, file.format, sections, f"{file.tensors:,}", devices, size(file.nbytes)
