"""Read broken safetensors: data missing at the end, or a header that is damaged or cut short.

In a damaged header, everything that still has the form of an entry is used. The format has no
checksums, so nothing proves the bytes of a tensor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ...errors import InputError
from ...sources.source import Readable, Source
from ...torch_pickle.values.strided import contiguous_stride
from ...zips.found_records import ProofLevel
from ..probe import Probe
from ..safetensors.header import (
    LENGTH_NBYTES,
    LONGEST,
    METADATA,
    HeaderEntry,
    Json,
    entry_of,
    read_json,
)
from .remains import NamedTensor, Remains, StorageRemains

#: A string, and the rest of an entry if it is a name. The pattern also matches a string alone, so
#: that the search continues after it: no byte is read again for each quote before it.
_ENTRY = re.compile(
    rb'"((?:[^"\\\x00-\x1f]|\\.){1,4096})(?:"\s{0,8}:\s{0,8}\{'
    rb"([^{}]{0,2048})\})?"
)
_FIELD = re.compile(
    rb'"(dtype|shape|data_offsets)"\s{0,8}:\s{0,8}("[A-Z0-9_a-z]{1,16}"|\[[\d,\s]{0,1024}\])'
)
_STEP = 1 << 20
_FAR = 1 << 16  # so many bytes without an entry mean that the header has ended
_MOST = 1_000_000  # entries
_ALIGNMENT = 8
_OVERLAP = "its place contradicts that of another tensor"
_CUT = "the file ends before its end"


class _Header(NamedTuple):
    """The readable contents of a header."""

    entries: Mapping[str, HeaderEntry]
    lost: Mapping[str, str]  #: names of tensors → why their entries are invalid
    data_at: int
    is_whole: bool


def read_safetensors(probe: Probe) -> Remains:
    """Read the remains of a safetensors file."""
    source = probe.source
    header = _strict(source) or _lenient(source)
    overlapping = _overlapping(header.entries.values())
    tensors, storages = list[NamedTensor](), dict[str, StorageRemains]()
    for name, entry in header.entries.items():
        stride = contiguous_stride(entry.shape)
        why = _OVERLAP if name in overlapping else ""
        tensors.append(
            NamedTensor(name, entry.dtype, entry.shape, stride, 0, entry.nbytes, name, why=why)
        )
        present = min(entry.nbytes, max(0, source.nbytes - entry.start))
        storages[name] = StorageRemains(
            entry.nbytes, present, ProofLevel.NONE, entry.dtype, start=entry.start, why=_CUT
        )
    for name, why in header.lost.items():
        tensors.append(NamedTensor(name, "", (), (), 0, 0, None, why=why))
    files = [source] if isinstance(source, Source) else []
    return Remains("safetensors", tensors, storages, files, names_complete=header.is_whole)


def _strict(source: Readable) -> _Header | None:
    """The header, if it is valid JSON; the data may be missing."""
    if source.nbytes < LENGTH_NBYTES:
        return None
    length = int.from_bytes(source.read(0, LENGTH_NBYTES), "little")
    data_at = LENGTH_NBYTES + length
    if not 0 < length <= LONGEST or data_at > source.nbytes:
        return None
    try:
        said = read_json(source.read(LENGTH_NBYTES, length), "its header")
    except InputError:
        return None
    if not isinstance(said, dict) or len(said) > _MOST:
        return None
    said.pop(METADATA, None)
    return _header(said.items(), data_at, is_whole=True)


def _header(said: Iterable[tuple[str, Json]], data_at: int, *, is_whole: bool) -> _Header:
    entries, lost = dict[str, HeaderEntry](), dict[str, str]()
    for name, each in said:
        try:
            entries[name] = entry_of(name, each, data_at)
        except InputError as error:
            lost[name] = f"its entry is damaged: {error}"
    return _Header(entries, lost, data_at, is_whole and not lost)


def _lenient(source: Readable) -> _Header:
    """Everything that has the form of an entry, in a header that is damaged or cut short."""
    said, end = _entries(source)
    length = int.from_bytes(source.read(0, min(LENGTH_NBYTES, source.nbytes)), "little")
    found = _header(said.items(), 0, is_whole=False)
    tail = max((each.start + each.nbytes for each in found.entries.values()), default=0)
    claimed = LENGTH_NBYTES + length
    ends = [claimed] if claimed <= source.nbytes else []
    text_end = _text_end(source, end)
    if text_end is not None and (ends or text_end + tail == source.nbytes):
        ends.insert(0, text_end)
    fitting = [each for each in ends if each + tail == source.nbytes]
    # the file may be cut short within the header
    data_at = next(iter(fitting or ends), source.nbytes)
    entries = {
        name: each._replace(start=each.start + data_at) for name, each in found.entries.items()
    }
    return _Header(entries, found.lost, data_at, is_whole=False)


def _entries(source: Readable) -> tuple[dict[str, Json], int]:
    """The apparent entries from the start of a file, and the offset where the last one ends."""
    said: dict[str, Json] = {}
    end, known = LENGTH_NBYTES, LENGTH_NBYTES
    while known < min(source.nbytes, LONGEST) and known - end < _FAR and len(said) < _MOST:
        known = min(source.nbytes, max(known + _FAR, 2 * known, _STEP), LONGEST)
        text = source.read(end, known - end)
        start = end
        for found in _ENTRY.finditer(text):
            if found[2] is None:
                continue
            if len(said) >= _MOST:
                break
            name = _text(found[1])
            fields = {kind.decode(): _json(value) for kind, value in _FIELD.findall(found[2])}
            if name is None or not fields or name == METADATA:
                continue
            said[name] = None if name in said else fields
            end = start + found.end()
        if end == start and known - end >= _FAR:
            break
    return said, end


def _text_end(source: Readable, end: int) -> int | None:
    """The end of a header, including padding, whose last entry ends at `end`.

    None if it does not.
    """
    after = source.read(end, min(64, source.nbytes - end))
    if after[:1] != b"}":
        return None
    end += len(after) - len(after[1:].lstrip(b" "))
    return end // _ALIGNMENT * _ALIGNMENT


def _text(raw: bytes) -> str | None:
    try:
        found = json.loads(b'"' + raw + b'"')
    except ValueError:
        return None
    return found if isinstance(found, str) and found.isprintable() else None


def _json(raw: bytes) -> Json:
    try:
        return json.loads(raw)
    except ValueError:
        return None


def _overlapping(entries: Iterable[HeaderEntry]) -> set[str]:
    """The tensors that overlap another one."""
    found, end, last = set[str](), 0, ""
    for each in sorted(entries, key=lambda each: (each.start, each.nbytes)):
        if each.nbytes and each.start < end:
            found |= {each.name, last}
        if each.start + each.nbytes > end:
            end, last = each.start + each.nbytes, each.name
    return found
