"""The metadata of safetensors (text by key), and how a torch-zip file keeps it.

    ROOT/.data/ckptmove_metadata.json    {"version": 1, "metadata": {KEY: TEXT, …}}

torch opens records by name and ignores all others; it uses `.data/` for data that is not content
(caffe2/serialize/inline_container.cc, its serialization id).

`safetensors.torch.save_model` writes a tensor with several names only once. For each name that it
leaves out, it adds a key to the metadata, whose text is the written name.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from ...errors import CorruptError, UnsupportedError
from ...zips.archive import Archive

#: The name of the record, without the folder of all records.
RECORD = ".data/ckptmove_metadata.json"
_VERSION = 1
_WHAT = f"the record {RECORD!r}"


def metadata_record(metadata: Mapping[str, str]) -> bytes:
    """The content of the record; the order of the keys has no meaning."""
    import json  # only here, and below what few files need

    said = {"version": _VERSION, "metadata": dict(sorted(metadata.items()))}
    return json.dumps(said, ensure_ascii=False, separators=(",", ":")).encode("utf-8")


def read_metadata(archive: Archive, prefix: str) -> dict[str, str]:
    """The metadata in the record of a zip; empty if there is none."""
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
    """Names that `save_model` left out → the name under which the same tensor is written.

    `save_model` keeps the name that is first in alphabetical order. So this excludes a key that is
    a tensor itself, a text that is not a tensor, and a key that is earlier than its text.
    """
    return {
        key: text
        for key, text in sorted(metadata.items())
        if key not in names and text in names and text < key
    }


def still_true(metadata: Mapping[str, str], names: Container[str]) -> dict[str, str]:
    """The metadata without shared names of tensors that are not in the written file."""
    gone = other_names(names, metadata)
    return {key: text for key, text in metadata.items() if key not in gone}
