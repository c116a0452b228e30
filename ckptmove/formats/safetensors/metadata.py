"""The metadata of safetensors (text by key), and how a torch-zip file keeps it.

    ROOT/.data/ckptmove_metadata.json    {"version": 1, "metadata": {KEY: TEXT, …}}

torch opens records by name and ignores all others; it uses `.data/` for what is not content
(caffe2/serialize/inline_container.cc, its serialization id).

`safetensors.torch.save_model` writes one of several names of a tensor, and notes each name that it
left out as a key, whose text is the name that it wrote.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from ...errors import CorruptError, UnsupportedError
from ...zips.archive import Archive

#: The record, without the folder that all records are in.
RECORD = ".data/ckptmove_metadata.json"
_VERSION = 1
_WHAT = f"the record {RECORD!r}"


def metadata_record(metadata: Mapping[str, str]) -> bytes:
    """The content of the record; the order of the keys says nothing."""
    import json  # only here, and below what few files need

    said = {"version": _VERSION, "metadata": dict(sorted(metadata.items()))}
    return json.dumps(said, ensure_ascii=False, separators=(",", ":")).encode("utf-8")


def read_metadata(archive: Archive, prefix: str) -> dict[str, str]:
    """What the record of a zip says; nothing where there is none."""
    record = archive.records.get(f"{prefix}{RECORD}")
    if record is None:
        return {}
    from .header import LONGEST, read_json

    said = read_json(archive.read(record, at_most=min(LONGEST, archive.source.nbytes)), _WHAT)
    if not isinstance(said, dict) or said.keys() != {"version", "metadata"}:
        raise CorruptError(f"{_WHAT} is malformed")
    if said["version"] != _VERSION:
        raise UnsupportedError(f"{_WHAT} was written by a newer version of ckptmove")
    metadata = said["metadata"]
    if not isinstance(metadata, dict) or not all(type(text) is str for text in metadata.values()):
        raise CorruptError(f"{_WHAT} is not a JSON object of strings")
    return metadata


def other_names(names: Container[str], metadata: Mapping[str, str]) -> dict[str, str]:
    """Names that `save_model` left out → the name that the same tensor is written under.

    It keeps the first name in the order of the alphabet. So a key that is a tensor itself, a text
    that is none, or one that comes later is something else.
    """
    return {
        key: text
        for key, text in sorted(metadata.items())
        if key not in names and text in names and text < key
    }


def still_true(metadata: Mapping[str, str], names: Container[str]) -> dict[str, str]:
    """The metadata without names of tensors that the checkpoint had and these are without."""
    gone = other_names(names, metadata)
    return {key: text for key, text in metadata.items() if key not in gone}
