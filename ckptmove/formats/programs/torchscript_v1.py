"""torchscript-v1: what `torch.jit.save` wrote from 1.0 to 1.3.

    P/version           "1" or "2"
    P/model.json        a tree of modules; and a table of tensors: dims, strides, record, device
    P/tensors/N         raw bytes
    P/attributes.pkl    a tuple of values, in which tensors are numbers of that table
    P/code/….py         TorchScript, P/debug/….pkl

This is JSON as protobuf writes it: 64-bit numbers are strings, and default values are left out.
Relocating changes the devices in the table. Devices in the code and in pickled attributes are shown
and stay as they are. torch abandoned this format in 1.4 and no longer loads it.

Sources, at v1.3.0: caffe2/proto/torch.proto; torch/csrc/jit/export.cpp (`ScriptModuleSerializer`)
and import_legacy.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from ...errors import CorruptError, UnsupportedError, WriteError
from ...manifest.manifest import Manifest, TensorEntry
from ...manifest.other_records import NamedDevice, RecordKind
from ...manifest.paths import Path, spell
from ...pickles.device_tags import names_device
from ...pickles.nodes import Call, Dict, List, Node, Tuple
from ...placement.place import Moves
from ...plans.plan import Plan
from ...sources.source import Memory
from ...torch_pickle.sections.tensor_names import with_shared
from ...torch_pickle.streams import LocationEdits, PickleStream
from ...torch_pickle.torchscript_code import literals
from ...zips.archive import Archive
from ...zips.members import Record
from ..archives.documents import Changes, Json, member
from ..archives.records import RecordsContainer, RecordView
from ..archives.zip_container import prefix_of
from ..base import Format
from ..checkpoint import Carries, Checkpoint
from ..probe import Probe
from ..session import ReadSession

#: caffe2/proto/caffe2.proto, `TensorProto.DataType`, by name.
_DTYPES = {
    **{"FLOAT": "float32", "DOUBLE": "float64", "FLOAT16": "float16", "BOOL": "bool"},
    **{"BYTE": "uint8", "UINT8": "uint8", "INT8": "int8", "INT16": "int16", "UINT16": "uint16"},
    **{"INT32": "int32", "INT64": "int64"},
}
MODEL, ATTRIBUTES = "model.json", "attributes.pkl"
_MODEL = {"protoVersion", "mainModule", "producerName", "producerVersion", "tensors", "libs"}
_MODULE = {"torchscriptArena", "torchscriptDebugArena", "submodules", "parameters", "attributes"}
_MODULE |= {"name", "optimize", "getStateAttributeId"}
_TENSOR = {"dims", "offset", "strides", "requiresGrad", "dataType", "data", "device"}
_TENSOR |= {"isQuantized", "scale", "zeroPoint"}
_FROM_ID = "torch.jit._pickle.build_tensor_from_id"
_MOST_CODE_NBYTES = 64 << 20
_DEEPEST = 200  # levels of nested modules, and of containers in a pickled attribute


class TorchScriptV1(Format):
    """The format of `torch.jit.save` before 1.4."""

    name = "torchscript-v1"
    suffixes = (".pt", ".pth")
    summary = "torch.jit.save, torch 1.0 to 1.3"
    refused = (
        "to relocate a module with members that are not understood, since they may name devices"
    )
    carries = Carries(
        devices=True, aliases=True, strides=True, objects=True, dtypes="those that torch 1.3 had"
    )

    def sniff(self, probe: Probe) -> bool:
        """Whether it is a zip with a `model.json` and without the pickles of later versions."""
        if probe.archive is None:
            return False
        records, prefix = probe.archive.records, prefix_of(probe.archive)
        names = (f"{prefix}data.pkl", f"{prefix}constants.pkl", f"{prefix}archive_format")
        return bool(prefix) and f"{prefix}{MODEL}" in records and not records.keys() & set(names)

    def read(self, probe: Probe) -> ScriptV1Checkpoint:
        """Read everything but the tensors."""
        assert probe.archive is not None
        container = ScriptV1Container(probe.archive, probe.session)
        return ScriptV1Checkpoint(self.name, container, self.carries)


class _DescribedTensor(NamedTuple):
    """A tensor of the table, with the JSON object that describes it."""

    key: str  #: the name of its record
    view: RecordView
    requires_grad: bool
    holder: dict[str, Json]


class ScriptModel:
    """The tensors in `model.json` and in the pickled attributes."""

    def __init__(self, root: Json, attributes: list[Node] | None) -> None:
        """If `attributes` is None, tensors that only attributes name have no name."""
        self.obstacles: list[str] = []  #: why it can't be relocated, one clause each
        #: path and number of each tensor, in the order of the modules
        self.names: list[tuple[Path, int]] = []
        self.parameters: set[int] = set()
        self.said: list[NamedDevice] = []  #: the devices that pickled attributes name
        self._check_keys(root, _MODEL, "the model")
        #: the tensors, by number
        self.table = [self._tensor(n, each) for n, each in enumerate(_list_at(root, "tensors"))]
        for path, module in _modules(member(root, "mainModule", dict, "the model")):
            self._read_module(path, module, attributes)
        if attributes is not None:
            named = {n for _, n in self.names}
            unnamed = (n for n in range(len(self.table)) if n not in named)
            # the names that the code uses
            self.names += [(("CONSTANTS", f"c{n}"), n) for n in unnamed]

    def _check_keys(self, node: Json, known: set[str], where: str) -> None:
        if not isinstance(node, dict):
            raise CorruptError(f"{where} is no JSON object")
        for key in node.keys() - known:
            self.obstacles.append(f"{where} has {key[:40]!r}, which is unknown")

    def _tensor(self, n: int, node: Json) -> _DescribedTensor:
        where = f"the tensor {n}"
        self._check_keys(node, _TENSOR, where)
        dtype = _DTYPES.get(member(node, "dataType", str, where))
        if dtype is None or node.get("isQuantized"):
            raise UnsupportedError(f"{where} has an unknown dtype")
        shape = tuple(_number(each, where) for each in _list_at(node, "dims"))
        stride = tuple(_number(each, where) for each in _list_at(node, "strides"))
        offset = _number(node.get("offset", "0"), where)
        key = member(member(node, "data", dict, where), "key", str, where)
        device = node.get("device", "cpu")
        if not isinstance(device, str) or not (names_device(device) or device == "meta"):
            raise CorruptError(f"{where} has no proper 'device'")
        if "device" not in node:
            self.obstacles.append(f"{where} has no device")
        view = RecordView(dtype, shape, stride, offset, device)
        return _DescribedTensor(key, view, node.get("requiresGrad") is True, node)

    def _read_module(
        self, path: Path, module: dict[str, Json], attributes: list[Node] | None
    ) -> None:
        where = f"the module {spell(path)!r}"
        self._check_keys(module, _MODULE, where)
        for each in _list_at(module, "parameters"):
            number = _number(member(each, "tensorId", str, where), where)
            self._name((*path, member(each, "name", str, where)), number)
            if each.get("isBuffer", False) is not True:
                self.parameters.add(number)
        for each in _list_at(module, "attributes"):
            name, at = member(each, "name", str, where), each.get("id", "0")
            if at == "-1":
                continue
            number = _number(at, where)
            if attributes is None:
                continue
            if number >= len(attributes):
                raise CorruptError(f"{where} has an attribute {name[:40]!r} that is not pickled")
            self._read_attribute((*path, name), attributes[number])

    def _name(self, path: Path, number: int) -> None:
        if number >= len(self.table):
            raise CorruptError(f"{spell(path)!r} is the tensor {number:,}, which is missing")
        if (path, number) not in self.names[-1:]:
            self.names.append((path, number))

    def _read_attribute(self, path: Path, node: Node) -> None:
        if len(path) > 2 * _DEEPEST:
            raise CorruptError(f"the attribute {spell(path[:3])!r} is nested too deeply")
        if isinstance(node, Call):
            items = node.args.items if isinstance(node.args, Tuple) else []
            if node.qualname == _FROM_ID and len(items) == 1 and isinstance(items[0], int):
                self._name(path, int(items[0]))
            else:
                for n, each in enumerate(items):
                    self._read_attribute((*path, n), each)
        elif isinstance(node, (Tuple, List)):
            for n, each in enumerate(node.items):
                self._read_attribute((*path, n), each)
        elif isinstance(node, Dict):
            for key, each in node.pairs:
                known = isinstance(key, (str, int, float))
                self._read_attribute((*path, key if known else "?"), each)  # type: ignore[arg-type]
        elif isinstance(node, str) and names_device(node):
            self.said.append(NamedDevice(path, spell(path), str(node), "str", fixed=True))


class ScriptV1Container(RecordsContainer):
    """A table of tensors, and a tree of modules that refers to it."""

    beside = "its code"
    program = True
    inert = True

    def __init__(self, archive: Archive, session: ReadSession) -> None:
        """Read the JSON, the attributes and the code."""
        super().__init__(archive, session, by_torch=True)
        self.prefix = prefix_of(archive)
        self.model = f"{self.prefix}{MODEL}"
        root = self.read_document(self.record(self.model)).root
        self.described = ScriptModel(root, self._read_attributes())
        #: the manifest entry of each tensor of the table, without a name
        self.entries = [self._entry(n, each) for n, each in enumerate(self.described.table)]
        self.said = self.described.said  #: the devices that code and pickled attributes name
        self._read_code()
        self.writer = "torch 1.0 to 1.3"
        self.warnings.append(
            "torch no longer loads TorchScript this old; torch 1.3 was the last version that did"
        )

    def short(self, record: Record) -> str:
        return record.name.removeprefix(self.prefix)

    def kind_of(self, name: str) -> RecordKind | None:
        if name.startswith("debug/"):
            return RecordKind.DEBUG
        code = name.startswith("code/") or name in (MODEL, ATTRIBUTES, "version")
        return RecordKind.CODE if code else super().kind_of(name)

    def without_devices(self, name: str) -> Changes:
        return {id(each.holder): {"device": "cpu"} for each in self.described.table}

    def _entry(self, n: int, tensor: _DescribedTensor) -> TensorEntry:
        key, view, requires_grad, _ = tensor
        self.add_raw(key, self.record(f"{self.prefix}{key}"), view, f"the tensor {n}", fake=False)
        is_parameter = n in self.described.parameters
        return view.entry((), key, is_parameter=is_parameter, requires_grad=requires_grad)

    def _read_attributes(self) -> list[Node]:
        record = self.archive.records.get(f"{self.prefix}{ATTRIBUTES}")
        if record is None:
            return []
        content = Memory(self.archive.read_parsed(record), self.source.path)
        return attributes_of(self.session.stream(content))

    def _read_code(self) -> None:
        for name, record in self.archive.records.items():
            short = name[len(self.prefix) :]
            if short.endswith(".py") and record.nbytes:
                text = self.archive.read(record, at_most=_MOST_CODE_NBYTES)
                for literal in literals(short, text.decode("utf-8", "replace")):
                    kind = "code" if literal.sure else "code string"
                    path, name = (short, literal.line), f"{short}:{literal.line}"
                    self.said.append(NamedDevice(path, name, literal.value, kind, fixed=True))


class ScriptV1Checkpoint(Checkpoint):
    """A TorchScript module of torch 1.0 to 1.3 as a checkpoint."""

    container: ScriptV1Container

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest of the checkpoint."""
        container = self.container
        tensors = [
            container.entries[n]._replace(path=path, name=spell(path), state_key=spell(path))
            for path, n in container.described.names
        ]
        return replace(
            super().manifest,
            tensors=tuple(with_shared(tensors)),
            values_naming_devices=tuple(container.said),
        )

    def raw(self) -> Sequence[TensorEntry]:
        return self.manifest.tensors

    def plan_relocate(self, moves: Moves) -> Plan:
        container = self.container
        changes = self._changes(moves)
        if not changes:
            return container.plan(LocationEdits())
        obstacles = container.described.obstacles
        if obstacles:
            raise UnsupportedError(f"the module can't be relocated: {obstacles[0]}")
        model = container.documents[container.model].rewrite(changes)
        return container.plan_with(LocationEdits(), {container.model: model})

    def _changes(self, moves: Moves) -> dict[int, dict[str, Json]]:
        return {
            id(tensor.holder): {"device": moves.storages[tensor.key]}
            for tensor in self.container.described.table
            if tensor.key in moves.storages
        }

    def check_relocated(self, other: Checkpoint, moves: Moves) -> None:
        super().check_relocated(other, Moves(storages=moves.storages))
        assert isinstance(other, ScriptV1Checkpoint)
        mine, theirs = self.container, other.container
        old, new = mine.documents[mine.model], theirs.documents[theirs.model]
        if old.differs(new, self._changes(moves)):
            raise WriteError(f"the written file differs from the source in {MODEL!r}")


