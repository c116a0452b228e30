"""torchscript: the format of `torch.jit.save`, for libtorch and for mobile devices.

    P/data.pkl            the module, by libtorch's pickler; tensors lie in P/data/N
    P/constants.pkl       tensors that the code names `CONSTANTS.cN`, in P/constants/N
    P/traced_inputs.pkl   the example inputs of a trace, in P/traced_inputs/N, whose bytes torch
                          leaves out
    P/bytecode.pkl        for phones: the same code, compiled; its tensors lie in P/constants/N, or
                          P/bytecode/N in old files
    P/code/**.py          the code; *.debug_pkl beside it says where in the sources it comes from
    P/version, P/extra/…  as in torch-zip; files of the user's own

Relocating changes the tags in all pickles. Devices in the code itself are changed only with
`values`; moving the tensors does not move them, and a warning says so. If the code is rewritten,
later error messages give slightly wrong columns, since `*.debug_pkl` counts characters; nothing
else reads it. Compiled code keeps its devices in `bytecode.pkl`, as values.

libtorch's pickler memoizes strings by value, so a tag may share its slot with any equal string.

Sources: torch/csrc/jit/serialization/{export_module,pickler,unpickler,import}.cpp.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ...errors import CorruptError, UnsupportedError
from ...manifest.manifest import Section
from ...manifest.other_records import NamedDevice, RecordKind
from ...manifest.paths import Path
from ...pickles.nodes import Global, Node, Tuple
from ...sources.source import Memory, Readable
from ...torch_pickle.streams import LocationEdits
from ...torch_pickle.torchscript_code import Literal, literals, rewrite
from ...torch_pickle.values.persistent_ids import StorageId
from ...zips.archive import Archive
from ...zips.members import Record
from ..archives.zip_container import ZipContainer, prefix_of
from ..base import PickledFormat
from ..checkpoint import Carries
from ..probe import Probe
from ..session import ReadSession
from .script_operators import called_by_bytecode, called_while_loading, is_foreign

_BYTECODE = "bytecode"
_PICKLES = ("data", "constants", "traced_inputs", _BYTECODE)
_MAX_CODE_NBYTES = 64 << 20  # the most bytes of one record
_NO_DEVICE = "device"
_OWN = ("__torch__", "torch.jit._pickle.")


class TorchScript(PickledFormat):
    """The format of `torch.jit.save`."""

    name = "torchscript"
    suffixes = (".pt", ".pth", ".jit", ".ptl")
    summary = "torch.jit.save, archive version 2 and newer; also for phones (`.ptl`)"
    refused = (
        "nothing; devices that its code names are listed, and moved only by `--values`, "
        "which leaves bare strings alone since they may mean anything"
    )
    carries = Carries(devices=True, aliases=True, strides=True, objects=True, dtypes="all of torch")

    def sniff(self, probe: Probe) -> bool:
        """Whether it is a zip with both a `data.pkl` and a `constants.pkl`."""
        if probe.archive is None:
            return False
        prefix = prefix_of(probe.archive)
        names = (f"{prefix}data.pkl", f"{prefix}constants.pkl")
        return bool(prefix) and all(name in probe.archive.records for name in names)

    def open(self, probe: Probe) -> ScriptContainer:
        """Read the directory, the pickles and the code."""
        assert probe.archive is not None
        return ScriptContainer(probe.archive, probe.session)


class ScriptContainer(ZipContainer):
    """A module, its constants, and its code."""

    section = Section.MODEL
    beside = "its code"
    program = True
    inert = True  # libtorch imports nothing

    def __init__(self, archive: Archive, session: ReadSession) -> None:
        """Read the pickles and the code."""
        super().__init__(archive, session)
        for name in _PICKLES:
            if f"{self.prefix}{name}.pkl" in archive.records:
                path = () if name == "data" else (name,)
                self.add(f"{name}.pkl", self._folder(name), path)
        self.roots = [named for path, root in self.roots for named in _as_code_says(path, root)]
        if f"{self.prefix}{_BYTECODE}.pkl" in archive.records:
            self.bytecode = _BYTECODE
        self.code: dict[str, str] = {}
        for record in archive.records.values():
            if self._is_code(record):
                self.code[record.name] = self._text(record)
        for name, text in self.code.items():
            self._list_devices(name, text)
        version = self.archive.read(self._version, at_most=64).strip().decode("ascii")
        self.writer = f"torch.jit.save, archive version {version}"

    def unknown_callables(self) -> Iterator[str]:
        yield from super().unknown_callables()
        for stream in self.streams:
            yield from (n.qualname for n in stream.pickle.globals if is_foreign(n.qualname))
        records = (each for each in self.archive.records.values() if _may_be_code(each.name))
        called = called_while_loading({each.name: self._text(each) for each in records})
        if called is not None:
            yield f"__setstate__ in {called[0]}, which names {called[1]}"
        for path, root in self.roots:
            named = called_by_bytecode(root) if path == (_BYTECODE,) else None
            if named is not None:
                yield f"__setstate__ in {self.prefix}{_BYTECODE}.pkl, which names {named}"

    def _folder(self, pickle: str) -> str:
        """The folder with a pickle's tensors; newer bytecode uses the folder of the constants."""
        if pickle == _BYTECODE and not any(
            self._in(record, "bytecode/") for record in self.archive.records.values()
        ):
            return "constants/"
        return f"{pickle}/"

    def is_known(self, name: Global) -> bool:
        """Whether a name is harmless; classes of the archive are TorchScript, not Python."""
        return name.qualname.startswith(_OWN) or super().is_known(name)

    def is_text(self, record: Record) -> bool:
        """Whether a record holds no tensor and so may be compressed."""
        return record.name.endswith((".pkl", ".py", ".debug_pkl")) or self._in(record, "extra/")

    def may_be_left_out(self, storage: StorageId, record: Record) -> bool:
        """Whether bytes may be missing: those of example inputs, which torch does not write."""
        return record.nbytes == 0 and self._in(record, "traced_inputs/")

    def _in(self, record: Record, folder: str) -> bool:
        return record.name.startswith(f"{self.prefix}{folder}")

    def _is_code(self, record: Record) -> bool:
        return self._in(record, "code/") and record.name.endswith(".py")

    def _text(self, record: Record) -> str:
        if record.nbytes > _MAX_CODE_NBYTES:
            raise UnsupportedError(f"the code in {record.name!r} is too long")
        try:
            return self.archive.read(record, at_most=_MAX_CODE_NBYTES).decode("utf-8")
        except UnicodeDecodeError:
            raise CorruptError(f"the code in {record.name!r} is not text") from None

    def _list_devices(self, name: str, text: str) -> None:
        place = name.removeprefix(self.prefix)
        for literal in literals(name, text):
            path = (place, literal.line)
            spelled = f"{place}:{literal.line}"
            kind = "code" if literal.sure else "code string"
            value = NamedDevice(path, spelled, literal.value, kind, fixed=not literal.sure)
            self.named.append((value, literal))

    def kind_of(self, name: str) -> RecordKind | None:
        if name.endswith((".debug_pkl", "mobile_debug_handles.pkl")):
            return RecordKind.DEBUG
        if name.startswith("code/") or name in ("version", ".data/version"):
            return RecordKind.CODE
        return super().kind_of(name)

    def content_to_compare(self, record: Record, no_devices: bool) -> Readable:
        text = self.code.get(record.name)
        if text is None or not no_devices:
            return super().content_to_compare(record, no_devices)
        found = [
            (literal, _NO_DEVICE) for _, literal in self.named if literal.record == record.name
        ]
        return Memory(rewrite(text, found).encode("utf-8"), self.source.path)

    def changed_records(self, spelling: LocationEdits) -> dict[str, bytes]:
        """The code records in which devices change, with their new text."""
        changes: dict[str, list[tuple[Literal, str]]] = defaultdict(list)
        for literal, device in spelling.literals:
            changes[literal.record].append((literal, device))
        return {
            name: rewrite(self.code[name], found).encode("utf-8") for name, found in changes.items()
        }

    def frame(self, spelling: LocationEdits | None = None) -> object:
        """The names of the records, and the code."""
        code = {name: text.encode("utf-8") for name, text in self.code.items()}
        new = {} if spelling is None else self.changed_records(spelling)
        return super().frame(spelling), {**code, **new}


def _may_be_code(name: str) -> bool:
    """Whether torch may read a record as code: it looks names up without regard to case."""
    return name.lower().endswith(".py")


def _as_code_says(path: Path, root: Node) -> Iterator[tuple[Path, Node]]:
    """The constants under the names that the code uses: `CONSTANTS.c0`."""
    if path == ("constants",) and isinstance(root, Tuple):
        yield from ((("CONSTANTS", f"c{n}"), each) for n, each in enumerate(root.items))
    else:
        yield path, root
