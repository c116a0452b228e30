"""Check whether the files of a DCP folder are of one save, as far as they show it.

Nothing ties `.metadata` to the files of items: a later save into the same folder first overwrites
these, under the same names, rank by rank. Three facts can show it: optimizer steps that are the
same within each file but differ between files; bytes after the last item, which torch never leaves;
and modification times, since `.metadata` is written last, and the files of ranks at about the same
time. Copying may change times: `.metadata`, the smallest file, is often copied first. So their
difference is proof only together with one of the others, or if it is longer than copying takes. If
the files of two ranks have equal places and shapes of items and were swapped, nothing shows it: no
item has the name of its tensor or of its rank.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from itertools import islice

from ....display.phrases import join_names
from ....errors import CorruptError, InputError
from ....sources.place import FolderEntry
from ...folders.parts import ALL_RANKS, IncompleteError
from ...probe import Probe
from ...safetensors.header import read_json
from .items import ReadChunks
from .metadata import METADATA, SavedState

#: The file that Megatron saves beside the items, and the file that says so. Source:
#: megatron/core/dist_checkpointing/core.py, strategies/common.py.
COMMON, _CONFIGURATION = "common.pt", "metadata.json"
_BACKENDS = {"sharded_backend": "torch_dist", "common_backend": "torch"}
_LARGEST_CONFIGURATION = 1 << 16
_FAR = 60  # seconds between the files of one save, or of one copy
#: What copying takes at most: seconds, and bytes per second.
_LONGEST_START, _SLOWEST_COPY = 600, 10_000_000
#: Files of a rank that saved without collectives: its metadata, and those with its items.
_OF_RANK = re.compile(r"__(\d{1,9})(?:(\.metadata)|_\d+\.distcp)")
_MOST_NAMED = 5
_STEP = "step"
_MOST_STEPS = 4  # steps that are read from each file
_NUMBERS = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"}


def check_saves(
    saved: SavedState,
    sizes: Mapping[str, int],
    entries: Mapping[str, FolderEntry],
    read: ReadChunks,
) -> Iterator[str]:
    """Warnings about files that may be of another save; CorruptError if two facts show it.

    `sizes`: the sizes of the files with items. `read` returns the chunks of a tensor.
    """
    times = {name: entries[name].mtime for name in (METADATA, *sizes) if name in entries}
    older = _older(times)
    spare = dict(_spare(saved, sizes))
    for name, nbytes in spare.items():
        yield f"{nbytes:,} bytes of {name} are in no item: of another save?"
    steps = _steps(saved, read)
    first, *others = steps or [""]
    if others:
        last = others[-1]
        said = f"steps of the optimizer are {steps[first]} in {first}, and {steps[last]} in {last}"
        if older or _are_far(times[name] for name in steps if name in times):
            raise CorruptError(f"has files of two saves, which were written far apart: {said}")
        yield f"{said}: of two saves?"
    if older in spare and older:
        raise CorruptError(
            f"has files of two saves: {older} is newer than .metadata, and "
            f"{spare[older]:,} of its bytes belong to no item",
            hint="use another checkpoint: a later save into it did not finish",
        )
    if older and _took(times, sizes) > _LONGEST_START + sum(sizes.values()) / _SLOWEST_COPY:
        raise CorruptError(
            f".metadata is older than {older} by more than copying takes: a later save into it did "
            "not finish",
            hint="if only a copy that was interrupted changed its time, touch .metadata",
        )
    if older:
        yield (
            f".metadata is older than {older}: unless copying changed their times, a later save "
            "did not finish"
        )


def ranks_of(probe: Probe) -> list[str]:
    """The metadata files of ranks that saved without collectives, in the order of the ranks."""
    found = [match for match in map(_OF_RANK.fullmatch, probe.entries) if match and match[2]]
    return [match[0] for match in sorted(found, key=lambda match: int(match[1]))]


def check_ranks(probe: Probe) -> None:
    """Raises IncompleteError if a rank that saved without collectives lacks its metadata."""
    ranks = {int(match[1]) for match in map(_OF_RANK.fullmatch, probe.entries) if match}
    most = min(max(ranks, default=-1) + 1, 2 * len(ranks) + 8)
    names = (f"__{rank}.metadata" for rank in range(most))
    missing = [name for name in names if name not in probe.entries]
    if missing:
        raise IncompleteError(
            f"metadata of ranks are missing: {join_names(missing, _MOST_NAMED)}",
            path=probe.path,
            hint=ALL_RANKS,
        )


def check_common(probe: Probe) -> None:
    """Raises IncompleteError if a folder lacks the file that Megatron saves beside the items."""
    if COMMON in probe.entries or _CONFIGURATION not in probe.entries:
        return
    try:
        said = read_json(probe.content(_CONFIGURATION, _LARGEST_CONFIGURATION), _CONFIGURATION)
    except InputError:
        return  # in any case, Megatron did not write it
    if isinstance(said, dict) and said.items() >= _BACKENDS.items():
        raise IncompleteError(
            f"its file {COMMON!r} is missing, which {_CONFIGURATION} requires", path=probe.path
        )


def _older(times: Mapping[str, float]) -> str:
    """The newest file, if `.metadata` is far older; otherwise ''."""
    written = times.get(METADATA)
    items = [name for name in times if name != METADATA]
    newest = max(items, key=times.__getitem__, default="")
    return newest if written and newest and times[newest] > written + _FAR else ""


def _took(times: Mapping[str, float], sizes: Mapping[str, int]) -> float:
    """The seconds from `.metadata` to the newest file."""
    return max(times[name] for name in sizes if name in times) - times[METADATA]


def _are_far(times: Iterator[float]) -> bool:
    known = [each for each in times if each]
    return bool(known) and max(known) > min(known) + _FAR


def _spare(saved: SavedState, sizes: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """The number of bytes of each file that belong to no item, if there are any."""
    used = dict.fromkeys(sizes, 0)
    for span in (*(span for _, span in saved.items()), *saved.copies):
        if span.file in used:
            used[span.file] += span.nbytes
    for name, nbytes in sizes.items():
        if nbytes > used[name]:
            yield name, nbytes - used[name]


def _steps(saved: SavedState, read: ReadChunks) -> dict[str, str]:
    """The first file with each step → the step that all parameters in the file have.

    Empty if parameters within a file have different steps, for example if some were frozen once.
    """
    of_file: dict[str, list[str]] = {}
    for name, tensor in saved.tensors.items():
        is_step = name.rpartition(".")[2] == _STEP
        if is_step and tensor.shape == () and tensor.dtype in _NUMBERS:
            for span in tensor.chunks.values():
                of_file.setdefault(span.file, []).append(name)
    found: dict[str, str] = {}
    if len(of_file) > 1:
        for file in sorted(of_file):
            values = {_value(saved, name, read) for name in islice(of_file[file], _MOST_STEPS)}
            if len(values) > 1:
                return {}
            (value,) = values
            if value not in found.values():
                found[file] = value
    return found


def _value(saved: SavedState, name: str, read: ReadChunks) -> str:
    ((*_, item),) = read(name)
    kind = _NUMBERS[saved.tensors[name].dtype]
    (value,) = struct.unpack(kind, item.source.read(item.at, item.nbytes))
    return f"{value:g}"
