"""Find in which of several files the bytes of each tensor lie."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os.path import commonprefix

from ..manifest.folder_files import FileShare
from ..manifest.manifest import Storage, TensorEntry
from ..manifest.other_records import Chunk
from ..sources.source import Source


def shares_of(
    tensors: Sequence[TensorEntry],
    storages: Mapping[str, Storage],
    chunks: Iterable[Chunk],
    files: Sequence[Source],
) -> tuple[tuple[FileShare, ...], dict[str, str]]:
    """How many bytes of tensors each file holds, and the file of each tensor by its name.

    Extents of `storages` give a number in `files`; `chunks` name their file. Both results are empty
    if the checkpoint has one file. Bytes that tensors share count once.
    """
    held = dict[str, dict[str, int]]()  # file → tensor → bytes
    ranks, over = dict[str, int | None](), dict[str, set[str]]()
    for each in chunks:
        own = held.setdefault(each.file, {})
        own[each.name] = own.get(each.name, 0) + each.nbytes
        ranks[each.file] = each.rank
        over.setdefault(each.name, set()).add(each.file)
    if len(files) > 1:
        from ..sources.joined import JoinedFiles

        names, seen = _short([each.path for each in files]), set[str]()
        for entry in tensors:
            storage = storages.get(entry.storage or "")
            extent = None if storage is None else storage.extent
            if (
                entry.name in over
                or extent is None
                or isinstance(files[extent.source], JoinedFiles)
            ):
                continue
            file = names[extent.source]
            new = entry.storage not in seen
            seen.add(entry.storage or "")
            held.setdefault(file, {})[entry.name] = extent.nbytes if new else 0
            over[entry.name] = {file}
    if len(held) < 2:
        return (), {}
    shares = (
        FileShare(name, ranks.get(name), len(own), sum(own.values())) for name, own in held.items()
    )
    told = {many: f"{many:,} files" for many in range(2, len(held) + 1)}
    lies_in = {
        name: next(iter(where)) if len(where) == 1 else told[len(where)]
        for name, where in over.items()
    }
    return tuple(sorted(shares)), lies_in


def _short(paths: Sequence[str]) -> list[str]:
    """The paths relative to the folder that holds all of them."""
    folders = (path.replace("\\", "/").rpartition("/")[0] + "/" for path in paths)
    whole = commonprefix(list(folders))  # noqa: RUF071 cut at a slash
    return [path[whole.rfind("/") + 1 :].replace("\\", "/") for path in paths]
