"""torch-package: objects with their code, as `torch.package.PackageExporter` writes them.

    P/any/name                an object, a pickle of protocol 3 or 4, under whatever name
    P/any/module.py           source text, which the pickles' classes come from
    P/any/other               text and bytes
    P/.data/0.storage …       the bytes of each storage; pickles have them in common
    P/.data/extern_modules    the modules that it does not bring, a line each
    P/.data/version, P/.data/python_version, P/byteorder, P/.data/serialization_id
    P/.data/ts_code/…         ScriptModules

This is a zip like torch.save writes it, but the keys of storages are numbers, and a storage may be
viewed as several dtypes. A record is a pickle if its name ends in `.pkl`, or if it can't be
anything else: it starts with a PROTO opcode, ends with STOP, and everything between is valid.

Objects with a `__reduce_package__`, such as ScriptModules, are persistent ids `('reduce_package',
id, function, arguments)`. A function of torch or of the package makes them, so their contents are
unknown, and a package with such an object is not relocated. Source text may name devices and is not
changed.

Sources: torch/package/package_exporter.py (`_persistent_id`); package_importer.py (`load_pickle`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from ...errors import CorruptError, UnsupportedError
from ...manifest.manifest import Extent
from ...manifest.other_records import RecordKind
from ...pickles.fetch import fetch
from ...pickles.nodes import Global, Persistent, Tuple
from ...pickles.walk import walk
from ...sources.budget import Excess
from ...sources.source import Memory
from ...torch_pickle.streams import LocationEdits
from ...torch_pickle.values.persistent_ids import StorageId, storage_ids, storages_of
from ...zips.archive import STORED, Archive
from ...zips.members import Record
from ..archives.zip_container import ZipContainer
from ..base import PickledFormat
from ..checkpoint import Carries
from ..probe import Probe
from ..session import ReadSession
from ..table import in_package

if TYPE_CHECKING:
    from ...plans.plan import Plan

_STORAGES = ".data/"
_CODE = (f"{_STORAGES}extern_modules", f"{_STORAGES}ts_code/")
_PROTO, _NEWEST_PROTOCOL = 0x80, 5
_STOP = b"."


class TorchPackage(PickledFormat):
    """The format of `torch.package`."""

    name = "torch-package"
    suffixes = (".pt", ".package")
    summary = "torch.package, torch 1.8 and newer"
    refused = "to relocate ScriptModules in it, since what they hold is not read"
    carries = Carries(devices=True, aliases=True, strides=True, objects=True, dtypes="all of torch")

    def sniff(self, probe: Probe) -> bool:
        """Whether it is a zip with the list of modules that a package does not include."""
        return in_package(probe)

    def open(self, probe: Probe) -> PackageContainer:
        """Read the directory and the pickles."""
        assert probe.archive is not None
        return PackageContainer(probe.archive, probe.session)


class PackageContainer(ZipContainer):
    """A package: pickles that share storages."""

    beside = "its modules"

    def __init__(self, archive: Archive, session: ReadSession) -> None:
        """Read the pickles."""
        super().__init__(archive, session)
        self.brought = {  # the top-level names of the modules and packages that it includes
            record.name.removeprefix(self.prefix).partition("/")[0].removesuffix(".py")
            for record in archive.records.values()
            if record.name.endswith(".py")
        }
        # for each object with unknown contents, the function that makes it
        self.made: list[str] = []
        for record in archive.records.values():
            if self._is_pickle(record):
                self._add(record.name.removeprefix(self.prefix))
        self.storages = storages_of(self.ids.values(), self._extents, retyped=True)
        if self.made:
            names = ", ".join(dict.fromkeys(self.made))
            self.warnings.append(
                f"the contents of {len(self.made):,} of its objects are not shown; "
                f"they are made by {names}"
            )
        self.writer = self._writer()

    def _is_pickle(self, record: Record) -> bool:
        name = record.name.removeprefix(self.prefix)
        if name.startswith(_STORAGES) or name.endswith(".py") or not record.nbytes:
            return False
        if name.endswith(".pkl"):
            return True
        if record.method == STORED:
            at = self.archive.data_at(record)
            if self.source.read(at, 1)[0] != _PROTO:
                return False
            if self.source.read(at + record.nbytes - 1, 1) != _STOP:
                return False
        content = self.archive.read_parsed(record)
        if content[0] != _PROTO or content[1:2] > bytes([_NEWEST_PROTOCOL]):
            return False
        try:
            found = fetch(Memory(content, self.source.path), 0)
            gaps = {at: gap.nbytes for at, gap in found.gaps.items()}
            walk(found.data, gaps=gaps, budget=self.session.budget)
        except Excess:
            raise
        except CorruptError:
            return False
        return found.nbytes == len(content)

    def _add(self, name: str) -> None:
        stream = self.add_pickle(name, (name,))
        stored = []
        for node in stream.pickle.persistents:
            made = _made_by(node)
            if made is None:
                stored.append(node)
            else:
                self.made.append(made)
        self.ids.update(storage_ids(stored, f"{self.folder}{_STORAGES}", numbered=True))

    def is_known(self, name: Global) -> bool:
        """Whether a name is harmless; never if the package includes a module of that name."""
        return name.module.partition(".")[0] not in self.brought and super().is_known(name)

    def _extents(self, storages: Collection[StorageId]) -> Iterator[Extent | None]:
        return self.extents(storages, ".storage")

    def kind_of(self, name: str) -> RecordKind | None:
        if name == f"{_STORAGES}python_version":
            return RecordKind.IDENTITY
        if name.endswith(".py") or name.startswith(_CODE):
            return RecordKind.CODE
        return super().kind_of(name)

    def is_text(self, record: Record) -> bool:
        """Whether a record holds no tensor and so may be compressed."""
        return not record.name.endswith(".storage")

    def _writer(self) -> str:
        record = self.archive.records.get(f"{self.prefix}{_STORAGES}python_version")
        if record is None:
            return "torch.package"
        version = self.archive.read(record, at_most=64).decode("latin-1").strip()
        return f"torch.package, Python {version}" if version.isprintable() else "torch.package"

    def plan(self, spelling: LocationEdits) -> Plan:
        if self.made:
            raise UnsupportedError(
                f"it holds an object made by {self.made[0]}, whose devices can't be changed"
            )
        return super().plan(spelling)


def _made_by(node: Persistent) -> str | None:
    """The function that makes an object with `__reduce_package__`; None for a storage."""
    items = node.pid.items if isinstance(node.pid, Tuple) else []
    if not items or items[0] != "reduce_package":
        return None
    function = items[-2] if len(items) in (3, 4) else None
    if not isinstance(function, Global):
        raise CorruptError("an object of the package reduces itself in a malformed way")
    return function.qualname