def attributes_of(stream: PickleStream) -> list[Node]:
    """The pickled values; UnsupportedError if they are not in the form that torch wrote."""
    root = stream.pickle.root
    if stream.pickle.persistents or not isinstance(root, (Tuple, List)):
        raise UnsupportedError("its pickled attributes are not a tuple")
    return list(root.items)


def _modules(main: dict[str, Json]) -> Iterator[tuple[Path, dict[str, Json]]]:
    """A module and all modules in it, each with its path."""
    todo: list[tuple[Path, dict[str, Json]]] = [((), main)]
    while todo:
        path, module = todo.pop()
        if len(path) > _DEEPEST:
            raise CorruptError(f"modules are nested more than {_DEEPEST} levels deep")
        yield path, module
        inner = _list_at(module, "submodules")
        todo += [((*path, member(each, "name", str, "a module")), each) for each in reversed(inner)]


def _list_at(node: Json, key: str) -> list[Json]:
    found = node.get(key, []) if isinstance(node, dict) else None
    if not isinstance(found, list):
        raise CorruptError(f"{key!r} is no list in the description of the model")
    return found


def _number(node: Json, where: str) -> int:
    """A number in the form that protobuf writes in JSON."""
    if not isinstance(node, str) or not node.isascii() or not node.isdigit() or len(node) > 18:
        raise CorruptError(f"{where} has an invalid number")
    return int(node)
