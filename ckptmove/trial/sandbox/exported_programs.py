"""Refuse files of torch.export with records that torch might run when it loads the program.

torch unpickles constants in records named `opaque_obj_N`, builds objects from `custom_obj_N`, loads
libraries in `data/aotinductor/`, and turns the program's JSON into Python. Each version of torch
reads other records. So this module lists the records that a program may have; some version of torch
might run any other record.

torch looks up records without regard to case, but does not document it. So names must be as torch
writes them, and two names that differ only in case are refused when the archive is opened.

Sources: torch/export/__init__.py (`load`); torch/export/pt2_archive/_package.py (`load_pt2`);
torch/_export/serde/serialize.py (`deserialize_torch_artifact`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ...errors import InputError, StrPath
from ...formats.archives.documents import Document
from ...formats.archives.zip_container import content_of
from ...sources.file import File
from ...zips.archive import Archive
from ...zips.members import Record
from . import exported_graphs

_SHOWN = 80  # characters of a name in a message
_NAME = r"[\w.-]+"
#: The record names of torch 2.8 and newer, in a folder of any name, and how each is checked.
_RECORDS = (
    (re.compile(rf"models/{_NAME}\.json"), "program"),
    (re.compile(rf"data/weights/{_NAME}_weights_config\.json"), "weights"),
    (re.compile(rf"data/constants/{_NAME}_constants_config\.json"), "constants"),
    (re.compile(r"data/weights/weight_\d+|data/constants/tensor_\d+"), "tensor"),
    (re.compile(rf"data/(weights|constants|sample_inputs)/{_NAME}\.pt"), "tensors"),
    (re.compile(r"archive_format|archive_version|byteorder|version"), "plain"),
    (
        re.compile(r"\.data/(version|serialization_id)|\.format_version|\.storage_alignment"),
        "plain",
    ),
    (re.compile(r"extra/.*", re.DOTALL), "plain"),
)
#: The record names of torch 2.1 to 2.7, without a folder.
_OLD_RECORDS = (
    (re.compile(r"serialized_exported_program\.json"), "program"),
    (re.compile(r"serialized_(state_dict|constants)\.json"), "tensors"),
    (re.compile(r"serialized_(state_dict|constants|example_inputs)\.pt"), "tensors"),
    (re.compile(r"version"), "plain"),
    (re.compile(r"extra_files/.*", re.DOTALL), "plain"),
)
_PAYLOADS = {"weights": re.compile(r"weight_\d+"), "constants": re.compile(r"tensor_\d+")}
#: Modules of transformers that define output classes of its models, as named in a tree of outputs.
_OUTPUTS = re.compile(
    rb'"(transformers\.(?:models\.\w+\.)?(?:modeling_\w+|cache_utils))\.\w+\\?"', re.ASCII
)
_ZIP = b"PK\x03\x04"


def danger(path: StrPath) -> str | None:
    """Describe content of a torch.export file that is not a graph of torch operators or tensors.

    Returns:
        A clause that names the record, or None if there is no such content.

    Raises:
        InputError: the file can't be read.
    """
    with File.open(path) as source:
        return next(_dangers(Archive(source)), None)


def libraries(path: StrPath) -> list[str]:
    """The library modules whose operators or classes a program names, as far as known.

    Raises:
        InputError: the file can't be read.
    """
    found: list[str] = []
    with File.open(path) as source:
        archive = Archive(source)
        for name, record in archive.records.items():
            if name.endswith(".json") and ("models/" in name or name.startswith("serialized_")):
                text = archive.read_parsed(record)
                found += (each.decode() for each in _OUTPUTS.findall(text))
                found += ["torchvision"] * (b"torch.ops.torchvision." in text)
    return list(dict.fromkeys(found))


def _dangers(archive: Archive) -> Iterator[str]:
    first = next(iter(archive.records), "")
    prefix = first[: first.find("/") + 1]  # torch uses the folder of the first record
    known = _RECORDS if prefix else _OLD_RECORDS
    for name, record in archive.records.items():
        if not name.startswith(prefix):
            yield f"the record {name[:_SHOWN]!r} lies outside of the program's folder"
            return
        short = name[len(prefix) :]
        kind = next((kind for pattern, kind in known if pattern.fullmatch(short)), None)
        if kind is None:
            yield f"{_what(short)}, {name[:_SHOWN]!r}"
        elif kind == "tensors":
            if record.nbytes and not _is_of_tensors(archive, record):
                yield f"{name[:_SHOWN]!r} is no checkpoint of torch.save"
        elif kind in ("program", *_PAYLOADS):
            root = Document(record.name, archive.read_parsed(record)).root
            folder = name[: name.rfind("/") + 1]
            said = exported_graphs.unknown(root) if kind == "program" else _payloads(root, kind)
            said = said or _pickled(archive, folder, root, kind)
            if said is not None:
                yield f"{name[:_SHOWN]!r} has {said}"


def _what(short: str) -> str:
    """Describe a record that is on no list."""
    lower = short.lower()
    if lower.startswith("data/aotinductor/"):
        return "it holds compiled code"
    if "_obj_" in lower:
        return "it holds a pickled object"
    return "it holds a record that is not known"


def _payloads(root: Any, kind: str) -> str | None:
    """Describe an entry of a weights or constants description that is no tensor, or None."""
    config = root.get("config") if isinstance(root, dict) else None
    if not isinstance(config, dict):
        return "no description of tensors"
    for name, payload in config.items():
        file = payload.get("path_name") if isinstance(payload, dict) else None
        if not isinstance(file, str) or not _PAYLOADS[kind].fullmatch(file):
            shown = str(file)[:_SHOWN]
            return f"an object that is no tensor, {name[:_SHOWN]!r} in {shown!r}"
        todo = [payload.get("tensor_meta")]
        while todo:
            each = todo.pop()
            if isinstance(each, dict):
                if "expr_str" in each:
                    return f"sizes that are code, of {name[:_SHOWN]!r}"
                todo += each.values()
            elif isinstance(each, list):
                todo += each
    return None


def _pickled(archive: Archive, folder: str, root: Any, kind: str) -> str | None:
    """Describe a record that is pickled as a tensor but can't be one, or None."""
    for payload in root["config"].values() if kind in _PAYLOADS else ():
        record = archive.records.get(f"{folder}{payload['path_name']}")
        if payload.get("use_pickle") and record and not _is_of_tensors(archive, record):
            return f"no checkpoint of torch.save, {record.name[:_SHOWN]!r}"
    return None


def _is_of_tensors(archive: Archive, record: Record) -> bool:
    """Whether it is a zip of torch.save; a zip of TorchScript, which torch also loads, is not."""
    content = content_of(archive, record)
    if record.nbytes < len(_ZIP) or content.read(0, len(_ZIP)) != _ZIP:
        return False
    try:
        names = [name.lower() for name in Archive(content).records]
    except InputError:
        return False
    return not any(name.endswith(("/constants.pkl", ".py")) for name in names)
