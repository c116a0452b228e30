"""torch-zip: what `torch.save` writes since 1.6.

    P/data.pkl            the object, a pickle of protocol 2; tensors name their storages
    P/.format_version     "1", since 2.7 or so; then offsets of storages may be computed by torch
    P/.storage_alignment  "64"
    P/byteorder           "little" or "big"
    P/data/0 … N-1        the bytes of each storage
    P/version             "3\\n"
    P/.data/serialization_id

`P` is the file's stem at the time of saving. Relocating changes device tags in `data.pkl` alone: if
the new pickle is as long as the old one, a clone of the file is patched; else the zip is laid out
anew, as torch would have. `.data/serialization_id` is kept either way: it is an identity that
nothing checks, and the tensors it stands for are the same.

Sources: torch/serialization.py (`_save`, `_load`); caffe2/serialize/inline_container.cc.
"""

from __future__ import annotations

from ..contents.pids import StorageId, storage_ids, storages_of
from ..contents.streams import Container, Spelling, Stream
from ..errors import CorruptError, UnsupportedError
from ..manifest import Extent
from ..plan import Plan, carry_out, edited
from ..source import Memory
from ..zips.archive import STORED, Archive, Record
from ..zips.layout import ALIGNMENT
from ..zips.rewrite import rewrite
from .base import Carries, Glimpse
from .checkpoint import PickledFormat
from .opening import Opening

_NAMES = ("data.pkl", "byteorder", "version", ".format_version", ".storage_alignment")
_NEWEST_VERSION = 10  # caffe2/serialize/versions.h, kMaxSupportedFileFormatVersion
_LONGEST_NUMBER = 8  # digits of a storage's number; those of an address are more
_LARGEST_ALIGNMENT = 1 << 15  # the padding must fit an extra field


class TorchZip(PickledFormat):
    """The format of `torch.save`."""

    name = "torch-zip"
    suffixes: tuple[str, ...] = (".pt", ".pth", ".bin", ".ckpt")
    summary = "torch.save, torch 1.6 and newer, or 1.4 when asked for it"
    refused = "zips that contradict themselves, since readers would disagree on what is in them"
    carries = Carries(devices=True, aliases=True, strides=True, objects=True, dtypes="all of torch")

    def sniff(self, glimpse: Glimpse) -> bool:
        """A zip with a `data.pkl`, and without the `constants.pkl` of TorchScript."""
        if glimpse.archive is None:
            return False
        prefix = prefix_of(glimpse.archive)
        records = glimpse.archive.records
        return (
            bool(prefix)
            and f"{prefix}data.pkl" in records
            and f"{prefix}constants.pkl" not in records
        )

    def open(self, glimpse: Glimpse) -> TorchZipContainer:
        """Read the directory and the pickle."""
        assert glimpse.archive is not None
        return TorchZipContainer(glimpse.archive, glimpse.opening)


def prefix_of(archive: Archive) -> str:
    """The folder that torch takes all records from: that of the first directory entry."""
    first = next(iter(archive.records), "")
    return first[: first.find("/") + 1]


