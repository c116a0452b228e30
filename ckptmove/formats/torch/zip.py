"""torch-zip: the format of `torch.save` since 1.6.

    P/data.pkl            the object, a pickle of protocol 2; tensors name their storages
    P/.format_version     "1", since 2.7 or so; then offsets of storages may be computed by torch
    P/.storage_alignment  "64"
    P/byteorder           "little" or "big"
    P/data/0 … N-1        the bytes of each storage
    P/version             "3\\n"
    P/.data/serialization_id
    P/.data/ckptmove_metadata.json    what safetensors said of the whole; torch passes over it

`P` is the file's stem at the time of saving. Relocating changes only device tags in `data.pkl`: if
the new pickle has the length of the old one, a clone of the file is patched; otherwise the zip is
laid out again, like torch would do it. `.data/serialization_id` is kept in both cases: nothing
checks this identity, and the tensors that it stands for are the same.

Sources: torch/serialization.py (`_save`, `_load`); caffe2/serialize/inline_container.cc.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...manifest.other_records import RecordKind
from ...sources.source import Readable
from ...zips.archive import Archive
from ..archives.zip_container import ZipContainer, prefix_of
from ..base import PickledFormat, WritableFormat
from ..checkpoint import Carries
from ..probe import Probe
from ..safetensors.metadata import RECORD, read_metadata
from ..session import ReadSession

if TYPE_CHECKING:
    from ...graph.draft import CheckpointGraph
    from ...reports.convert import Loss
    from ..writing import WriteOptions, WritePlan

_LONGEST_NUMBER = 8  # digits of a storage's number; an address has more


class TorchZip(PickledFormat, WritableFormat):
    """The format of `torch.save`."""

    name = "torch-zip"
    suffixes = (".pt", ".pth", ".bin", ".ckpt")
    folder_stem = "pytorch_model"
    shards = False
    annotates = False
    summary = "torch.save, torch 1.6 and newer, or 1.4 when asked for it"
    refused = "zips that contradict themselves, since readers would disagree on what is in them"
    carries = Carries(devices=True, aliases=True, strides=True, objects=True, dtypes="all of torch")

    def sniff(self, probe: Probe) -> bool:
        """Whether it is a zip with a `data.pkl` and without the `constants.pkl` of TorchScript."""
        if probe.archive is None:
            return False
        prefix = prefix_of(probe.archive)
        records = probe.archive.records
        return (
            bool(prefix)
            and f"{prefix}data.pkl" in records
            and f"{prefix}constants.pkl" not in records
        )

    def open(self, probe: Probe) -> TorchZipContainer:
        """Read the directory and the pickle."""
        assert probe.archive is not None
        return TorchZipContainer(probe.archive, probe.session)

    def losses(self, draft: CheckpointGraph, options: WriteOptions) -> list[Loss]:
        """Nothing is lost."""
        return []

    def plan_write(self, draft: CheckpointGraph, options: WriteOptions) -> WritePlan:
        """Plan a file like torch.save of torch 2.13 writes, with numbered storages."""
        from .zip_writing import plan_write

        return plan_write(draft, options)


class TorchZipContainer(ZipContainer):
    """A file that torch.save wrote."""

    def __init__(self, archive: Archive, session: ReadSession) -> None:
        """Read the pickle."""
        super().__init__(archive, session)
        self.add("data.pkl", "data/")
        self.metadata = read_metadata(archive, self.prefix)
        self.writer = self._writer()

    def kind_of(self, name: str) -> RecordKind | None:
        return None if name == RECORD else super().kind_of(name)

    def patched_pickles(self, written: Readable) -> Sequence[Readable] | None:
        from ...zips.checking import holds_patched

        if not holds_patched(self.archive, written, self.pickled):
            return None
        if any(stream.nested or stream.unread for stream in self.streams):
            return None
        places = ((self.archive.data_at(record), record.nbytes) for record in self.pickled)
        return [written.window(*place) for place in places]

    def _writer(self) -> str:
        """The version of torch that wrote it, as far as the records show: each release added some.

        Python's writer puts the pickle first, the C++ writer the storages. The keys of storages
        were the addresses of C objects at first, and have been numbers from 0 since 1.7.
        `byteorder` was added in 2.1, and `.data/serialization_id` then or a little earlier;
        `.format_version` in early 2025.
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
