"""Name the tensors of a broken program by its JSON documents, if a checksum proves these.

P/data/weights/NAME_weights_config.json, P/data/constants/…    torch.export; behind the weights
P/data/sample_inputs/NAME.pt, and of torch 2.8 P/data/weights/NAME.pt    files of torch.save
serialized_state_dict.pt …                                     torch.export before 2.8
P/model.json, P/attributes.pkl                                 TorchScript of torch 1.0 to 1.3
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ...errors import InputError
from ...manifest.paths import Path, spell
from ...sources.budget import Excess
from ...sources.source import Memory, Readable
from ...zips.found_records import FoundRecord, ProofLevel, read_record
from ..archives.documents import Document, Json, member
from ..archives.records import RecordView
from ..programs.export_archive import OLD_PARTS, described_weight
from ..programs.torchscript_v1 import ATTRIBUTES, MODEL, ScriptModel, attributes_of
from ..session import ReadSession

_CONFIG = re.compile(r"data/(?:weights|constants)/([^/]+)_(?:weights|constants)_config\.json")
_PART = re.compile(r"data/(weights|constants|sample_inputs)/([^/]+)\.pt")


class RecordTensor(NamedTuple):
    """A tensor over the bytes of a record."""

    name: str
    record: str
    view: RecordView
    is_proven: bool = True  #: whether checksums prove the name


class ProgramRemains(NamedTuple):
    """The tensors and checkpoints in a program."""

    tensors: list[RecordTensor]
    #: names of records that are files of torch.save → the prefix of the names in them
    parts: dict[str, str]
    warnings: list[str]


def program_of(
    source: Readable, found: Mapping[str, FoundRecord], prefix: str, session: ReadSession
) -> ProgramRemains:
    """Read the JSON documents among the records of a zip, all in one folder."""
    program = ProgramRemains([], {}, [])
    for name, path in OLD_PARTS:
        if f"{name}.pt" in found:
            program.parts[f"{name}.pt"] = _start(path)
    for name, record in found.items():
        short = name.removeprefix(prefix)
        config, part = _CONFIG.fullmatch(short), _PART.fullmatch(short)
        if part is not None:
            path = _path(part[2]) + (("sample_inputs",) if part[1] == "sample_inputs" else ())
            program.parts[name] = _start(path)
        elif config is not None or (short == MODEL and record.proof is ProofLevel.RIGHT):
            try:
                root = _document(source, record)
                if config is None:
                    attributes = found.get(f"{prefix}{ATTRIBUTES}")
                    program.tensors.extend(_of_script(source, root, attributes, prefix, session))
                else:
                    folder = f"{prefix}{short.rpartition('/')[0]}/"
                    path = _path(config[1])
                    program.tensors.extend(_of_config(program, root, folder, path, record))
            except Excess:
                raise
            except InputError as error:
                program.warnings.append(f"{short}: {error}")
    return program


def _document(source: Readable, record: FoundRecord) -> Json:
    if record.proof is not ProofLevel.RIGHT:
        raise InputError(f"{record.proof.value}, so that the names in it are lost")
    return Document(record.name, read_record(source, record)).root


def _path(name: str) -> Path:
    return () if name == "model" else (name,)


def _start(path: Path) -> str:
    return f"{spell(path)}." if path else ""


def _of_config(
    program: ProgramRemains, root: Json, folder: str, path: Path, config: FoundRecord
) -> Iterator[RecordTensor]:
    """The weights or constants of a program, like `ExportContainer` reads them.

    Also adds its parts. The names start with the name of the config, for which there is no
    checksum.
    """
    for name, payload in member(root, "config", dict, "it").items():
        where = f"the description of {name!r}"
        record = folder + member(payload, "path_name", str, where)
        called = (*path, name)
        if not member(payload, "use_pickle", bool, where):
            view, _ = described_weight(payload, where)
            yield RecordTensor(spell(called), record, view, config.is_named_twice)
        elif payload.get("tensor_meta") is not None:
            program.parts[record] = _start(called)


def _of_script(
    source: Readable,
    root: Json,
    attributes: FoundRecord | None,
    prefix: str,
    session: ReadSession,
) -> Iterator[RecordTensor]:
    """The tensors of a module; if the attributes are lost, tensors in them have no names."""
    values = None
    if attributes is not None and attributes.proof is ProofLevel.RIGHT:
        content = Memory(read_record(source, attributes), source.path)
        values = attributes_of(session.stream(content))
    model = ScriptModel(root, values)
    for path, n in model.names:
        yield RecordTensor(spell(path), f"{prefix}{model.table[n].key}", model.table[n].view)
