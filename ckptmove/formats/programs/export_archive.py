"""The records of a torch.export archive, in every layout that torch has written.

`torch_export` describes what the records hold.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from typing import NamedTuple

from ...errors import CorruptError, UnsupportedError
from ...manifest.manifest import TensorEntry
from ...manifest.other_records import RecordKind
from ...manifest.paths import Path
from ...zips.archive import Archive
from ...zips.members import Record
from ..archives.documents import Changes, Json, member
from ..archives.records import RecordsContainer, RecordView
from ..archives.zip_container import prefix_of
from ..session import ReadSession
from .export_graph import DeviceMention, device_text, walk

OLD_PROGRAM = "serialized_exported_program.json"
OLD_PARTS: tuple[tuple[str, Path], ...] = (
    ("serialized_state_dict", ()),
    ("serialized_constants", ()),
    ("serialized_example_inputs", ("sample_inputs",)),
)
_WEIGHTS, _CONSTANTS = "data/weights/", "data/constants/"
_MODELS, _SAMPLE_INPUTS, _COMPILED = "models/", "data/sample_inputs/", "data/aotinductor/"
_OBJECTS = {"custom_obj_": "custom object", "opaque_obj_": "opaque object"}
#: Other records that may be present; they do not name devices that matter.
_HARMLESS = (
    *("extra/", "extra_files/", ".data/", "version", "byteorder", "archive_format"),
    *("archive_version", _WEIGHTS, _CONSTANTS, _SAMPLE_INPUTS, _MODELS, _COMPILED),
)
_FAKE = "torch._export.serde.serialize._reconstruct_fake_tensor"
_STRIDED = 7
#: torch/_export/serde/schema.py, `ScalarType`, whose numbers differ from c10's.
_DTYPES = {
    **dict(
        enumerate(["uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"], 1)
    ),
    **dict(enumerate(["complex32", "complex64", "complex128", "bool", "bfloat16"], 9)),
    **dict(enumerate(["uint16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"], 28)),
    **dict(enumerate(["float8_e5m2fnuz", "float8_e8m0fnu", "uint32", "uint64"], 32)),
}


class Weight(NamedTuple):
    """A weight or constant that is stored as raw bytes."""

    entry: TensorEntry  #: its entry in the manifest
    config: str  #: the name of the record that describes it
    place: DeviceMention  #: its device in that record


class ExportContainer(RecordsContainer):
    """Exported programs, their weights and sample inputs."""

    beside = "its program"
    program = True

    def __init__(self, archive: Archive, session: ReadSession) -> None:
        """Read all but the tensors."""
        self.old = OLD_PROGRAM in archive.records
        super().__init__(archive, session, by_torch=not self.old)
        self.weights: list[Weight] = []  #: the raw weights
        #: named devices other than those of the raw weights; `place_records` has the record of each
        self.places: list[DeviceMention] = []
        self.place_records: list[str] = []
        self.compiled: list[tuple[Path, str]] = []  #: path and device type of compiled code
        self.obstacles: list[str] = []  #: why it can't be relocated, one clause each
        self.bound: list[str] = []  #: operators that exist for only one type of device
        self.objects: dict[str, int] = {}  #: how many objects have unknown content, by kind
        self.machine_code: dict[str, None] = {}  #: folders of code that AOTInductor compiled
        self.held_objects: list[Record] = []  #: the records of these objects, which torch unpickles
        self.prefix = "" if self.old else prefix_of(archive)
        if self.old:
            self._read_old()
        else:
            self._read()
        for part in self.parts.values():
            for each in part.everything():
                if any(name.qualname == _FAKE for s in each.streams for name in s.pickle.globals):
                    self.obstacles.append("it holds pickled tensors without data")
        self.obstacles = list(dict.fromkeys(self.obstacles))

    def short(self, record: Record) -> str:
        return record.name.removeprefix(self.prefix)

    def kind_of(self, name: str) -> RecordKind | None:
        if name in ("archive_format", "archive_version"):
            return None
        if f"{self.prefix}{name}" in self.documents or name.startswith(_COMPILED):
            return RecordKind.CODE
        return RecordKind.CODE if self.old and name == "version" else super().kind_of(name)

    def unknown_callables(self) -> Iterator[str]:
        yield from super().unknown_callables()
        for record in self.held_objects:
            yield from self.callables_in(record)
        yield from self.machine_code  # torch.export.load hands it to the system's loader

    def without_devices(self, name: str) -> Changes:
        places = [each.place for each in self.weights if each.config == name]
        records = zip(self.place_records, self.places, strict=True)
        places += [place for record, place in records if record == name]
        changes: dict[int, dict[str, Json]] = {}
        for place in places:
            changes.setdefault(id(place.holder), {}).update(place.with_device("cpu"))
        return changes

    # -- layouts -------------------------------------------------------------------------------

    def _read_old(self) -> None:
        self._read_program(self.record(OLD_PROGRAM), ())
        for name, path in OLD_PARTS:
            records = self.archive.records
            record = records.get(f"{name}.pt") or self.record(f"{name}.json")
            self.add(record, path, needed=record.nbytes > 0)
        known = ("serialized_", *_HARMLESS)
        self._look_at_others(known)

    def _read(self) -> None:
        if self._text("archive_format") != "pt2":
            raise UnsupportedError("its archive format is not pt2")
        version = self._text("archive_version")
        if version != "0":
            raise UnsupportedError(f"its archive version is {version[:20]!r}, not '0'")
        for name, record in self.archive.records.items():
            if not name.startswith(self.prefix):
                raise CorruptError(f"the record {name!r} is outside {self.prefix!r}")
            short = name[len(self.prefix) :]
            if short.startswith(_MODELS) and short.endswith(".json"):
                self._read_model(record, short[len(_MODELS) : -len(".json")])
            elif short.startswith(_COMPILED):
                self._note_compiled(record, short)
        known = self.archive.records.get(f"{self.prefix}byteorder")
        self.big_endian = known is not None and self._text("byteorder") == "big"
        if self.big_endian:
            self.warnings.append("its tensors are big-endian")
        self._look_at_others(_HARMLESS)
        self.writer = ", ".join(dict.fromkeys([*filter(None, [self.writer]), "pt2 archive 0"]))

    def _text(self, name: str) -> str:
        record = self.record(f"{self.prefix}{name}")
        return self.archive.read(record, at_most=64).decode("utf-8", "replace").strip()

    def _look_at_others(self, known: tuple[str, ...]) -> None:
        for name in self.archive.records:
            short = name[len(self.prefix) :]
            if not short.startswith(known):
                self.obstacles.append(f"the record {short!r} is not known")

    def _note_compiled(self, record: Record, short: str) -> None:
        """Note code that AOTInductor compiled, and for which type of device."""
        self.obstacles.append(f"it holds code compiled for its device, in {_COMPILED!r}")
        self.machine_code[f"compiled code in {short.rpartition('/')[0]}"] = None
        if short.endswith("_metadata.json"):
            metadata = self.read_document(record).root
            kind = metadata.get("AOTI_DEVICE_KEY") if isinstance(metadata, dict) else None
            if isinstance(kind, str):
                self.compiled.append(((*short.split("/")[1:], "AOTI_DEVICE_KEY"), kind))

    # -- programs ------------------------------------------------------------------------------

    def _read_program(self, record: Record, path: Path) -> None:
        root = self.read_document(record).root
        found = walk(root, path)
        self._note(record.name, found.places)
        self.obstacles += found.obstacles
        self.bound += found.bound
        version = root.get("torch_version") if isinstance(root, dict) else None
        if isinstance(version, str) and not self.writer:
            self.writer = f"torch {version[:40]}"

    def _note(self, record: str, places: list[DeviceMention]) -> None:
        self.places += places
        self.place_records += [record] * len(places)

    def _read_model(self, record: Record, name: str) -> None:
        path: Path = () if name == "model" else (name,)
        self._read_program(record, path)
        for folder, kind in ((_WEIGHTS, "weights"), (_CONSTANTS, "constants")):
            whole = self.archive.records.get(f"{self.prefix}{folder}{name}.pt")
            if whole is not None:  # torch 2.8
                self.add(whole, path, needed=whole.nbytes > 0)
            else:
                config = self.record(f"{self.prefix}{folder}{name}_{kind}_config.json")
                self._read_config(config, folder, path)
        inputs = self.record(f"{self.prefix}{_SAMPLE_INPUTS}{name}.pt")
        self.add(inputs, (*path, "sample_inputs"), needed=inputs.nbytes > 0)

    def _read_config(self, record: Record, folder: str, path: Path) -> None:
        config = member(self.read_document(record).root, "config", dict, f"{record.name!r}")
        for name, payload in config.items():
            where = f"the description of {name!r}"
            file = member(payload, "path_name", str, where)
            if posixpath.basename(file) != file or file in ("", ".", ".."):
                raise CorruptError(f"{where} points outside its folder, to {file[:40]!r}")
            content = self.record(f"{self.prefix}{folder}{file}")
            meta = payload.get("tensor_meta")
            is_pickled = member(payload, "use_pickle", bool, where)
            if file.startswith(tuple(_OBJECTS)) or (is_pickled and meta is None):
                kind = next((k for p, k in _OBJECTS.items() if file.startswith(p)), "object")
                self.objects[kind] = self.objects.get(kind, 0) + 1
                self.held_objects.append(content)
                self.obstacles.append(f"its {kind}s may be on any device")
            elif not is_pickled:
                self._add_weight(record.name, content, (*path, name), payload, where)
            else:
                device = _device(member(payload, "tensor_meta", dict, where), where)
                self._note(record.name, [device._replace(path=(*path, name, "device"))])
                if content.name not in self.parts:
                    self.add(content, (*path, name), needed=True)
                else:
                    raise CorruptError(f"{where} shares its pickle with another tensor")

    def _add_weight(
        self, config: str, record: Record, path: Path, payload: Json, where: str
    ) -> None:
        """Add a tensor over the bytes of a record, as the config describes it."""
        view, place = described_weight(payload, where)
        key = None
        if record.nbytes or place.device != "meta" or not view.nbytes:
            key = record.name[len(self.prefix) :]
            self.add_raw(key, record, view, where, fake=True)
        entry = view.entry(
            path,
            key,
            is_parameter=member(payload, "is_param", bool, where),
            requires_grad=member(payload["tensor_meta"], "requires_grad", bool, where),
            state_key=str(path[-1]),
        )
        entry = entry if record.nbytes else entry._replace(nbytes=0)
        self.weights.append(Weight(entry, config, place))


def described_weight(payload: Json, where: str) -> tuple[RecordView, DeviceMention]:
    """A raw weight as a config describes it, and its device in the config."""
    meta = member(payload, "tensor_meta", dict, where)
    dtype = _DTYPES.get(member(meta, "dtype", int, where))
    if dtype is None or member(meta, "layout", int, where) != _STRIDED:
        raise UnsupportedError(f"{where} has an unknown dtype or layout")
    shape, stride = (
        tuple(_size(each, where) for each in member(meta, key, list, where))
        for key in ("sizes", "strides")
    )
    place = _device(meta, where)
    offset = _size(meta.get("storage_offset"), where)
    return RecordView(dtype, shape, stride, offset, place.device), place


def _device(meta: dict[str, Json], where: str) -> DeviceMention:
    holder = member(meta, "device", dict, where)
    device = device_text(holder)
    if device is None:
        raise CorruptError(f"{where} has no proper 'device'")
    return DeviceMention((), holder, device)


def _size(node: Json, where: str) -> int:
    found: int = member(node, "as_int", int, where)
    if found < 0 or found.bit_length() > 62:
        raise CorruptError(f"{where} has an invalid size")
    return found
