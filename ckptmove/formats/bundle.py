"""zip-bundle: an ordinary zip file, some of whose records are checkpoints.

    policy.pth              a whole torch-zip, torch-legacy or pickle file, mostly stored
    policy.optimizer.pth    another
    data, …                 anything else, which is left alone

stable-baselines3 saves agents this way, and people zip what they download. Each checkpoint is shown
under the name of its record. Relocating changes the devices in these; the zip keeps what else its
writer chose, and gets new checksums. Records that only hold a plain pickle are read as well, but
don't make a zip a bundle: many zips hold some.

Source: stable_baselines3/common/save_util.py (`save_to_zip_file`).
"""

from __future__ import annotations

import zlib

from ..errors import InputError
from ..pickles.literals import may_be_checkpoint
from ..zips.archive import DEFLATED, LOCAL_MAGIC, Archive, Record, most_inflated
from .base import Carries, Glimpse
from .checkpoint import PickledFormat
from .opening import Opening
from .records import RecordsContainer, content_of
from .torch_legacy import TorchLegacy
from .torch_zip import TorchZip

_HEAD_NBYTES = 512
_NAME_NBYTES = 300  # within which the name of a zip's first record ends
_BY_TORCH = (".data/", "data.pkl", "archive_format", "model.json")


class ZipBundle(PickledFormat):
    """The format of zips that hold checkpoints."""

    name = "zip-bundle"
    suffixes: tuple[str, ...] = (".zip",)
    summary = "any zip with checkpoints in it, such as those of stable-baselines3"
    refused = "nothing; records that are no checkpoints stay as they are"
    carries = Carries(devices=True, aliases=True, strides=True, objects=True, dtypes="all of torch")

    def sniff(self, glimpse: Glimpse) -> bool:
        """A zip that torch did not lay out, with a record that torch.save wrote."""
        archive = glimpse.archive
        if archive is None or any(
            name.startswith(_BY_TORCH) or name.partition("/")[2].startswith(_BY_TORCH)
            for name in archive.records
        ):
            return False
        records = archive.records.values()
        return any(_is_checkpoint(archive, each, glimpse.opening) for each in records)

    def open(self, glimpse: Glimpse) -> BundleContainer:
        """Open every record that is a checkpoint."""
        assert glimpse.archive is not None
        return BundleContainer(glimpse.archive, glimpse.opening)


class BundleContainer(RecordsContainer):
    """The checkpoints in a zip."""

    def __init__(self, archive: Archive, opening: Opening) -> None:
        """Open every record that is a checkpoint.

        Raises:
            CorruptError, UnsupportedError: as `formats.read`.
        """
        super().__init__(archive, opening, by_torch=False)
        large = 0
        for record in archive.records.values():
            if _too_large(record):
                large += 1
            elif may_be_checkpoint(_head(archive, record)):
                self._try(record)
        if large:
            self.warnings.append(
                f"{large:,} of its records are compressed and too large to be looked into: "
                "they stay as they are"
            )

    def _try(self, record: Record) -> None:
        """Open a record that may be a checkpoint; what torch did not write may be anything."""
        try:
            self.add(record, (record.name,), needed=False)
        except InputError:
            if _is_checkpoint(self.archive, record, self.opening):
                raise
            self.warnings.append(f"the record {record.name!r} can't be read, and stays as it is")


def _too_large(record: Record) -> bool:
    return record.method == DEFLATED and record.nbytes > most_inflated(record)


def _is_checkpoint(archive: Archive, record: Record, opening: Opening) -> bool:
    """Whether `torch.save` wrote a record."""
    head = b"" if _too_large(record) else _head(archive, record)
    if not may_be_checkpoint(head):
        return False
    if not head.startswith(LOCAL_MAGIC):
        return TorchLegacy().sniff(Glimpse(archive.source, head, None, opening))
    source = content_of(archive, record)
    try:
        inner = Archive(source)
    except InputError:  # broken, or no zip at all; torch.save's begins with the pickle
        return b"/data.pkl" in head[:_NAME_NBYTES]
    return TorchZip().sniff(Glimpse(source, head, inner, opening))


def _head(archive: Archive, record: Record) -> bytes:
    """The first bytes of a record."""
    nbytes = min(record.stored_nbytes, _HEAD_NBYTES)
    head = archive.source.read(archive.data_at(record), nbytes)
    if record.method != DEFLATED:
        return head
    try:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(head, _HEAD_NBYTES)
    except zlib.error:
        return b""