class ZipContainer(Container):
    """A zip file with pickles in records, and a record for each storage, as torch lays it out."""

    def __init__(self, archive: Archive, opening: Opening) -> None:
        super().__init__(archive.source)
        self.archive = archive
        self.opening = opening
        self.folder = opening.folder()
        self.prefix = prefix_of(archive)
        self.pickled: list[Record] = []  # the record of each stream
        archive.check_layout()
        self._check_records()
        self.warnings += self._warnings()

    def _check_records(self) -> None:
        records, prefix = self.archive.records, self.prefix
        for name in records:
            if not name.startswith(prefix):
                raise CorruptError(f"the record {name!r} is outside {prefix!r}")
        version = records.get(f"{prefix}version") or records.get(f"{prefix}.data/version")
        if version is None:
            raise CorruptError("the record 'version' is missing, without which torch loads nothing")
        self._version = version
        text = self.archive.read(version, at_most=64).strip()
        if not text.isdigit() or not 1 <= int(text) <= _NEWEST_VERSION:
            raise UnsupportedError(f"its format version is not one of 1 to {_NEWEST_VERSION}")
        order = records.get(f"{prefix}byteorder")
        if order is not None and self.archive.read(order, at_most=64) not in (b"little", b"big"):
            raise CorruptError("its byte order is neither little nor big")
        for name in _NAMES:  # torch finds a record whatever the case of its name
            for found in records:
                wanted = f"{prefix}{name}"
                if found != wanted and found.casefold() == wanted.casefold():
                    raise CorruptError(f"torch would take the record {found!r} for {name!r}")

    def add(self, name: str, folder: str, path: tuple[str, ...] = ()) -> None:
        """Read a pickle and the storages it names.

        Args:
            name: of the record, without the prefix.
            folder: where the storages' records are, without the prefix, e.g. `data/`.
            path: under which it is shown.
        """
        stream = self.add_pickle(name, path)
        self.ids.update(storage_ids(stream.pickle.persistents, f"{self.folder}{folder}"))
        self.storages = storages_of(self.ids.values(), self.extent)

    def add_pickle(self, name: str, path: tuple[str, ...]) -> Stream:
        """Read a pickle, but none of what it refers to; the arguments are those of `add`."""
        record = self.archive.records[f"{self.prefix}{name}"]
        content = Memory(self.archive.read_parsed(record), self.source.path)
        stream = self.opening.stream(content)
        if stream.pickle.textual:
            raise UnsupportedError("its pickle is of protocol 0, which torch itself can't load")
        self.streams.append(stream)
        self.pickled.append(record)
        self.roots.append((path, stream.pickle.root))
        if stream.nbytes != content.nbytes:
            rest = content.nbytes - stream.nbytes
            self.warnings.append(f"{rest:,} bytes follow the end of the pickle")
        return stream

    def extent(self, storage: StorageId, suffix: str = "") -> Extent | None:
        """Where the record of a storage lies in the file, or None where it is compressed.

        Raises:
            CorruptError: there is none, or it is of another size.
        """
        name = self.prefix + storage.id.removeprefix(self.folder) + suffix
        record = self.archive.records.get(name)
        if record is None:
            raise CorruptError(f"the storage {storage.key!r} is missing")
        if storage.whole_nbytes != record.nbytes and not self.may_be_left_out(storage, record):
            raise CorruptError(
                f"the storage {storage.key!r} should be {storage.whole_nbytes:,} bytes long, "
                f"and is {record.nbytes:,}"
            )
        if self.source.start is None or record.method != STORED:
            return None
        return Extent(self.source.start + self.archive.data_at(record), record.nbytes)

    def may_be_left_out(self, storage: StorageId, record: Record) -> bool:
        """Whether the bytes of a storage need not be there."""
        return False

    def _warnings(self) -> list[str]:
        records = list(self.archive.records.values())
        warnings = self.archive.oddities()
        packed = [r for r in records if r.method != STORED and not self.is_text(r)]
        if packed:
            warnings.append(
                f"{len(packed):,} of its records are compressed: torch.load(mmap=True) would take "
                "compressed bytes for tensors"
            )
        order = self.archive.records.get(f"{self.prefix}byteorder")
        if order is not None and self.archive.read(order, at_most=64) == b"big":
            warnings.append("its tensors are big-endian")
        return warnings

    def is_text(self, record: Record) -> bool:
        """Whether a record holds no tensor, so that it may be compressed."""
        return record.name == f"{self.prefix}data.pkl"

    def plan(self, spelling: Spelling) -> Plan:
        """Patch a clone if the pickles can keep their lengths, else lay the zip out anew."""
        for exact in (True, False):
            new: dict[str, bytes] = {}
            for record, stream in zip(self.pickled, self.streams, strict=True):
                changes = stream.edits(spelling, exact=exact and record.method == STORED)
                if changes is None:
                    break
                if changes:
                    assert isinstance(stream.source, Memory)
                    plan = edited(0, stream.source.nbytes, changes)
                    new[record.name] = carry_out(plan, stream.source.content)
            else:
                break
        return rewrite(self.archive, {**new, **self.replaced(spelling)}, self._alignment())

    def replaced(self, spelling: Spelling) -> dict[str, bytes]:
        """Other records that change."""
        return {}

    def _alignment(self) -> int:
        record = self.archive.records.get(f"{self.prefix}.storage_alignment")
        if record is None:
            return ALIGNMENT
        text = self.archive.read(record, at_most=64).strip()
        if not text.isdigit() or not 1 <= int(text) <= _LARGEST_ALIGNMENT:
            raise CorruptError("the record '.storage_alignment' is not a number that makes sense")
        return int(text)

    def frame(self, spelling: Spelling | None = None) -> object:
        """The names of the records, in order."""
        return list(self.archive.records)


class TorchZipContainer(ZipContainer):
    """A file that torch.save wrote."""

    def __init__(self, archive: Archive, opening: Opening) -> None:
        """Read the pickle.

        Raises:
            CorruptError, UnsupportedError: as `formats.read`.
        """
        super().__init__(archive, opening)
        self.add("data.pkl", "data/")
        self.writer = self._writer()

    def _writer(self) -> str:
        """Which torch wrote it, as far as the records tell: each release only added to them.

        Python's writer puts the pickle first, that of C++ the storages. Storages went by the
        addresses of C objects at first, by numbers from 0 since 1.7. `byteorder` came with 2.1, and
        `.data/serialization_id` with it or a little earlier; `.format_version` in early 2025.
        """
        records, prefix = self.archive.records, self.prefix
        if f"{prefix}.format_version" in records:
            return "a recent torch (about 2.7 or newer)"
        order = sorted(records.values(), key=lambda record: record.header_at)
        names = [record.name.removeprefix(prefix) for record in order]
        keys = {name[5:] for name in names if name.startswith("data/")}
        if keys and names.index("data.pkl") > max(names.index(f"data/{key}") for key in keys):
            return "libtorch (C++)"
        if "byteorder" in names:
            return "torch 2.1 or newer"
        if ".data/serialization_id" in names:
            return "torch 2.0 or newer"
        if any(key.isdecimal() and len(key) > _LONGEST_NUMBER for key in keys):
            return "torch 1.4 to 1.6"
        return "torch 1.6 to 2.0" if keys else "torch 1.4 to 2.0"
