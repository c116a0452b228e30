"""Read the remains of several files: some are missing or damaged, or their index is.

*.index.json                       {"weight_map": {TENSOR: FILE, …}}
NAME-00001-of-00003.safetensors …  the files, which say themselves how many they are

In any other folder, such as that of a Trainer, each checkpoint is read separately. The names of its
tensors start with its own name: `optimizer.state.0.step` for `optimizer.pt`, `model.…` for weights.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import NamedTuple

from ...display.phrases import join_names, short
from ...errors import InputError, UnsupportedError
from ...sources.place import EntryKind
from ...sources.source import Readable, Source
from ..folders.sharded import is_plain_name, read_index
from ..folders.weight_names import INDEXES, is_weights, shard_name
from ..probe import Probe
from ..safetensors.header import LONGEST
from .remains import NamedTensor, Remains, StorageRemains

#: Reads the remains of one file.
ReadFile = Callable[[Probe], Remains]

#: A string, and the value after it if it is a key. The pattern also matches a string alone, so that
#: the search continues after it: no byte is read again for each quote before it.
_PAIR = re.compile(
    rb'"((?:[^"\\\x00-\x1f]|\\.){1,4096})(?:"\s{0,8}:\s{0,8}"([^"\\\x00-\x1f]{1,255})")?'
)
_MOST_FILES = 10_000
_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".pkl")


class _Files(NamedTuple):
    """The files of a checkpoint."""

    expected: Mapping[str, list[str]]  #: name of a file → the tensors that it should hold
    is_whole: bool  #: whether these are all files
    note: str = ""
    #: name of a file → the prefix of its tensors' names; empty for parts of one checkpoint
    prefixes: Mapping[str, str] = {}


def has_files(probe: Probe) -> bool:
    """Whether this is an index, or a folder with several files of one checkpoint."""
    if probe.is_alone:
        return False
    if probe.is_folder:
        return _index_name(probe) is not None or any(map(shard_name, probe.entries))
    return probe.is_json


def has_several(probe: Probe) -> bool:
    """Whether a folder has several separate checkpoints, or one in a subfolder."""
    names = _checkpoints_in(probe).expected
    return len(names) > 1 or any(probe.entries[n].kind is EntryKind.FOLDER for n in names)


def read_files(probe: Probe, read: ReadFile) -> Remains:
    """Read the remains of a checkpoint of several files; `read` reads each file."""
    files = _files_of(probe)
    if not files.expected or len(files.expected) > _MOST_FILES:
        raise UnsupportedError("names no files that could be read")
    parts, warnings = list[Remains](), [files.note] if files.note else []
    tensors, storages, sources = list[NamedTensor](), dict[str, StorageRemains](), list[Source]()
    damage = dict[str, str]()
    for name, expected in files.expected.items():
        found, why = _read(probe, name, read)
        if found is not None:
            found = found.renumber(len(sources), name, files.prefixes.get(name, ""))
            parts.append(found)
            sources += found.files
            tensors += found.tensors
            storages |= found.storages
            damage |= found.damage
            warnings += (f"{name}: {each}" for each in found.warnings)
        else:
            warnings.append(f"{name}: {why}")
        there = set() if found is None else {each.name for each in found.tensors}
        why = why or f"{short(name)} does not name it any more"
        tensors += (_lost(each, why) for each in expected if each not in there)
    format = "safetensors-sharded" if _are_safe(files.expected) else "torch-sharded"
    return Remains(
        "training-folder" if files.prefixes else format,
        tensors,
        storages,
        sources,
        names_proven=all(each.names_proven for each in parts) and len(parts) == len(files.expected),
        names_complete=files.is_whole
        and not (files.prefixes and len(parts) < len(files.expected))
        and all(each.names_complete for each in parts),
        warnings=warnings,
        damage=damage,
    )


def _read(probe: Probe, name: str, read: ReadFile) -> tuple[Remains | None, str]:
    """The remains of one of the files, or why there are none."""
    try:
        is_folder = probe.is_folder and name in probe.entries
        is_folder = is_folder and probe.entries[name].kind is EntryKind.FOLDER
        return read(probe.open_folder(name) if is_folder else probe.open(name)), ""
    except InputError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None, f"the file {short(name)} is missing"
        return None, f"the file {short(name)}: {error}"


def _files_of(probe: Probe) -> _Files:
    if not probe.is_folder:
        return _listed(probe.source)
    name = _index_name(probe)
    if name is not None:
        found = _listed(probe.open(name).source)
        if found.expected and found.is_whole:
            return found
    shards = {n: each for n in probe.entries if (each := shard_name(n)) is not None}
    if not shards:
        return found if name is not None else _checkpoints_in(probe)
    first = next(iter(shards.values()))
    numbered = [first.file_name(n) for n in range(1, 1 + first.total)]
    missing = sum(each not in shards for each in numbered)
    note = "its index is missing or damaged: the names of its files say what belongs to it"
    return _Files({each: [] for each in numbered[: _MOST_FILES + 1]}, not missing, note)


def _checkpoints_in(probe: Probe) -> _Files:
    """The checkpoints in a folder, by their suffixes, and its subfolders that have any."""
    names = sorted(
        name
        for name, each in probe.entries.items()
        if each.kind is EntryKind.FILE and name.endswith(_SUFFIXES) and name[0] != "."
    )
    kinds = {name: each.kind for name, each in sorted(probe.entries.items())}
    folders = [n for n in kinds if kinds[n] is EntryKind.FOLDER and _has_any(probe.open_folder(n))]
    others = [n for n in kinds if kinds[n] not in (EntryKind.FILE, EntryKind.FOLDER)]
    weights = [name for name in names if is_weights(name)]
    stems = Counter(PurePath(name).stem for name in names)
    prefixes = {
        name: "model."
        if [name] == weights
        else f"{PurePath(name).stem if stems[PurePath(name).stem] == 1 else name}."
        for name in names
    }
    prefixes |= {name: f"{name}." for name in folders}
    note = f"not looked at: {join_names(others)}" if others else ""
    return _Files({name: [] for name in (*names, *folders)}, not others, note, prefixes)


def _has_any(folder: Probe) -> bool:
    """Whether a folder has a checkpoint at any depth, judged by the names."""
    return any(name.endswith((*_SUFFIXES, ".distcp")) for name in folder.names_below())


def _index_name(probe: Probe) -> str | None:
    names = [
        n for n, e in probe.entries.items() if e.kind is EntryKind.FILE and n.endswith(INDEXES)
    ]
    return names[0] if len(names) == 1 else None


def _listed(source: Readable) -> _Files:
    """The files that an index names, even if it is damaged."""
    expected: dict[str, list[str]] = {}
    try:
        for tensor, file in read_index(source).where.items():
            expected.setdefault(file, []).append(tensor)
        return _Files(dict(sorted(expected.items())), True)
    except InputError:
        pass
    text = source.read(0, min(source.nbytes, LONGEST))
    for found in _PAIR.finditer(text):
        if found[2] is None:
            continue
        name, file = (each.decode("utf-8", "replace") for each in found.groups())
        if is_plain_name(file) and file.endswith((".safetensors", ".bin")):
            expected.setdefault(file, []).append(name)
    note = "its index is damaged or cut short: what it still names was read"
    return _Files(dict(sorted(expected.items())), False, note)


def _are_safe(files: Mapping[str, object]) -> bool:
    return all(name.endswith(".safetensors") for name in files)


def _lost(name: str, why: str) -> NamedTensor:
    return NamedTensor(name, "", (), (), 0, 0, None, why=why)
